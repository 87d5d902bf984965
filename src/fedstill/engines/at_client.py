"""What a hook sees of one client after its work, and the hook that tests the client's model on its
own test sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.core.extensions import ClientHook
from fedstill.core.records import RULED_OUT, SERVER, Examples, Stage, Tensors, View, World
from fedstill.data.inputs import Inputs
from fedstill.engines.passes import Outputs, correct_by_class, outputs_by_example
from fedstill.metrics.classification import ACCURACY, METRICS, NO_METRICS, Predictions, RunMetrics
from fedstill.metrics.score_histograms import as_histograms
from fedstill.models.contract import predictor


@dataclass(frozen=True)
class AtClient:
    """A stage that is done, as a measure sees it at one client.

    ``start``, ``end``: the model's parameters before and after the client's work. ``by_epoch``:
    after each local epoch, where a measure with ``each_epoch`` asks for them and the client trained
    on its own data. ``test``: the common test set, None on real sites. ``public``: the public set
    with its labels, which no method may see. ``sent``: the groups of its reply.
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
        """Whether the client is the server, at work on public data."""
        return self.view.client == SERVER

    def correct_by_class(self, params: Tensors, examples: Examples) -> list[int]:
        """How many examples of each class (C,) these parameters of the client's network predict
        right.
        """
        predict = predictor(self.view.model, params)
        counts: list[int] = correct_by_class(predict, examples, self.inputs, self.classes).tolist()
        return counts


@dataclass(frozen=True)
class OwnTestSets(ClientHook):
    """Tests a client's model on the client's own test set, or on those of its tasks.

    ``metrics``: what is measured beside accuracy. ``histogram_stages``: those after which a real
    site sends counts and histograms of its scores, in the order of their names; None for a client
    of a simulation, which sends the metrics after every stage.
    """

    metrics: RunMetrics = NO_METRICS
    histogram_stages: tuple[str, ...] | None = None

    def measured(self, seen: AtClient) -> dict[str, Any]:
        """``site_accuracy``, with tasks ``site_by_task``, and ``site_metrics`` or ``site_scores``;
        nothing without a test set.
        """
        if seen.view.tests:
            return self._tested_by_task(seen)
        test = seen.view.test
        if test is None or len(test) == 0:
            return {}
        if not self._records_metrics(seen.stage):
            return {"site_accuracy": sum(seen.correct_by_class(seen.end, test)) / len(test)}
        outputs = outputs_by_example(predictor(seen.view.model, seen.end), test, seen.inputs)
        labels = test.labels.cpu()
        right = int((outputs.predicted == labels).sum())
        return {"site_accuracy": right / len(test), **self._metrics(outputs, labels)}

    def _records_metrics(self, stage: Stage) -> bool:
        if not self.metrics.names:
            return False
        return self.histogram_stages is None or stage.name in self.histogram_stages

    def _metrics(self, outputs: Outputs, labels: Tensor) -> dict[str, Any]:
        """The metrics of some outputs, or the histograms of which the server computes them."""
        predictions = Predictions.of(
            outputs.logits, outputs.predicted, labels, self.metrics.positive
        )
        if self.histogram_stages is not None:
            return {"site_scores": as_histograms(predictions)}
        return {"site_metrics": self.metrics.of(predictions)}

    def _tested_by_task(self, seen: AtClient) -> dict[str, Any]:
        """The accuracy of a real site's model on its own test sets of the tasks so far, among the
        classes seen by then.

        ``site_by_task``: the accuracy on each task, None if the site has no test examples of it or
        the task is still to come. ``site_accuracy`` and metrics: on all of them.
        """
        tests = seen.view.tests
        outputs = _outputs_among_seen(seen)
        right = {t: int((outputs[t].predicted == tests[t].labels.cpu()).sum()) for t in tests}
        by_task: list[float | None] = [None] * seen.world.stream.tasks
        for task, count in right.items():
            by_task[task] = count / len(tests[task])
        examples = sum(len(test) for test in tests.values())
        fields = {"site_accuracy": sum(right.values()) / examples, "site_by_task": by_task}
        if not self._records_metrics(seen.stage):
            return fields
        joined = Outputs(
            torch.cat([outputs[task].logits for task in tests]),
            torch.cat([outputs[task].predicted for task in tests]),
        )
        labels = torch.cat([test.labels.cpu() for test in tests.values()])
        return {**fields, **self._metrics(joined, labels)}


@dataclass(frozen=True)
class HeldOutTests(ClientHook):
    """Tests a client's model on the examples that the client holds out.

    ``stages``: those after which it does, in the order of their names. ``by``: the metric by which
    rounds are compared. ``positive``: the positive class if there are two. ``as_histograms``:
    whether the server computes the metric on the examples of all clients, for which it needs counts
    and histograms of the scores.
    """

    stages: tuple[str, ...]
    by: str = ACCURACY
    positive: int = 0
    as_histograms: bool = False

    def measured(self, seen: AtClient) -> dict[str, Any]:
        """``held_out_accuracy``, and ``held_out_examples``, how many they are; with another metric
        than accuracy ``held_out_score`` or ``held_out_histograms``. Nothing in other stages, and
        without held-out examples.
        """
        held_out = seen.view.validation
        if seen.stage.name not in self.stages or held_out is None:
            return {}
        outputs = outputs_by_example(predictor(seen.view.model, seen.end), held_out, seen.inputs)
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


def _outputs_among_seen(seen: AtClient) -> dict[int, Outputs]:
    """What the client's model gives for its test sets by task, among the classes seen so far."""
    stream = seen.world.stream
    classes_seen = torch.zeros(seen.classes, dtype=torch.bool)
    classes_seen[list(stream.seen(stream.task(seen.stage.round)))] = True
    predict = predictor(seen.view.model, seen.end)

    def logits_of_seen(x: Tensor) -> Tensor:
        logits = predict(x)
        return logits.where(classes_seen.to(logits.device), RULED_OUT)

    return {
        task: outputs_by_example(logits_of_seen, test, seen.inputs)
        for task, test in seen.view.tests.items()
    }
