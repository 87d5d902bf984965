"""The progress of runs on the standard error: bars in a terminal, lines in a file or a pipe."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

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

from fedstill.core.files import counted, duration, neutral
from fedstill.metrics.classification import METRICS
from fedstill.report.terminal import SafeConsole, percent
from fedstill.running.compare import Outcome
from fedstill.running.journal import STOP_REASON

EVERY = 10.0
"""Seconds between two lines. The first and the last round always have a line, and so has the end of
each run of a comparison.
"""

STOPPING = "stopping after this stage (press Ctrl-C again to stop immediately)"

Clock = Callable[[], float]
"""Returns the time in seconds."""


# One run


class Display:
    """Shows the progress of one run. The base class shows nothing."""

    def begin(self) -> None:
        """Start to show it."""

    def end(self) -> None:
        """Stop, whether or not the run is finished."""

    def started(self, folder: Path, round: int) -> None:
        """Show that the run is prepared and a round begins."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Show that a stage is finished."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Show that a round is finished."""

    def stopping(self) -> None:
        """Show that the run will stop, after Ctrl-C."""


class Followed:
    """The progress of one run (``running.recording.Progress``), and its reaction to Ctrl-C.

    Ctrl-C ends the run after the stage; pressed twice, it ends the run at once.

    ``display``: shows the progress.
    """

    def __init__(self, display: Display) -> None:
        self.display = display
        self._is_stopping = False
        self._former_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Followed:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former_handlers[number] = signal.signal(number, self._stop)
        self.display.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.display.end()
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)

    def started(self, folder: Path, round: int) -> None:
        """Show that the run starts or continues."""
        self.display.started(folder, round)

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Show that a stage is finished; stages before round 1 are not shown."""
        if round > 0 and stages:
            self.display.stage(round, rounds, index, stages)

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Show that a round is finished."""
        self.display.round(event, rounds)

    def stop(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._is_stopping

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._is_stopping:
            raise KeyboardInterrupt
        self._is_stopping = True
        self.display.stopping()


def followed(rounds: int, label: str, quiet: bool = False) -> Followed:
    """The progress of a run: a bar in a terminal, lines elsewhere, nothing if ``quiet``."""
    if quiet:
        return Followed(Display())
    if in_terminal():
        return Followed(Bar(rounds, label))
    return Followed(Lines(rounds, label))


def in_terminal() -> bool:
    """Whether the standard error is a terminal."""
    return _console().is_terminal


class Bar(Display):
    """A progress bar for one run: rounds, the latest numbers, time left."""

    def __init__(self, rounds: int, label: str) -> None:
        self._bar = progress_bar()
        self._task = self._bar.add_task(label, total=rounds, note="")

    def begin(self) -> None:
        """Draw the bar."""
        self._bar.start()

    def end(self) -> None:
        """Remove the bar."""
        self._bar.stop()

    def started(self, folder: Path, round: int) -> None:
        """Move to the round before the first one of this process."""
        self._bar.update(self._task, completed=round - 1)

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Move by the stage's share of the round; measuring counts as one more stage."""
        share = (index + 1) / (stages + 1)
        self._bar.update(self._task, completed=round - 1 + share)

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Move to the end of the round and show its numbers."""
        note = "  ".join(_numbers(event))
        self._bar.update(self._task, completed=event["round"], note=note)

    def stopping(self) -> None:
        """Show that the run will stop."""
        self._bar.update(self._task, note=STOPPING)


@dataclass(frozen=True)
class Mark:
    """A finished round and the seconds that had passed by then."""

    round: int
    seconds: float


class Lines(Display):
    """Lines for one run: at its first and last round, and at least ``EVERY`` seconds apart."""

    def __init__(self, rounds: int, label: str, clock: Clock = time.monotonic) -> None:
        self.rounds = rounds
        self.label = label
        self.clock = clock
        self._began = 0.0
        self._last_line = 0.0
        self._is_writing = False
        self._is_stop_pending = False
        # Of a resumed run, the first round of this process.
        self._first: Mark | None = None

    def begin(self) -> None:
        """Start the clock."""
        self._began = self.clock()
        self._last_line = self._began

    def started(self, folder: Path, round: int) -> None:
        """Write the number of rounds and the run's directory."""
        rounds = counted(self.rounds, "round")
        if round > 1:
            rounds = f"resuming at round {round} of {self.rounds}"
        self._write(f"{rounds}, in {folder}")

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Write a line in the middle of a long round."""
        number = index + 1
        if self._is_due() and number < stages:
            self._write(
                f"round {round} of {rounds}, stage {number} of {stages}, "
                f"{duration(self._elapsed())}"
            )

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Write a line at the end of a round, unless the last line is recent."""
        mark = Mark(int(event["round"]), self._elapsed())
        first = self._first
        if first is None:
            self._first = mark

        is_last = mark.round == rounds or STOP_REASON in event
        if first is not None and not is_last and not self._is_due():
            return
        parts = [f"round {mark.round} of {rounds}", *_numbers(event), duration(mark.seconds)]
        if STOP_REASON in event:
            parts.append(f"stopped early: {event[STOP_REASON]}")
        elif not is_last:
            remaining = _seconds_per_round(first, mark) * (rounds - mark.round)
            parts.append(f"about {duration(remaining)} left")
        self._write(", ".join(parts))

    def stopping(self) -> None:
        """Write that the run will stop.

        If the signal has interrupted another line, the message follows this line: a stream refuses
        a second write inside of the first.
        """
        if self._is_writing:
            self._is_stop_pending = True
        else:
            self._write(STOPPING)

    def _elapsed(self) -> float:
        return self.clock() - self._began

    def _is_due(self) -> bool:
        return self.clock() - self._last_line >= EVERY

    def _write(self, text: str) -> None:
        self._last_line = self.clock()
        self._is_writing = True
        try:
            print(neutral(f"{self.label}: {text}", "terminal"), file=sys.stderr, flush=True)
        finally:
            self._is_writing = False
        if self._is_stop_pending:
            self._is_stop_pending = False
            self._write(STOPPING)


