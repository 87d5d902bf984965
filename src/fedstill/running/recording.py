"""What a run records: its data, each client's stages, each round, and its measures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedstill.core.errors import FedstillError
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.records import SERVER, Payload
from fedstill.core.reports import event_fields
from fedstill.core.results import StageResult
from fedstill.core.user_code import reason
from fedstill.data.dataset import examples_digest
from fedstill.engines.client_memory import Memory
from fedstill.engines.user_functions import Lent, journal_fields
from fedstill.measures.base import Measure, Numbers, Reports, Room, seconds_at_clients
from fedstill.measures.choice import looks_last, measures
from fedstill.methods.fit import FIT
from fedstill.metrics import consistency, forgetting
from fedstill.privacy.budget import Budget, TrainingBudget
from fedstill.privacy.masking import bytes_of
from fedstill.querying.events import RunQueries
from fedstill.querying.hooks import queries_raised
from fedstill.running.context import world_in
from fedstill.running.evaluation import OwnAnswers, OwnTests, evaluated, tests_by_class
from fedstill.running.preparation import Prepared
from fedstill.running.split_file import StoredSplit
from fedstill.running.standardisation import Scaler
from fedstill.running.tasks import TaskEnds

# What the first event of a journal says of the data: classes, inputs, the clients' names, what was
# left out.


MOST_NAMES = 10_000
"""Clients of more are known by their numbers alone."""


def told_of_data(
    prepared: Prepared, test_counts: Sequence[int], asked: Mapping[str, Any], split: bool
) -> dict[str, Any]:
    """Classes, label counts of the test set, what makes inputs of examples; who asks for what;
    networks and names.

    split: whether a split stands beside the journal, which then says who has which network.
    """
    data, networks, names = prepared.dataset, prepared.world.client_models, prepared.client_names
    told: dict[str, Any] = {
        "classes": list(data.classes),
        "inputs": {
            **prepared.sites.inputs.stored(data.train.values),
            **_standardised(prepared.scaler),
        },
        "test_counts": test_counts,
        **asked,
    }
    if data.before is not None:
        told["backbone_inputs"] = data.before
    if not split and len(set(networks)) > 1:
        told["models"] = [spec.label for spec in networks]
    if 0 < len(names) <= MOST_NAMES:
        told["client_names"] = list(names)
    if prepared.notes:
        told["notes"] = list(prepared.notes)
    return told


def sealed_examples(prepared: Prepared) -> dict[str, Any]:
    """The SHA-256 of all examples by split; none of real sites' own, nor of features, which differ
    by the processor.
    """
    data = prepared.dataset
    if prepared.settings.on_sites or data.before is not None:
        return {}
    splits = {"train": data.train, "test": data.test, "public": prepared.sites.public}
    return {
        "examples_sha256": {
            name: examples_digest(each) for name, each in splits.items() if each is not None
        }
    }


def _standardised(scaler: Scaler) -> dict[str, Any]:
    """Whose mean and spread standardises; and each client's own, where clients have such."""
    if scaler.origin == "none":
        return {}
    own = scaler.by_client or {}
    each = {str(c): {"mean": list(m.mean), "std": list(m.std)} for c, m in sorted(own.items())}
    return {
        "standardise": scaler.origin,
        **({"by_client": each} if 0 < len(each) <= MOST_NAMES else {}),
    }


# The functions of measures, called: what they give is checked, and what goes wrong names the
# measure.


log = logging.getLogger("fedstill.measuring")

EVENT = frozenset({"event", "measure", "round", "stage", "name", "seconds"})
"""Fields of an event that say what happened where: no measure gives one of these names."""


def when_they_look(
    measures: Mapping[str, Measure], prepared: Prepared
) -> dict[str, tuple[int, int]]:
    """By name, of measures that look once: the round and the stage in which they do."""
    last, world = prepared.settings.rounds, prepared.world
    schedule = prepared.settings.schedule
    stages = schedule(last, world)
    once = {n: looks_last(m, stages, schedule, world) for n, m in measures.items() if m.only_last}
    return {name: (last, index) for name, index in once.items() if index is not None}


