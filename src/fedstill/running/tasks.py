"""What a run measures of its tasks: at each task's end the accuracy on every task."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedstill.core.records import Examples
from fedstill.core.stream import OFF
from fedstill.engines.cores import workers
from fedstill.engines.passes import Predict, by_shard, correct_by_class, counted_right
from fedstill.running.evaluation import SiteRows, mean_row
from fedstill.running.preparation import Prepared

Predictors = Mapping[str, Predict]

MOST_CLIENTS = 1000
"""With more clients than these, the event of a task's end has no row for each."""


@dataclass
class TaskEnds:
    """The events of a run's task ends, and what round events say of tasks; nothing without a stream
    or a test set.
    """

    prepared: Prepared

    def __post_init__(self) -> None:
        self.said = SiteRows(self.prepared.settings.method.personal)
        self.at_sites = self.prepared.settings.on_tasks
        # the last pass
        self._last: tuple[Predict, Examples, Sequence[int], tuple[Tensor, Tensor]] | None = None

    @property
    def on(self) -> bool:
        """Whether the run has a stream, and there is a test set: the server's, or those of real
        sites.
        """
        tested = self.at_sites or self.prepared.sites.common_test is not None
        return tested and self.prepared.sites.tasks is not None

    def about(self) -> dict[str, Any]:
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

    def of_round(self, round: int, predictors: Predictors) -> dict[str, Any]:
        """The task of a round, and the accuracy over test examples of all classes seen by then,
        among these.
        """
        if not self.on:
            return {}
        stream = self.prepared.world.stream
        task = stream.task(round)
        known = {"task": task + 1}
        if (
            self.prepared.sites.common_test is None
            or len(self.tests) > 1
            or not (predict := _first(predictors))
        ):
            return known
        seen = list(stream.seen(task))
        right, totals = (
            self._right(predict, self.tests[0], seen)[0][seen].sum(),
            self._totals[0][seen].sum(),
        )
        return {**known, "accuracy_seen": int(right) / int(totals) if totals else None}

    def event(self, round: int, predictors: Predictors) -> dict[str, Any] | None:
        """The event of a task's end, None in another round; round 0 is that of the untrained model,
        as task 0.
        """
        stream, predict = self.prepared.world.stream, _first(predictors)
        if not self.on or not (round == 0 or stream.ends(round)):
            return None
        began, task = time.perf_counter(), stream.task(round) if round else -1
        said = self._of_sites(task) if self.at_sites else {}
        if (
            not predict
            or self.prepared.sites.common_test is None
            or (self.at_sites and not self._by_classes)
        ):
            where = {"event": "task", "task": task + 1, "round": round}
            return {**where, **said, "seconds": time.perf_counter() - began} if said else None
        told = self.told(round, self._correct(predict, task), said)
        return {**told, "seconds": time.perf_counter() - began}

    def told(
        self, round: int, correct: Tensor, of_sites: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The event of a task's end, without its time: what follows from right answers by test set
        and class.
        """
        task = self.prepared.world.stream.task(round) if round else -1
        accuracy = correct.double() / self._totals  # a class without test examples: 0 / 0, NaN
        by_client = {k: v for k, v in (of_sites or {}).items() if k != "row"}
        return {
            "event": "task",
            "task": task + 1,
            "round": round,
            "correct": correct.tolist(),
            "totals": self._totals.tolist(),
            "row": [_number(v) for v in self._row(correct, accuracy)],
            **(by_client if self.at_sites else self._by_client(accuracy, task)),
        }

    @property
    def _by_classes(self) -> bool:
        """Whether a test set says by its classes what belongs to which task."""
        stream = self.prepared.world.stream
        return len(set(stream.by_task)) == stream.tasks

    def _of_sites(self, task: int) -> dict[str, Any]:
        """The rows that real sites said, and their mean; nothing of the untrained model."""
        rows = self.said.end()
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
            return [tasks.shown(test, t) for t in range(tasks.stream.tasks)]
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
        sites, world = self.prepared.sites, self.prepared.world
        tasks, labels = sites.tasks, sites.train.labels.cpu()
        assert tasks is not None
        counts = torch.zeros(world.clients, world.stream.tasks, world.classes, dtype=torch.int64)
        for client in range(world.clients):
            for t in range(world.stream.tasks):
                part = sites.positions(client)
                own = part[tasks.of_task(part, t)]
                counts[client, t] = torch.bincount(labels[own], minlength=world.classes)
        return counts

    def _correct(self, predict: Predict, task: int) -> Tensor:
        """Right answers by test set and class (tests, C): among the classes seen, or all for those
        to come.
        """
        stream = self.prepared.world.stream
        seen = list(stream.seen(task)) if task >= 0 else []
        both = [
            self._right(predict, test, seen if len(self.tests) == 1 or t <= task else [])
            for t, test in self._each
        ]
        return torch.stack([among.where(self._mask(seen), over_all) for among, over_all in both])

    @property
    def _each(self) -> list[tuple[int, Examples]]:
        return list(enumerate(self.tests))

    def _mask(self, seen: Sequence[int]) -> Tensor:
        mask = torch.zeros(self.prepared.world.classes, dtype=torch.bool)
        mask[list(seen)] = True
        return mask

    def right_of_all(self, predict: Predict, test: Examples) -> Tensor:
        """Right answers by class (C,), of the last pass if it was that predictor's over that test
        set.
        """
        if self._last and predict is self._last[0] and test is self._last[1]:
            return self._last[3][1]
        world, inputs = self.prepared.world, self.prepared.sites.inputs
        return correct_by_class(predict, test, inputs, world.classes, workers())

    def _right(
        self, predict: Predict, test: Examples, seen: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Right answers by class (C,) with the likeliest of the classes seen, and of all; the last
        pass is kept.
        """
        if not (
            self._last
            and predict is self._last[0]
            and test is self._last[1]
            and seen == self._last[2]
        ):
            self._last = (predict, test, seen, self._passed(predict, test, seen))
        return self._last[3]

    def _passed(
        self, predict: Predict, test: Examples, seen: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        classes = self.prepared.world.classes
        on = self._mask(seen or range(classes)).to(test.labels.device)

        def both(logits: Tensor) -> tuple[Tensor, Tensor]:
            return logits.where(on, 100 * OFF).argmax(1), logits.argmax(1)

        said = by_shard(both, predict, test, self.prepared.sites.inputs, workers())
        each = [counted_right([shard[k] for shard in said], test.labels, classes) for k in (0, 1)]
        among, over_all = torch.stack(each).cpu()
        return among, over_all

    def _row(self, correct: Tensor, accuracy: Tensor) -> list[float]:
        """The accuracy on each task (T,)."""
        stream = self.prepared.world.stream
        if len(self.tests) > 1:
            return (correct.sum(1).double() / self._totals.sum(1)).tolist()
        # drift: as its clients' mixes weigh the classes, the mean over clients
        if len(set(stream.by_task)) == 1:
            each = [_weighed(accuracy[0], self.counts[:, t].double()) for t in range(stream.tasks)]
            return [float(own[~own.isnan()].mean()) for own in each]
        rows = [list(own) for own in stream.by_task]
        return [float(correct[0][own].sum().double() / self._totals[0][own].sum()) for own in rows]

    def _by_client(self, accuracy: Tensor, task: int) -> dict[str, Any]:
        """The model's accuracy on each task as each client's own mix of it weighs the classes;
        derived, no pass.
        """
        if task < 0 or self.prepared.world.clients > MOST_CLIENTS:
            return {}
        of = range(self.prepared.world.stream.tasks)
        each = [
            _weighed(accuracy[t if len(accuracy) > 1 else 0], self.counts[:, t].double()).tolist()
            for t in of
        ]
        return {
            "clients": {
                str(c): [_number(v) for v in row] for c, row in enumerate(zip(*each, strict=True))
            }
        }


def _weighed(accuracy: Tensor, counts: Tensor) -> Tensor:
    """Class accuracies (C,) weighed by counts (clients, C); NaN for a client without any."""
    known = counts * ~accuracy.isnan()
    return (known @ accuracy.nan_to_num()) / known.sum(1)


def _first(predictors: Predictors) -> Predict | None:
    """The federation's own predictor; None where models are single clients'."""
    name = next(iter(predictors), "client ")
    return None if name.startswith("client ") else predictors[name]


def _number(value: float) -> float | None:
    return value if value == value else None
