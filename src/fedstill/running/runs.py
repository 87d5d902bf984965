"""Runs as a reader sees them: what a run's directory says, finished or not."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.config.overrides import flat
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.files import read_toml
from fedstill.data.client_split import LabelCounts
from fedstill.metrics.classification import METRICS
from fedstill.running import journal as journals
from fedstill.running.archive import folder_of, packs_below, readable
from fedstill.running.journal import Event, with_later_looks
from fedstill.running.numbers import LearningRates, Numbers, RunNumbers
from fedstill.running.same_run import check_config, check_journal
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
        further = list(LearningRates.of(self.settings, self.start).numbers(self.clients))
        if not self.own_models:
            further.append(_worth_to_clients(numbers.class_accuracy, self.label_counts))
        return RunNumbers([*numbers, *further], numbers.rounds, numbers.classes)

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
