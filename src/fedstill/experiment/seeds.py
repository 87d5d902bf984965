"""Seeds of one setting trained together: their clients in the same stacks, each run in a folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedstill.engines.together import Company, Seat
from fedstill.errors import ConfigError
from fedstill.experiment import runner
from fedstill.experiment.prepare import prepare
from fedstill.experiment.settings import settle

if TYPE_CHECKING:
    from fedstill.experiment.compare import Variant


def together(runs: Sequence[Variant]) -> list[list[Variant]]:
    """The runs of a comparison, those in one list whose clients are stacked with each other's.

    A run that was begun keeps the company that its config.toml names; the seeds of a setting that are new make one, if
    they are asked to. Raises ConfigError for a run that was begun together with one that is not among these.
    """
    settings: dict[Path, dict[int, Variant]] = {}
    for run in runs:
        settings.setdefault(run.folder.parent, {})[run.seed] = run
    return [company for by_seed in settings.values() for company in _companies(by_seed)]


def _companies(runs: dict[int, Variant]) -> list[list[Variant]]:
    left = dict(runs)
    found: list[list[Variant]] = []
    for seed, run in runs.items():
        company = _begun_with(run)
        missing = [s for s in company if s not in runs]
        if missing and not _finished(run):
            raise ConfigError(f"{run.folder} was begun together with seed {missing[0]}: name that one too, in --seeds")
        if company and seed in left:
            members = [left.pop(s) for s in company if s in left]
            found.append([_beside(one, company) for one in members if not _finished(one)])
            found += [[one] for one in members if _finished(one)]
    new = [s for s, run in left.items() if not _begun(run) and run.experiment.stacked_seeds]
    if len(new) > 1:
        found.append([_beside(left.pop(s), new) for s in new])
    return [[run if _begun(run) else apart(run)] for run in left.values()] + [company for company in found if company]


def _beside(run: Variant, seeds: Sequence[int]) -> Variant:
    """The run with its company written down; one that was begun has it in its config.toml."""
    return replace(run, experiment=run.experiment.with_values({"stacked_seeds": list(seeds)}, "compare"))


def apart(run: Variant) -> Variant:
    """The run without company."""
    return replace(run, experiment=run.experiment.with_values({"stacked_seeds": []}, "compare"))


def _begun_with(run: Variant) -> tuple[int, ...]:
    return runner.settings_of(run.folder).stacked_seeds if _begun(run) else ()


def _begun(run: Variant) -> bool:
    return (run.folder / "config.toml").is_file()


def _finished(run: Variant) -> bool:
    return (run.folder / "summary.json").is_file()


def stacks(company: Sequence[Variant]) -> bool:
    """Whether these are trained together after all: not if ``auto`` comes to an engine that does not stack."""
    begun = any(map(_begun, company))
    return begun or bool(prepare(settle(company[0].experiment)).settings["engine"] == "vectorised")


def run_together(company: Sequence[Variant], watch: runner.Progress) -> list[Exception | None]:
    """Run or resume all, a thread each; what each of them raised.

    They share their stacks, so their last bits depend on each other: they go in step, and a resume takes all back to a
    checkpoint that all have. One that fails leaves the others; if they are resumed later than it can follow, it goes
    on alone.
    """
    seats = Company(len(company))
    if len(company) == 1:
        return [_caught(company[0], Seat(seats, 0, left=True), watch)]
    with ThreadPoolExecutor(len(company), "seed") as pool:
        futures = [pool.submit(_caught, run, Seat(seats, i), watch) for i, run in enumerate(company)]
        return [future.result() for future in futures]


def _caught(run: Variant, seat: Seat, watch: runner.Progress) -> Exception | None:
    try:
        if _begun(run):
            runner.resume(run.folder, watch=watch, seat=seat)
        else:
            runner.run(run.experiment, run.folder, watch=watch, seat=seat)
    except Exception as error:
        return error
    finally:
        seat.leave()
    return None
