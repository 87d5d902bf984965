"""Measurements that clients send with their replies: the run's measures, and tests on own test sets
and held-out examples.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedstill.continual.task_test import TEST_STAGES
from fedstill.core.checks import MutationGuard, journal_fields
from fedstill.core.errors import FedstillError
from fedstill.core.extensions import ClientHook
from fedstill.core.records import RULED_OUT, SERVER, Examples, Stage, Tensors, View, World
from fedstill.core.reports import ENGINE, METHOD_REPORT, PROBE, SERVER_FIELDS
from fedstill.core.user_code import reason
from fedstill.core.user_modules import class_identity
from fedstill.data.inputs import Inputs
from fedstill.engines.passes import Outputs, correct_by_class, outputs_by_example
from fedstill.methods.fit import FIT
from fedstill.metrics.classification import ACCURACY, METRICS, NO_METRICS, Predictions, RunMetrics
from fedstill.metrics.score_histograms import HISTOGRAMS, as_histograms, wrong_histograms
from fedstill.models.predictors import predictor

RESERVED_CLIENT_FIELDS = SERVER_FIELDS | ENGINE.keys()
"""Fields of a client's event that a measure may not return."""


@dataclass(frozen=True)
class AtClient:
    """The data of a measure at a client that has finished its work in a stage.

    ``start``, ``end``: the model's parameters before and after the client's work. ``by_epoch``: the
    parameters after each local epoch, if a measure has ``each_epoch`` and the client trained on its
    own data. ``test``: the common test set, None at real sites. ``public``: the public set with its
    labels, which methods do not see. ``sent``: the groups of the client's reply.
    """

    stage: Stage
    view: View
    start: Tensors
    end: Tensors
    by_epoch: Sequence[Tensors]
    test: Examples | None
    public: Examples | None
    inputs: Inputs
    world: World
    sent: frozenset[str] = frozenset()

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.world.classes

    @property
    def is_server(self) -> bool:
        """Whether the client is the server, which works on public data."""
        return self.view.client == SERVER

    def correct_by_class(self, params: Tensors, examples: Examples) -> list[int]:
        """The number of correct predictions of the client's network by class (C,)."""
        predict = predictor(self.view.model, params)
        counts: list[int] = correct_by_class(predict, examples, self.inputs, self.classes).tolist()
        return counts


class ClientMeasure(Protocol):
    """The interface of measures at clients, which ``measures.base.Measure`` implements."""

    @property
    def each_epoch(self) -> bool:
        """Whether the measure needs the parameters after each local epoch."""

    def at_client(self, visit: AtClient) -> Mapping[str, Any] | None:
        """Fields of the client's event, without times; None if there is nothing to measure."""

    @property
    def gives(self) -> Sequence[str]:
        """The names of the fields that ``at_client`` returns; empty if they are unknown."""

    def refuses(self, report: Mapping[str, Any], classes: int) -> str:
        """The reason why a client's report is invalid; empty if it is valid."""


