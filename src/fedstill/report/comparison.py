"""Runs side by side, for Python and for notebooks: the table that ``fedstill compare`` prints, and
as data frames.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError, CorruptFile, Interrupted, RunsFailed
from fedstill.core.fields import plain_value
from fedstill.core.files import named_path, read_file
from fedstill.core.process_settings import process_settings
from fedstill.report import terminal
from fedstill.report.page import write_page
from fedstill.report.progress import followed_runs
from fedstill.report.summary import COLUMNS, Column, own_columns
from fedstill.report.table_files import write_tables
from fedstill.running.compare import (
    Outcome,
    Variant,
    carry_out_runs,
    jobs_that_fit,
    new_folder,
    variants,
)
from fedstill.running.directory import claimed, unpack_if_packed
from fedstill.running.frame import data_frame
from fedstill.running.result import (
    Result,
    Shade,
    lost_by_class,
    most_forgotten,
    note_on_classes,
    notebook,
    notebook_table,
    shaded,
)
from fedstill.running.runs import CONFIG, Group, groups, read_run

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
        over how many; ``runs`` has the runs themselves.
        """
        columns = [*COLUMNS, *own_columns(self.groups)]
        return data_frame([_of_group(group, columns) for group in self.groups])

    def runs(self) -> pandas.DataFrame:
        """One row for each run: its group, seed and directory, whether it is finished, rounds done,
        and its numbers.
        """
        rows = []
        for group in self.groups:
            for run in group.runs:
                about = {
                    "group": group.label,
                    "seed": run.seed,
                    "directory": str(run.folder),
                    "finished": run.finished,
                    "rounds": len(run.rounds),
                }
                rows.append({**about, **run.numbers.summary})
        return data_frame(rows)

    def __repr__(self) -> str:
        if not self.groups:
            return "<Comparison of 0 runs>"
        out = io.StringIO()
        screen = terminal.SafeConsole(file=out, width=WIDTH, highlight=False, markup=False)
        screen.print(terminal.comparison_table(self.groups))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        """The comparison in a notebook: its table, and what each class has lost."""
        if not self.groups:
            return notebook("no runs", {})
        runs = sum(len(group.runs) for group in self.groups)
        table = terminal.comparison_table(self.groups)
        tables = [notebook_table(list(table.head), [list(row) for row in table.rows])]
        tables += self._forgetting_by_class()
        return notebook(f"{runs} runs", {}, *tables)

    def _forgetting_by_class(self) -> list[str]:
        """A table of forgetting by class, a row for each group; none if it was not measured."""
        classes = next((group.classes for group in self.groups if group.classes), [])
        lost = {}
        for group in self.groups:
            losses = _mean_loss_by_class(group)
            if group.classes == classes and losses and not np.isnan(losses).all():
                lost[group.label] = losses
        if not lost:
            return []

        largest = [max(losses) for losses in zip(*lost.values(), strict=True)]
        chosen = most_forgotten(largest)
        rows: list[list[str | Shade]] = [
            [label, *(shaded(losses[c]) for c in chosen)] for label, losses in lost.items()
        ]
        notes = [
            note_on_classes(chosen, classes),
            "accuracy in the best earlier round less that in the last, mean over seeds",
        ]
        head = ["forgotten, by class", *(classes[c] for c in chosen)]
        return [notebook_table(head, rows, "; ".join(filter(None, notes)))]


def _mean_loss_by_class(group: Group) -> list[float]:
    """What each class lost, the mean over the group's seeds; empty without a round."""
    losses = [lost_by_class(run.rounds) for run in group.started]
    means: list[float] = np.mean(losses, axis=0).tolist() if losses else []
    return means


def _of_group(group: Group, columns: Sequence[Column]) -> dict[str, Any]:
    """Mean and standard deviation of each number of a group."""
    row: dict[str, Any] = {
        "group": group.label,
        "seeds": len(group.started),
        "finished": group.finished,
    }
    for column in columns:
        spread = group.mean_spread(column.key)
        if spread:
            row[column.key] = spread.mean
            row[f"{column.key}_std"] = spread.std if spread.runs > 1 else None
    return row


# Several methods, settings and seeds side by side: from Python, and what the command ``compare``
# shares with that.


