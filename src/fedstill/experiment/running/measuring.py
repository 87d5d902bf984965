"""What a run measures: after every round, by clients in their stages, and by the run's measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.engines.masking import bytes_of
from fedstill.engines.memory import Memory
from fedstill.experiment.measures.base import Happened, Reports, seconds_at_clients
from fedstill.experiment.measures.choose import measures
from fedstill.experiment.preparing.prepared import Prepared
from fedstill.experiment.run_directory.split_file import split_of_sites
from fedstill.experiment.running.about_data import sealed_examples, told_of_data
from fedstill.experiment.running.asking_measures import (
    looked,
    note_silent,
    summed_by_measures,
    when_they_look,
)
from fedstill.experiment.running.evaluation import evaluated, tests_by_class
from fedstill.experiment.running.own_answers import OwnAnswers
from fedstill.experiment.running.own_tests import OwnTests
from fedstill.experiment.running.privacy_budget import Budget
from fedstill.experiment.running.queried import RunQueries
from fedstill.experiment.running.task_ends import TaskEnds
from fedstill.experiment.running.training_budget import TrainingBudget
from fedstill.metrics import consistency, forgetting
from fedstill.raised import as_asked, queries_raised, raises
from fedstill.records import SERVER, Payload, Reply, Stage
from fedstill.wire.reports import event_fields
from fedstill.wire.screen import Refusal

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
        self._hops = {s.name for s in settings.topology(1, self.prepared.world) if s.hop}
        self._last = when_they_look(self.measures, self.prepared)
        self.queried = RunQueries(self.prepared)
        world = self.prepared.world
        self.dealt_out, classes = (
            split_of_sites(self.prepared.sites, world.client_models),
            world.classes,
        )
        self._totals = tests_by_class(self.prepared.sites, classes)
        counts = self.dealt_out.counts(classes) if self.dealt_out else ()
        self.own = OwnAnswers(settings.method.personal, counts, self._totals)
        self.tasks = TaskEnds(self.prepared)
        self.own_tests = OwnTests(self.prepared.sites, settings.method.personal)

    def about(self) -> dict[str, Any]:
        """What the journal's first event says of the data, with the SHA-256 of all examples."""
        asked = self.queried.before() if self.queried.anyone else {}
        told = told_of_data(self.prepared, self._totals, asked, split=self.dealt_out is not None)
        return {**told, **self.tasks.about(), **sealed_examples(self.prepared)}

    def initial(self, predictors: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, Any]:
        """The server's models before round 1."""
        accuracies = evaluated(
            predictors, self.prepared.sites, self.prepared.world.classes, self.tasks.right_of_all
        )
        self._before = accuracies["class_accuracy"]
        return accuracies

    def stage(
        self,
        stage: Stage,
        replies: Sequence[Reply],
        refused: Sequence[Refusal],
        downs: Mapping[int, Payload],
    ) -> Iterator[dict[str, Any]]:
        """The events of a finished stage: one for each client that replied, was refused, or had
        nothing to do.
        """
        where = {"event": "client", "round": stage.round, "stage": stage.index, "name": stage.name}
        world = self.prepared.world
        asked = queries_raised(replies, stage, world)
        events = [
            {
                **where,
                "client": r.client,
                "examples": r.examples,
                "bytes_up": bytes_of(r.up, bool(self.prepared.settings.privacy.secure_sum)),
                "bytes_down": downs[r.client].nbytes,
                **event_fields(r.metrics),
                **({"query": list(asked.get(r.client, ()))} if raises(stage, world) else {}),
            }
            for r in replies
        ]
        events += [
            {
                **where,
                "client": r.client,
                "refused": r.reason,
                "bytes_down": downs[r.client].nbytes if r.client in downs else 0,
            }
            for r in refused
        ]
        events += [{**where, "client": c, "idle": True} for c in stage.clients if c not in downs]
        self.budget.mark(
            stage, events, {r.client: r.up for r in refused} | {r.client: r.up for r in replies}
        )
        self._note(events)
        yield from events

    def look(self, seen: Happened) -> Iterator[dict[str, Any]]:
        """The events of the measures that look at a finished stage, each with the seconds it
        took.
        """
        room = self.prepared.room(self.folder, self.memory)
        if room is None or seen.stage.round not in self.rounds:
            return
        room = replace(room, world=as_asked(room.world, seen.after))
        torch.set_num_threads(self.prepared.settings.threads[1])
        if seen.stage.hop and seen.replies:
            client, round = self._acted[0] if len(self._acted) == 2 else (None, None)
            seen = replace(seen, previous=client, previous_round=round)
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
