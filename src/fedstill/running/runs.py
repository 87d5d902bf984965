"""Runs as a reader sees them: what a run's directory says, finished or not."""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from fedstill.config.overrides import flat
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.files import read_toml
from fedstill.core.registry import short_name
from fedstill.data.client_split import LabelCounts
from fedstill.metrics.classification import METRICS
from fedstill.running import journal as journals
from fedstill.running.directory import folder_of, packs_below, readable
from fedstill.running.journal import Event, with_later_looks
from fedstill.running.numbers import LearningRates, Numbers, RunNumbers
from fedstill.running.same_run import check_config, check_journal, settings_but_seed
from fedstill.running.selection import STOP_REASON, BestRound, best_round
from fedstill.running.split_file import label_counts_of, networks_of, read_split

CONFIG = "config.toml"
JOURNAL = "journal.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Run:
    """One run, read from its directory.

    ``settings``: every resolved value by dotted key. ``start``, ``initial``: those events, empty if
    they are not there yet. ``rounds``, ``clients``: the events of that name, in
    order; ``measures``: what measures saw. ``written``: when the journal was last written, in
    seconds since 1970. ``resumed``: where the run went on with other versions.
    ``label_counts``: what each client has of each class, (C,) by client; of no client where nobody
    knows them.
    ``networks``: the name of each client's network; empty where all have the server's. ``named``:
    where a reader finds it, ``folder`` if it is in no pack.
    """

    folder: Path
    settings: Mapping[str, Any]
    start: Event
    initial: Event
    rounds: Sequence[Event]
    clients: Sequence[Event]
    finished: bool
    written: float
    measures: Sequence[Event] = ()
    resumed: Sequence[Event] = ()
    label_counts: LabelCounts = field(default_factory=lambda: LabelCounts.of_table([], 0))
    networks: Sequence[str] = ()
    task_ends: Sequence[Event] = ()
    named: Path = Path()

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.settings.get("seed", 0))

    @property
    def asked(self) -> int:
        """How many rounds it was asked for."""
        return int(self.settings.get("rounds", 0))

    @property
    def classes(self) -> list[str]:
        """The names of the classes; empty for a run that has not started."""
        return [str(name) for name in self.start.get("classes", [])]

    @property
    def stop_reason(self) -> str:
        """Why it stopped before the last round that it was asked for; empty if it did not."""
        return str(self.rounds[-1].get(STOP_REASON, "")) if self.rounds else ""

    @property
    def best(self) -> BestRound | None:
        """Its best round; None if its rounds were not compared."""
        return best_round(self.start, self.rounds)

    def versions(self, name: str) -> list[str]:
        """The versions of fedstill, torch, numpy or Python that it was run with, or the cards, in
        order.
        """
        events = [self.start, *(event["versions"] for event in self.resumed)]
        return [str(event[name]) for event in events if name in event]

    def curve(self, key: str) -> dict[int, float]:
        """A measure by round, where it was measured; round 0 is before training.

        ``measure/key/key``: a number that a measure saw, the mean over a round's stages where it
        looked more than once; or that it summed up from what clients reported, the last key in the
        event of the round.
        """
        curve = self.numbers.by_round(key)
        last = key.rpartition("/")[2]
        # A metric of this name is the run's own, and no sum of what a measure saw.
        if curve or last in METRICS:
            return curve
        return self.numbers.by_round(last)

    @functools.cached_property
    def numbers(self) -> RunNumbers:
        """The run's numbers by metric.

        Beside those of its journal, the learning rates, and ``personal_accuracy``: of a run whose
        clients have no models of their own, what the global model is worth to them.
        """
        events = [self.start, self.initial, *self.rounds, *self.clients, *self.measures]
        numbers = RunNumbers.of([event for event in (*events, *self.task_ends) if event])
        numbers.add(LearningRates.of(self.settings, self.start).numbers(self.clients))
        if not self.own_models:
            numbers.add([_worth_to_clients(numbers.class_accuracy, self.label_counts)])
        return numbers

    @property
    def own_metrics(self) -> list[str]:
        """The metrics that measures of the user's own gave, without the seconds that they took."""
        measures: set[str] = set()
        fields: set[str] = set()
        for event in self.rounds:
            for measure, names in event.get("of_measures", {}).items():
                measures.add(measure)
                fields.update(names)
        prefixes = tuple(f"{measure}/" for measure in measures)
        times = {f"{measure}/seconds" for measure in measures}
        return [
            metric
            for metric in self.numbers.summary
            if metric in fields or (metric.startswith(prefixes) and metric not in times)
        ]

    @property
    def own_models(self) -> bool:
        """Whether its clients have models of their own, which were measured."""
        return any("personal_clients" in event for event in self.rounds)

    @property
    def untaught(self) -> tuple[int, int]:
        """How many queries had no teacher, and how many there were; (0, 0) for methods that do not
        choose any.
        """
        taught = {
            (e["round"], e["client"]): e["teachers"]
            for e in self.clients
            if "query" in e and "teachers" in e
        }
        return sum(not teachers for teachers in taught.values()), len(taught)

    def class_accuracy(self) -> dict[int, list[float | None]]:
        """Accuracy of each class by round, as (C,) shares; None for a class without test examples.

        Of the server's model; if it has none, of the clients' own, the mean over them in rounds
        where they measured.
        """
        return self.numbers.class_accuracy


