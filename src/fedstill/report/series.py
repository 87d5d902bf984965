"""Series: a measure by round, its mean and spread over the runs of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fedstill.report.groups import Group
from fedstill.report.numbers import Spread, spread
from fedstill.report.runs import Run


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
    return _series([run.curve(key) for run in group.started])


def of_runs(curves: Sequence[dict[int, float]]) -> Series:
    """Mean and spread of some runs' curves, each a number by round or hop."""
    return _series(curves)


def trained(group: Group) -> Series:
    """Seconds that clients trained, from the start to the end of each round, summed over them; 0
    for round 0.
    """
    return _series([_passed(run, "seconds_clients") for run in group.started])


def elapsed(group: Group) -> Series:
    """Seconds from the start to the end of each round; 0 for round 0."""
    return _series([_passed(run, "seconds") for run in group.started])


def class_means(runs: Sequence[Run]) -> dict[int, list[float | None]]:
    """Accuracy of each class by round, mean over the runs that have it: (C,) a round."""
    curves = [run.class_accuracy() for run in runs]
    out = {}
    for number in sorted({n for curve in curves for n in curve}):
        by_class = zip(*(curve[number] for curve in curves if number in curve), strict=True)
        out[number] = [_mean([v for v in values if v is not None]) for values in by_class]
    return out


def phases(run: Run) -> Phases:
    """A run's seconds by phase; clients that worked side by side share the time on the clock in
    proportion.
    """
    training = measuring = busy = 0.0
    for event in run.clients:
        training += event.get("seconds_training") or 0.0
        measuring += event.get("seconds_measuring") or 0.0
        busy += event.get("seconds") or 0.0
    wall = sum(e.get("seconds_training") or 0.0 for e in run.rounds)
    scale = min(1.0, wall / busy) if busy > 0 else 0.0
    server = sum(e.get("seconds_measuring") or 0.0 for e in run.rounds)
    total = sum(e.get("seconds") or 0.0 for e in run.rounds)
    training, measuring = scale * training, scale * measuring + server
    return Phases(training, measuring, max(0.0, total - training - measuring))


def _passed(run: Run, key: str) -> dict[int, float]:
    numbers = [0, *(e["round"] for e in run.rounds)]
    return dict(
        zip(numbers, accumulate([0.0, *(e.get(key) or 0.0 for e in run.rounds)]), strict=True)
    )


def _series(curves: Sequence[dict[int, float]]) -> Series:
    rounds = sorted({r for curve in curves for r in curve})
    spreads = [spread([curve[r] for curve in curves if r in curve]) for r in rounds]
    return Series(rounds, [s for s in spreads if s is not None])


def _mean(values: Sequence[float]) -> float | None:
    average = spread(values)
    return None if average is None else average.mean
