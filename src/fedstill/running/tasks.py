"""What a run measures of its tasks: at each task's end the accuracy on every task."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedstill.continual.task_test import TASK_TEST
from fedstill.core.extensions import (
    Event,
    Fields,
    Observer,
    Predictors,
    RoundResult,
    of_some_clients,
)
from fedstill.core.records import Examples
from fedstill.running.evaluation import Evaluation, Predict, Row, mean_row
from fedstill.running.preparation import Prepared

MOST_CLIENTS = 1000
"""With more clients than these, the event of a task's end has no row for each."""


@dataclass
class TaskEnds(Observer):
    """The events of a run's task ends, and what round events say of tasks; nothing without a stream
    or a test set.
    """

    prepared: Prepared
    evaluation: Evaluation
    _site_rows: dict[int, Row] = field(default_factory=dict)
    """What each real site said of its accuracy on every task, in the task under way."""

    def __post_init__(self) -> None:
        self.at_sites = self.prepared.settings.sites_have_tasks

    @property
    def on(self) -> bool:
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
        stream, names = self.prepared.world.stream, self.prepared.dataset.classes
        counted = {} if self.at_sites else self._counted()
        return {
            "stream": {
                "kind": self.prepared.settings.named.stream.label,
                "classes": [list(own) for own in stream.by_task],
                "names": [[names[c] for c in own] for own in stream.by_task],
                "first_rounds": list(stream.starts),
                **counted,
            }
        }

    def _counted(self) -> dict[str, Any]:
        there = (self.counts.sum(dim=2) > 0).sum(dim=0)
        return {"label_counts": self.counts.sum(dim=0).tolist(), "clients": [int(n) for n in there]}

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """The task of a round, and the accuracy over test examples of all classes seen by then,
        among these.
        """
        if not self.on:
            return {}
        stream = self.prepared.world.stream
        task = stream.task(result.number)
        fields: Fields = {"task": task + 1}
        models = _answering(result)
        if self.prepared.sites.common_test is None or len(self.tests) > 1 or not models:
            return fields
        seen = list(stream.seen(task))
        total = int(self._totals[0][seen].sum())
        right = {}
        for name, predict in models.items():
            answers = self.evaluation.right_answers(predict, self.tests[0], seen)
            right[name] = answers.among_seen[seen].sum()
        fields["accuracy_seen"] = None
        if total:
            fields["accuracy_seen"] = _over_clients(right, result.client_predictors).item() / total
        return fields

    def round_events(self, result: RoundResult) -> Iterator[Event]:
        """The event of a task's end; round 0 is that of the untrained model, as task 0."""
        stream = self.prepared.world.stream
        is_end = result.number == 0 or stream.ends(result.number)
        if not self.on or not is_end:
            return
        began = time.perf_counter()
        task = stream.task(result.number) if result.number else -1
        at_sites = self._of_sites(task) if self.at_sites else {}
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
        """Remember what sites reported, until the task ends."""
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
        stream = self.prepared.world.stream
        task = stream.task(result.number) if result.number else -1
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
            "row": [_number(v) for v in self._row(mean, accuracies, names)],
            **by_client,
        }

    @property
    def _by_classes(self) -> bool:
        """Whether a test set says by its classes what belongs to which task."""
        stream = self.prepared.world.stream
        return len(set(stream.by_task)) == stream.tasks

    def _of_sites(self, task: int) -> dict[str, Any]:
        """The rows that real sites said, and their mean; nothing of the untrained model."""
        rows = dict(sorted(self._site_rows.items()))
        if task < 0:
            return {}
        each = {str(client): list(row) for client, row in rows.items()}
        return {"row": mean_row(rows.values(), self.prepared.world.stream.tasks), "clients": each}

    @cached_property
    def tests(self) -> list[Examples]:
        """The test sets: one for all tasks, or each task's own where tasks are domains."""
        tasks, test = self.prepared.sites.tasks, self.prepared.sites.common_test
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
        seen = list(stream.seen(task)) if task >= 0 else []
        correct = []
        for number, test in enumerate(self.tests):
            is_past = len(self.tests) == 1 or number <= task
            answers = self.evaluation.right_answers(predict, test, seen if is_past else ())
            correct.append(answers.among_seen.where(self._mask(seen), answers.among_all))
        return torch.stack(correct)

    def _mask(self, seen: Sequence[int]) -> Tensor:
        mask = torch.zeros(self.prepared.world.classes, dtype=torch.bool)
        mask[list(seen)] = True
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
            return [float(own[~own.isnan()].mean()) for own in by_task]
        rows = [list(own) for own in stream.by_task]
        return [float(correct[0][own].sum().double() / self._totals[0][own].sum()) for own in rows]

    def _by_client(
        self, accuracies: Mapping[str, Tensor], client_predictors: Mapping[int, str], task: int
    ) -> dict[str, Any]:
        """The accuracy of each client's model on each task; derived, no pass."""
        if task < 0 or self.prepared.world.clients > MOST_CLIENTS:
            return {}
        by_task = self._weighed_by_task(accuracies, client_predictors)
        rows = torch.stack(by_task, dim=1).tolist()
        return {"clients": {str(c): [_number(v) for v in row] for c, row in enumerate(rows)}}

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
                of_task = accuracy[task if len(accuracy) > 1 else 0]
                answered = torch.tensor([own == name for own in names])
                weighed[answered] = _weighed(of_task, counts)[answered]
            by_task.append(weighed)
        return by_task


def _weighed(accuracy: Tensor, counts: Tensor) -> Tensor:
    """Class accuracies (C,) weighed by counts (clients, C); NaN for a client without any."""
    known = counts * ~accuracy.isnan()
    return (known @ accuracy.nan_to_num()) / known.sum(1)


def _answering(result: RoundResult) -> Predictors:
    """The models that answer for clients: those that are named for each, or else the one for all;
    none where only single clients have models.
    """
    predictors = result.predictors
    if result.client_predictors:
        return {name: predictors[name] for name in dict.fromkeys(result.client_predictors.values())}
    first = next(iter(predictors), "")
    if not first or of_some_clients(first):
        return {}
    return {first: predictors[first]}


def _over_clients(values: Mapping[str, Tensor], client_predictors: Mapping[int, str]) -> Tensor:
    """The mean over clients of what their predictors have; of one predictor, exactly its own."""
    if len(values) == 1:
        return next(iter(values.values()))
    clients = Counter(client_predictors.values())
    weighted = [clients[name] * value.double() for name, value in values.items()]
    return torch.stack(weighted).sum(0) / clients.total()


def _number(value: float) -> float | None:
    return value if value == value else None


def task_label_counts(prepared: Prepared) -> Tensor:
    """Label counts by client, task and class (clients, T, C)."""
    sites, world = prepared.sites, prepared.world
    tasks = sites.tasks
    assert tasks is not None
    labels = sites.train.labels.cpu()
    counts = torch.zeros(world.clients, world.stream.tasks, world.classes, dtype=torch.int64)
    for client in range(world.clients):
        part = sites.positions(client)
        for task in range(world.stream.tasks):
            own = part[tasks.of_task(part, task)]
            counts[client, task] = torch.bincount(labels[own], minlength=world.classes)
    return counts