def _worth_to_clients(
    class_accuracy: Mapping[int, Sequence[float | None]], label_counts: LabelCounts
) -> Numbers:
    """By round, the accuracy of the global model on test examples in the clients' proportions of
    classes; empty where nobody knows their label counts.
    """
    if not len(label_counts):
        class_accuracy = {}
    known = {
        number: tuple(v is not None for v in accuracy)
        for number, accuracy in class_accuracy.items()
    }
    shares = {mask: label_counts.mean_shares(np.array(mask)) for mask in set(known.values())}
    worth = [
        sum(
            float(share) * value
            for share, value in zip(shares[known[number]], accuracy, strict=True)
            if value is not None
        )
        for number, accuracy in class_accuracy.items()
    ]
    rounds = np.array(list(class_accuracy), np.int64)
    return Numbers("personal_accuracy", np.array(worth, np.float64), {"round": rounds})


@dataclass(frozen=True)
class RunFolder:
    """Where a run is read from, and what it is called: the path as a reader finds it."""

    path: Path
    named: Path


def run_folders(directories: Iterable[Path]) -> list[RunFolder]:
    """The folders of runs in some directories and packs, or anywhere below them, each once.

    Raises ConfigError for a directory without runs.
    """
    folders: dict[Path, RunFolder] = {}
    for named in directories:
        directory = readable(named)
        if not directory.is_dir():
            raise ConfigError(
                f"there is no directory {directory}; name directories of runs, e.g. runs/"
            )
        below = sorted(_below(directory, folder_of(named)), key=lambda folder: natural(folder.path))
        if not below:
            raise ConfigError(
                f"{directory} holds no run: no folder in it has both {CONFIG} and {JOURNAL}"
            )
        folders.update({folder.path.resolve(): folder for folder in below})
    if not folders:
        raise ConfigError("no directory of runs was named, e.g. runs/")
    return list(folders.values())


def find(directories: Sequence[Path]) -> list[Run]:
    """The runs in some directories, or in any folder below them, each once.

    Raises ConfigError for a directory without runs, CorruptFile for a run that cannot be read.
    """
    return [read_run(folder.path, folder.named) for folder in run_folders(directories)]


def read_run(folder: Path, named: Path | None = None) -> Run:
    """A run from its directory; raises CorruptFile naming the file, and the line, that is not what
    it should be.
    """
    check_config(folder)
    path = folder / JOURNAL
    events = journals.read_journal(path)
    check_journal(folder, events)
    by_name: dict[str, list[Event]] = {}
    for event in events:
        by_name.setdefault(event["event"], []).append(event)
    start = next(iter(by_name.get("start", ())), {})
    split = read_split(folder, start)
    return Run(
        folder=folder,
        settings=_settings(folder / CONFIG),
        start=start,
        initial=next(iter(by_name.get("initial", ())), {}),
        rounds=by_name.get("round", []),
        clients=by_name.get("client", []),
        finished=(folder / SUMMARY).is_file(),
        written=path.stat().st_mtime,
        measures=with_later_looks(folder, by_name.get("measure", [])),
        resumed=by_name.get("resumed", []),
        label_counts=label_counts_of(split, start),
        networks=networks_of(split, start),
        task_ends=by_name.get("task", []),
        named=named or folder,
    )


def natural(folder: Path) -> list[tuple[str, float, str]]:
    """What to sort folders by, so that 10 comes after 9.

    >>> sorted([Path("beta10.0"), Path("beta9.0")], key=natural)[0].name
    'beta9.0'
    """
    pieces = re.split(r"(\d+)", str(folder))
    return [
        (text, int(number or 0), number)
        for text, number in zip_longest(pieces[::2], pieces[1::2], fillvalue="")
    ]


def _below(directory: Path, named: Path) -> Iterator[RunFolder]:
    """The folders of runs, and what each is called below ``named``; none that is hidden: a pack may
    be half read.
    """
    for config in directory.rglob(CONFIG):
        hidden = any(name.startswith(".") for name in config.relative_to(directory).parts)
        if any((config.parent / name).is_file() for name in (JOURNAL, SUMMARY)) and not hidden:
            yield RunFolder(config.parent, named / config.parent.relative_to(directory))
    for packed in packs_below(directory):
        yield from _below(readable(packed), named / folder_of(packed).relative_to(directory))


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = flat(read_toml(path))
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error
    for key in ("seed", "rounds"):
        if type(settings.get(key)) is not int:
            raise CorruptFile(
                f"{path} is not the config of a run: {key} = {settings.get(key)!r} is not a whole "
                "number"
            )
    return settings


# Groups: runs that differ only in their seed. A label has the settings in which groups differ.


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
        started = len(self.started)
        if started == len(self.runs):
            return str(started)
        return f"{started} of {len(self.runs)}"

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


def _shared_settings(run: Configured) -> dict[str, Any]:
    """The settings that runs of one group share."""
    return settings_but_seed(run.settings, run.start)


def alike(runs: Sequence[R]) -> list[Alike[R]]:
    """The runs, grouped by everything but their seed."""
    by_settings: dict[str, list[R]] = {}
    for run in runs:
        settings = json.dumps(_shared_settings(run), sort_keys=True, default=str)
        by_settings.setdefault(settings, []).append(run)
    lists = list(by_settings.values())
    labels = group_labels([_shared_settings(members[0]) for members in lists])
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
