"""What every run records beside its clients' events: accuracies, forgetting, traffic, measures.

Each observer adds fields or events to the journal, and knows what has happened from the journal's
events alone (``core.extensions.Observer``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.core.extensions import Event, Fields, Observer, RoundHook, RoundResult, StageResult
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.records import SERVER, Payload, World
from fedstill.core.rounds import extended_world
from fedstill.core.user_code import reason
from fedstill.engines.serial import Memory
from fedstill.engines.user_functions import MutationGuard, journal_fields
from fedstill.measures.base import Measure, Numbers, RoundReports
from fedstill.measures.choice import looks_last, measures
from fedstill.measures.context import EvaluationContext
from fedstill.metrics import consistency, forgetting
from fedstill.running.evaluation import tests_by_class
from fedstill.running.preparation import Prepared

log = logging.getLogger("fedstill.measuring")

Accuracies = Sequence[Any]
"""One number in [0, 1] for each class, None for a class without test examples."""


@dataclass
class Forgetting(Observer):
    """How the server's class accuracies changed: what was forgotten since the best round, and how
    consistent two rounds in a row are.
    """

    _last: Accuracies = ()
    _best: Accuracies = ()

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """``forgetting`` and ``consistency``."""
        classes = result.accuracies["class_accuracy"]
        forgotten = None
        if result.accuracies["accuracy"] is not None:
            forgotten = forgetting([self._best or classes, classes])
        return {"forgetting": forgotten, "consistency": consistency(self._last, classes)}

    def on_event(self, event: Event) -> None:
        """Remember the last accuracies, and the best of all rounds."""
        if event["event"] == "initial":
            self._last = event["class_accuracy"]
        elif event["event"] == "round":
            self._last = event["class_accuracy"]
            self._best = _best_of(self._best or self._last, self._last)


def _best_of(best: Accuracies, last: Accuracies) -> Accuracies:
    """The larger accuracy of each class."""
    larger = []
    for old, new in zip(best, last, strict=True):
        is_better = old is None or (new is not None and new > old)
        larger.append(new if is_better else old)
    return larger


@dataclass
class Traffic(Observer):
    """How many replies came, and how many bytes were sent."""

    world: World
    sends_weights: bool
    """Whether clients send models; if not, the bytes of models are recorded for comparison."""

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """``replies``, ``refused``, ``bytes_up``, ``bytes_down`` and ``bytes_as_weights``."""
        events = result.client_events
        fields: Fields = {
            "replies": sum("refused" not in e and "idle" not in e for e in events),
            "refused": sum("refused" in e for e in events),
            "bytes_up": _bytes_sent(events, "bytes_up"),
            "bytes_down": _bytes_sent(events, "bytes_down"),
        }
        if not self.sends_weights:
            fields["bytes_as_weights"] = self._bytes_of_weights(events)
        return fields

    def _bytes_of_weights(self, events: Sequence[Event]) -> int:
        """What models would have cost: once down and once up for each client that trained."""
        trained = {e["client"] for e in events if "steps" in e and e["client"] != SERVER}
        models = [Payload(params=self.world.initial(client)) for client in trained]
        return 2 * sum(model.nbytes for model in models)


def _bytes_sent(events: Sequence[Event], key: str) -> int:
    """Bytes between clients and server: what the server computes itself is not sent."""
    return sum(event.get(key, 0) for event in events if event["client"] != SERVER)


# ---- measures ------------------------------------------------------------------------------------

WHERE = frozenset({"event", "measure", "round", "stage", "name", "seconds"})
"""Fields of a measure's event that say what happened where. No measure may give one of them."""

TIMES = ("seconds_training", "seconds_saving", "seconds_clients")
"""Fields of a round's event that no measure may give."""

OF_MEASURES = "of_measures"
"""The field of a round's event that lists what measures of the user's own gave it."""


@dataclass(frozen=True)
class Link:
    """A client of a chain, and the round in which it acted."""

    client: int
    round: int


