"""Runs as a reader sees them: what a run's directory says, finished or not."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.data.dealt_out import LabelCounts
from fedstill.errors import ConfigError, CorruptFile
from fedstill.experiment.config.overrides import flat
from fedstill.experiment.run_directory import journal as journals
from fedstill.experiment.run_directory.begun import refuse_changed
from fedstill.experiment.run_directory.cut_short import refuse_cut
from fedstill.experiment.run_directory.evidence import folder_of, packs_below, readable
from fedstill.experiment.run_directory.journal import Event
from fedstill.experiment.run_directory.split_file import label_counts_of, networks_of, read_split
from fedstill.experiment.why.falls import with_later_looks
from fedstill.report.checks import check_events, check_looks, check_resumed, checked_ends

CONFIG, JOURNAL, SUMMARY = "config.toml", "journal.jsonl", "summary.json"


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
        if "/" in key and (seen := seen_by_round(self.measures, key)):
            return seen
        if key == "personal_accuracy" and not self.own_models:
            return self._for_clients()
        key, events = key.rpartition("/")[2], [{**self.initial, "round": 0}, *self.rounds]
        return {e["round"]: float(e[key]) for e in events if isinstance(e.get(key), (int, float))}

    @property
    def own_models(self) -> bool:
        """Whether its clients have models of their own, which were measured."""
        return any("personal_clients" in event for event in self.rounds)

    def _for_clients(self) -> dict[int, float]:
        """By round, what the global model is worth to the clients; empty where nobody knows their
        label counts.
        """
        by_class = self.class_accuracy() if len(self.label_counts) else {}
        known = {
            number: tuple(v is not None for v in accuracy) for number, accuracy in by_class.items()
        }
        shares = {
            mask: self.label_counts.mean_shares(np.array(mask)) for mask in set(known.values())
        }
        return {
            number: sum(
                float(s) * v
                for s, v in zip(shares[known[number]], accuracy, strict=True)
                if v is not None
            )
            for number, accuracy in by_class.items()
        }

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
        events = [{**self.initial, "round": 0}, *self.rounds]
        server, own = (
            _by_class(events, key) for key in ("class_accuracy", "personal_class_accuracy")
        )
        return own if own and not server.keys() - {0} else server


def find(directories: Sequence[Path]) -> list[Run]:
    """The runs in some directories, or in any folder below them, each once.

    Raises ConfigError for a directory without runs, CorruptFile for a run that cannot be read.
    """
    folders: dict[Path, tuple[Path, Path]] = {}
    for named in directories:
        directory = readable(named)
        if not directory.is_dir():
            raise ConfigError(
                f"there is no directory {directory}; name directories of runs, e.g. runs/"
            )
        run_folders = sorted(_below(directory, folder_of(named)), key=lambda pair: natural(pair[0]))
        if not run_folders:
            raise ConfigError(
                f"{directory} holds no run: no folder in it has both {CONFIG} and {JOURNAL}"
            )
        folders.update({pair[0].resolve(): pair for pair in run_folders})
    if not folders:
        raise ConfigError("no directory of runs was named, e.g. runs/")
    return [read_run(folder, shown) for folder, shown in folders.values()]


def read_run(folder: Path, named: Path | None = None) -> Run:
    """A run from its directory; raises CorruptFile naming the file, and the event, that is not what
    it should be.
    """
    refuse_changed(folder)
    path = folder / JOURNAL
    events = journals.read_journal(path)
    by_name: dict[str, list[Event]] = {
        "start": [],
        "initial": [],
        "round": [],
        "client": [],
        "measure": [],
    }
    for event in events:
        by_name.setdefault(event["event"], []).append(event)
    start = by_name["start"][0] if by_name["start"] else {}
    initial = by_name["initial"][0] if by_name["initial"] else {}
    check_events(path, start, initial, by_name["round"], by_name["client"])
    check_looks(path, by_name["measure"])
    check_resumed(path, by_name.get("resumed", []))
    refuse_cut(folder, events)
    split = read_split(folder, start)
    return Run(
        folder,
        _settings(folder / CONFIG),
        start,
        initial,
        by_name["round"],
        by_name["client"],
        (folder / SUMMARY).is_file(),
        path.stat().st_mtime,
        with_later_looks(folder, by_name["measure"]),
        by_name.get("resumed", []),
        label_counts_of(split, start),
        networks_of(split, start),
        checked_ends(path, start, by_name.get("task", [])),
        named or folder,
    )


def _by_class(events: Sequence[Event], key: str) -> dict[int, list[float | None]]:
    return {
        e["round"]: e[key] for e in events if any(value is not None for value in e.get(key) or ())
    }


def seen_by_round(events: Sequence[Event], key: str) -> dict[int, float]:
    """The number ``measure/key/key`` by round, from events of measures; the mean where it is there
    more than once.
    """
    measure, *path = key.split("/")
    by_round: dict[int, list[float]] = {}
    for event in events:
        value: Any = event if event["measure"] == measure else None
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)):
            by_round.setdefault(event["round"], []).append(float(value))
    return {number: sum(each) / len(each) for number, each in by_round.items()}


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


def _below(directory: Path, named: Path) -> Iterator[tuple[Path, Path]]:
    """The folders of runs, and what each is called below ``named``; none that is hidden: a pack may
    be half read.
    """
    for config in directory.rglob(CONFIG):
        hidden = any(name.startswith(".") for name in config.relative_to(directory).parts)
        if any((config.parent / name).is_file() for name in (JOURNAL, SUMMARY)) and not hidden:
            yield config.parent, named / config.parent.relative_to(directory)
    for packed in packs_below(directory):
        yield from _below(readable(packed), named / folder_of(packed).relative_to(directory))


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = flat(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{path} cannot be read: {error}") from error
    for key in ("seed", "rounds"):
        if type(settings.get(key)) is not int:
            raise CorruptFile(
                f"{path} is not the config of a run: {key} = {settings.get(key)!r} is not a whole "
                "number"
            )
    return settings
