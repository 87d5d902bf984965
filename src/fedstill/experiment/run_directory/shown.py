"""How results look in a notebook: a small table of HTML without scripts, readable on light and on
dark pages.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstill.metrics.forgetting import forgetting_by_class

MOST_CLASSES = 12
"""How many classes are shown: those that were forgotten most."""


@dataclass(frozen=True)
class Shade:
    """A cell of a table, and how strong its background is, from 0 to 1: red for a loss, green for a
    gain.
    """

    text: str
    loss: float = 0.0


def share(value: float | None) -> str:
    """A share in percent, with a dash for none."""
    return "–" if value is None or np.isnan(value) else f"{100 * value:.1f} %"


def shaded(loss: float) -> Shade:
    """A cell with what was lost of an accuracy."""
    return Shade(share(loss), 0.0 if np.isnan(loss) else loss)


def class_history(history: Sequence[Mapping[str, Any]]) -> list[list[float | None]]:
    """Accuracies by class (rounds, C), from the events of all rounds: of the server's model, else
    of the clients' own.

    Of the latter, the mean over clients, in the rounds in which they were measured.
    """
    for key in ("class_accuracy", "personal_class_accuracy"):
        rows = [e[key] for e in history if any(v is not None for v in e.get(key) or ())]
        if rows:
            return rows
    return []


def lost_by_class(history: Sequence[Mapping[str, Any]]) -> list[float]:
    """What each class lost of its best earlier round, from the events of all rounds; NaN where it
    was not measured.
    """
    rows = [[np.nan if v is None else v for v in row] for row in class_history(history)]
    lost: list[float] = forgetting_by_class(rows).tolist() if rows else []
    return lost


def most_forgotten(lost: Sequence[float]) -> list[int]:
    """The classes to show, in their order: all if they are few, else those with the greatest
    loss.
    """
    order = sorted(
        range(len(lost)), key=lambda c: -np.inf if np.isnan(lost[c]) else lost[c], reverse=True
    )
    return sorted(order[:MOST_CLASSES])


def forgotten_table(classes: Sequence[str], history: Sequence[Mapping[str, Any]]) -> str:
    """For each class its last accuracy, its best earlier one, and what it lost; empty if that was
    not measured.
    """
    lost = lost_by_class(history)
    if np.isnan(lost).all() or len(lost) != len(classes):
        return ""
    last, chosen = class_history(history)[-1], most_forgotten(lost)
    rows: list[list[str | Shade]] = [
        [classes[c], share(last[c]), share(lost[c] + (last[c] or 0)), shaded(lost[c])]
        for c in chosen
    ]
    return notebook_table(
        ["class", "accuracy", "best earlier round", "forgotten"], rows, few(chosen, lost)
    )


def few(chosen: Sequence[int], classes: Sequence[object]) -> str:
    """Which classes are shown; empty if all are."""
    return (
        f"the {len(chosen)} of {len(classes)} classes that were forgotten most"
        if len(chosen) < len(classes)
        else ""
    )


def notebook(title: str, facts: Mapping[str, str], *tables: str) -> str:
    """A title, facts in one line, and tables."""
    line = " · ".join(f"{html.escape(k)} <b>{html.escape(v)}</b>" for k, v in facts.items())
    head = f'<div style="margin-bottom:0.4em"><b>{html.escape(title)}</b><br>{line}</div>'
    return f'<div style="font-variant-numeric:tabular-nums">{head}{"".join(tables)}</div>'


def notebook_table(
    head: Sequence[str], rows: Sequence[Sequence[str | Shade]], note: str = ""
) -> str:
    """A table whose first column holds text and the others numbers; below it, a note."""
    top = "".join(f'<th style="{_style(i)}">{html.escape(c)}</th>' for i, c in enumerate(head))
    body = "".join(f"<tr>{''.join(_cell(i, c) for i, c in enumerate(row))}</tr>" for row in rows)
    small = f'<div style="opacity:0.7;font-size:smaller">{html.escape(note)}</div>' if note else ""
    table = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return (
        '<table style="border-collapse:collapse;font-size:inherit;margin:0 0 0.4em '
        f'0">{table}</table>{small}'
    )


def _style(column: int) -> str:
    return f"padding:0.15em 0.6em;text-align:{'right' if column else 'left'}"


def _cell(column: int, cell: str | Shade) -> str:
    shade = cell if isinstance(cell, Shade) else Shade(cell)
    colour = "200,60,40" if shade.loss > 0 else "40,140,80"
    depth = min(0.6, abs(shade.loss))
    ground = f";background:rgba({colour},{depth:.2f})" if depth >= 0.005 else ""
    return f'<td style="{_style(column)};white-space:nowrap{ground}">{html.escape(shade.text)}</td>'
