"""Comparisons in Python and in notebooks: ``Comparison`` shows existing runs, and ``compare``
executes runs, as the command ``fedstill compare`` does.
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
from fedstill.core.files import counted, named_path
from fedstill.core.process_settings import process_settings
from fedstill.core.registry import LIVE
from fedstill.engines.devices import check_numbers, slots_for
from fedstill.report import terminal
from fedstill.report.page import write_page
from fedstill.report.progress import followed_runs
from fedstill.report.summary import COLUMNS, Column, own_columns
from fedstill.report.table_files import write_tables
from fedstill.running.compare import (
    Outcome,
    Variant,
    carry_out_runs,
    output_folder,
    variants,
)
from fedstill.running.directory import claimed
from fedstill.running.frame import data_frame
from fedstill.running.journal import CONFIG
from fedstill.running.packs import unpack_if_packed
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
from fedstill.running.runs import Group, groups, read_run
from fedstill.running.same_run import other_settings

if TYPE_CHECKING:
    import pandas


# ---- runs that exist -----------------------------------------------------------------------------

WIDTH = 160
"""The width of the table as text, in characters."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """Groups of runs that differ only in their seed. A notebook shows the comparison as a table.

    >>> Comparison([])
    <Comparison of 0 runs>
    """

    groups: Sequence[Group]

    @staticmethod
    def of(*runs: Result | Path | str) -> Comparison:
        """Compare runs, finished or not.

        Raises ConfigError for a directory without runs, and CorruptFile for a run that cannot be
        read.

        runs: results, directories of runs, or directories with runs below them.
        """
        folders = []
        for run in runs:
            if isinstance(run, Result):
                folders.append(run.directory)
            else:
                folders.append(named_path(run))
        return Comparison(groups(folders))

    def table(self) -> pandas.DataFrame:
        """A row for each group: the mean of each number over seeds, and its sample standard
        deviation, ``..._std``, if there are at least two.

        Accuracies and forgetting are shares in [0, 1]. Numbers that were not measured are missing.
        ``seeds`` is the number of runs; the method ``runs`` returns a row for each.
        """
        columns = [*COLUMNS, *own_columns(self.groups)]
        return data_frame([_group_row(group, columns) for group in self.groups])

    def runs(self) -> pandas.DataFrame:
        """A row for each run: its group, seed and directory, whether it is finished, the number of
        its rounds, and its numbers.
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
        """The comparison in a notebook: its table, and the forgetting of each class."""
        if not self.groups:
            return notebook("no runs", {})
        runs = sum(len(group.runs) for group in self.groups)
        table = terminal.comparison_table(self.groups)
        tables = [notebook_table(list(table.head), [list(row) for row in table.rows])]
        tables += self._forgetting_by_class()
        return notebook(counted(runs, "run"), {}, *tables)

    def _forgetting_by_class(self) -> list[str]:
        """A table of forgetting by class, a row for each group; none if it was not measured."""
        classes = next((group.classes for group in self.groups if group.classes), [])
        lost = {}
        for group in self.groups:
            losses = _mean_forgetting_by_class(group)
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
            "best earlier accuracy minus last accuracy, mean over seeds",
        ]
        head = ["forgotten, by class", *(classes[c] for c in chosen)]
        return [notebook_table(head, rows, "; ".join(filter(None, notes)))]


def _mean_forgetting_by_class(group: Group) -> list[float]:
    """The forgetting of each class, mean over the group's seeds; empty without a round."""
    losses = [lost_by_class(run.rounds) for run in group.started]
    if not losses:
        return []
    means: list[float] = np.mean(losses, axis=0).tolist()
    return means


def _group_row(group: Group, columns: Sequence[Column]) -> dict[str, Any]:
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
            row[f"{column.key}_std"] = None
            if spread.runs > 1:
                row[f"{column.key}_std"] = spread.std
    return row


# ---- runs to carry out ---------------------------------------------------------------------------


