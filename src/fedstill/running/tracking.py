"""The trackers of one run: notified of each round, and kept from harming the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from fedstill.config.overrides import flat
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError, Interrupted, UnknownName, cut_reason
from fedstill.core.files import in_shell, write_whole
from fedstill.running.journal import VERSIONS, Event, read_journal
from fedstill.running.numbers import OF_ROUND, LearningRates, Numbers, numbers_of
from fedstill.running.trackers import AboutRun, HowEnded, MLflow, TensorBoard, Track, Tracker, WandB

# The numbers of each round, from the events of a journal.


GATHERED = frozenset({"initial", "round", "client", "measure"})
"""The events that a round's numbers are made of."""


class RoundNumbers:
    """Takes a journal's events in order, and gives the numbers of a round when its last event has
    come.

    They are the numbers of the whole federation in ``fedstill.load_runs``, by metric, and below
    ``class_accuracy/`` the accuracy of each class by its name. Those of a further model stand below
    its name: ``client 3/accuracy``. settings: the run's, by dotted key; learning rates come from
    them.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._learning_rates = LearningRates({})
        self._classes: list[str] = []
        self._events: list[Event] = []

    def take(self, event: Event) -> tuple[int, dict[str, float]] | None:
        """One event; (round, numbers) if it ends a round (0: before training)."""
        kind = event["event"]
        if kind == "start":
            self._classes = event["classes"]
            self._learning_rates = LearningRates.of(self._settings, event)
        if kind in GATHERED:
            self._events.append(event)
        if kind not in ("initial", "round"):
            return None
        number = event.get("round", 0)
        clients = [event for event in self._events if event["event"] == "client"]
        columns = numbers_of(self._events, len(self._classes))
        columns += self._learning_rates.numbers(clients)
        numbers: dict[str, float] = {}
        for column in columns:
            numbers.update(self._scalars(column, number))
        self._events = []
        return number, numbers

    def _scalars(self, column: Numbers, number: int) -> Iterator[tuple[str, float]]:
        """Name and value of what trackers are sent of one metric in a round."""
        name = column.metric.removeprefix("others/")
        axes = column.about.keys()
        of_classes = name.endswith("class_accuracy") and axes == {"round", "class"}
        if axes != OF_ROUND and not of_classes:
            return
        here = np.flatnonzero(column.about["round"] == number)
        for index in here:
            place = name
            if of_classes:
                place = f"{name}/{self._classes[column.about['class'][index]]}"
            yield place, float(column.values[index])


# The trackers of one run: told what its journal is told, and kept from harming it.


TRACKERS: dict[str, type[Tracker]] = {"mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB}
"""The trackers that have a name."""

MEMO = "trackers.json"
"""The file of a run's directory that says what each tracker has, and what it goes on with."""

log = logging.getLogger("fedstill.track")

Named = dict[str, Tracker]
"""Trackers by name; one of your own has the name of its class."""


def wanted(track: Track) -> Named:
    """The trackers that are asked for, each ready; raises UnknownName, or ConfigError for one that
    cannot work here.
    """
    trackers = dict(_each(track))
    for tracker in trackers.values():
        tracker.ready()
    return trackers


def _each(track: Track) -> Iterator[tuple[str, Tracker]]:
    if isinstance(track, str):
        for name in filter(None, map(str.strip, track.split(","))):
            if name not in TRACKERS:
                raise UnknownName("tracker", name, TRACKERS)
            yield name, TRACKERS[name]()
    elif isinstance(track, Iterable):
        for one in track:
            yield from _each(one)
    elif isinstance(track, type) or not all(
        hasattr(track, call) for call in ("ready", "begin", "log", "end")
    ):
        raise ConfigError(
            f"track: {track!r} is neither a name ({', '.join(TRACKERS)}) nor has ready, begin, log "
            "and end"
        )
    else:
        yield type(track).__name__, track


def behind(folder: Path, settings: Settings, trackers: Named) -> bool:
    """Whether a tracker of a finished run, or one of ``trackers``, has not been told that it is
    finished.
    """
    return Tracking(folder, settings, trackers).behind


