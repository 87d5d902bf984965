"""The numbers of a run beside its clients' events: accuracies, forgetting, traffic, measures.

Each observer adds fields or events to the journal, and knows what has happened from the journal's
events alone (``core.extensions.Observer``).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.continual.task_test import TASK_TEST
from fedstill.core.checks import MutationGuard, bad_return, journal_fields
from fedstill.core.errors import FedstillError
from fedstill.core.extensions import (
    Event,
    Fields,
    Observer,
    Predictors,
    RoundHook,
    RoundResult,
    StageResult,
    common_predictor,
)
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.records import SERVER, Examples, Payload, World
from fedstill.core.rounds import extended_world
from fedstill.core.user_code import reason
from fedstill.core.user_modules import is_library_module
from fedstill.engines.serial import Memory
from fedstill.measures.base import EvaluationContext, Measure, Numbers, RoundReports
from fedstill.measures.choice import looks_last, measures
from fedstill.metrics import consistency, forgetting
from fedstill.running.evaluation import Evaluation, Predict, tests_by_class
from fedstill.running.numbers import OF_USER_MEASURES, none_if_undefined
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
        if old is None or (new is not None and new > old):
            larger.append(new)
        else:
            larger.append(old)
    return larger


@dataclass
class Traffic(Observer):
    """The number of replies, and of bytes sent and received."""

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
        """The bytes of models sent once down and once up for each client that trained."""
        trained = {e["client"] for e in events if "steps" in e and e["client"] != SERVER}
        models = [Payload(params=self.world.initial(client)) for client in trained]
        return 2 * sum(model.nbytes for model in models)


def _bytes_sent(events: Sequence[Event], key: str) -> int:
    """Bytes between clients and server; the server's own replies are not sent."""
    return sum(event.get(key, 0) for event in events if event["client"] != SERVER)


# ---- measures ------------------------------------------------------------------------------------

LOCATION_FIELDS = frozenset({"event", "measure", "round", "stage", "name", "seconds"})
"""Fields that locate a measure's event in the run. No measure may return one of them."""

RESERVED_TIMES = ("seconds_training", "seconds_saving", "seconds_clients")
"""Fields of a round's event that no measure may return."""


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
    """The client states, if they are in this process."""
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
        position = {"round": stage.round, "stage": stage.index, "name": stage.name}
        for name, measure in self.measures.items():
            place = (stage.round, stage.index)
            if measure.only_last and place != self._single_looks.get(name):
                continue
            began = time.perf_counter()
            fields = look(name, measure, result, context)
            seconds = time.perf_counter() - began
            if fields is not None:
                yield {
                    "event": "measure",
                    "measure": name,
                    **position,
                    **fields,
                    "seconds": seconds,
                }

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """The fields that measures derive from the clients' reports."""
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
        reserved = {*so_far, *RESERVED_TIMES, OF_USER_MEASURES}
        by_measure = fields_of_measures(self.measures, reports, reserved, is_tolerant)
        fields: Fields = {}
        for fields_of_one in by_measure.values():
            fields |= fields_of_one
        of_users = {name: list(by_measure[name]) for name in self.measures if self._is_own(name)}
        if of_users and (fields or result.number in settings.measured_in):
            fields[OF_USER_MEASURES] = of_users
        return fields

    def _is_own(self, name: str) -> bool:
        """Whether a measure is the user's own, which no table knows."""
        return not is_library_module(type(self.measures[name]).__module__)

    def on_event(self, event: Event) -> None:
        """Remember the model's accuracies, and the last links of a chain."""
        if event["event"] in ("initial", "round"):
            self._received = event["class_accuracy"]
        is_reply = event["event"] == "client" and not {"refused", "idle"} & event.keys()
        if is_reply and event["name"] in self._chains:
            self._links = [*self._links, Link(event["client"], event["round"])][-2:]

    def _context(self, result: StageResult) -> EvaluationContext | None:
        """The evaluation context of measures at a stage; None without a common test set."""
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
    """The numbers that a measure takes in a finished stage; None if it takes none.

    Raises FedstillError with the round and the stage if the measure fails.
    """
    stage = result.stage
    place = f"round {stage.round}, stage {stage.name!r}"
    seed = seed_for(context.world.seed, stage.round, stage.index, SERVER, f"measure {name}")
    guard = _guard(result)
    try:
        with drawing_from(seed):
            numbers = measure.look(result, context)
        guard.check(measure.look)
        if numbers is None:
            if measure.only_last:
                log.warning(
                    "measure %s looks once, in %s, and there was nothing to see", name, place
                )
            return None
        fields = journal_fields(measure.look, numbers, LOCATION_FIELDS)
        _check_client(measure, fields)
        return fields
    except FedstillError:
        raise
    except Exception as error:
        raise FedstillError(f"{place}: measure {name} failed: {reason(error, measure)}") from error


