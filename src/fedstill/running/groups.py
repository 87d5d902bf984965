"""Groups: runs that differ in their seed only, told apart by the settings in which they differ from
other groups.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from fedstill.config.settings import OLD_BEHAVIOUR
from fedstill.core.registry import short_name
from fedstill.running.journal import Event
from fedstill.running.runs import Run, find
from fedstill.running.same_run import settings_but_seed

UNSET = "–"


@dataclass(frozen=True)
class Spread:
    """A mean over runs and their sample standard deviation, 0 for a single run."""

    mean: float
    std: float
    runs: int

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """Mean ± spread; the mean alone if there is one run.

        >>> spread([0.1, 0.3]).text(100), spread([0.5]).text()
        ('20.00 ± 14.14', '0.50')
        """
        mean = f"{scale * self.mean:.{digits}f}"
        return mean if self.runs == 1 else f"{mean} ± {scale * self.std:.{digits}f}"


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and sample standard deviation; None of nothing."""
    if not values:
        return None
    deviation = 0.0
    if len(values) > 1:
        deviation = statistics.stdev(values)
    return Spread(statistics.fmean(values), deviation, len(values))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only: ``label`` names what is special, ``runs`` are sorted by
    seed.

    ``repeats``: further runs of a seed that is there already; they are left out, for the same seed
    is no new evidence.
    """

    label: str
    runs: Sequence[Run]
    repeats: Sequence[Run] = ()

    @property
    def settings(self) -> Mapping[str, Any]:
        """What its runs have in common, by dotted key."""
        return settings_but_seed(self.runs[0].settings, self.runs[0].start)

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return [r.seed for r in self.runs]

    @property
    def started(self) -> list[Run]:
        """Its runs with at least one finished round."""
        return [r for r in self.runs if r.rounds]

    @property
    def counted(self) -> str:
        """Of how many runs its numbers are: "3", or "2 of 3" where one has failed, or was stopped,
        in round 1.
        """
        there, asked = len(self.started), len(self.runs)
        return str(asked) if there == asked else f"{there} of {asked}"

    @property
    def own_models(self) -> bool:
        """Whether its clients have models of their own, which were measured."""
        return any(r.own_models for r in self.runs)

    @property
    def finished(self) -> bool:
        """Whether all its runs came to their end."""
        return all(r.finished for r in self.runs)

    @property
    def display(self) -> str:
        """The label, and whether it is unfinished."""
        return self.label if self.finished else f"{self.label} (unfinished)"

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return next((r.classes for r in self.runs if r.classes), [])

    def values(self, key: str) -> list[float]:
        """A measure of each run that has it; ``key`` as in a run's summary."""
        summaries = [run.numbers.summary for run in self.started]
        return [summary[key] for summary in summaries if key in summary]

    def mean_spread(self, key: str) -> Spread | None:
        """Mean and sample standard deviation of a measure over seeds; None if no run has it."""
        return spread(self.values(key))


def groups(directories: Sequence[Path]) -> list[Group]:
    """The runs in some directories, grouped, in the order in which they are found."""
    return group(find(directories))


def group(runs: Sequence[Run]) -> list[Group]:
    """Runs by everything but their seed."""
    return [_group(members.label, members.runs) for members in alike(runs)]


class Configured(Protocol):
    """A run as far as its group depends on it: its settings by dotted key, and its first event."""

    @property
    def settings(self) -> Mapping[str, Any]: ...

    @property
    def start(self) -> Event: ...


R = TypeVar("R", bound=Configured)


@dataclass(frozen=True)
class Alike(Generic[R]):
    """Runs that differ in their seed at most; ``label`` tells them from other runs."""

    label: str
    runs: Sequence[R]


def alike(runs: Sequence[R]) -> list[Alike[R]]:
    """Runs by everything but their seed, and but keys that one of them lacks because it began
    before there were any.
    """
    absent = {k for k in OLD_BEHAVIOUR if any(k not in run.settings for run in runs)}

    def telling(run: R) -> dict[str, Any]:
        shared = settings_but_seed(run.settings, run.start)
        return {key: value for key, value in shared.items() if key not in absent}

    by_settings: dict[str, list[R]] = {}
    for run in runs:
        settings = json.dumps(telling(run), sort_keys=True, default=str)
        by_settings.setdefault(settings, []).append(run)
    lists = list(by_settings.values())
    labels = group_labels([telling(members[0]) for members in lists])
    return [Alike(label, members) for label, members in zip(labels, lists, strict=True)]


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same everywhere.

    >>> differing([{"rounds": 5, "method.beta": 1}, {"rounds": 5}])
    ['method.beta']
    """
    keys = dict.fromkeys(k for s in settings for k in s)
    return [k for k in keys if any(s.get(k, UNSET) != settings[0].get(k, UNSET) for s in settings)]


SCHEDULE = {"topology.kind": "topology", "rounds": "rounds"}
"""Settings in which methods of one comparison may differ of themselves, and their titles."""


def differing_schedule(compared: Sequence[Group]) -> dict[str, str]:
    """The settings of ``SCHEDULE`` in which groups differ, with their titles."""
    keys = differing([group.settings for group in compared])
    return {key: title for key, title in SCHEDULE.items() if key in keys}


def schedule_cells(group: Group, schedule: Iterable[str]) -> list[str]:
    """A group's values of some settings, as they stand in a table."""
    return [said(group.settings.get(key, UNSET)) for key in schedule]


def said(value: Any) -> str:
    """A value of a config as people write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, tuple)) else str(value)


def method_of(settings: Mapping[str, Any]) -> str:
    """A method's name without the folder of the file it is in."""
    return short_name(str(settings.get("method.name", "unnamed")))


def _group(label: str, members: Sequence[Run]) -> Group:
    kept: dict[int, Run] = {}
    for run in members:
        rival = kept.get(run.seed)
        if rival is None or (run.finished, len(run.rounds)) > (rival.finished, len(rival.rounds)):
            kept[run.seed] = run
    chosen = [kept[seed] for seed in sorted(kept)]
    return Group(label, chosen, [r for r in members if not any(r is c for c in chosen)])


def split_of(settings: Mapping[str, Any]) -> str:
    """How the data came to be uneven: the partition and what tells how much, or that sites have
    their own.
    """
    if settings.get("engine") == "flower" and settings.get("flower.data") == "sites":
        return "sites' own data"
    keys = [k for k in ("alpha", "shards", "classes_per_client") if f"partition.{k}" in settings]
    told = [f"{k} {said(settings[f'partition.{k}'])}" for k in keys]
    return " ".join([said(settings.get("partition.kind", "–")), *told])


def group_labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells settings apart: the method, and the keys in which those of one method differ."""
    names = [method_of(s) for s in settings]
    labels = []
    for name, own in zip(names, settings, strict=True):
        same = [s for n, s in zip(names, settings, strict=True) if n == name]
        parts = [f"{_short(key, same)}={said(own.get(key, UNSET))}" for key in differing(same)]
        labels.append(", ".join([name, *parts]))
    return labels


def _short(key: str, settings: Sequence[Mapping[str, Any]]) -> str:
    last = key.rpartition(".")[2]
    return (
        key
        if sum(k.rpartition(".")[2] == last for k in differing(settings)) > 1 or last == "name"
        else last
    )