def send_late(
    folder: Path, settings: Settings, trackers: Named, summary: Mapping[str, Any]
) -> None:
    """Send to the trackers of a finished run, and to ``trackers``, what they do not have."""
    tracking = Tracking(folder, settings, trackers)
    if tracking.behind:
        with tracking:
            for event in read_journal(folder / "journal.jsonl"):
                tracking.take(event)
            tracking.finished(summary)


class Tracking:
    """The trackers of a run: ``trackers``, and those that it had before it was stopped.

    As a context: however the run leaves it, the trackers are told.
    """

    def __init__(self, folder: Path, settings: Settings, trackers: Named) -> None:
        self.folder, self.settings = folder, settings
        self._memos = _read(folder / MEMO)
        earlier = {name: TRACKERS[name]() for name in self._memos if name in TRACKERS}
        self._trackers: Named = {**earlier, **trackers}
        self._begun: Named = {}
        self._numbers = RoundNumbers(flat(settings.tree))
        self._summary: Mapping[str, Any] = {}

    def take(self, event: Event) -> None:
        """An event that the journal has; the one that ends a round is sent on."""
        if not self._trackers:
            return
        if event["event"] == "start":
            self._begin(event)
        done = self._numbers.take(event)
        for name, tracker in list(self._begun.items()) if done else ():
            number, numbers = done or (0, {})
            memo = self._memos[name]
            if number > memo["round"]:
                with self._harmless(name, f"round {number}"):
                    tracker.log(number, numbers)
                    memo["round"] = number
                    self._write()

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run is finished."""
        self._summary = summary

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        stopped = kind is not None and issubclass(kind, (Interrupted, KeyboardInterrupt))
        how: HowEnded = "stopped" if stopped else "failed" if kind else "finished"
        words = {k: v for k, v in self._summary.items() if isinstance(v, (int, float, str))}
        for name, tracker in list(self._begun.items()):
            with self._harmless(name, "the run's end"):
                tracker.end(how, words if how == "finished" else {})
                self._memos[name]["how"] = how
        if self._begun:
            self._write()

    @property
    def behind(self) -> bool:
        """Whether a tracker has not been told that the run is finished."""
        return any(self._memos.get(name, {}).get("how") != "finished" for name in self._trackers)

    def _begin(self, start: Event) -> None:
        folder, seeded = self.folder, self.folder.name == f"seed{self.settings.seed}"
        name = f"{folder.parent.name}, seed {self.settings.seed}" if seeded else folder.name
        shared = folder.parent.name if seeded else self.settings.named.method.label
        versions = {name: str(start[name]) for name in VERSIONS if name in start}
        values = flat(self.settings.tree)
        run = AboutRun(folder, name, shared, self.settings.seed, values, versions)
        for name, tracker in self._trackers.items():
            memo = self._memos.setdefault(name, {"round": -1, "memo": {}})
            with self._harmless(name, "the run's beginning"):
                memo["round"] = max(memo["round"], tracker.begin(run, memo["memo"], memo["round"]))
                memo["how"] = "running"
                self._begun[name] = tracker
        self._write()

    def _write(self) -> None:
        write_whole(self.folder / MEMO, json.dumps(self._memos, indent=2).encode())

    @contextmanager
    def _harmless(self, name: str, what: str) -> Iterator[None]:
        """What a tracker raises is a warning, and the last that is heard of it."""
        try:
            yield
        except Exception as error:
            self._begun.pop(name, None)
            reason = cut_reason(f"{type(error).__name__}: {error}")
            todo = (
                f"the run goes on without it; `fedstill resume {in_shell(self.folder)}` sends what "
                "it missed"
            )
            log.warning("%s did not take %s (%s): %s", name, what, reason, todo)


def _read(path: Path) -> dict[str, Any]:
    """What each tracker has; nothing if the file is not there, or is none of ours: then all is sent
    anew.
    """
    try:
        memos = json.loads(path.read_bytes())
        return {
            str(n): {"round": int(m["round"]), "memo": dict(m["memo"]), "how": m.get("how")}
            for n, m in memos.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read (%s): trackers begin anew", path, error)
        return {}