@dataclass
class Measures(Observer):
    """The measures of a run: what they see after a stage, and what they make of clients' reports.

    It comes last among a run's observers, because no measure may give a field that another
    observer gives.
    """

    prepared: Prepared
    hooks: Sequence[RoundHook] = ()
    """The hooks of the run's rounds, which extend the world that measures see."""
    folder: Path | None = None
    memory: Memory | None = None
    """What clients remember, if it is in this process."""
    _received: Accuracies = ()
    _links: list[Link] = field(default_factory=list)
    """The last two links of a chain that answered."""

    def __post_init__(self) -> None:
        settings = self.prepared.settings
        world = self.prepared.world
        self.measures = measures(settings.measure)
        self._single_looks = single_looks(self.measures, self.prepared)
        self._test_counts = tests_by_class(self.prepared.sites, world.classes)
        first_round = settings.schedule(1, world)
        self._chains = {stage.name for stage in first_round if stage.sequential}

    def stage_events(self, result: StageResult) -> Iterator[Event]:
        """An event of each measure that looks at a stage and sees something."""
        context = self._context(result)
        if context is None or result.stage.round not in self.prepared.settings.measured_in:
            return
        stage = result.stage
        where = {"round": stage.round, "stage": stage.index, "name": stage.name}
        for name, measure in self.measures.items():
            place = (stage.round, stage.index)
            if measure.only_last and place != self._single_looks.get(name):
                continue
            began = time.perf_counter()
            fields = look(name, measure, result, context)
            seconds = time.perf_counter() - began
            if fields is not None:
                yield {"event": "measure", "measure": name, **where, **fields, "seconds": seconds}

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """What the measures make of what clients reported."""
        settings = self.prepared.settings
        reports = RoundReports(
            clients=result.client_events,
            received=self._received,
            aggregated=result.accuracies["class_accuracy"],
            test_counts=self._test_counts,
        )
        if result.number == settings.rounds:
            warn_of_silence(self.measures, reports)
        # Over Flower no client's report may end the run.
        is_tolerant = settings.engine == "flower"
        taken = {*so_far, *TIMES, OF_MEASURES}
        by_measure = fields_of_measures(self.measures, reports, taken, is_tolerant)
        fields = {name: value for given in by_measure.values() for name, value in given.items()}
        own = {name: list(by_measure[name]) for name in self.measures if self._is_own(name)}
        if own and (fields or result.number in settings.measured_in):
            fields[OF_MEASURES] = own
        return fields

    def _is_own(self, name: str) -> bool:
        """Whether a measure is the user's own, which no table knows."""
        return type(self.measures[name]).__module__.partition(".")[0] != "fedstill"

    def on_event(self, event: Event) -> None:
        """Remember the model's accuracies, and the last links of a chain."""
        if event["event"] in ("initial", "round"):
            self._received = event["class_accuracy"]
        is_reply = event["event"] == "client" and not {"refused", "idle"} & event.keys()
        if is_reply and event["name"] in self._chains:
            self._links = [*self._links, Link(event["client"], event["round"])][-2:]

    def _context(self, result: StageResult) -> EvaluationContext | None:
        """What the measures may use at a stage; None without a common test set."""
        context = self.prepared.evaluation_context(self.folder, self.memory)
        if context is None:
            return None
        world = extended_world(context.world, result.after, self.hooks)
        context = replace(context, world=world)
        if not (result.stage.sequential and result.accepted) or len(self._links) < 2:
            return context
        previous = self._links[0]
        return replace(context, previous=previous.client, previous_round=previous.round)


def single_looks(chosen: Mapping[str, Measure], prepared: Prepared) -> dict[str, tuple[int, int]]:
    """The measures that look once, by name, with the round and the stage in which they look."""
    settings = prepared.settings
    last = settings.rounds
    stages = settings.schedule(last, prepared.world)
    places = {}
    for name, measure in chosen.items():
        if not measure.only_last:
            continue
        index = looks_last(measure, stages, settings.schedule, prepared.world)
        if index is not None:
            places[name] = (last, index)
    return places


def look(
    name: str, measure: Measure, result: StageResult, context: EvaluationContext
) -> Numbers | None:
    """What a measure sees in a finished stage. Raises FedstillError, with its place, if it
    fails.
    """
    stage = result.stage
    where = f"round {stage.round}, stage {stage.name!r}"
    seed = seed_for(context.world.seed, stage.round, stage.index, SERVER, f"measure {name}")
    shown = _shown(result)
    try:
        with drawing_from(seed):
            numbers = measure.look(result, context)
        shown.check(measure.look)
        if numbers is None:
            if measure.only_last:
                log.warning(
                    "measure %s looks once, in %s, and there was nothing to see", name, where
                )
            return None
        return journal_fields(measure.look, numbers, WHERE)
    except FedstillError:
        raise
    except Exception as error:
        raise FedstillError(f"{where}: measure {name} failed: {reason(error, measure)}") from error


def _shown(result: StageResult) -> MutationGuard:
    """The run's own tensors that a measure is shown."""
    states = {"before": result.before, "after": result.after}
    tensors: dict[str, Any] = {
        name: {"params": state.params, "extra": state.extra} for name, state in states.items()
    }
    tensors["replies"] = [reply.content for reply in result.accepted]
    tensors["payloads"] = result.payloads
    return MutationGuard(tensors)


def warn_of_silence(chosen: Mapping[str, Measure], reports: RoundReports) -> None:
    """Name the measures that clients take and of which no client reported anything."""
    for name, measure in chosen.items():
        is_taken_by_clients = type(measure).look is Measure.look and measure.gives
        if is_taken_by_clients and not any(
            {*measure.gives} & event.keys() for event in reports.clients
        ):
            log.warning("measure %s: in the last round no client had a model to measure", name)


def fields_of_measures(
    chosen: Mapping[str, Measure], reports: RoundReports, taken: Collection[str], is_tolerant: bool
) -> dict[str, Fields]:
    """What each measure makes of the clients' reports.

    taken: names of the round's other fields; no two measures may give the same one either.
    is_tolerant: whether a measure that fails is a warning.
    """
    made: dict[str, Fields] = {name: {} for name in chosen}
    for name, measure in chosen.items():
        others = set().union(*made.values())
        try:
            numbers = measure.of_round(reports)
            made[name] = journal_fields(measure.of_round, numbers, {*WHERE, *taken, *others})
        except Exception as error:
            text = f"measure {name} cannot sum up what clients reported: {reason(error, measure)}"
            if not is_tolerant:
                raise FedstillError(text) from error
            log.warning("%s", text)
    return made


def seconds_by_measure(events: Sequence[Event], names: Collection[str]) -> dict[str, float]:
    """The seconds that each measure took in a run, at the server and at clients."""
    seconds: dict[str, float] = {}

    def add(name: str, more: float) -> None:
        if more > 0:
            seconds[name] = seconds.get(name, 0.0) + more

    for event in events:
        if event["event"] == "measure":
            add(event["measure"], event["seconds"])
        elif event["event"] == "client":
            for name in names:
                add(name, event.get(f"seconds_{name}") or 0.0)
    return seconds
