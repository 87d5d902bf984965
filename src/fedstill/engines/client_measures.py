"""The measures that clients take of their own models at the end of a stage, and send with their
replies.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedstill.continual.task_test import TEST_STAGES
from fedstill.core.errors import FedstillError
from fedstill.core.extensions import ClientHook
from fedstill.core.records import SERVER, Stage
from fedstill.core.reports import ENGINE, OWN, PROBE, TAKEN
from fedstill.core.user_code import reason
from fedstill.engines.at_client import AtClient
from fedstill.engines.reply_cache import class_identity
from fedstill.engines.user_functions import MutationGuard, journal_fields
from fedstill.methods.fit import FIT
from fedstill.metrics.score_histograms import HISTOGRAMS, wrong_histograms

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
        if not self.named or stage.name in TEST_STAGES:
            return False
        return stage.round in self.rounds or (stage.name == FIT and bool(self.rounds))

    def keeps_epochs(self, stage: Stage) -> bool:
        """Whether a measure of this stage looks at every epoch."""
        private = stage.view == "private" and SERVER not in stage.clients
        return private and self.due(stage) and any(m.each_epoch for m in self.named.values())

    def reads_test_set(self, stage: Stage) -> bool:
        """Whether a reply of this stage depends on the common test set, which measures read."""
        return self.due(stage)

    def cache_key(self, stage: Stage) -> str:
        """The measures that are taken in this stage."""
        if not self.due(stage):
            return ""
        return repr([(name, class_identity(type(m))) for name, m in self.named.items()])

    def measured(self, seen: AtClient) -> dict[str, Any]:
        """The fields that the measures give, if they are due."""
        if not self.due(seen.stage):
            return {}
        return self.take(seen)

    def take(self, seen: AtClient) -> dict[str, Any]:
        """All fields that the measures give, with the seconds of each measure; empty if there are
        none.

        Raises FedstillError naming the measure that failed.
        """
        began = time.perf_counter()
        report: dict[str, Any] = {}
        models = MutationGuard({"start": seen.start, "end": seen.end, "by_epoch": seen.by_epoch})
        for name, measure in self.named.items():
            measure_began = time.perf_counter()
            try:
                fields = _fields_of(measure, seen)
            except Exception as error:
                raise _measure_failed(name, measure, seen, error) from error
            models.check(measure.at_client, seen.view.client)
            if fields is not None:
                report |= fields
                report[f"seconds_{name}"] = time.perf_counter() - measure_began
        if report:
            report["seconds_measuring"] = time.perf_counter() - began
        return report

    def refuses(self, metrics: Mapping[str, Any], stage: Stage, classes: int) -> str:
        """Why a reply's metrics hold what nothing in this run gives in a stage, or are malformed;
        empty if they do not.
        """
        due: Mapping[str, ClientMeasure] = {}
        if self.due(stage):
            due = self.named
        return (
            _unknown_field(metrics, due)
            or _malformed_measure(metrics, due, classes)
            or _field_of_measure(metrics, self.named)
            or _malformed_probe(metrics, classes)
            or _malformed_histograms(metrics, classes)
        )


def _fields_of(measure: ClientMeasure, seen: AtClient) -> dict[str, Any] | None:
    """The fields that a measure gives; None if there is nothing to measure."""
    fields = measure.at_client(seen)
    if fields is None:
        return None
    return dict(journal_fields(measure.at_client, fields, NOT_A_MEASURES))


def _measure_failed(
    name: str, measure: ClientMeasure, seen: AtClient, error: Exception
) -> FedstillError:
    place = f"client {seen.view.client}"
    if seen.is_server:
        place = "the server"
    return FedstillError(f"measure {name} failed at {place}: {reason(error, measure)}")


def _field_names(measures: Mapping[str, ClientMeasure]) -> set[str]:
    """The fields that measures declare, and those with their times."""
    times = {f"seconds_{name}" for name in measures}
    return times.union(*(measure.gives for measure in measures.values()))


def _unknown_field(metrics: Mapping[str, Any], due: Mapping[str, ClientMeasure]) -> str:
    if not all(measure.gives for measure in due.values()):
        return ""  # a measure may give any field
    unknown = sorted(metrics.keys() - _field_names(due) - ENGINE.keys() - {OWN})
    if unknown:
        return f"its report {unknown[0][:40]!r} is none that this run asks for"
    return ""


def _malformed_measure(
    metrics: Mapping[str, Any], due: Mapping[str, ClientMeasure], classes: int
) -> str:
    for name, measure in due.items():
        problem = measure.refuses(metrics, classes)
        if problem:
            return f"its report for measure {name!r} is malformed: {problem}"
    return ""


def _field_of_measure(metrics: Mapping[str, Any], measures: Mapping[str, ClientMeasure]) -> str:
    """Whether the method reports a field that belongs to a measure."""
    clashes = sorted(metrics.get(OWN, {}).keys() & _field_names(measures))
    if clashes:
        return f"its method's report {clashes[0][:40]!r} is not a method's to give"
    return ""


def _malformed_probe(metrics: Mapping[str, Any], classes: int) -> str:
    report = metrics.get(OWN, {})
    if PROBE not in report or len(report[PROBE]) == classes:
        return ""
    return f"its report {PROBE!r} has {len(report[PROBE])} numbers for {classes} classes"


def _malformed_histograms(metrics: Mapping[str, Any], classes: int) -> str:
    """Whether the histograms that the server joins are none."""
    for name in HISTOGRAMS:
        problem = wrong_histograms(metrics[name], classes) if name in metrics else ""
        if problem:
            return f"its report {name!r} is malformed: {problem}"
    return ""
