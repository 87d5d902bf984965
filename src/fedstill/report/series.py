"""Series: a measure by round, its mean and spread over the runs of a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import PurePath
from typing import Any

import numpy as np

from fedstill.core.errors import CorruptFile
from fedstill.measures.base import seconds_at_clients
from fedstill.metrics.values import Values
from fedstill.running.groups import Group, Spread
from fedstill.running.journal import Event
from fedstill.running.runs import JOURNAL, Run


@dataclass(frozen=True)
class Series:
    """A measure at each round: (rounds,) numbers and as many spreads over seeds."""

    rounds: list[int]
    values: list[Spread]

    @property
    def mean(self) -> list[float]:
        """The means."""
        return [v.mean for v in self.values]

    @property
    def stretches(self) -> list[Series]:
        """The same in parts, in each of which numbers follow one another."""
        starts = [i for i, (one, other) in enumerate(pairwise(self.rounds), 1) if other > one + 1]
        parts = pairwise([0, *starts, len(self.rounds)])
        return [Series(self.rounds[start:end], self.values[start:end]) for start, end in parts]

    @property
    def has_band(self) -> bool:
        """Whether any round was reached by more than one run."""
        return any(v.runs > 1 for v in self.values)


@dataclass(frozen=True)
class Phases:
    """Where a run's seconds went."""

    training: float
    measuring: float
    other: float


def over_seeds(group: Group, key: str) -> Series:
    """A measure by round over the runs that have it there: fewer where some are unfinished."""
    return of_runs([run.curve(key) for run in group.started])


def of_runs(curves: Sequence[Mapping[int, float]]) -> Series:
    """Mean and spread of some runs' curves, each a number by round or hop."""
    rounds = sorted({number for curve in curves for number in curve})
    values = np.array([[curve.get(number, np.nan) for number in rounds] for curve in curves])
    return Series(rounds, _spreads(values) if rounds else [])


def trained(group: Group) -> Series:
    """Seconds that clients trained, from the start to the end of each round, summed over them; 0
    for round 0.
    """
    return of_runs([_passed(run, "seconds_clients") for run in group.started])


def elapsed(group: Group) -> Series:
    """Seconds from the start to the end of each round; 0 for round 0."""
    return of_runs([_passed(run, "seconds") for run in group.started])


def class_means(runs: Sequence[Run]) -> dict[int, list[float | None]]:
    """Accuracy of each class by round, mean over the runs that have it: (C,) a round."""
    curves = [run.class_accuracy() for run in runs]
    means = {}
    for number in sorted({number for curve in curves for number in curve}):
        rows = np.array([curve[number] for curve in curves if number in curve], np.float64)
        counts = np.sum(~np.isnan(rows), axis=0)
        sums = np.nansum(rows, axis=0)
        means[number] = [
            total / count if count else None
            for total, count in zip(sums.tolist(), counts.tolist(), strict=True)
        ]
    return means


def phases(run: Run) -> Phases:
    """A run's seconds by phase; clients that worked side by side share the time on the clock in
    proportion.
    """
    busy = run.numbers.sum_over_clients("seconds")
    wall = _total(run, "seconds_training")
    scale = 0.0
    if busy > 0:
        scale = min(1.0, wall / busy)
    training = scale * run.numbers.sum_over_clients("seconds_training")
    measuring = scale * run.numbers.sum_over_clients("seconds_measuring")
    measuring += _total(run, "seconds_measuring")
    other = _total(run, "seconds") - training - measuring
    return Phases(training, measuring, max(0.0, other))


def _total(run: Run, metric: str) -> float:
    return sum(run.curve(metric).values())


def _passed(run: Run, metric: str) -> dict[int, float]:
    """What has passed of a metric by the end of each round."""
    rounds = run.numbers.rounds
    curve = run.curve(metric)
    passed = accumulate([0.0, *(curve.get(number, 0.0) for number in rounds)])
    return dict(zip([0, *rounds], passed, strict=True))


def _spreads(values: Values) -> list[Spread]:
    """Mean and sample standard deviation of each column, (runs, columns); NaN is left out."""
    runs = np.sum(~np.isnan(values), axis=0)
    means = np.nansum(values, axis=0) / runs
    squares = np.nansum((values - means) ** 2, axis=0)
    stds = np.sqrt(squares / np.maximum(1, runs - 1))
    return [
        Spread(float(mean), float(std), int(count))
        for mean, std, count in zip(means, stds, runs, strict=True)
    ]


# What measures wrote into journals, read with care: the last look of a measure, and the numbers of
# all looks.


@dataclass(frozen=True)
class Look:
    """The last look of a measure in a group's first seed that has one."""

    group: Group
    run: Run
    event: Event

    @property
    def place(self) -> str:
        """Which seed and round it is from."""
        return f"seed {self.run.seed}, round {self.event['round']}"


def last_looks(groups: Sequence[Group], measure: str) -> list[Look]:
    """The last look of each group that has the measure."""
    out = []
    for group in groups:
        for run in group.started:
            events = [e for e in run.measures if e["measure"] == measure]
            if events:
                out.append(Look(group, run, events[-1]))
                break
    return out


def looks(group: Group, measure: str) -> Iterator[Look]:
    """Every look of a measure in all of a group's runs."""
    for run in group.started:
        for event in run.measures:
            if event["measure"] == measure:
                yield Look(group, run, event)


@contextmanager
def reading(look: Look) -> Iterator[Event]:
    """The event of a look; what is not as the measure writes it raises CorruptFile with the
    journal's name.
    """
    try:
        yield look.event
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        path, said = look.run.folder / JOURNAL, f"{type(error).__name__}: {error}"
        raise CorruptFile(
            f"{path}: round {look.event['round']} of {look.event['measure']} is damaged: {said}"
        ) from error


def seconds(group: Group) -> dict[str, float]:
    """Seconds a run by measure, mean over seeds; some are taken by clients."""
    total: dict[str, float] = {}
    for run in group.started:
        for event in run.measures:
            total[event["measure"]] = total.get(event["measure"], 0.0) + float(
                event.get("seconds") or 0.0
            )
        names = [PurePath(str(name)).name for name in run.settings.get("measure", ())]
        for name, took in seconds_at_clients(run.clients, names).items():
            total[name] = total.get(name, 0.0) + took
    return {k: v / len(group.started) for k, v in total.items()}


def matrix(value: Any, rows: int, columns: int) -> list[list[float]]:
    """Numbers in so many rows and columns; raises ValueError for anything else."""
    numbers = [[float(v) for v in row] for row in value]
    if len(numbers) != rows or any(len(row) != columns for row in numbers):
        raise ValueError(f"it must have {rows} × {columns} numbers")
    return numbers
