"""What clients measure of their own models at the end of a stage, and send with their replies:
measures, by name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedstill.continual.task_test import TASK_TEST
from fedstill.core.errors import FedstillError
from fedstill.core.extensions import ClientHook
from fedstill.core.records import OFF, SERVER, Stage
from fedstill.core.reports import ENGINE, OWN, PROBE, TAKEN
from fedstill.core.user_code import reason
from fedstill.engines.at_client import AtClient
from fedstill.engines.passes import correct_by_class
from fedstill.engines.reply_cache import class_identity
from fedstill.engines.user_functions import MutationGuard, journal_fields
from fedstill.methods.fit import FIT
from fedstill.models.contract import predictor

NOT_A_MEASURES = TAKEN | ENGINE.keys()
"""Fields of a client's event that no measure gives."""


class ClientMeasure(Protocol):
    """What a measure that clients take has; ``measures.base.Measure`` is one."""

    @property
    def each_epoch(self) -> bool:
        """Whether it wants the parameters after each local epoch."""

    def at_client(self, seen: AtClient) -> Mapping[str, Any] | None:
        """Fields of the client's event, without times; None where there is nothing to measure."""

    @property
    def gives(self) -> Sequence[str]:
        """The names of the fields that ``at_client`` gives; empty: any."""

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """Why a client's report cannot have come from ``at_client``; empty if it can."""


@dataclass(frozen=True)
class ClientMeasures(ClientHook):
    """The measures that clients take, by name, and the rounds in which they do; by default none.

    If there are any rounds, models of the stage ``fit`` are measured in every round.
    """

    named: Mapping[str, ClientMeasure] = field(default_factory=dict)
    rounds: frozenset[int] = frozenset()

    def due(self, stage: Stage) -> bool:
        """Whether clients measure in this stage."""
        if not self.named or stage.name == TASK_TEST:
            return False
        return stage.round in self.rounds or (stage.name == FIT and bool(self.rounds))

    def keeps_epochs(self, stage: Stage) -> bool:
        """Whether a measure of this stage looks at every epoch."""
        private = stage.view == "private" and SERVER not in stage.clients
        return private and self.due(stage) and any(m.each_epoch for m in self.named.values())

    def reads_test_set(self, stage: Stage) -> bool:
        """Whether clients measure in this stage."""
        return self.due(stage)

    def cache_key(self, stage: Stage) -> str:
        """The measures that are taken in this stage."""
        if not self.due(stage):
            return ""
        return repr([(name, class_identity(type(m))) for name, m in self.named.items()])

    def measured(self, seen: AtClient) -> dict[str, Any]:
        """What the measures give, if they are due."""
        return self.take(seen) if self.due(seen.stage) else {}

    def take(self, seen: AtClient) -> dict[str, Any]:
        """All fields that the measures give, each measure's seconds beside them; empty if there are
        none.

        Raises FedstillError naming the measure that failed.
        """
        began, report = time.perf_counter(), dict[str, Any]()
        shown = MutationGuard({"start": seen.start, "end": seen.end, "by_epoch": seen.by_epoch})
        for name, measure in self.named.items():
            start = time.perf_counter()
            try:
                given = measure.at_client(seen)
                numbers = (
                    None
                    if given is None
                    else journal_fields(measure.at_client, given, NOT_A_MEASURES)
                )
            except Exception as error:
                who = "the server" if seen.is_server else f"client {seen.view.client}"
                raise FedstillError(
                    f"measure {name} failed at {who}: {reason(error, measure)}"
                ) from error
            shown.check(measure.at_client, seen.view.client)
            if numbers is not None:
                report |= {**numbers, f"seconds_{name}": time.perf_counter() - start}
        return {**report, "seconds_measuring": time.perf_counter() - began} if report else {}

    def refuses(self, metrics: Mapping[str, Any], stage: Stage, classes: int) -> str:
        """Why a reply's metrics hold what nothing in this run gives in a stage, or are malformed;
        empty if not.
        """
        due = self.named if self.due(stage) else {}
        given = {name for measure in due.values() for name in measure.gives}
        known = given | {f"seconds_{name}" for name in due} | ENGINE.keys() | {OWN}
        strange = (
            sorted(metrics.keys() - known) if all(measure.gives for measure in due.values()) else []
        )
        if strange:
            return f"its report {strange[0][:40]!r} is none that this run asks for"
        for name, measure in due.items():
            if why := measure.refuses(metrics, classes):
                return f"its report for measure {name!r} is malformed: {why}"
        reserved = {name for measure in self.named.values() for name in measure.gives}
        reserved |= {f"seconds_{name}" for name in self.named}
        if both := sorted(metrics.get(OWN, {}).keys() & reserved):
            return f"its method's report {both[0][:40]!r} is not a method's to give"
        probe = metrics.get(OWN, {}).get(PROBE, [0] * classes)
        return (
            ""
            if len(probe) == classes
            else f"its report {PROBE!r} has {len(probe)} numbers for {classes} classes"
        )


@dataclass(frozen=True)
class OwnTestSets(ClientHook):
    """Tests a client's model on the client's own test set, or on those of its tasks."""

    def measured(self, seen: AtClient) -> dict[str, Any]:
        """``site_accuracy``, and with tasks ``site_by_task``; nothing without a test set."""
        if seen.view.tests:
            return tested_by_task(seen)
        test = seen.view.test
        if test is None or not len(test):
            return {}
        return {"site_accuracy": sum(seen.correct_by_class(seen.end, test)) / len(test)}


def tested_by_task(seen: AtClient) -> dict[str, Any]:
    """What a real site's model is worth on its own test sets of the tasks so far, among the classes
    seen by then.

    ``site_by_task``: the accuracy on each task, None where the site has no test examples of it, or
    it is still to come. ``site_accuracy``: on all of them.
    """
    tests, stream, right = seen.view.tests, seen.world.stream, dict[int, int]()
    on = torch.zeros(seen.classes, dtype=torch.bool)
    on[list(stream.seen(stream.task(seen.stage.round)))] = True
    predict = predictor(seen.view.model, seen.end)
    for task, own in tests.items():
        some = correct_by_class(lambda x: _among(predict(x), on), own, seen.inputs, seen.classes)
        right[task] = int(some.sum())
    return {
        "site_accuracy": sum(right.values()) / sum(map(len, tests.values())),
        "site_by_task": [
            right[t] / len(tests[t]) if t in tests else None for t in range(stream.tasks)
        ],
    }


def _among(logits: Tensor, on: Tensor) -> Tensor:
    return logits.where(on.to(logits.device), 100 * OFF)
