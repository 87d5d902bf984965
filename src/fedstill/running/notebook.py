"""Results in a notebook: small tables of HTML without scripts, for light and for dark pages."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedstill.metrics.forgetting import forgetting_by_class
from fedstill.running.journal import Event
from fedstill.running.numbers import RunNumbers

MOST_CLASSES = 12
"""How many classes are shown: those that were forgotten most."""

FAINTEST = 0.005
"""The share of colour below which a cell has no background."""


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


def class_history(history: Sequence[Event]) -> list[list[float | None]]:
    """Accuracies by class (rounds, C), from the events of all rounds: of the server's model, else
    of the clients' own.

    Of the latter, the mean over clients, in the rounds in which they were measured.
    """
    classes = len(history[0]["class_accuracy"]) if history else 0
    return list(RunNumbers.of(history, classes).class_accuracy.values())


def lost_by_class(history: Sequence[Event]) -> list[float]:
    """What each class lost of its best earlier round, from the events of all rounds; NaN where it
    was not measured.
    """
    rows = np.array(class_history(history), np.float64)
    lost: list[float] = forgetting_by_class(rows).tolist() if len(rows) else []
    return lost


def most_forgotten(lost: Sequence[float]) -> list[int]:
    """The classes to show, in their order: all if they are few, else those with the greatest
    loss.
    """
    losses = np.nan_to_num(np.array(lost), nan=-np.inf)
    order = np.argsort(-losses, kind="stable")
    return sorted(order[:MOST_CLASSES].tolist())


def forgotten_table(classes: Sequence[str], history: Sequence[Event]) -> str:
    """For each class its last accuracy, its best earlier one, and what it lost; empty if that was
    not measured.
    """
    lost = lost_by_class(history)
    if np.isnan(lost).all() or len(lost) != len(classes):
        return ""
    last = class_history(history)[-1]
    chosen = most_forgotten(lost)
    rows: list[list[str | Shade]] = [
        [classes[c], share(last[c]), share(lost[c] + (last[c] or 0)), shaded(lost[c])]
        for c in chosen
    ]
    head = ["class", "accuracy", "best earlier round", "forgotten"]
    return notebook_table(head, rows, note_on_classes(chosen, lost))


def note_on_classes(chosen: Sequence[int], classes: Sequence[object]) -> str:
    """Which classes are shown; empty if all are."""
    if len(chosen) == len(classes):
        return ""
    return f"the {len(chosen)} of {len(classes)} classes that were forgotten most"


def notebook(title: str, facts: Mapping[str, str], *tables: str) -> str:
    """A title, facts in one line, and tables."""
    line = " · ".join(
        f"{html.escape(name)} <b>{html.escape(fact)}</b>" for name, fact in facts.items()
    )
    head = f'<div style="margin-bottom:0.4em"><b>{html.escape(title)}</b><br>{line}</div>'
    return f'<div style="font-variant-numeric:tabular-nums">{head}{"".join(tables)}</div>'


def notebook_table(
    head: Sequence[str], rows: Sequence[Sequence[str | Shade]], note: str = ""
) -> str:
    """A table whose first column holds text and the others numbers; below it, a note."""
    titles = "".join(
        f'<th style="{_style(column)}">{html.escape(title)}</th>'
        for column, title in enumerate(head)
    )
    lines = ["".join(_cell(column, cell) for column, cell in enumerate(row)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    small = ""
    if note:
        small = f'<div style="opacity:0.7;font-size:smaller">{html.escape(note)}</div>'
    style = "border-collapse:collapse;font-size:inherit;margin:0 0 0.4em 0"
    table = f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody>"
    return f'<table style="{style}">{table}</table>{small}'


def _style(column: int) -> str:
    alignment = "right" if column else "left"
    return f"padding:0.15em 0.6em;text-align:{alignment}"


def _cell(column: int, cell: str | Shade) -> str:
    shade = cell if isinstance(cell, Shade) else Shade(cell)
    colour = "200,60,40" if shade.loss > 0 else "40,140,80"
    depth = min(0.6, abs(shade.loss))
    ground = ""
    if depth >= FAINTEST:
        ground = f";background:rgba({colour},{depth:.2f})"
    style = f"{_style(column)};white-space:nowrap{ground}"
    return f'<td style="{style}">{html.escape(shade.text)}</td>'
