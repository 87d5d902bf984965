"""Runs side by side, for Python and for notebooks: the table that ``fedstill compare`` prints, and
as data frames.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from fedstill.experiment.run_directory.frames import data_frame
from fedstill.experiment.run_directory.result import Result
from fedstill.experiment.run_directory.shown import (
    Shade,
    few,
    lost_by_class,
    most_forgotten,
    notebook,
    notebook_table,
    shaded,
)
from fedstill.files import named_path
from fedstill.report import terminal
from fedstill.report.groups import Group, groups
from fedstill.report.numbers import COLUMNS, reported
from fedstill.report.terminal import PlainTable

if TYPE_CHECKING:
    import pandas

WIDTH = 160
"""Columns of the table as text."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs, grouped by all their settings but the seed: ``groups``. In a notebook it shows its
    table.

    >>> Comparison([])
    <Comparison of 0 runs>
    """

    groups: Sequence[Group]

    @staticmethod
    def of(*runs: Result | Path | str) -> Comparison:
        """Some runs: results, directories of runs, or directories with runs below them, finished or
        not.

        Raises ConfigError for a directory without runs, CorruptFile for a run that cannot be read.
        """
        return Comparison(
            groups([run.directory if isinstance(run, Result) else named_path(run) for run in runs])
        )

    def table(self) -> pandas.DataFrame:
        """One row for each group: means over seeds, and ``..._std``, their sample standard
        deviation from two on.

        Accuracies and forgetting are shares in [0, 1]; what was not measured is missing. ``seeds``:
        over how many; ``runs`` has the runs themselves. Raises ConfigError without pandas.
        """
        return data_frame([_of_group(group) for group in self.groups])

    def runs(self) -> pandas.DataFrame:
        """One row for each run: its group, seed and directory, whether it is finished, rounds done,
        and its numbers.
        """
        return data_frame(
            [
                {
                    "group": group.label,
                    "seed": run.seed,
                    "directory": str(run.folder),
                    "finished": run.finished,
                    "rounds": len(run.rounds),
                    **{k: v for k, v in reported(run).items() if v is not None},
                }
                for group in self.groups
                for run in group.runs
            ]
        )

    def __repr__(self) -> str:
        if not self.groups:
            return "<Comparison of 0 runs>"
        out = io.StringIO()
        Console(file=out, width=WIDTH, highlight=False, markup=False).print(
            terminal.comparison_table(self.groups)
        )
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        """The comparison in a notebook: its table, and what each class has lost."""
        if not self.groups:
            return notebook("no runs", {})
        runs = sum(len(g.runs) for g in self.groups)
        tables = [_as_html(terminal.comparison_table(self.groups)), self._by_class()]
        return notebook(f"{runs} runs", {}, *(t for t in tables if t))

    def _by_class(self) -> str:
        """Forgetting by class, a row for each group, the mean over its seeds; empty if it was not
        measured.
        """
        classes = next((g.classes for g in self.groups if g.classes), [])
        lost = {g.label: _lost(g) for g in self.groups if g.classes == classes}
        lost = {
            label: each for label, each in lost.items() if len(each) and not np.isnan(each).all()
        }
        if not lost:
            return ""
        chosen = most_forgotten(
            [max(each[c] for each in lost.values()) for c in range(len(classes))]
        )
        rows: list[list[str | Shade]] = [
            [label, *(shaded(each[c]) for c in chosen)] for label, each in lost.items()
        ]
        some = few(chosen, classes)
        note = (
            f"{some + '; ' if some else ''}accuracy in the best earlier round less that in the "
            "last, mean over seeds"
        )
        return notebook_table(["forgotten, by class", *(classes[c] for c in chosen)], rows, note)


def _lost(group: Group) -> list[float]:
    """What each class lost, the mean over the group's seeds."""
    each = [lost_by_class(run.rounds) for run in group.started]
    means: list[float] = np.mean(each, axis=0).tolist() if each else []
    return means


def _of_group(group: Group) -> dict[str, Any]:
    row: dict[str, Any] = {
        "group": group.label,
        "seeds": len(group.started),
        "finished": group.finished,
    }
    for column in COLUMNS:
        if spread := group.mean_spread(column.key):
            row |= {
                column.key: spread.mean,
                f"{column.key}_std": spread.std if spread.runs > 1 else None,
            }
    return row


def _as_html(table: PlainTable) -> str:
    """A terminal's table as one of a notebook."""
    return notebook_table(list(table.head), [list(row) for row in table.rows])
