"""The table of a comparison: a line for each group of runs, a column for each number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedstill import manifest
from fedstill.report.groups import Group
from fedstill.report.numbers import COLUMNS, PERSONAL, Column, Spread
from fedstill.report.runs import Run

# The order of a comparison's lines: as asked for, or best first where some methods leave each
# client its own model.


BY = ("own_test_accuracy", "personal_accuracy")
"""What such methods are ranked by: accuracy on the clients' own tests, or else on test examples in
their own mix.
"""


def best_first(compared: Sequence[Group]) -> tuple[list[Group], Column | None]:
    """The groups in the order of their lines, and the number by which they are ranked; None where
    they are as asked.

    Groups of which nobody has that number come last. Equal ones stay in the order asked for.
    """
    column = next(
        (m for key in BY for m in COLUMNS if m.key == key and any(g.values(key) for g in compared)),
        None,
    )
    if column is None or not any(g.own_models for g in compared):
        return list(compared), None

    def mean(group: Group) -> float:
        value = group.mean_spread(column.key)
        return value.mean if value else float("-inf")

    return sorted(compared, key=mean, reverse=True), column


def said_of_order(column: Column | None) -> str:
    """How the lines are ordered, in a sentence; empty where they are as asked for."""
    if column is None:
        return ""
    why = "Some of these methods leave each client a model of its own, so lines are ranked by"
    return f'{why} "{column.title}": {column.says}.'


# The table of a comparison: a line for each group of runs, a column for each number that was
# measured.


NONE = "–"


@dataclass(frozen=True)
class Row:
    """A line of the table: a group, its number of seeds, and each number over them; None where
    nothing was measured.
    """

    label: str
    seeds: str
    note: str
    values: dict[str, Spread | None]

    def text(self, column: Column) -> str:
        """The cell of a column."""
        value = self.values[column.key]
        return NONE if value is None else value.text(column.scale, column.digits)


def rows(groups: Sequence[Group]) -> list[Row]:
    """The table: one line a group."""
    return [
        Row(g.label, g.counted, _note(g), {m.key: g.mean_spread(m.key) for m in COLUMNS})
        for g in groups
    ]


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that at least one line has; what clients have of a run only where some have
    models of their own.
    """
    there = [m for m in COLUMNS if any(r.values[m.key] is not None for r in rows)]
    own = any(r.values["personal_forgetting"] is not None for r in rows)
    first = [
        *(m for m in there if own and m.key.startswith("own_test_")),
        *(PERSONAL if own else ()),
    ]
    return [*first, *(m for m in there if m not in (*first, *PERSONAL))]


def _note(group: Group) -> str:
    open_runs = [r for r in group.runs if not r.finished]
    if not open_runs:
        return ""
    reached = [r.rounds[-1]["round"] if r.rounds else 0 for r in open_runs]
    rounds = f"{min(reached)}" if min(reached) == max(reached) else f"{min(reached)}–{max(reached)}"
    who = "" if len(group.runs) == 1 else f"{len(open_runs)} of {len(group.runs)} runs "
    return f"{who}unfinished, at round {rounds} of {open_runs[0].asked}"


# What packages add below the table of a comparison.


def package_notes(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """The sentences of outer packages on runs, by what the runs are called."""
    notes = []
    for part in manifest.comparison_notes():
        note_on = part.load()
        notes.append(note_on(runs))
    return [note for note in notes if note]