@process_settings()
def compare(
    experiment: Experiment,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    grid: Mapping[str, Sequence[Any]] | None = None,
    out: Path | str | None = None,
    jobs: int | None = None,
    track: str | Sequence[str] = (),
    overwrite: bool = False,
    debug: bool = False,
    quiet: bool = False,
) -> Comparison:
    """Run methods × a grid × seeds, several runs at once, as ``fedstill compare`` does, and compare
    them.

    ``methods``, ``seeds``: unset, the experiment's. ``grid``: values by key, e.g.
    ``{"method.beta": [0.1, 1]}``.
    ``out``: the folder of the runs; unset, one is made under ``runs/``. The report and tables are
    written there. The same call goes on where it was stopped; finished runs are left
    alone. ``jobs``: how many runs at once, at least 1; unset, one a core. ``track``: trackers by
    name. ``overwrite``, ``debug``: as for ``run``. ``quiet``: no progress. Raises ConfigError
    before anything is trained, RunsFailed when all runs have ended and some of them failed, and
    Interrupted after Ctrl-C.
    """
    methods, seeds, grid = plain_value(methods), plain_value(seeds), plain_value(grid)
    if isinstance(methods, str) or isinstance(seeds, int):
        raise ConfigError(
            'methods and seeds are lists: methods=["fedavg", "fedntd"], seeds=[1, 2, 3]'
        )
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs = {jobs} must be at least 1")
    folder = named_path(out) if out else new_folder("compare")
    runs = variants(experiment, folder, methods, seeds, grid)
    _check_lives(runs)
    unpack_if_packed(folder)
    tracked = [track] if isinstance(track, str) else track
    with claimed(folder):
        with _main_hidden():
            how = {"quiet": quiet, "debug": debug, "overwrite": overwrite}
            outcomes = followed_outcomes(runs, jobs, track=tracked, **how)
        begun = begun_of(runs, outcomes)
        if begun:
            write_files(begun, folder)
    _raise_unless_finished(outcomes, folder)
    return Comparison.of(*begun)


def followed_outcomes(
    runs: Sequence[Variant],
    jobs: int | None,
    *,
    quiet: bool = False,
    debug: bool = False,
    overwrite: bool = False,
    track: Sequence[str] = (),
) -> list[Outcome]:
    """Do the runs, and show how far they are unless ``quiet``."""
    device = "cuda" if any(v.settings.device == "cuda" for v in runs) else "cpu"
    with followed_runs(quiet) as shown:
        return carry_out_runs(
            runs, jobs or jobs_that_fit(device), shown.show, debug, overwrite, track
        )


def begun_of(runs: Sequence[Variant], outcomes: Sequence[Outcome]) -> list[Path]:
    """The folders of the runs that have done a round, and of those beside them that failed in the
    first.

    Not those of runs that others only start from, nor of a row none of whose runs has done a round.
    """
    asked = {v.folder for v in runs}
    there = [o for o in outcomes if o.variant.folder in asked]
    rows = {o.variant.label for o in there if o.done}
    return [
        o.variant.folder
        for o in there
        if o.done or (o.variant.label in rows and _failed_at_once(o))
    ]


def _failed_at_once(outcome: Outcome) -> bool:
    """Whether a run began and failed in its first round; its folder may hold another run, or a
    damaged one.
    """
    config = outcome.variant.folder / CONFIG
    if not outcome.problem or not config.is_file():
        return False
    try:
        own = read_file(config).decode() == outcome.variant.settings.toml
        return own and not read_run(outcome.variant.folder).rounds
    except (CorruptFile, OSError, UnicodeDecodeError):  # which is the problem that is said
        return False


def write_files(begun: Sequence[Path], folder: Path) -> Path:
    """Write the report of some runs, and their tables as files; the report's path."""
    page = write_page(begun, folder / "report.html")
    write_tables(groups(begun), folder / "tables")
    return page


def _raise_unless_finished(outcomes: Sequence[Outcome], folder: Path) -> None:
    failures = [outcome for outcome in outcomes if outcome.problem]
    failed = [f"{one.variant.label}, seed {one.variant.seed}: {one.problem}" for one in failures]
    if failed:
        many = f"{len(failed)} of {len(outcomes)} runs failed"
        todo = f"the others: fedstill.Comparison.of({str(folder)!r})"
        raise RunsFailed(f"{many}: {'; '.join(failed)}; {todo}")
    if left := sum(o.state != "finished" for o in outcomes):
        raise Interrupted(
            f"stopped; the same call with out={str(folder)!r} goes on with {left} of "
            f"{len(outcomes)} runs"
        )


def _check_lives(runs: Sequence[Variant]) -> None:
    """Runs are done by other processes, which cannot import what exists in this one only."""
    lives = {name for run in runs for name in run.settings.live_names}
    if lives:
        names = ", ".join(sorted(name.removeprefix("python:") for name in lives))
        raise ConfigError(
            f"the runs of a comparison are processes of their own and cannot import {names}: put "
            "it in a file"
        )


@contextmanager
def _main_hidden() -> Iterator[None]:
    """A script's processes do not execute the script again: nothing that they do is in it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
