"""Series: a measure by round, its mean and spread over the runs of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import PurePath
from typing import Any

from fedstill.core.errors import CorruptFile
from fedstill.measures.base import seconds_at_clients
from fedstill.running.groups import Group, Spread, spread
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