def _check_client(measure: Measure, fields: Numbers) -> None:
    """Raise BadReturn for a field ``client`` that is not a client's id.

    Readers of the journal take this field as the client that the other numbers belong to.
    """
    client = fields.get("client", SERVER)
    if type(client) is not int or client < SERVER:
        raise bad_return(
            measure.look, f"returns client = {client!r:.40}; return a client's id, or rename it"
        )


def _guard(result: StageResult) -> MutationGuard:
    """A guard of the run's tensors, which a measure may read and must not change."""
    states = {"before": result.before, "after": result.after}
    tensors: dict[str, Any] = {
        name: {"params": state.params, "extra": state.extra} for name, state in states.items()
    }
    tensors["replies"] = [reply.content for reply in result.accepted]
    tensors["payloads"] = result.payloads
    return MutationGuard(tensors)


def warn_of_silence(chosen: Mapping[str, Measure], reports: RoundReports) -> None:
    """Name the measures taken by clients that no client reported."""
    for name, measure in chosen.items():
        is_taken_by_clients = type(measure).look is Measure.look and measure.gives
        is_reported = any({*measure.gives} & event.keys() for event in reports.clients)
        if is_taken_by_clients and not is_reported:
            log.warning("measure %s: in the last round no client had a model to measure", name)


def fields_of_measures(
    chosen: Mapping[str, Measure],
    reports: RoundReports,
    reserved: Collection[str],
    is_tolerant: bool,
) -> dict[str, Fields]:
    """The fields of a round that each measure derives from the clients' reports.

    reserved: names of the round's other fields; two measures may not give the same field either.
    is_tolerant: whether a measure that fails is a warning.
    """
    by_measure: dict[str, Fields] = {name: {} for name in chosen}
    for name, measure in chosen.items():
        of_other_measures = set().union(*by_measure.values())
        forbidden = {*LOCATION_FIELDS, *reserved, *of_other_measures}
        try:
            numbers = measure.of_round(reports)
            by_measure[name] = journal_fields(measure.of_round, numbers, forbidden)
        except Exception as error:
            text = f"measure {name} cannot sum up what clients reported: {reason(error, measure)}"
            if not is_tolerant:
                raise FedstillError(text) from error
            log.warning("%s", text)
    return by_measure


# What a run measures of its tasks: at each task's end the accuracy on every task.


MOST_CLIENTS = 1000
"""With more clients than these, the event of a task's end has no row for each."""