@dataclass(frozen=True)
class ClientMeasures(ClientHook):
    """The measures at clients, by name, and the measured rounds.

    Unless ``rounds`` is empty, models of the stage ``fit`` are measured in every round.
    """

    named: Mapping[str, ClientMeasure] = field(default_factory=dict)
    rounds: frozenset[int] = frozenset()

    def due(self, stage: Stage) -> bool:
        """Whether clients measure in a stage."""
        if not self.named or stage.name in TEST_STAGES:
            return False
        return stage.round in self.rounds or (stage.name == FIT and bool(self.rounds))

    def keeps_epochs(self, stage: Stage) -> bool:
        """Whether a measure of a stage needs the parameters after each epoch."""
        private = stage.view == "private" and SERVER not in stage.clients
        return private and self.due(stage) and any(m.each_epoch for m in self.named.values())

    def measures(self, stage: Stage) -> bool:
        """Whether the clients of a stage are measured."""
        return self.due(stage)

    def cache_key(self, stage: Stage) -> str:
        """A text that identifies the measures of a stage."""
        if not self.due(stage):
            return ""
        return repr([(name, class_identity(type(m))) for name, m in self.named.items()])

    def measured(self, visit: AtClient) -> dict[str, Any]:
        """The fields of the measures, if the stage is measured."""
        if not self.due(visit.stage):
            return {}
        return self.take(visit)

    def take(self, visit: AtClient) -> dict[str, Any]:
        """The fields of all measures, and the seconds of each measure; empty if there are none.

        Raises FedstillError with the name of a measure that failed.
        """
        start = time.perf_counter()
        report: dict[str, Any] = {}
        models = MutationGuard({"start": visit.start, "end": visit.end, "by_epoch": visit.by_epoch})
        for name, measure in self.named.items():
            measure_start = time.perf_counter()
            try:
                fields = _fields_of(measure, visit)
            except Exception as error:
                raise _measure_failed(name, measure, visit, error) from error
            models.check(measure.at_client, visit.view.client)
            if fields is not None:
                report |= fields
                report[f"seconds_{name}"] = time.perf_counter() - measure_start
        if report:
            report["seconds_measuring"] = time.perf_counter() - start
        return report

    def refuses(self, metrics: Mapping[str, Any], stage: Stage, classes: int) -> str:
        """The reason why a reply's metrics are malformed or unexpected in a stage; empty if they
        are valid.
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


def _fields_of(measure: ClientMeasure, visit: AtClient) -> dict[str, Any] | None:
    """The fields of a measure; None if there is nothing to measure."""
    fields = measure.at_client(visit)
    if fields is None:
        return None
    return dict(journal_fields(measure.at_client, fields, RESERVED_CLIENT_FIELDS))


def _measure_failed(
    name: str, measure: ClientMeasure, visit: AtClient, error: Exception
) -> FedstillError:
    place = f"client {visit.view.client}"
    if visit.is_server:
        place = "the server"
    return FedstillError(f"measure {name} failed at {place}: {reason(error, measure)}")


def _field_names(measures: Mapping[str, ClientMeasure]) -> set[str]:
    """The fields that measures declare, and the fields with their times."""
    times = {f"seconds_{name}" for name in measures}
    return times.union(*(measure.gives for measure in measures.values()))


def _unknown_field(metrics: Mapping[str, Any], due: Mapping[str, ClientMeasure]) -> str:
    if not all(measure.gives for measure in due.values()):
        return ""  # a measure without declared fields may return any field
    unknown = sorted(metrics.keys() - _field_names(due) - ENGINE.keys() - {METHOD_REPORT})
    if unknown:
        return f"its report {unknown[0][:40]!r} belongs to no measure of this run"
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
    """The message about a field of the method's report that belongs to a measure; empty if there is
    none.
    """
    clashes = sorted(metrics.get(METHOD_REPORT, {}).keys() & _field_names(measures))
    if clashes:
        return f"its method's report {clashes[0][:40]!r} is a field of a measure"
    return ""


def _malformed_probe(metrics: Mapping[str, Any], classes: int) -> str:
    report = metrics.get(METHOD_REPORT, {})
    if PROBE not in report or len(report[PROBE]) == classes:
        return ""
    return f"its report {PROBE!r} has {len(report[PROBE])} numbers for {classes} classes"


def _malformed_histograms(metrics: Mapping[str, Any], classes: int) -> str:
    """The message about malformed histograms; empty if there are none."""
    for name in HISTOGRAMS:
        if name not in metrics:
            continue
        problem = wrong_histograms(metrics[name], classes)
        if problem:
            return f"its report {name!r} is malformed: {problem}"
    return ""


# ---- own test sets and held-out examples ---------------------------------------------------------


@dataclass(frozen=True)
class OwnTestSets(ClientHook):
    """Tests a client's model on its own test set, or on the test sets of its tasks.

    ``metrics``: the metrics in addition to accuracy. ``histogram_stages``: the stages, in the order
    of their names, after which a real site sends counts and histograms of its scores; None for a
    client of a simulation, which sends the metrics after every stage.
    """

    metrics: RunMetrics = NO_METRICS
    histogram_stages: tuple[str, ...] | None = None

    def measured(self, visit: AtClient) -> dict[str, Any]:
        """``site_accuracy``, with tasks ``site_by_task``, and ``site_metrics`` or ``site_scores``;
        empty without a test set. ``site_test_examples`` is the size of a real site's test set, in
        ``histogram_stages``.
        """
        if visit.view.tests:
            return self._tested_by_task(visit)
        test = visit.view.test
        if test is None or len(test) == 0:
            return {}
        counted = self._counted(visit.stage, len(test))
        if not self._records_metrics(visit.stage):
            accuracy = sum(visit.correct_by_class(visit.end, test)) / len(test)
            return {"site_accuracy": accuracy, **counted}
        outputs = outputs_by_example(predictor(visit.view.model, visit.end), test, visit.inputs)
        labels = test.labels.cpu()
        right = int((outputs.predicted == labels).sum())
        return {"site_accuracy": right / len(test), **counted, **self._metrics(outputs, labels)}

    def _counted(self, stage: Stage, examples: int) -> dict[str, int]:
        """The size of a test set, if a real site reports it in a stage; otherwise empty."""
        if self.histogram_stages is None or stage.name not in self.histogram_stages:
            return {}
        return {"site_test_examples": examples}

    def _records_metrics(self, stage: Stage) -> bool:
        if not self.metrics.names:
            return False
        return self.histogram_stages is None or stage.name in self.histogram_stages

    def _metrics(self, outputs: Outputs, labels: Tensor) -> dict[str, Any]:
        """The metrics of outputs, or the histograms from which the server computes them."""
        predictions = Predictions.of(
            outputs.logits, outputs.predicted, labels, self.metrics.positive
        )
        if self.histogram_stages is not None:
            return {"site_scores": as_histograms(predictions)}
        return {"site_metrics": self.metrics.of(predictions)}

    def _tested_by_task(self, visit: AtClient) -> dict[str, Any]:
        """The accuracy of a real site's model on its test sets of the tasks so far, with
        predictions among the classes so far.

        ``site_by_task``: the accuracy on each task, None if the site has no test examples of it, or
        for a future task. ``site_accuracy`` and metrics: on all these test sets together.
        """
        tests = visit.view.tests
        outputs = _outputs_among_classes_so_far(visit)
        right = {t: int((outputs[t].predicted == tests[t].labels.cpu()).sum()) for t in tests}
        by_task: list[float | None] = [None] * visit.world.stream.tasks
        for task, count in right.items():
            by_task[task] = count / len(tests[task])
        examples = sum(len(test) for test in tests.values())
        fields = {
            "site_accuracy": sum(right.values()) / examples,
            "site_by_task": by_task,
            **self._counted(visit.stage, examples),
        }
        if not self._records_metrics(visit.stage):
            return fields
        all_outputs = Outputs(
            torch.cat([outputs[task].logits for task in tests]),
            torch.cat([outputs[task].predicted for task in tests]),
        )
        labels = torch.cat([test.labels.cpu() for test in tests.values()])
        return {**fields, **self._metrics(all_outputs, labels)}


@dataclass(frozen=True)
class HeldOutTests(ClientHook):
    """Tests a client's model on its held-out examples.

    ``stages``: the stages with a test, in the order of their names. ``by``: the metric that
    compares rounds. ``positive``: the positive class of two classes. ``as_histograms``: whether the
    client sends counts and histograms of the scores, from which the server computes the metric on
    the examples of all clients.
    """

    stages: tuple[str, ...]
    by: str = ACCURACY
    positive: int = 0
    as_histograms: bool = False

    def measured(self, visit: AtClient) -> dict[str, Any]:
        """``held_out_accuracy`` and ``held_out_examples`` (their number); for another metric than
        accuracy, also ``held_out_score`` or ``held_out_histograms``. Empty in other stages, and
        without held-out examples.
        """
        held_out = visit.view.validation
        if visit.stage.name not in self.stages or held_out is None:
            return {}
        outputs = outputs_by_example(predictor(visit.view.model, visit.end), held_out, visit.inputs)
        labels = held_out.labels.cpu()
        right = int((outputs.predicted == labels).sum())
        fields: dict[str, Any] = {
            "held_out_accuracy": right / len(held_out),
            "held_out_examples": len(held_out),
        }
        if self.by == ACCURACY:
            return fields
        predictions = Predictions.of(outputs.logits, outputs.predicted, labels, self.positive)
        if self.as_histograms:
            return {**fields, "held_out_histograms": as_histograms(predictions)}
        return {**fields, "held_out_score": METRICS[self.by].value(predictions)}


def _outputs_among_classes_so_far(visit: AtClient) -> dict[int, Outputs]:
    """The outputs of the client's model on the test set of each task, restricted to the classes so
    far.
    """
    stream = visit.world.stream
    classes_so_far = torch.zeros(visit.classes, dtype=torch.bool)
    classes_so_far[list(stream.seen(stream.task(visit.stage.round)))] = True
    predict = predictor(visit.view.model, visit.end)

    def masked_logits(x: Tensor) -> Tensor:
        logits = predict(x)
        return logits.where(classes_so_far.to(logits.device), RULED_OUT)

    return {
        task: outputs_by_example(masked_logits, test, visit.inputs)
        for task, test in visit.view.tests.items()
    }
