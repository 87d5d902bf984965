"""How far the runs of a comparison are, on the standard error: bars in a terminal, plain lines
elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.progress import TaskID

from fedstill.experiment.comparing.compare import Outcome
from fedstill.report.following import EVERY, Clock, duration, in_terminal, progress_bar
from fedstill.report.terminal import percent

ENDS = ("finished", "failed")
"""States of which a line is written: those of runs that were stopped, the last line counts."""


class ManyRuns(Protocol):
    """Shows several runs as long as its block runs."""

    def __enter__(self) -> ManyRuns: ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Show how far they are; called a few times a second."""


def followed_runs(quiet: bool = False, runs: int = 0) -> ManyRuns:
    """What follows a comparison: bars in a terminal, elsewhere a line every few seconds and for
    each run that ends.

    runs: how many there will be, where not all are known from the start.
    """
    if quiet:
        return UnseenRuns()
    return RunBars(runs) if in_terminal() else RunLines(runs=runs)


def _all_rounds(outcomes: Sequence[Outcome], runs: int) -> int:
    """The rounds of all runs; those that are not known yet are taken to be like the others."""
    known = sum(o.rounds for o in outcomes)
    return known * max(runs, len(outcomes)) // max(1, len(outcomes))


class UnseenRuns:
    """Shows nothing."""

    def __enter__(self) -> UnseenRuns:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""

    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing."""


class RunBars:
    """A progress bar over all rounds of all runs, and one line for each run under way."""

    def __init__(self, runs: int = 0) -> None:
        self.runs = runs
        self._bar = progress_bar()
        self._all: TaskID | None = None
        self._tasks: dict[Path, TaskID] = {}

    def __enter__(self) -> RunBars:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Show how far the runs are."""
        if self._all is None:
            self._all = self._bar.add_task(
                "all rounds", total=_all_rounds(outcomes, self.runs), said=""
            )
        self._bar.update(self._all, completed=sum(o.done for o in outcomes))
        for outcome in outcomes:
            task = self._tasks.get(outcome.variant.folder)
            if outcome.state == "running" and task is None:
                task = self._bar.add_task(_name(outcome), total=outcome.rounds, said="")
                self._tasks[outcome.variant.folder] = task
            if task is not None:
                said = "" if outcome.accuracy is None else f"accuracy {percent(outcome.accuracy)}"
                self._bar.update(
                    task, completed=outcome.done, said=said, visible=outcome.state == "running"
                )


class RunLines:
    """A line when a run ends, and one for all of them at least ``EVERY`` seconds after a line."""

    def __init__(self, clock: Clock = time.monotonic, runs: int = 0) -> None:
        self.clock, self.runs = clock, runs
        # rounds that a run had when it was begun or gone on with
        self._before: dict[Path, int] = {}
        self._ended: set[Path] = set()
        self._last = -EVERY

    def __enter__(self) -> RunLines:
        self._began = self.clock()
        self._last = self._began - EVERY
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing: every run has had its last line."""

    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Say how far all are, at first and from time to time, and what has ended."""
        self.runs = max(self.runs, len(outcomes))
        for outcome in outcomes:
            if outcome.state != "waiting":
                self._before.setdefault(outcome.variant.folder, outcome.done)
        if self.clock() - self._last >= EVERY:
            self._say(self._far(outcomes))
        for outcome in outcomes:
            folder = outcome.variant.folder
            if outcome.state in ENDS and folder not in self._ended:
                self._ended.add(folder)
                self._say(
                    f"{_name(outcome)}: {_end(outcome)}, {len(self._ended)} of "
                    f"{max(self.runs, len(outcomes))} runs"
                )

    def _far(self, outcomes: Sequence[Outcome]) -> str:
        done, rounds = sum(o.done for o in outcomes), _all_rounds(outcomes, self.runs)
        here, passed = done - sum(self._before.values()), self.clock() - self._began
        at_work = sum(o.state == "running" for o in outcomes)
        far = (
            f"{done} of {rounds} rounds in {self.runs} runs, {at_work} at work, {duration(passed)}"
        )
        return f"{far}, about {duration(passed / here * (rounds - done))} left" if here else far

    def _say(self, text: str) -> None:
        self._last = self.clock()
        print(text, file=sys.stderr, flush=True)


def _name(outcome: Outcome) -> str:
    return f"{outcome.variant.label}, seed {outcome.variant.seed}"


def _end(outcome: Outcome) -> str:
    if outcome.state != "finished":
        return f"{outcome.state} at round {outcome.done} of {outcome.rounds}"
    return f"finished, accuracy {percent(outcome.accuracy)}"