@dataclass
class TaskEnds(Observer):
    """The events of a run's task ends, and what round events say of tasks; nothing without a stream
    or a test set.
    """

    prepared: Prepared
    evaluation: Evaluation
    _site_rows: dict[int, SiteRow] = field(default_factory=dict)
    """The accuracies on every task that real sites reported during the current task."""

    def __post_init__(self) -> None:
        self.at_sites = self.prepared.settings.sites_have_tasks

    @property
    def is_active(self) -> bool:
        """Whether the run has a stream, and there is a test set: the server's, or those of real
        sites.
        """
        tested = self.at_sites or self.prepared.sites.common_test is not None
        return tested and self.prepared.sites.tasks is not None

    def start_fields(self) -> Fields:
        """What the journal's first event says of the stream: classes, first rounds and label counts
        by task.
        """
        if self.prepared.sites.tasks is None:
            return {}
        stream = self.prepared.world.stream
        names = self.prepared.dataset.classes
        fields: Fields = {
            "kind": self.prepared.settings.named.stream.label,
            "classes": [list(classes) for classes in stream.by_task],
            "names": [[names[label] for label in classes] for classes in stream.by_task],
            "first_rounds": list(stream.starts),
        }
        if not self.at_sites:
            fields |= self._counts_by_task()
        return {"stream": fields}

    def _counts_by_task(self) -> dict[str, Any]:
        """Label counts of each task (T, C), and the number of clients with examples of it (T,)."""
        has_examples = self.counts.sum(dim=2) > 0
        return {
            "label_counts": self.counts.sum(dim=0).tolist(),
            "clients": has_examples.sum(dim=0).tolist(),
        }

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """The task of a round, and the accuracy over test examples of all classes seen by then,
        among these.
        """
        if not self.is_active:
            return {}
        stream = self.prepared.world.stream
        task = stream.task(result.number)
        fields: Fields = {"task": task + 1}
        models = _answering(result)
        if self.prepared.sites.common_test is None or len(self.tests) > 1 or not models:
            return fields
        seen_classes = list(stream.seen(task))
        total = int(self._totals[0][seen_classes].sum())
        right = {}
        for name, predict in models.items():
            answers = self.evaluation.right_answers(predict, self.tests[0], seen_classes)
            right[name] = answers.among_seen[seen_classes].sum()
        fields["accuracy_seen"] = None
        if total:
            fields["accuracy_seen"] = _over_clients(right, result.client_predictors).item() / total
        return fields

    def round_events(self, result: RoundResult) -> Iterator[Event]:
        """The event of a task's end; round 0 is that of the untrained model, as task 0."""
        stream = self.prepared.world.stream
        is_end = result.number == 0 or stream.ends(result.number)
        if not self.is_active or not is_end:
            return
        began = time.perf_counter()
        task = self._task_of(result)
        at_sites = {}
        if self.at_sites:
            at_sites = self._of_sites(task)
        models = _answering(result)
        is_tested = bool(models) and self.prepared.sites.common_test is not None
        if is_tested and (self._by_classes or not self.at_sites):
            correct = {name: self._correct(predict, task) for name, predict in models.items()}
            event = self._event(result, correct, at_sites)
        elif at_sites:
            event = {"event": "task", "task": task + 1, "round": result.number, **at_sites}
        else:
            return
        yield {**event, "seconds": time.perf_counter() - began}

    def on_event(self, event: Event) -> None:
        """Store the sites' reports until the task ends."""
        stages = self.prepared.settings.method.personal or (TASK_TEST,)
        is_report = event["event"] == "client" and event["name"] in stages
        if is_report and "site_by_task" in event:
            self._site_rows[event["client"]] = event["site_by_task"]
        elif event["event"] == "task":
            self._site_rows = {}

    def _event(
        self, result: RoundResult, correct: Mapping[str, Tensor], of_sites: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The event of a task's end, without its time, from each predictor's right answers by test
        set and class (tests, C).

        With several predictors, ``correct`` and ``row`` are means over their clients.
        """
        names = result.client_predictors
        task = self._task_of(result)
        mean = _over_clients(correct, names)
        # Of a class without test examples it is NaN: 0 / 0.
        accuracies = {name: right.double() / self._totals for name, right in correct.items()}
        by_client = {key: value for key, value in of_sites.items() if key != "row"}
        if not self.at_sites:
            by_client = self._by_client(accuracies, names, task)
        return {
            "event": "task",
            "task": task + 1,
            "round": result.number,
            "correct": mean.tolist(),
            "totals": self._totals.tolist(),
            "row": [none_if_undefined(v) for v in self._row(mean, accuracies, names)],
            **by_client,
        }

    def _task_of(self, result: RoundResult) -> int:
        """The task of a round; -1 before round 1."""
        if result.number == 0:
            return -1
        return self.prepared.world.stream.task(result.number)

    @property
    def _by_classes(self) -> bool:
        """Whether the classes of a test set determine its tasks."""
        stream = self.prepared.world.stream
        return len(set(stream.by_task)) == stream.tasks

    def _of_sites(self, task: int) -> dict[str, Any]:
        """The rows that real sites reported, and their mean; nothing for the untrained model."""
        rows = dict(sorted(self._site_rows.items()))
        if task < 0:
            return {}
        return {
            "row": mean_over_sites(rows.values(), self.prepared.world.stream.tasks),
            "clients": {str(client): list(row) for client, row in rows.items()},
        }

    @cached_property
    def tests(self) -> list[Examples]:
        """The test sets: one for all tasks, or each task's own where tasks are domains."""
        tasks = self.prepared.sites.tasks
        test = self.prepared.sites.common_test
        assert tasks is not None
        assert test is not None
        if tasks.by_domain and test.owners is not None:
            return [
                test.take((test.owners == t).nonzero().flatten()) for t in range(tasks.stream.tasks)
            ]
        if tasks.transforms:
            return [tasks.transformed(test, t) for t in range(tasks.stream.tasks)]
        return [test]

    @cached_property
    def _totals(self) -> Tensor:
        """Test examples by test set and class (tests, C)."""
        classes = self.prepared.world.classes
        return torch.stack(
            [torch.bincount(test.labels.cpu(), minlength=classes) for test in self.tests]
        )

    @cached_property
    def counts(self) -> Tensor:
        """Label counts by client, task and class (clients, T, C)."""
        return task_label_counts(self.prepared)

    def _correct(self, predict: Predict, task: int) -> Tensor:
        """Right answers by test set and class (tests, C): among the classes seen, or all for those
        to come.
        """
        stream = self.prepared.world.stream
        seen_classes: Sequence[int] = ()
        if task >= 0:
            seen_classes = list(stream.seen(task))
        correct = []
        for number, test in enumerate(self.tests):
            candidates: Sequence[int] = ()
            if len(self.tests) == 1 or number <= task:
                candidates = seen_classes
            answers = self.evaluation.right_answers(predict, test, candidates)
            correct.append(answers.among_seen.where(self._mask(seen_classes), answers.among_all))
        return torch.stack(correct)

    def _mask(self, seen_classes: Sequence[int]) -> Tensor:
        mask = torch.zeros(self.prepared.world.classes, dtype=torch.bool)
        mask[list(seen_classes)] = True
        return mask

    def _row(
        self,
        correct: Tensor,
        accuracies: Mapping[str, Tensor],
        client_predictors: Mapping[int, str],
    ) -> list[float]:
        """The accuracy on each task (T,)."""
        stream = self.prepared.world.stream
        if len(self.tests) > 1:
            return (correct.sum(1).double() / self._totals.sum(1)).tolist()
        # drift: as its clients' mixes weigh the classes, the mean over clients
        if len(set(stream.by_task)) == 1:
            by_task = self._weighed_by_task(accuracies, client_predictors)
            return [float(of_task[~of_task.isnan()].mean()) for of_task in by_task]
        labels = [list(classes) for classes in stream.by_task]
        return [float(correct[0][c].sum().double() / self._totals[0][c].sum()) for c in labels]

    def _by_client(
        self, accuracies: Mapping[str, Tensor], client_predictors: Mapping[int, str], task: int
    ) -> dict[str, Any]:
        """The accuracy of each client's model on each task; derived, no pass."""
        if task < 0 or self.prepared.world.clients > MOST_CLIENTS:
            return {}
        by_task = self._weighed_by_task(accuracies, client_predictors)
        rows = torch.stack(by_task, dim=1).tolist()
        return {
            "clients": {str(c): [none_if_undefined(v) for v in row] for c, row in enumerate(rows)}
        }

    def _weighed_by_task(
        self, accuracies: Mapping[str, Tensor], client_predictors: Mapping[int, str]
    ) -> list[Tensor]:
        """For each task the accuracy of each client's model as the client's own mix of it weighs
        the classes, (clients,).

        accuracies: of each predictor, by test set and class (tests, C).
        """
        single = next(iter(accuracies))
        clients = range(self.prepared.world.clients)
        names = [client_predictors.get(client, single) for client in clients]
        by_task = []
        for task in range(self.prepared.world.stream.tasks):
            counts = self.counts[:, task].double()
            weighed = torch.empty(len(clients), dtype=torch.float64)
            for name, accuracy in accuracies.items():
                of_task = accuracy[0]
                if len(accuracy) > 1:
                    of_task = accuracy[task]
                answered = torch.tensor([predictor == name for predictor in names])
                weighed[answered] = _weighed(of_task, counts)[answered]
            by_task.append(weighed)
        return by_task


SiteRow = Sequence[float | None]
"""A model's accuracy on each task (T,), on a site's own test set; None without test examples."""


def mean_over_sites(rows: Collection[SiteRow], tasks: int) -> list[float | None]:
    """The mean over sites of the accuracy on each task (T,); None for a task that no site tested.

    >>> mean_over_sites([[1.0, None], [0.5, None]], 2)
    [0.75, None]
    """
    means: list[float | None] = []
    for task in range(tasks):
        accuracies = [row[task] for row in rows]
        tested = [accuracy for accuracy in accuracies if accuracy is not None]
        mean = None
        if tested:
            mean = sum(tested) / len(tested)
        means.append(mean)
    return means


def _weighed(accuracy: Tensor, counts: Tensor) -> Tensor:
    """Class accuracies (C,) weighed by counts (clients, C); NaN for a client without any."""
    measured_counts = counts * ~accuracy.isnan()
    return (measured_counts @ accuracy.nan_to_num()) / measured_counts.sum(1)


def _answering(result: RoundResult) -> Predictors:
    """The models that answer for clients: those that are named for each, or else the one for all;
    none where only single clients have models.
    """
    predictors = result.predictors
    if result.client_predictors:
        return {name: predictors[name] for name in dict.fromkeys(result.client_predictors.values())}
    common = common_predictor(predictors)
    if not common:
        return {}
    return {common: predictors[common]}


def _over_clients(values: Mapping[str, Tensor], client_predictors: Mapping[int, str]) -> Tensor:
    """The mean over clients of their predictors' values; exactly the value of a single one."""
    if len(values) == 1:
        return next(iter(values.values()))
    clients = Counter(client_predictors.values())
    weighted = [clients[name] * value.double() for name, value in values.items()]
    return torch.stack(weighted).sum(0) / clients.total()


def task_label_counts(prepared: Prepared) -> Tensor:
    """Label counts by client, task and class (clients, T, C)."""
    sites = prepared.sites
    world = prepared.world
    tasks = sites.tasks
    assert tasks is not None
    labels = sites.train.labels.cpu()
    counts = torch.zeros(world.clients, world.stream.tasks, world.classes, dtype=torch.int64)
    for client in range(world.clients):
        part = sites.positions(client)
        for task in range(world.stream.tasks):
            positions = part[tasks.of_task(part, task)]
            counts[client, task] = torch.bincount(labels[positions], minlength=world.classes)
    return counts