@process_settings()
def compare(  # noqa: PLR0913 - the options of the command compare
    experiment: Experiment,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    out: Path | str | None = None,
    jobs: int | None = None,
    devices: Sequence[int] = (),
    track: str | Sequence[str] = (),
    overwrite: bool = False,
    debug: bool = False,
    quiet: bool = False,
) -> Comparison:
    """Execute runs for all methods, all values of a grid and all seeds, and compare them.

    The report and the tables are written to the folder of the runs. If the call is stopped, the
    same call continues; finished runs are not repeated. Raises ConfigError before anything is
    trained, RunsFailed after the last run if runs failed, and Interrupted after Ctrl-C.

    methods, seeds: by default, those of the experiment.
    grid: values by key, such as ``{"method.beta": [0.1, 1]}``.
    out: the folder of the runs; by default, a new folder under ``runs/``.
    jobs: the number of runs at a time, at least 1; by default, one per core.
    devices: the CUDA devices over which runs with ``device="cuda"`` are distributed, by number; by
    default, all that torch sees.
    track: names of trackers.
    overwrite, debug: as for ``run``.
    quiet: whether to print no progress.
    """
    methods, seeds, grid = plain_value(methods), plain_value(seeds), plain_value(grid)
    if isinstance(methods, str) or isinstance(seeds, int):
        raise ConfigError(
            'methods and seeds are lists: methods=["fedavg", "fedntd"], seeds=[1, 2, 3]'
        )
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs = {jobs} must be at least 1")
    check_numbers(plain_value(devices))
    if isinstance(track, str):
        track = [track]
    if not isinstance(track, Sequence) or not all(isinstance(name, str) for name in track):
        raise ConfigError(
            "the runs of a comparison are separate processes: track names trackers, such as "
            "track=['mlflow']; fedstill.run accepts your own"
        )
    requested_folder = None
    if out:
        requested_folder = named_path(out)
    with output_folder(requested_folder, "compare") as folder:
        runs = variants(experiment, folder, methods, seeds, grid)
        _check_importable(runs)
        unpack_if_packed(folder)
        with claimed(folder):
            with _without_main_module():
                outcomes = followed_outcomes(
                    runs,
                    jobs,
                    devices=plain_value(devices),
                    quiet=quiet,
                    debug=debug,
                    overwrite=overwrite,
                    track=track,
                )
            started = started_folders(runs, outcomes)
            if started:
                write_files(started, folder)
    _raise_unless_finished(outcomes, folder)
    return Comparison.of(*started)


def followed_outcomes(
    runs: Sequence[Variant],
    jobs: int | None,
    *,
    devices: Sequence[int] = (),
    quiet: bool = False,
    debug: bool = False,
    overwrite: bool = False,
    track: Sequence[str] = (),
) -> list[Outcome]:
    """Execute the runs, and show progress unless ``quiet``. ``devices``: as in ``compare``."""
    slots = slots_for({variant.settings.device for variant in runs}, jobs, devices)
    with followed_runs(quiet) as shown:
        return carry_out_runs(
            runs,
            slots.jobs,
            shown.show,
            cards=slots.cards,
            debug=debug,
            overwrite=overwrite,
            track=track,
        )


def started_folders(runs: Sequence[Variant], outcomes: Sequence[Outcome]) -> list[Path]:
    """The folders of the runs to compare: those that have completed a round, and those that failed
    in their first round if another seed of the same settings completed one.

    Runs that only provide a start for other runs are left out.
    """
    folders = {variant.folder for variant in runs}
    compared = [outcome for outcome in outcomes if outcome.variant.folder in folders]
    labels = {outcome.variant.label for outcome in compared if outcome.done}
    started = []
    for outcome in compared:
        is_beside_others = outcome.variant.label in labels
        if outcome.done or (is_beside_others and _failed_in_first_round(outcome)):
            started.append(outcome.variant.folder)
    return started


def _failed_in_first_round(outcome: Outcome) -> bool:
    """Whether the run started and failed before it completed a round.

    False if the folder holds a run with other settings, or a damaged run.
    """
    config = outcome.variant.folder / CONFIG
    if not outcome.problem or not config.is_file():
        return False
    try:
        has_these_settings = not other_settings(outcome.variant.settings, config.parent)
        return has_these_settings and not read_run(outcome.variant.folder).rounds
    except (CorruptFile, OSError, UnicodeDecodeError):
        # The outcome's problem already reports it.
        return False


def write_files(runs: Sequence[Path], folder: Path) -> Path:
    """Write the report and the tables of runs to a folder; returns the path of the report."""
    page = write_page(runs, folder / "report.html")
    write_tables(groups(runs), folder / "tables")
    return page


def _raise_unless_finished(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Raise RunsFailed if a run failed, and Interrupted if a run is unfinished."""
    failed = [outcome for outcome in outcomes if outcome.problem]
    if failed:
        problems = [f"{o.variant.label}, seed {o.variant.seed}: {o.problem}" for o in failed]
        raise RunsFailed(
            f"{len(failed)} of {counted(len(outcomes), 'run')} failed: {'; '.join(problems)}; the "
            f"others: fedstill.Comparison.of({str(folder)!r})"
        )
    unfinished = sum(outcome.state != "finished" for outcome in outcomes)
    if unfinished:
        raise Interrupted(
            f"stopped with {unfinished} of {counted(len(outcomes), 'run')} unfinished; repeat the "
            f"call with out={str(folder)!r} to continue"
        )


def _check_importable(runs: Sequence[Variant]) -> None:
    """Raise ConfigError for classes and functions that exist in this process only.

    Runs are separate processes, which import what they need.
    """
    live_names = {live.name for run in runs for live in run.settings.live_objects}
    if live_names:
        names = ", ".join(sorted(name.removeprefix(LIVE) for name in live_names))
        raise ConfigError(
            f"the runs of a comparison are separate processes, which cannot import {names}; move "
            "it to a file"
        )


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Replace the module ``__main__`` by an empty one.

    Otherwise each process of a run would execute the script that started the comparison, and so
    start it again. The processes use nothing of the script.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