def looked(name: str, measure: Measure, seen: StageResult, room: Room) -> Numbers | None:
    """What a measure sees in a finished stage; raises FedstillError, with its place, if it
    fails.
    """
    world, stage, shown = room.world, seen.stage, _shown(seen)
    where = f"round {stage.round}, stage {stage.name!r}"
    try:
        with drawing_from(
            seed_for(world.seed, stage.round, stage.index, SERVER, f"measure {name}")
        ):
            given = measure.look(seen, room)
        shown.check(measure.look)
        if given is None and measure.only_last:
            log.warning("measure %s looks once, in %s, and there was nothing to see", name, where)
        return None if given is None else journal_fields(measure.look, given, EVENT)
    except FedstillError:
        raise
    except Exception as error:
        raise FedstillError(f"{where}: measure {name} failed: {reason(error, measure)}") from error


def _shown(seen: StageResult) -> Lent:
    """What a measure is shown of the run's own tensors."""
    states = {"before": seen.before, "after": seen.after}
    return Lent(
        {
            **{
                name: {"params": state.params, "extra": state.extra}
                for name, state in states.items()
            },
            "replies": [reply.content for reply in seen.accepted],
            "payloads": seen.payloads,
        }
    )


def note_silent(measures: Mapping[str, Measure], reports: Reports) -> None:
    """Say of which measures that clients take none had anything to report, as where no client has a
    model.
    """
    for name, measure in measures.items():
        theirs = type(measure).look is Measure.look and measure.gives
        if theirs and not any({*measure.gives} & event.keys() for event in reports.clients):
            log.warning("measure %s: in the last round no client had a model to measure", name)


def summed_by_measures(
    measures: Mapping[str, Measure], reports: Reports, taken: Collection[str], over_flower: bool
) -> dict[str, Any]:
    """What the measures make of the clients' reports; over Flower no client's report may end the
    run.

    taken: names of the round's own fields. No two measures may give the same one either.
    """
    made: dict[str, Any] = {}
    for name, measure in measures.items():
        try:
            made |= journal_fields(
                measure.of_round, measure.of_round(reports), {*EVENT, *taken, *made}
            )
        except Exception as error:
            said = f"measure {name} cannot sum up what clients reported: {reason(error, measure)}"
            if not over_flower:
                raise FedstillError(said) from error
            log.warning("%s", said)
    return made


# What a run measures: after every round, by clients in their stages, and by the run's measures.


Accuracies = Sequence[Any]
"""One number in [0, 1] for each class, None for a class without test examples."""

TIMES = ("seconds_training", "seconds_saving", "seconds_clients")
"""Fields of a round's event that no measure may have."""


