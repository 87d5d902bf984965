"""The trackers of one run: notified of each round, and kept from harming the run."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from fedstill.config.overrides import flat
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError, Interrupted, UnknownName, cut_reason
from fedstill.core.files import in_shell, write_whole
from fedstill.running.journal import VERSIONS, Event, read_journal
from fedstill.running.trackers import AboutRun, HowEnded, MLflow, TensorBoard, Track, Tracker, WandB

# The numbers of each round, gathered from the events of a journal.


PLACES = ("event", "measure", "round", "stage", "client", "previous")
"""What says in an event where it comes from."""


class RoundNumbers:
    """Takes a journal's events in order, and gives the numbers of a round when its last event has
    come.

    Names of classes stand below ``class_accuracy/``, what a measure saw below the measure's name
    (``divergence/mean_l2``: the mean over the round's looks), and below ``loss/`` the terms of the
    training loss: the mean over the round's clients, weighted by their examples. Lists are left
    out.
    """

    def __init__(self, classes: Sequence[str] = ()) -> None:
        self.classes = list(classes)
        self._losses: list[tuple[float, Mapping[str, float]]] = []
        self._looks: list[Event] = []

    def take(self, event: Event) -> tuple[int, dict[str, float]] | None:
        """One event; (round, numbers) if it ends a round (0: before training)."""
        kind = event["event"]
        if kind == "start":
            self.classes = [str(name) for name in event.get("classes", [])]
        elif kind == "measure":
            self._looks.append(event)
        elif (
            kind == "client" and not event.get("refused") and isinstance(event.get("loss"), Mapping)
        ):
            self._losses.append((event.get("examples") or 0, event["loss"]))
        elif kind in ("initial", "round"):
            numbers = {
                **dict(_of_event(event, self.classes)),
                **_mean_losses(self._losses),
                **_mean_looks(self._looks),
            }
            self._losses, self._looks = [], []
            return int(event.get("round", 0)), numbers
        return None


def _of_event(event: Mapping[str, Any], classes: Sequence[str]) -> Iterator[tuple[str, float]]:
    for key, value in event.items():
        if key == "class_accuracy":
            pairs = zip(classes, value, strict=True) if value else ()
            yield from ((f"class_accuracy/{c}", float(v)) for c, v in pairs if v is not None)
        elif key == "others" and isinstance(value, dict):
            for other, measured in value.items():
                yield from ((f"{other}/{name}", v) for name, v in _of_event(measured, classes))
        elif key not in ("event", "round") and isinstance(value, (int, float)):
            yield key, float(value)


def _mean_losses(losses: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    weights: dict[str, float] = defaultdict(float)
    sums: dict[str, float] = defaultdict(float)
    for examples, terms in losses:
        for name, value in terms.items():
            if isinstance(value, (int, float)):
                weights[f"loss/{name}"] += examples
                sums[f"loss/{name}"] += examples * value
    return {name: sums[name] / weight for name, weight in weights.items() if weight}


def _mean_looks(looks: Sequence[Event]) -> dict[str, float]:
    seen: dict[str, list[float]] = defaultdict(list)
    for look in looks:
        for name, value in _inside(look, look["measure"]):
            seen[name].append(value)
    return {name: sum(each) / len(each) for name, each in seen.items()}


def _inside(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _inside(value, f"{prefix}/{key}")
        elif key not in PLACES and isinstance(value, (int, float)):
            yield f"{prefix}/{key}", float(value)


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
        self._numbers = RoundNumbers()
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
