"""The numbers that the ranking takes from a run's journal, and the runs behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import CorruptFile, Diverged, Interrupted, RunsFailed, TooFewReplies
from fedstill.metrics import tasks as over
from fedstill.metrics.values import Values
from fedstill.running.compare import Outcome, Variant
from fedstill.running.journal import Event, read_journal
from fedstill.running.numbers import RunNumbers

# The numbers that the ranking takes from a run's journal: how much was learned, how much of it was
# kept, what it cost.
#
# For each class (or task, or client that asked) there are a best row and a last row of a matrix:
# accuracy = learned x kept, exactly.


SUCCESSIVE = 5
"""Rows are means of so many successive rounds: single rounds swing by twenty points where data are
uneven.
"""


@dataclass(frozen=True)
class Score:
    """One run's numbers. Accuracies are shares; ``accuracy`` = ``learned`` x ``kept``.

    ``kept``: NaN for a run of two to nine rounds without tasks, which is one row. Of one round all
    is kept.
    ``forgetting``: FedNTD's F over rounds. ``average_forgetting``, ``backward_transfer``: over
    tasks, NaN without.
    ``sent``: bytes up and down. ``rounds``: how many were done; fewer than asked for where the run
    diverged.
    """

    accuracy: float
    learned: float
    kept: float
    forgetting: float
    average_forgetting: float
    backward_transfer: float
    bytes_up: int
    bytes_down: int
    seconds_cpu: float
    rounds: int

    @property
    def sent(self) -> int:
        """Bytes up and down."""
        return self.bytes_up + self.bytes_down

    @property
    def table(self) -> dict[str, Any]:
        """Name and number of each."""
        return asdict(self)

    @staticmethod
    def of(told: Mapping[str, str]) -> Score:
        """A score from the text of its numbers, by name; an empty text is NaN. Raises KeyError,
        ValueError.
        """
        whole = ("bytes_up", "bytes_down", "rounds")
        numbers: dict[str, Any] = {
            k: int(told[k]) if k in whole else float(told[k] or "nan") for k in NUMBERS
        }
        return Score(**numbers)


NUMBERS = tuple(f.name for f in fields(Score))
"""What a line of the table of all runs has, in order."""


KEPT = 64
"""Of so many journals the events are kept: each check of an entry reads all of its runs'."""


def events_of(journal: Path) -> Sequence[Event]:
    """The events of a finished run's journal; read once for several checks. Raises CorruptFile as
    ``read_journal``.
    """
    stat = journal.stat() if journal.is_file() else None
    return _read(journal, *((stat.st_mtime_ns, stat.st_size) if stat else (0, 0)))


@lru_cache(KEPT)
def _read(journal: Path, changed: int, size: int) -> Sequence[Event]:
    return tuple(read_journal(journal))


def score_of(folder: Path, asked: int) -> Score:
    """The score of a run's directory; ``asked``: how many rounds it was to have.

    Rounds that it lacks, as it diverged, count as its last one. Raises CorruptFile for a journal
    that cannot be read.
    """
    events = events_of(folder / "journal.jsonl")
    try:
        return score_from(events, asked)
    except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise CorruptFile(
            f"{folder / 'journal.jsonl'} cannot be scored: {type(error).__name__}: {error}"
        ) from error


def score_from(events: Sequence[Event], asked: int) -> Score:
    """The score of a journal's events; raises KeyError or another error where one is missing."""
    numbers = RunNumbers.of([event for event in events if event["event"] != "client"])
    rows = matrix_of(events, asked)
    columns = np.zeros(rows.shape[1])
    learned = over.learned(rows, columns)
    kept = 0.0
    if len(rows) == 1 < asked:
        kept = math.nan
    elif learned > 0:
        kept = over.kept_share(rows, columns)
    forgetting = numbers.summary.get("forgetting", math.nan)
    return Score(
        accuracy=over.final_accuracy(rows, columns),
        learned=learned,
        kept=kept,
        forgetting=forgetting if numbers.rounds else 0.0,
        average_forgetting=_number(numbers.over_tasks.get("average_forgetting")),
        backward_transfer=_number(numbers.over_tasks.get("backward_transfer")),
        bytes_up=int(numbers.summary.get("bytes_up", 0)),
        bytes_down=int(numbers.summary.get("bytes_down", 0)),
        seconds_cpu=numbers.summary.get("seconds_cpu", 0.0),
        rounds=len(numbers.rounds),
    )


