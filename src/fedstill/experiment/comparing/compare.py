"""Several runs side by side, as many at once as fit on the machine; the same command goes on with them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill.engines.cores import WORKERS, cores
from fedstill.errors import FedstillError, RunExists
from fedstill.experiment.comparing.stopping import Asked, StopsWhenAsked
from fedstill.experiment.comparing.variants import Variant, with_starts
from fedstill.experiment.config.experiment import Experiment
from fedstill.experiment.config.overrides import flat
from fedstill.experiment.config.settings import Settings

BYTES_A_RUN = 1.5e9
"""What one run of the usual sizes takes at most; only how many run at once depends on it."""

POLL_SECONDS = 0.2

SAME_BITS = ("serial", "pooled")
"""Engines that give one and the same run."""


@dataclass
class Outcome:
    """How far a run has come: rounds done, the last accuracy; what went wrong, if anything did, and its traceback."""

    variant: Variant
    rounds: int
    done: int = 0
    accuracy: float | None = None
    state: str = "waiting"
    problem: str = ""
    trace: str = ""
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


def jobs_that_fit() -> int:
    """How many runs to do at once: one a core, fewer if there is not enough memory."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores(), int(free / BYTES_A_RUN)))


def compare(
    runs: Sequence[Variant], jobs: int, watch: Callable[[Sequence[Outcome]], None], debug: bool = False
) -> list[Outcome]:
    """Do all runs, going on with those that were begun, and leaving alone those that are finished.

    A run that starts from another's model waits for that one. ``watch`` is called a few times a second. A run that
    fails does not stop the others. The first Ctrl-C lets running stages end and starts nothing new; the second ends at
    once. ``debug``: as for ``run``. Raises RunExists for a folder that holds another run.
    """
    outcomes = [Outcome(v, v.settings.rounds) for v in with_starts(runs)]
    for outcome in outcomes:
        check_folder(outcome.variant)
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
                experiment, folder = ready.variant.experiment, ready.variant.folder
                running[pool.submit(_do, experiment, folder, workers, debug)] = ready
            if asked.stop and not running:
                break
            done, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                _finish(running.pop(future), future)
            for outcome in outcomes:
                outcome.follow()
            watch(outcomes)
    return outcomes


Answer = tuple[int, str, str]
"""A run's exit code, what went wrong, and its traceback."""


def _next(waiting: Sequence[Outcome], outcomes: Sequence[Outcome]) -> Outcome | None:
    """The first that does not wait for another run; None if all do."""
    open_ = {o.variant.folder for o in outcomes if o.state in ("waiting", "running")}
    return next((o for o in waiting if not (o.variant.after and o.variant.after.folder in open_)), None)


def _do(experiment: Experiment, folder: Path, workers: str, debug: bool) -> Answer:
    """Carry out one run, or go on with it."""
    from fedstill.experiment.running import runner

    if (folder / "summary.json").is_file():
        return 0, "", ""
    os.environ[WORKERS] = workers
    watch = StopsWhenAsked()
    signal.signal(signal.SIGINT, watch.ask)
    signal.signal(signal.SIGTERM, watch.ask)
    try:
        with watch.working:
            if (folder / "config.toml").is_file():
                runner.resume(folder, watch=watch, debug=debug)
            else:
                runner.run(experiment, folder, watch=watch, debug=debug)
    except Exception as error:
        return _answer(error)
    return 0, "", ""


def _answer(error: BaseException) -> Answer:
    from fedstill.experiment.progress import Interrupted

    if isinstance(error, Interrupted):
        return 1, "stopped; the same command continues it", ""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, FedstillError):
        return error.exit_code, str(error), trace
    return 1, f"{type(error).__name__}: {error}", trace


def _finish(outcome: Outcome, future: Future[Answer]) -> None:
    """Note how a run ended."""
    error = future.exception()
    outcome.exit_code, outcome.problem, outcome.trace = _answer(error) if error else future.result()
    outcome.state = "failed" if outcome.exit_code else "finished"


def check_folder(variant: Variant) -> None:
    """Raise RunExists for a folder that holds a run of other settings than a variant's."""
    if other := other_settings(variant):
        raise RunExists(f"{variant.folder} holds a run with other settings ({', '.join(other)}); choose another --out")


def other_settings(variant: Variant) -> list[str]:
    """The dotted keys of which the run in a variant's folder has other values; none where there is no run."""
    from fedstill.experiment.run_directory.begun import settings_of

    if not (variant.folder / "config.toml").is_file():
        return []
    wanted = flat(_defining(variant.settings, variant.settings))
    there = flat(_defining(settings_of(variant.folder), variant.settings))
    return sorted(k for k in {*wanted, *there} if wanted.get(k) != there.get(k))


def _defining(settings: Settings, wanted: Settings) -> Mapping[str, Any]:
    """The settings that identify a run: all but an engine with the serial engine's bits, or one that ``auto`` chose."""
    same = settings.engine in SAME_BITS or wanted.engine == "auto"
    return {**settings.tree, "engine": "serial"} if same else settings.tree