@dataclass
class Measuring:
    """Turns what happens into journal events, and remembers what later measures need; all of it is
    in the journal.

    It does not grow with the rounds: of those before, the last one's accuracies by class and the
    best so far are kept.
    """

    prepared: Prepared
    spent: float = 0.0  # seconds of this round's measures
    seconds: dict[str, float] = field(default_factory=dict)  # of each measure, all rounds
    folder: Path | None = None  # the run's directory
    memory: Memory | None = None  # what clients remember, if it is in this process
    _before: Accuracies = ()  # accuracies by class after the last round
    _best: Accuracies = ()  # of all rounds so far
    _replies: list[dict[str, Any]] = field(default_factory=list)
    # the last two links of a chain: client, round
    _acted: list[tuple[int, int]] = field(default_factory=list)
    # this process's CPU seconds when the last round ended
    _cpu: float = field(default_factory=time.process_time)

    def __post_init__(self) -> None:
        settings = self.prepared.settings
        self.measures = measures(settings.measure)
        self.budget = (TrainingBudget if settings.privacy.trains else Budget).of(self.prepared)
        self.rounds = settings.measured_in
        self._hops = {s.name for s in settings.schedule(1, self.prepared.world) if s.sequential}
        self._last = when_they_look(self.measures, self.prepared)
        self.queried = RunQueries(self.prepared)
        world = self.prepared.world
        self.split = StoredSplit.of_sites(self.prepared.sites, world.client_models)
        self._totals = tests_by_class(self.prepared.sites, world.classes)
        counts = self.split.label_counts(world.classes) if self.split else ()
        self.own = OwnAnswers(settings.method.personal, counts, self._totals)
        self.tasks = TaskEnds(self.prepared)
        self.own_tests = OwnTests(self.prepared.sites, settings.method.personal)

    def about(self) -> dict[str, Any]:
        """What the journal's first event says of the data, with the SHA-256 of all examples."""
        asked = self.queried.before() if self.queried.anyone else {}
        told = told_of_data(self.prepared, self._totals, asked, split=self.split is not None)
        return {**told, **self.tasks.about(), **sealed_examples(self.prepared)}

    def initial(self, predictors: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, Any]:
        """The server's models before round 1."""
        accuracies = evaluated(
            predictors, self.prepared.sites, self.prepared.world.classes, self.tasks.right_of_all
        )
        self._before = accuracies["class_accuracy"]
        return accuracies

    def stage(self, result: StageResult) -> Iterator[dict[str, Any]]:
        """The events of a finished stage: one for each client that replied, was refused, or had
        nothing to do.
        """
        stage, downs = result.stage, result.payloads
        where = {"event": "client", "round": stage.round, "stage": stage.index, "name": stage.name}
        asking = self.prepared.world.asking
        asked = None
        if asking is not None and stage.name == FIT:
            asked = queries_raised(asking, result.accepted, stage)
        events = [
            {
                **where,
                "client": r.client,
                "examples": r.examples,
                "bytes_up": bytes_of(r.content, bool(self.prepared.settings.privacy.secure_sum)),
                "bytes_down": downs[r.client].nbytes,
                **event_fields(r.metrics),
                **({"query": list(asked.get(r.client, ()))} if asked is not None else {}),
            }
            for r in result.accepted
        ]
        events += [
            {
                **where,
                "client": r.client,
                "refused": r.reason,
                "bytes_down": downs[r.client].nbytes if r.client in downs else 0,
            }
            for r in result.refused
        ]
        events += [{**where, "client": c, "idle": True} for c in stage.clients if c not in downs]
        self.budget.mark(
            stage,
            events,
            {r.client: r.content for r in result.refused}
            | {r.client: r.content for r in result.accepted},
        )
        self._note(events)
        yield from events

    def look(self, seen: StageResult) -> Iterator[dict[str, Any]]:
        """The events of the measures that look at a finished stage, each with the seconds it
        took.
        """
        room = self.prepared.room(self.folder, self.memory)
        if room is None or seen.stage.round not in self.rounds:
            return
        room = replace(room, world=world_in(self.prepared, seen.after))
        if seen.stage.sequential and seen.accepted:
            client, round = self._acted[0] if len(self._acted) == 2 else (None, None)
            room = replace(room, previous=client, previous_round=round)
        where = {"round": seen.stage.round, "stage": seen.stage.index, "name": seen.stage.name}
        for name, measure in self.measures.items():
            if measure.only_last and (seen.stage.round, seen.stage.index) != self._last.get(name):
                continue
            began = time.perf_counter()
            fields = looked(name, measure, seen, room)
            seconds = time.perf_counter() - began
            self._count(name, seconds)
            if fields is not None:
                yield {"event": "measure", "measure": name, **where, **fields, "seconds": seconds}

    def round(
        self,
        round: int,
        predictors: Mapping[str, Callable[[Tensor], Tensor]],
        training: float,
        saving: float,
    ) -> dict[str, Any]:
        """The event of a finished round, given the seconds that its stages took and that
        checkpoints took.
        """
        began = time.perf_counter()
        clients = sum(e.get("seconds_training", 0.0) for e in self._replies)
        # its pass over the test set is the one that is evaluated
        of_tasks = self.tasks.of_round(round, predictors)
        measured = evaluated(
            predictors, self.prepared.sites, self.prepared.world.classes, self.tasks.right_of_all
        )
        event = {
            **self.told(round, measured, {**self.own_tests.round(predictors), **of_tasks}),
            "seconds_training": training,
            "seconds_saving": saving,
            "seconds_clients": clients,
            "seconds_measuring": time.perf_counter() - began + self.spent,
        }
        self.spent, began_cpu, self._cpu = 0.0, self._cpu, time.process_time()
        event["seconds_cpu"] = self._cpu - began_cpu
        event["seconds"] = training + saving + event["seconds_measuring"]
        return event

    def told(
        self, round: int, measured: Mapping[str, Any], looked: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The event of a round, without times: what follows from the events of its stages and its
        accuracies.

        ``measured``: accuracies of the server's models; ``looked``: what else a pass over test sets
        gave. Ends the round.
        """
        replies, self._replies = self._replies, []
        before, classes = self._before, measured["class_accuracy"]
        about = {
            "round": round,
            **measured,
            "forgetting": None
            if measured["accuracy"] is None
            else forgetting([self._best or classes, classes]),
            "consistency": consistency(before, classes),
        }
        rest = {
            **self.queried.answers(round, replies, measured, self._totals),
            **self.own.round(),
            **looked,
            "replies": sum("refused" not in e and "idle" not in e for e in replies),
            "refused": sum("refused" in e for e in replies),
            "bytes_up": _sent(replies, "bytes_up"),
            "bytes_down": _sent(replies, "bytes_down"),
            **self._as_weights(replies),
            **self.budget.told(),
        }
        reports, over_flower = (
            Reports(replies, before, classes, self._totals),
            self.prepared.settings.engine == "flower",
        )
        if round == self.prepared.settings.rounds:
            note_silent(self.measures, reports)
        summed = summed_by_measures(self.measures, reports, {*about, *rest, *TIMES}, over_flower)
        self._passed(classes)
        return {**about, **summed, **rest}

    def _passed(self, classes: Accuracies) -> None:
        best = self._best or classes
        self._best = [
            a if b is None or (a is not None and a > b) else b
            for a, b in zip(classes, best, strict=True)
        ]
        self._before = classes

    def _as_weights(self, replies: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """For methods that send none: what weights would have cost, once down and once up for each
        client.
        """
        if "same_shapes" in self.prepared.settings.method.requires():
            return {}
        took_part = {e["client"] for e in replies if "steps" in e and e["client"] != SERVER}
        return {
            "bytes_as_weights": 2
            * sum(Payload(params=self.prepared.world.initial(c)).nbytes for c in took_part)
        }

    def replay(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Remember what a journal says, as if it had happened here."""
        for event in events:
            rest = {k: v for k, v in event.items() if k != "event"}
            if event["event"] == "initial":
                self._before = rest["class_accuracy"]
            elif event["event"] == "round":
                self._passed(rest["class_accuracy"])
                self.own.round()
                self._replies, self.spent = [], 0.0
            elif event["event"] == "client":
                self._note([dict(rest)])
                self.budget.count([event])
            elif event["event"] == "task":
                self.tasks.said.end()
            elif event["event"] == "measure":
                self._count(event["measure"], event["seconds"])

    def _count(self, name: str, seconds: float) -> None:
        self.spent += seconds
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _note(self, events: Sequence[dict[str, Any]]) -> None:
        self._replies += events
        self.own.note(events)
        self.own_tests.note(events)
        self.tasks.said.note(events)
        # the stage's already
        for name, seconds in seconds_at_clients(events, list(self.measures)).items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.queried.note(events)
        done = [e for e in events if not {"refused", "idle"} & e.keys() and e["name"] in self._hops]
        accepted = [(e["client"], e["round"]) for e in done]
        self._acted = [*self._acted, *accepted][-2:]


def _sent(replies: Sequence[Mapping[str, Any]], key: str) -> int:
    """Bytes between clients and server; what the server computes itself is not sent."""
    return sum(e.get(key, 0) for e in replies if e["client"] != SERVER)