def matrix_of(events: Sequence[Event], asked: int) -> Values:
    """The accuracies that a score is taken from, oldest row first, (rows, columns).

    Rows are task ends where there are tasks; before and after where clients asked; else means of
    successive rounds. Columns are classes, or tasks that are domains, or clients that asked.
    """
    start = events[0]
    rounds = [event for event in events if event["event"] == "round"]
    if rounds and "queries" in start:
        return _before_and_after(rounds[-1]["answers"])
    if "stream" in start:
        ends = [event for event in events if event["event"] == "task"]
        return _by_task_end(ends, len(start["stream"]["classes"]))
    by_round = _by_round(events)
    by_round += by_round[-1:] * (asked - len(by_round))
    first = 0
    if len(by_round) > SUCCESSIVE:
        first = len(by_round) % SUCCESSIVE
    starts = range(first, len(by_round), SUCCESSIVE)
    return np.array([np.mean(by_round[i : i + SUCCESSIVE], axis=0) for i in starts])


def _before_and_after(answers: Sequence[Mapping[str, Any]]) -> Values:
    """Two rows, the average accuracy of each client that asked: alone, and then."""
    before = [_number(answer["average_accuracy_before"]) for answer in answers]
    after = [_number(answer["average_accuracy"]) for answer in answers]
    return np.array([before, after])


def _by_task_end(ends: Sequence[Event], tasks: int) -> Values:
    """A row for each task; one that did not end counts as the last one that did."""
    rows = [_end(end) for end in ends if end["task"]]
    if not rows:
        rows = [_end(ends[0])]  # of the untrained model
    return np.array(rows + rows[-1:] * (tasks - len(rows)))


def _by_round(events: Sequence[Event]) -> list[list[float]]:
    """The accuracy of each class after each round, or of the initial model without a round."""
    evaluated = [event for event in events if event["event"] in ("start", "initial", "round")]
    rows = RunNumbers.of(evaluated).class_accuracy
    has_rounds = evaluated[-1]["event"] == "round"
    numbers = [number for number in rows if (number > 0) == has_rounds]
    if not numbers:
        raise KeyError("class_accuracy")
    return [[_number(value) for value in rows[number]] for number in numbers]


def task_rows(events: Sequence[Event]) -> list[list[float]]:
    """The accuracy on each task at each task's end, (T, T); empty without tasks."""
    ends = [event for event in events if event["event"] == "task"]
    rows = RunNumbers.of(ends).task_accuracy()
    return [[_number(value) for value in row] for number, row in rows.items() if number > 0]


def _end(event: Mapping[str, Any]) -> list[float]:
    """The columns at a task's end: classes where there is one test set, else tasks."""
    if len(event["totals"]) > 1:
        return [_number(v) for v in event["row"]]
    return [
        c / n if n else math.nan
        for c, n in zip(event["correct"][0], event["totals"][0], strict=True)
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


# Runs of the ranking, done or gone on with, and their scores; a run that diverged counts as far as
# it came.


Do = Callable[[Sequence[Variant]], Sequence[Outcome]]
"""Carries runs out, and leaves alone those that are finished."""


@dataclass(frozen=True)
class Ended:
    """A run that has come to its end, its score, and why it diverged; empty where it did not."""

    run: Variant
    score: Score
    diverged: str = ""


def ended(runs: Sequence[Variant], do: Do) -> list[Ended]:
    """Do the runs and score them; raises as ``completed``."""
    return [
        Ended(o.variant, score_of(o.variant.folder, o.rounds), o.problem)
        for o in completed(runs, do)
    ]


def completed(runs: Sequence[Variant], do: Do) -> list[Outcome]:
    """Do the runs, to their end; raises Interrupted if stopped, RunsFailed if one failed but did
    not diverge.
    """
    own = not_stopped(runs, do)
    if failed := [o for o in own if o.problem and not _diverged(o)]:
        first = failed[0]
        raise RunsFailed(
            f"{len(failed)} of {len(own)} failed; {first.variant.label}, seed "
            f"{first.variant.seed}: {first.problem}"
        )
    return own


def not_stopped(runs: Sequence[Variant], do: Do) -> list[Outcome]:
    """Do the runs, as far as each comes by itself; raises Interrupted if they were stopped."""
    outcomes = {o.variant.folder: o for o in do(runs)}
    own = [outcomes[run.folder] for run in runs]
    if left := sum(o.state in ("waiting", "running", "stopped") for o in own):
        raise Interrupted(f"stopped; the same command goes on with {left} of {len(own)} runs")
    return own


def _diverged(outcome: Outcome) -> bool:
    """Whether a run ended because its numbers grew beyond all bounds, not by a mistake in its
    code.
    """
    last = outcome.trace.strip().rpartition("\n")[2]
    kinds = (Diverged, TooFewReplies)
    return (
        any(last.startswith(f"{kind.__module__}.{kind.__name__}:") for kind in kinds)
        and "failed" not in last
    )
