"""Progress of runs on the standard error: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedstill.metrics.classification import METRICS
from fedstill.report.terminal import percent
from fedstill.running.compare import Outcome
from fedstill.running.selection import STOP_REASON

# How far runs are, on the standard error: bars in a terminal, plain lines in a file or a pipe.


EVERY = 10.0
"""Seconds between two lines; the first and the last round, and the end of each run of several, have
one anyway.
"""

Clock = Callable[[], float]


class Display(Protocol):
    """Shows how far something is."""

    def begin(self) -> None:
        """It begins."""

    def end(self) -> None:
        """It has ended, well or not."""


class OneRun(Display, Protocol):
    """Shows one run."""

    def started(self, folder: Path, round: int) -> None:
        """Everything is prepared, and a round begins."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """A stage is done."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """A round is done."""

    def asked(self) -> None:
        """Ctrl-C was pressed."""


class Followed:
    """One run that is followed (``running.recording.Progress``). Ctrl-C ends after the stage,
    twice at once.

    ``display``: shows it; None: nothing is shown.
    """

    def __init__(self, display: OneRun | None) -> None:
        self.display, self._asked = display, False

    def __enter__(self) -> Followed:
        self._old = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        if self.display:
            self.display.begin()
        return self

    def __exit__(self, *_: object) -> None:
        if self.display:
            self.display.end()
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def started(self, folder: Path, round: int) -> None:
        """Show that the run starts, or goes on."""
        if self.display:
            self.display.started(folder, round)

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Show a stage that is done."""
        if self.display and round > 0 and stages:
            self.display.stage(round, rounds, index, stages)

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Show a round that is done."""
        if self.display:
            self.display.round(event, rounds)

    def stop(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        if self.display:
            self.display.asked()


def followed(rounds: int, label: str, quiet: bool = False) -> Followed:
    """What follows a run: a bar in a terminal, elsewhere a line a round or every few seconds;
    nothing if quiet.
    """
    if quiet:
        return Followed(None)
    return Followed(Bar(rounds, label) if in_terminal() else Lines(rounds, label))


def in_terminal() -> bool:
    """Whether people look at the standard error as it comes."""
    return _console().is_terminal


class Bar:
    """A progress bar for one run: round, accuracy, time left."""

    def __init__(self, rounds: int, label: str) -> None:
        self._bar = progress_bar()
        self._task = self._bar.add_task(label, total=rounds, said="")

    def begin(self) -> None:
        """Draw it."""
        self._bar.start()

    def end(self) -> None:
        """Take it away."""
        self._bar.stop()

    def started(self, folder: Path, round: int) -> None:
        """Move to where a resumed run goes on."""
        self._bar.update(self._task, completed=round - 1)

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Move by the share of the round that is done."""
        self._bar.update(self._task, completed=round - 1 + (index + 1) / (stages + 1))

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Show a finished round."""
        self._bar.update(self._task, completed=event["round"], said="  ".join(_numbers(event)))

    def asked(self) -> None:
        """Say that the run will end."""
        self._bar.update(self._task, said="ending after this stage (Ctrl-C again: at once)")


class Lines:
    """Lines for one run: the first and the last round, and what is done at least ``EVERY`` seconds
    after a line.
    """

    def __init__(self, rounds: int, label: str, clock: Clock = time.monotonic) -> None:
        self.rounds, self.label, self.clock = rounds, label, clock
        # the first round done here, and when; a resumed run had others
        self._first: tuple[int, float] | None = None

    def begin(self) -> None:
        """Time passes from now on."""
        self._began = self._last = self.clock()

    def started(self, folder: Path, round: int) -> None:
        """Say how many rounds there are, and where their journal is."""
        rounds = (
            f"{self.rounds} rounds"
            if round == 1
            else f"goes on with round {round} of {self.rounds}"
        )
        self._say(f"{rounds}, in {folder}")

    def end(self) -> None:
        """Nothing: the last round has had its line."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """A line, where a round takes long."""
        if self._due() and index + 1 < stages:
            self._say(
                f"round {round} of {rounds}, stage {index + 1} of {stages}, "
                f"{duration(self._passed())}"
            )

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """A line for a finished round."""
        number, passed = int(event["round"]), self._passed()
        first = self._first
        self._first = first or (number, passed)
        is_last = number == rounds or STOP_REASON in event
        if not (first is None or is_last or self._due()):
            return
        each = passed if first is None else (passed - first[1]) / (number - first[0])
        ahead = "" if is_last else f", about {duration(each * (rounds - number))} left"
        if STOP_REASON in event:
            ahead = f", stopped early: {event[STOP_REASON]}"
        self._say(
            f"{', '.join([f'round {number} of {rounds}', *_numbers(event)])}, "
            f"{duration(passed)}{ahead}"
        )

    def asked(self) -> None:
        """Say that the run will end."""
        self._say("ending after this stage (Ctrl-C again: at once)")

    def _passed(self) -> float:
        return self.clock() - self._began

    def _due(self) -> bool:
        return self.clock() - self._last >= EVERY

    def _say(self, text: str) -> None:
        self._last = self.clock()
        print(f"{self.label}: {text}", file=sys.stderr, flush=True)


def _numbers(event: Mapping[str, Any]) -> list[str]:
    refused = [f"{event['refused']} refused"] if event.get("refused") else []
    own = (
        [f"for the clients {percent(event['personal_accuracy'])}"]
        if "personal_clients" in event
        else []
    )
    own += (
        [f"on own tests {percent(event['own_test_accuracy'])}"]
        if "own_test_accuracy" in event
        else []
    )
    server = [
        f"{name} {percent(event[name])}"
        for name in ("accuracy", "forgetting")
        if event[name] is not None
    ]
    measured = [name for name in METRICS if event.get(name) is not None]
    metrics = [f"{METRICS[name].title} {METRICS[name].text(event[name])}" for name in measured]
    return [*own, *server, *metrics, *refused]


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(9.6), duration(200), duration(7500)
    ('10 s', '3 min 20 s', '2 h 5 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def progress_bar() -> Progress:
    """A bar with rounds done, time passed and time left."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=_console(),
        transient=True,
    )


def _console() -> Console:
    return Console(stderr=True, highlight=False, markup=False)


# How far the runs of a comparison are, on the standard error: bars in a terminal, plain lines
# elsewhere.


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
    known = sum(o.due for o in outcomes)
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
        self._bar.update(
            self._all,
            completed=sum(o.done for o in outcomes),
            total=_all_rounds(outcomes, self.runs),
        )
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
    end = "finished"
    if outcome.stopped_early:
        end = f"stopped early in round {outcome.done} of {outcome.rounds}"
    return f"{end}, accuracy {percent(outcome.accuracy)}"
