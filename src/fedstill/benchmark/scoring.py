"""The numbers that the ranking takes from a run's journal, and the runs behind them.

Every score is computed from a matrix of accuracies, whose columns are classes, tasks or clients and
whose rows follow one another in time. From each column's best row and last row follows
accuracy = learned × kept, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import CorruptFile, Diverged, Interrupted, RunsFailed, TooFewReplies
from fedstill.core.files import counted
from fedstill.metrics import tasks as task_metrics
from fedstill.metrics.accuracy import Values
from fedstill.running.compare import Outcome, Variant
from fedstill.running.journal import JOURNAL, Event, read_journal
from fedstill.running.numbers import RunNumbers

ROUNDS_PER_ROW = 5
"""The number of successive rounds whose mean is one row of the matrix: on uneven data, single
rounds differ by twenty points.
"""

CACHED_JOURNALS = 64
"""The number of journals whose events stay in memory: several checks read those of one entry."""


@dataclass(frozen=True)
class Score:
    """The numbers of one run. Accuracies are shares from 0 to 1; accuracy = learned × kept.

    ``kept``: NaN if the matrix has a single row, which is the case for two to nine rounds without
    tasks; 1 for a single round.
    ``forgetting``: FedNTD's F, over rounds. ``average_forgetting``, ``backward_transfer``: over
    tasks; NaN without tasks.
    ``rounds``: completed rounds; fewer than planned if the run diverged.
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
        """The numbers by name."""
        return asdict(self)

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> Score:
        """A score from its numbers as text, by name; an empty text is NaN.

        Raises KeyError or ValueError for a number that is missing or malformed.
        """
        numbers: dict[str, Any] = {}
        for name in SCORE_FIELDS:
            if name in ("bytes_up", "bytes_down", "rounds"):
                numbers[name] = int(texts[name])
            else:
                numbers[name] = float(texts[name] or "nan")
        return cls(**numbers)


SCORE_FIELDS = tuple(score_field.name for score_field in fields(Score))
"""The names of a score's numbers, in the order of table.csv."""


# ---- scores of journals --------------------------------------------------------------------------


def read_events(journal: Path) -> Sequence[Event]:
    """The events of a finished run's journal, from a cache if the file has not changed.

    Raises CorruptFile, as ``read_journal`` does.
    """
    if not journal.is_file():
        return _read_events(journal, 0, 0)
    stat = journal.stat()
    return _read_events(journal, stat.st_mtime_ns, stat.st_size)


@lru_cache(CACHED_JOURNALS)
def _read_events(journal: Path, changed: int, size: int) -> Sequence[Event]:
    """The events; the time of the last change and the size are keys of the cache."""
    return tuple(read_journal(journal))


def score_of(folder: Path, planned_rounds: int) -> Score:
    """The score of a run's directory.

    If the run diverged, the rounds that are missing count as its last one. Raises CorruptFile for a
    journal that cannot be scored.
    """
    journal = folder / JOURNAL
    events = read_events(journal)
    try:
        return score_of_events(events, planned_rounds)
    except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise CorruptFile(f"{journal} cannot be scored: {type(error).__name__}: {error}") from error


def score_of_events(events: Sequence[Event], planned_rounds: int) -> Score:
    """The score of a journal's events. Raises KeyError or another error if one is missing."""
    numbers = RunNumbers.of([event for event in events if event["event"] != "client"])
    accuracies = accuracy_matrix(events, planned_rounds)
    if accuracies.ndim < 2:
        raise ValueError("no round has the accuracies that a score is computed from")
    # All columns are learned from the first row on.
    column_tasks = np.zeros(accuracies.shape[1])
    learned = task_metrics.learned(accuracies, column_tasks)
    kept = 0.0
    if len(accuracies) == 1 < planned_rounds:
        kept = math.nan
    elif learned > 0:
        kept = task_metrics.kept_share(accuracies, column_tasks)
    forgetting = 0.0
    if numbers.rounds:
        forgetting = numbers.summary.get("forgetting", math.nan)
    return Score(
        accuracy=task_metrics.final_accuracy(accuracies, column_tasks),
        learned=learned,
        kept=kept,
        forgetting=forgetting,
        average_forgetting=_float(numbers.over_tasks.get("average_forgetting")),
        backward_transfer=_float(numbers.over_tasks.get("backward_transfer")),
        bytes_up=int(numbers.summary.get("bytes_up", 0)),
        bytes_down=int(numbers.summary.get("bytes_down", 0)),
        seconds_cpu=numbers.summary.get("seconds_cpu", 0.0),
        rounds=len(numbers.rounds),
    )


def accuracy_matrix(events: Sequence[Event], planned_rounds: int) -> Values:
    """The accuracies that a score is computed from, (rows, columns), the oldest row first.

    With queries there are two rows, before and after the exchange, and a column for each client
    that asked. With tasks there is a row for each end of a task. Otherwise a row is the mean of
    ``ROUNDS_PER_ROW`` successive rounds. Columns are then classes, or tasks that are domains.
    """
    start = events[0]
    rounds = [event for event in events if event["event"] == "round"]
    if rounds and "queries" in start:
        return _rows_of_queries(rounds[-1]["answers"])
    if "stream" in start:
        task_ends = [event for event in events if event["event"] == "task"]
        return _rows_of_tasks(task_ends, len(start["stream"]["classes"]))
    return _rows_of_rounds(_class_accuracies(events), planned_rounds)


