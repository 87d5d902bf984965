"""Several runs side by side: methods × a grid × seeds, as many at once as the machine bears, resumable."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedstill.engines.cores import WORKERS, cores
from fedstill.errors import ConfigError, FedstillError, RunExists
from fedstill.experiment.comparing.stopping import Asked, StopsWhenAsked
from fedstill.experiment.config.experiment import Experiment
from fedstill.experiment.config.settings import Settings, settle

BYTES_A_RUN = 1.5e9
"""What one run of the usual sizes takes at most; only how many run at once depends on it."""

POLL_SECONDS = 0.2

SAME_BITS = ("serial", "pooled")
"""Engines that give one and the same run."""


@dataclass(frozen=True)
class Variant:
    """One run of a comparison: what is varied, as text, its seed, where it goes, and the run that it starts from."""

    label: str
    seed: int
    experiment: Experiment
    folder: Path
    after: Variant | None = None


@dataclass
class Outcome:
    """How far a run has come: rounds done, the last accuracy, and what went wrong, if anything did."""

    variant: Variant
    rounds: int
    done: int = 0
    accuracy: float | None = None
    state: str = "waiting"
    problem: str = ""
    exit_code: int = 0
    _read: int = field(default=0, repr=False)

    def follow(self) -> None:
        """Read what the run's journal says by now."""
        path = self.variant.folder / "journal.jsonl"
        if self.state not in ("running", "finished") or not path.is_file():
            return
        lines = path.read_bytes().split(b"\n")[:-1]
        for line in lines[self._read :] if len(lines) >= self._read else lines:
            if line.startswith(b'{"event":"round"'):
                event = json.loads(line)
                self.done, self.accuracy = event["round"], event["accuracy"]
        self._read = len(lines)


def variants(
    experiment: Experiment,
    out: Path,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    grid: Mapping[str, Sequence[Any]] | None = None,
) -> list[Variant]:
    """The runs of a comparison: every method, every combination of the grid's values, every seed; all checked.

    Every run uses one thread, so that its bits do not depend on how many run at once.
    """
    base = experiment.with_values({"threads": 1}, "compare")
    found = []
    for method in methods or ("",):
        of_method = base.with_values({"method": method}, "compare") if method else base
        for values in itertools.product(*(grid or {}).values()):
            setting = dict(zip(grid or {}, values, strict=True))
            chosen = of_method.with_values(setting, "compare")
            name = settle(chosen)["method"]["name"]
            label = " ".join([Path(name.partition(":")[0]).stem, *(f"{k}={v}" for k, v in setting.items())])
            folder = out / label.replace("/", "-").replace(" ", "_")
            found += [seeded(label, chosen, seed, folder) for seed in seeds or [settle(chosen)["seed"]]]
    if len({v.folder for v in found}) != len(found):
        raise ConfigError("two runs of this comparison are the same; name each method, value and seed once")
    return found


def seeded(label: str, experiment: Experiment, seed: int, folder: Path) -> Variant:
    """One run of an experiment with a seed, in a folder of that seed; raises ConfigError if it cannot be run."""
    with_seed = replace(experiment, seed=seed)
    return Variant(label, settle(with_seed)["seed"], with_seed, folder / f"seed{seed}")


def with_starts(runs: Sequence[Variant]) -> list[Variant]:
    """The runs, each behind the one that it starts from; a start that several share is there once."""
    found: dict[Path, Variant] = {}
    for run in runs:
        for one in (run.after, run):
            if one is not None:
                found.setdefault(one.folder, one)
    return list(found.values())


def new_folder(name: str) -> Path:
    """A folder under ``runs/`` that is not there yet."""
    return next(p for i in itertools.count(1) if not (p := Path("runs") / f"{name}-{i}").exists())


def rounds_of(variant: Variant) -> int:
    """How many rounds a run has."""
    return int(settle(variant.experiment)["rounds"])