def _seconds_per_round(first: Mark | None, latest: Mark) -> float:
    """The mean time of the rounds after the first one, whose time includes reading the data."""
    if first is None:
        return latest.seconds
    return (latest.seconds - first.seconds) / (latest.round - first.round)


def _numbers(event: Mapping[str, Any]) -> list[str]:
    """The numbers of a round that a line or a bar shows."""
    numbers = []
    if "personal_clients" in event:
        numbers.append(f"for the clients {percent(event['personal_accuracy'])}")
    if "own_test_accuracy" in event:
        numbers.append(f"on own tests {percent(event['own_test_accuracy'])}")
    if "own_test_weighted" in event:
        numbers.append(f"weighted {percent(event['own_test_weighted'])}")
    server_numbers = [name for name in ("accuracy", "forgetting") if event[name] is not None]
    numbers += [f"{name} {percent(event[name])}" for name in server_numbers]
    for name, metric in METRICS.items():
        if event.get(name) is not None:
            numbers.append(f"{metric.title} {metric.text(event[name])}")
    if event.get("refused"):
        numbers.append(f"{event['refused']} refused")
    return numbers


def progress_bar() -> Progress:
    """A bar with finished rounds, elapsed time and time left; its tasks have a ``note``."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=_console(), transient=True)


def _console() -> Console:
    return SafeConsole(stderr=True, highlight=False, markup=False)


# The runs of a comparison


ENDS = ("finished", "failed")
"""States that a line reports. A run that is stopped has no line of its own."""


class ManyRuns:
    """Shows the progress of several runs while its block runs. The base class shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop showing it."""

    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Show the state of all runs; it is called a few times a second."""


def followed_runs(quiet: bool = False, runs: int = 0) -> ManyRuns:
    """The progress of a comparison: bars in a terminal, lines elsewhere, nothing if ``quiet``.

    runs: the number of runs, where not all of them are known from the start.
    """
    if quiet:
        return ManyRuns()
    if in_terminal():
        return RunBars(runs)
    return RunLines(runs=runs)