def _rows_of_queries(answers: Sequence[Mapping[str, Any]]) -> Values:
    """Two rows: the average accuracy of each client that asked, before and after the exchange."""
    accuracies_before = [_float(answer["average_accuracy_before"]) for answer in answers]
    accuracies = [_float(answer["average_accuracy"]) for answer in answers]
    return np.array([accuracies_before, accuracies])


def _rows_of_tasks(task_ends: Sequence[Event], task_count: int) -> Values:
    """A row for each task: NaN if no model was tested at its end, and for a task that did not end,
    the row of the last one that did.
    """
    # Task 0 is the untrained model, which counts if nothing else was evaluated.
    rows = {event["task"]: _task_end(event) for event in task_ends}
    last = max(rows)
    untested = [math.nan] * len(rows[last])
    before = [rows.get(task, untested) for task in range(1, last + 1)]
    after = [rows[last]] * (task_count - last)
    return np.array(before + after)


def _task_end(event: Mapping[str, Any]) -> list[float]:
    """The accuracies at a task's end: by class if there is a single test set, else by task."""
    if len(event["totals"]) > 1:
        return list(map(_float, event["row"]))
    counts = zip(event["correct"][0], event["totals"][0], strict=True)
    return [correct / total if total else math.nan for correct, total in counts]


def _rows_of_rounds(accuracies: list[list[float]], planned_rounds: int) -> Values:
    """Means of successive rounds; the rounds that do not fill a row are left out at the start."""
    # A run that diverged keeps its last accuracies.
    padded = accuracies + accuracies[-1:] * (planned_rounds - len(accuracies))
    first = 0
    if len(padded) > ROUNDS_PER_ROW:
        first = len(padded) % ROUNDS_PER_ROW
    starts = range(first, len(padded), ROUNDS_PER_ROW)
    return np.array([np.mean(padded[i : i + ROUNDS_PER_ROW], axis=0) for i in starts])


def _class_accuracies(events: Sequence[Event]) -> list[list[float]]:
    """The accuracy of each class after each round, or of the initial model if there is no round."""
    evaluated = [event for event in events if event["event"] in ("start", "initial", "round")]
    rows = RunNumbers.of(evaluated).class_accuracy
    has_rounds = evaluated[-1]["event"] == "round"
    numbers = [number for number in rows if (number > 0) == has_rounds]
    if not numbers:
        raise KeyError("class_accuracy")
    return [list(map(_float, rows[number])) for number in numbers]


def task_rows(events: Sequence[Event]) -> list[list[float]]:
    """The accuracy on each task at each task's end, (T, T); empty without tasks."""
    task_ends = [event for event in events if event["event"] == "task"]
    rows: list[list[float]] = RunNumbers.of(task_ends).task_rows.tolist()
    return rows


def _float(value: float | None) -> float:
    if value is None:
        return math.nan
    return float(value)


# ---- runs and their scores -----------------------------------------------------------------------

Execute = Callable[[Sequence[Variant]], Sequence[Outcome]]
"""Executes runs, without those that are finished already."""


@dataclass(frozen=True)
class ScoredRun:
    """A finished run and its score. ``diverged``: the reason if it diverged, else empty."""

    variant: Variant
    score: Score
    diverged: str = ""


def scored_runs(variants: Sequence[Variant], execute: Execute) -> list[ScoredRun]:
    """Execute runs and score them. Raises Interrupted and RunsFailed as ``completed`` does."""
    return [
        ScoredRun(
            outcome.variant, score_of(outcome.variant.folder, outcome.rounds), outcome.problem
        )
        for outcome in completed(variants, execute)
    ]


def completed(variants: Sequence[Variant], execute: Execute) -> list[Outcome]:
    """Execute runs to their end; a run that diverges counts as complete.

    Raises Interrupted if they were stopped, and RunsFailed if one failed for another reason.
    """
    outcomes = executed(variants, execute)
    failed = [outcome for outcome in outcomes if outcome.problem and not _diverged(outcome)]
    if failed:
        first = failed[0]
        raise RunsFailed(
            f"{len(failed)} of {len(outcomes)} failed; {first.variant.label}, seed "
            f"{first.variant.seed}: {first.problem}"
        )
    return outcomes


def executed(variants: Sequence[Variant], execute: Execute) -> list[Outcome]:
    """Execute runs until each has finished or failed. Raises Interrupted if they were stopped."""
    by_folder = {outcome.variant.folder: outcome for outcome in execute(variants)}
    outcomes = [by_folder[variant.folder] for variant in variants]
    unfinished = sum(outcome.state in ("waiting", "running", "stopped") for outcome in outcomes)
    if unfinished:
        remaining = f"{unfinished} of {counted(len(outcomes), 'run')}"
        raise Interrupted(f"stopped; the same command continues with {remaining}")
    return outcomes


def _diverged(outcome: Outcome) -> bool:
    """Whether a run failed because its numbers diverged, not because of an error in its code."""
    last_line = outcome.trace.strip().rpartition("\n")[2]
    errors = (f"{error.__module__}.{error.__name__}:" for error in (Diverged, TooFewReplies))
    return last_line.startswith(tuple(errors)) and "failed" not in last_line