def jobs_that_fit() -> int:
    """How many runs to do at once: one a core, as far as memory goes."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores(), int(free / BYTES_A_RUN)))


def compare(runs: Sequence[Variant], jobs: int, watch: Callable[[Sequence[Outcome]], None]) -> list[Outcome]:
    """Do all runs, going on with those that were begun, and leaving alone those that are finished.

    A run that starts from another's model waits for that one. ``watch`` is called a few times a second. A run that
    fails does not stop the others. The first Ctrl-C lets running stages end and starts nothing new; the second ends at
    once. Raises RunExists for a folder that holds another run.
    """
    outcomes = [Outcome(v, rounds_of(v)) for v in with_starts(runs)]
    for outcome in outcomes:
        _check_folder(outcome.variant)
    waiting = list(outcomes)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedstill.experiment.running.runner", "fedstill.methods.fedavg"])
    asked = Asked(context.Event())
    with asked, ProcessPoolExecutor(jobs, context, StopsWhenAsked.listen, (asked.event,)) as pool:
        running = dict[Future[Answer], Outcome]()
        while waiting or running:
            while len(running) < jobs and not asked.stop and (ready := _next(waiting, outcomes)):
                waiting.remove(ready)
                ready.state = "running"
                side_by_side = min(jobs, 1 + len(running) + len(waiting))
                workers = os.environ.get(WORKERS) or str(max(1, cores() // side_by_side))
                running[pool.submit(_do, ready.variant, workers)] = ready
            if asked.stop and not running:
                break
            done, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                _finish(running.pop(future), future)
            for outcome in outcomes:
                outcome.follow()
            watch(outcomes)
    return outcomes


Answer = tuple[int, str]
"""A run's exit code, and what went wrong."""


def _next(waiting: Sequence[Outcome], outcomes: Sequence[Outcome]) -> Outcome | None:
    """The first that waits for no other run; None if all do."""
    open_ = {o.variant.folder for o in outcomes if o.state in ("waiting", "running")}
    return next((o for o in waiting if not (o.variant.after and o.variant.after.folder in open_)), None)


def _do(variant: Variant, workers: str) -> Answer:
    """Carry out one run, or go on with it."""
    from fedstill.experiment.running import runner

    if (variant.folder / "summary.json").is_file():
        return 0, ""
    os.environ[WORKERS] = workers
    watch = StopsWhenAsked()
    signal.signal(signal.SIGINT, watch.ask)
    signal.signal(signal.SIGTERM, watch.ask)
    try:
        with watch.working:
            if (variant.folder / "config.toml").is_file():
                runner.resume(variant.folder, watch=watch)
            else:
                runner.run(variant.experiment, variant.folder, watch=watch)
    except Exception as error:
        return _answer(error)
    return 0, ""


def _answer(error: BaseException) -> Answer:
    from fedstill.experiment.running.runner import Interrupted

    if isinstance(error, Interrupted):
        return 1, "stopped; the same command goes on with it"
    if isinstance(error, FedstillError):
        return error.exit_code, str(error)
    return 1, f"{type(error).__name__}: {error}"


def _finish(outcome: Outcome, future: Future[Answer]) -> None:
    """Note how a run ended."""
    error = future.exception()
    outcome.exit_code, outcome.problem = _answer(error) if error else future.result()
    outcome.state = "failed" if outcome.exit_code else "finished"


def _check_folder(variant: Variant) -> None:
    from fedstill.experiment.running.runner import settings_of

    there = (variant.folder / "config.toml").is_file()
    wanted = settle(variant.experiment)
    if there and _defining(settings_of(variant.folder), wanted) != _defining(wanted, wanted):
        raise RunExists(f"{variant.folder} holds a run with other settings; choose another --out")


def _defining(settings: Settings, wanted: Settings) -> Mapping[str, Any]:
    """What makes it this run and no other: all but an engine whose bits are the serial engine's, or that was chosen."""
    same = settings["engine"] in SAME_BITS or wanted["engine"] == "auto"
    return {**settings.tree, "engine": "serial"} if same else settings.tree
