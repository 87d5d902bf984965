"""The data of figures: measures by round over the runs of a group, the times of runs, and what
measures recorded after stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import PurePath

import numpy as np

from fedstill.metrics.accuracy import Values
from fedstill.running.numbers import Look
from fedstill.running.runs import Group, Run, Spread

ByRound = Mapping[int, float]
"""A number by round. Round 0 is before training."""

# ---- measures by round ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """A measure at some rounds or hops.

    ``rounds``: the numbers of the rounds or hops. ``values``: the spread over seeds at each.
    """

    rounds: list[int]
    values: list[Spread]

    @property
    def mean(self) -> list[float]:
        """The means."""
        return [value.mean for value in self.values]

    @property
    def mean_by_round(self) -> dict[int, float]:
        """The means by round or hop."""
        return dict(zip(self.rounds, self.mean, strict=True))

    @property
    def stretches(self) -> list[Series]:
        """The parts of the series without gaps between rounds."""
        starts = [
            index
            for index, (number, following) in enumerate(pairwise(self.rounds), 1)
            if following > number + 1
        ]
        ends = pairwise([0, *starts, len(self.rounds)])
        return [Series(self.rounds[start:end], self.values[start:end]) for start, end in ends]

    @property
    def bands(self) -> list[Series]:
        """The parts of the series whose values are of more than one run, and so have a spread."""
        parts: list[Series] = []
        is_continued = False
        for number, value in zip(self.rounds, self.values, strict=True):
            has_spread = value.runs > 1
            if has_spread and not is_continued:
                parts.append(Series([], []))
            if has_spread:
                parts[-1].rounds.append(number)
                parts[-1].values.append(value)
            is_continued = has_spread
        return parts


def over_seeds(group: Group, key: str) -> Series:
    """A measure by round, over all runs that have it in the round."""
    return of_runs([run.curve(key) for run in group.started])


def of_runs(curves: Sequence[ByRound]) -> Series:
    """Mean and spread of the curves of runs."""
    rounds = sorted({number for curve in curves for number in curve})
    if not rounds:
        return Series([], [])
    values = np.array([[curve.get(number, np.nan) for number in rounds] for curve in curves])
    return Series(rounds, _spreads(values))


def _spreads(values: Values) -> list[Spread]:
    """Mean and sample standard deviation of each column of (runs, columns), without NaN."""
    runs = np.sum(~np.isnan(values), axis=0)
    means = np.nansum(values, axis=0) / runs
    squares = np.nansum((values - means) ** 2, axis=0)
    deviations = np.sqrt(squares / np.maximum(1, runs - 1))
    columns = zip(means.tolist(), deviations.tolist(), runs.tolist(), strict=True)
    return [Spread(mean, deviation, count) for mean, deviation, count in columns]


def mean_over_seeds(group: Group, key: str) -> dict[int, float]:
    """The means of a measure by round."""
    return over_seeds(group, key).mean_by_round


def common_rounds(group: Group, key: str) -> list[int]:
    """The rounds in which all runs that record a measure have it."""
    curves = [run.curve(key) for run in group.started]
    recorded = [set(curve) for curve in curves if curve]
    if not recorded:
        return []
    return sorted(set.intersection(*recorded))


def class_means(runs: Sequence[Run]) -> dict[int, list[float | None]]:
    """The mean accuracy of each class by round, (C,), over the runs that have it."""
    curves = [run.numbers.class_accuracy for run in runs]
    rounds = sorted({number for curve in curves for number in curve})
    if not rounds:
        return {}
    blank = [None] * len(next(row for curve in curves for row in curve.values()))
    by_run = [[curve.get(number, blank) for number in rounds] for curve in curves]
    # (runs, rounds, C)
    means = known_means(np.array(by_run, dtype=np.float64))
    return {
        number: [_known(mean) for mean in row]
        for number, row in zip(rounds, means.tolist(), strict=True)
    }


def known_means(values: Values) -> Values:
    """The means over the first axis without NaN; NaN where no number is known."""
    counts = np.sum(~np.isnan(values), axis=0)
    sums = np.nansum(values, axis=0)
    unknown = np.full(sums.shape, np.nan)
    means: Values = np.divide(sums, counts, out=unknown, where=counts > 0)
    return means


def _known(mean: float) -> float | None:
    """A mean; None if no run has the number."""
    if math.isnan(mean):
        return None
    return mean


# ---- times ---------------------------------------------------------------------------------------


def seconds_trained(run: Run) -> dict[int, float]:
    """The total training time of all clients up to each round, in seconds; 0 for round 0."""
    return _sums_by_round(run, "seconds_clients")


def mean_seconds_trained(group: Group) -> dict[int, float]:
    """``seconds_trained``, as the mean over seeds."""
    return of_runs([seconds_trained(run) for run in group.started]).mean_by_round


def mean_seconds_elapsed(group: Group) -> dict[int, float]:
    """The time from the start of the run to the end of each round, in seconds; 0 for round 0."""
    sums = [_sums_by_round(run, "seconds") for run in group.started]
    return of_runs(sums).mean_by_round


def _sums_by_round(run: Run, metric: str) -> dict[int, float]:
    """The cumulative sum of a metric by round; 0 for round 0."""
    curve = run.curve(metric)
    rounds = run.numbers.rounds
    sums = accumulate(curve.get(number, 0.0) for number in rounds)
    return {0: 0.0, **dict(zip(rounds, sums, strict=True))}


@dataclass(frozen=True)
class Phases:
    """The time of a run by phase, in seconds."""

    training: float
    measuring: float
    other: float


def phases(run: Run) -> Phases:
    """A run's time by phase. The wall time of clients that work in parallel is divided in
    proportion to their own times.
    """
    client_seconds = sum(run.numbers.client_values("seconds"))
    wall_seconds = _total(run, "seconds_training")
    scale = 0.0
    if client_seconds > 0:
        scale = min(1.0, wall_seconds / client_seconds)
    training = scale * sum(run.numbers.client_values("seconds_training"))
    measuring = scale * sum(run.numbers.client_values("seconds_measuring"))
    measuring += _total(run, "seconds_measuring")
    remaining = _total(run, "seconds") - training - measuring
    return Phases(training, measuring, max(0.0, remaining))


def _total(run: Run, metric: str) -> float:
    """The sum of a metric over rounds."""
    return sum(run.curve(metric).values())


def seconds_by_measure(group: Group) -> dict[str, float]:
    """The time of each measure in a run, at the server and at clients, in seconds, as the mean over
    seeds.
    """
    totals: dict[str, float] = {}
    for run in group.started:
        names = [PurePath(str(name)).name for name in run.settings.get("measure", ())]
        for name, seconds in run.numbers.seconds_by_measure(names).items():
            totals[name] = totals.get(name, 0.0) + seconds
    return {name: total / len(group.started) for name, total in totals.items()}


# ---- measurements after stages -------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """What a measure of a run recorded after a stage."""

    group: Group
    run: Run
    look: Look

    @property
    def place(self) -> str:
        """Its seed and round, as text."""
        return f"seed {self.run.seed}, round {self.look.round}"


def measurements(group: Group, measure: str) -> list[Measurement]:
    """All measurements of a measure in the runs of a group."""
    return [
        Measurement(group, run, look)
        for run in group.started
        for look in run.numbers.looks(measure)
    ]


def first_run_measurements(group_measurements: Sequence[Measurement]) -> list[Measurement]:
    """The measurements of the first run that has any."""
    return [
        measurement
        for measurement in group_measurements
        if measurement.run is group_measurements[0].run
    ]


def last_measurements(groups: Sequence[Group], measure: str) -> list[Measurement]:
    """The last measurement of each group, from its first run with the measure."""
    last = []
    for group in groups:
        run_measurements = first_run_measurements(measurements(group, measure))
        if run_measurements:
            last.append(run_measurements[-1])
    return last
