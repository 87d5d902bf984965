"""Several methods, settings and seeds side by side: from Python, and what the command ``compare``
shares with that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fedstill.errors import ConfigError, CorruptFile, Interrupted, RunsFailed
from fedstill.experiment.comparing.compare import Outcome, carry_out_runs, jobs_that_fit
from fedstill.experiment.comparing.variants import Variant, new_folder, variants
from fedstill.experiment.config.experiment import Experiment
from fedstill.experiment.run_directory.claim import claimed
from fedstill.experiment.run_directory.evidence import restored
from fedstill.fields import plain_value
from fedstill.files import named_path
from fedstill.report.comparison import Comparison
from fedstill.report.following_several import followed_runs
from fedstill.report.groups import groups
from fedstill.report.page import write_page
from fedstill.report.runs import CONFIG, read_run
from fedstill.report.table_files import write_tables


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
    _refuse_lives(runs)
    restored(folder)
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
        own = config.read_text(encoding="utf-8") == outcome.variant.settings.toml
        return own and not read_run(outcome.variant.folder).rounds
    except (CorruptFile, OSError, UnicodeDecodeError):  # which is the problem that is said
        return False


def write_files(begun: Sequence[Path], folder: Path) -> Path:
    """Write the report of some runs, and their tables as files; the report's path."""
    page = write_page(begun, folder / "report.html")
    write_tables(groups(begun), folder / "tables")
    return page


def _raise_unless_finished(outcomes: Sequence[Outcome], folder: Path) -> None:
    failed = [
        f"{o.variant.label}, seed {o.variant.seed}: {o.problem}" for o in outcomes if o.problem
    ]
    if failed:
        many = f"{len(failed)} of {len(outcomes)} runs failed"
        todo = f"the others: fedstill.Comparison.of({str(folder)!r})"
        raise RunsFailed(f"{many}: {'; '.join(failed)}; {todo}")
    if left := sum(o.state != "finished" for o in outcomes):
        raise Interrupted(
            f"stopped; the same call with out={str(folder)!r} goes on with {left} of "
            f"{len(outcomes)} runs"
        )


def _refuse_lives(runs: Sequence[Variant]) -> None:
    """Runs are done by other processes, which cannot import what exists in this one only."""
    lives = {name for run in runs for name in run.settings.lives}
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