def _all_rounds(outcomes: Sequence[Outcome], runs: int) -> int:
    """The rounds of all runs; a run that is not known yet counts as the mean of the others."""
    rounds = sum(outcome.due for outcome in outcomes)
    return rounds * max(runs, len(outcomes)) // max(1, len(outcomes))


class RunBars(ManyRuns):
    """A progress bar over all rounds of all runs, and a bar for each run that is running."""

    def __init__(self, runs: int = 0) -> None:
        self.runs = runs
        self._bar = progress_bar()
        self._total: TaskID | None = None
        self._tasks: dict[Path, TaskID] = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Draw all bars."""
        rounds = _all_rounds(outcomes, self.runs)
        if self._total is None:
            self._total = self._bar.add_task("all rounds", total=rounds, note="")
        finished = sum(outcome.done for outcome in outcomes)
        self._bar.update(self._total, completed=finished, total=rounds)
        for outcome in outcomes:
            self._draw(outcome)

    def _draw(self, outcome: Outcome) -> None:
        """Draw the bar of a run; it is hidden while the run is not running."""
        is_running = outcome.state == "running"
        folder = outcome.variant.folder
        if folder not in self._tasks:
            if not is_running:
                return
            self._tasks[folder] = self._bar.add_task(_name(outcome), total=outcome.rounds, note="")
        note = ""
        if outcome.accuracy is not None:
            note = f"accuracy {percent(outcome.accuracy)}"
        self._bar.update(self._tasks[folder], completed=outcome.done, note=note, visible=is_running)


class RunLines(ManyRuns):
    """A line at the end of each run, and lines about all runs at least ``EVERY`` seconds apart."""

    def __init__(self, clock: Clock = time.monotonic, runs: int = 0) -> None:
        self.clock = clock
        self.runs = runs
        self._began = 0.0
        self._last_line = 0.0
        # The rounds that each run had when it was started or continued.
        self._initial_rounds: dict[Path, int] = {}
        self._ended: set[Path] = set()

    def __enter__(self) -> Self:
        self._began = self.clock()
        self._last_line = self._began - EVERY
        return self

    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Write a line about all runs if one is due, and a line for each run that has ended."""
        self.runs = max(self.runs, len(outcomes))
        for outcome in outcomes:
            if outcome.state != "waiting":
                self._initial_rounds.setdefault(outcome.variant.folder, outcome.done)
        if self.clock() - self._last_line >= EVERY:
            self._write(self._overview(outcomes))
        for outcome in outcomes:
            folder = outcome.variant.folder
            if outcome.state in ENDS and folder not in self._ended:
                self._ended.add(folder)
                count = f"{len(self._ended)} of {counted(self.runs, 'run')}"
                self._write(f"{_name(outcome)}: {_end(outcome)}, {count}")

    def _overview(self, outcomes: Sequence[Outcome]) -> str:
        """The rounds of all runs, and the time left where any round was finished here."""
        finished = sum(outcome.done for outcome in outcomes)
        rounds = _all_rounds(outcomes, self.runs)
        running = sum(outcome.state == "running" for outcome in outcomes)
        elapsed = self.clock() - self._began
        text = (
            f"{finished} of {rounds} rounds in {counted(self.runs, 'run')}, {running} running, "
            f"{duration(elapsed)}"
        )
        finished_here = finished - sum(self._initial_rounds.values())
        if not finished_here:
            return text
        remaining = elapsed / finished_here * (rounds - finished)
        return f"{text}, about {duration(remaining)} left"

    def _write(self, text: str) -> None:
        self._last_line = self.clock()
        print(neutral(text, "terminal"), file=sys.stderr, flush=True)


def _name(outcome: Outcome) -> str:
    return f"{outcome.variant.label}, seed {outcome.variant.seed}"


def _end(outcome: Outcome) -> str:
    """How a run ended, in words."""
    if outcome.state != "finished":
        return f"{outcome.state} at round {outcome.done} of {outcome.rounds}"
    end = "finished"
    if outcome.stopped_early:
        end = f"stopped early in round {outcome.done} of {outcome.rounds}"
    return f"{end}, accuracy {percent(outcome.accuracy)}"
