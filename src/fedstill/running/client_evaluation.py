"""Evaluation of the models that answer for clients: on the common test set (``ClientAnswers``), on
the clients' own test sets in a simulation (``ClientTests``), and at real sites (``SiteTests``).

A client's *answer* is the model that predicts for it after a round: a model of its own, a model of
the server's that the method names for it, or the model of the whole federation. These observers
remember what clients reported over rounds, because not every client takes part in every round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.continual.task_test import TEST_STAGES
from fedstill.core.extensions import Event, Fields, Observer, RoundResult
from fedstill.core.records import Examples
from fedstill.data.views import SiteViews
from fedstill.engines.hardware import workers
from fedstill.engines.passes import Outputs, correct_by_example, outputs_by_example
from fedstill.metrics import class_accuracy
from fedstill.metrics.accuracy import Values
from fedstill.metrics.classification import CONFUSION, NO_METRICS, Predictions, RunMetrics
from fedstill.metrics.local_models import personal_answers
from fedstill.metrics.score_histograms import auc_error, concatenated, from_histograms
from fedstill.running.evaluation import Predict

# ---- on the common test set ----------------------------------------------------------------------


@dataclass
class ClientAnswers(Observer):
    """The class accuracies of the clients' answers on the common test set, if the method gives
    clients different models; no fields for other methods.

    stages: those after which a client's own model is its answer. If there are several, the last
    stage in which the client acted counts.
    label_counts: (clients, C); empty if nobody knows them.
    totals: test examples by class (C,).
    """

    stages: Collection[str]
    label_counts: Sequence[Sequence[int]]
    totals: Sequence[int]
    _latest: dict[int, Values] = field(default_factory=dict)
    """By client, the class accuracies (C,) of its last measurement."""
    _best: dict[int, Values] = field(default_factory=dict)
    """By client, the best accuracy of each class (C,) in earlier rounds."""
    _measured: set[int] = field(default_factory=set)
    """The clients that were measured in this round."""

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """The accuracies of the clients' answers; none if no client was measured in this round."""
        if result.client_predictors:
            return self._fields_of_server(result)
        if not self._measured:
            return {}
        return personal_answers(self._latest, self._best, self.label_counts)

    def on_event(self, event: Event) -> None:
        """Store a client's measurement; at the end of a round, update the best accuracies."""
        if event["event"] == "client":
            self._on_client(event)
        elif event["event"] == "round":
            self._on_round(event)

    def _on_client(self, event: Event) -> None:
        is_answer = event["name"] in self.stages and "correct_by_class" in event
        if is_answer and self.label_counts:
            client = event["client"]
            self._latest[client] = class_accuracy(event["correct_by_class"], self.totals)
            self._measured.add(client)

    def _on_round(self, event: Event) -> None:
        names = event.get("client_predictors", {})
        if names and "others" in event:
            by_client = {int(client): name for client, name in names.items()}
            self._latest = _accuracies_by_client(event["others"], by_client)
            self._measured = set(by_client)
        for client in self._measured:
            latest = self._latest[client]
            best = self._best.get(client, latest)
            self._best[client] = np.fmax(best, latest)
        self._measured.clear()

    def _fields_of_server(self, result: RoundResult) -> Fields:
        """The fields if models of the server answer for clients."""
        names = result.client_predictors
        fields: Fields = {"client_predictors": {str(c): name for c, name in names.items()}}
        others = result.accuracies.get("others")
        if others and self.label_counts:
            latest = _accuracies_by_client(others, names)
            fields |= personal_answers(latest, self._best, self.label_counts)
        return fields


def _accuracies_by_client(
    by_name: Mapping[str, Mapping[str, Any]], client_predictors: Mapping[int, str]
) -> dict[int, Values]:
    """Class accuracies (C,) of each client's predictor; NaN for a class without test examples."""
    arrays = {
        name: np.array(by_name[name]["class_accuracy"], dtype=np.float64)
        for name in set(client_predictors.values())
    }
    return {client: arrays[name] for client, name in client_predictors.items()}


# ---- on the clients' own test sets, in a simulation ----------------------------------------------


@dataclass(frozen=True)
class ClientTest:
    """The accuracy and the run's metrics of a client's answer on the client's own test set."""

    accuracy: float
    metrics: Fields = field(default_factory=dict)


@dataclass
class ClientTests(Observer):
    """Tests of the clients' answers on the clients' own test sets.

    stages: those after which a client's own model is its answer. The client tests this model
    itself, and reports the result.
    metrics: those that the run records.
    """

    sites: SiteViews
    stages: Collection[str]
    metrics: RunMetrics = NO_METRICS
    _reported: dict[int, ClientTest] = field(default_factory=dict)

    def on_event(self, event: Event) -> None:
        """Store the test result that a client reported for its own model."""
        is_answer = event["event"] == "client" and event["name"] in self.stages
        if is_answer and "site_accuracy" in event:
            self._reported[event["client"]] = ClientTest(
                event["site_accuracy"], event.get("site_metrics", {})
            )

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """Fields of a round's event (``own_test_fields``); none without own test sets."""
        if not self.sites.own_tests:
            return {}
        by_client = self._tests_of_round(result)
        if not by_client:
            return {}
        return own_test_fields(by_client)

    def _tests_of_round(self, result: RoundResult) -> dict[int, ClientTest]:
        """The tests of the clients' answers after a round."""
        if self.stages and self._reported:
            return dict(self._reported)
        tests = self.sites.own_tests
        predictors = result.predictors
        single = {c: f"client {c}" for c in tests if f"client {c}" in predictors}
        names = result.client_predictors or single
        if names:
            return {
                client: self._test(predictors[name], tests[client])
                for client, name in names.items()
                if client in tests
            }
        if not predictors:
            return {}
        return self._test_together(next(iter(predictors.values())))

    def _test(self, predict: Predict, examples: Examples) -> ClientTest:
        """Test a predictor on one client's test set."""
        if self.metrics.names:
            outputs = outputs_by_example(predict, examples, self.sites.inputs)
            return self._client_test(outputs, examples.labels.cpu())
        is_right = correct_by_example(predict, examples, self.sites.inputs)
        return ClientTest(float(is_right.double().mean()))

    def _test_together(self, predict: Predict) -> dict[int, ClientTest]:
        """Test the federation's model on the test sets of all clients, in one pass."""
        examples = self._joined.examples
        owners = self._joined.owners
        inputs = self.sites.inputs
        if not self.metrics.names:
            right = correct_by_example(predict, examples, inputs, workers()).double()
            length = int(owners.max()) + 1
            right_by_client = torch.bincount(owners, right, length)
            counts = torch.bincount(owners, minlength=length)
            return {
                client: ClientTest(float(right_by_client[client] / counts[client]))
                for client in self.sites.own_tests
            }

        outputs = outputs_by_example(predict, examples, inputs, workers())
        labels = examples.labels.cpu()
        tests = {}
        for client in self.sites.own_tests:
            positions = (owners == client).nonzero().flatten()
            tests[client] = self._client_test(outputs.take(positions), labels[positions])
        return tests

    def _client_test(self, outputs: Outputs, labels: Tensor) -> ClientTest:
        is_right = outputs.predicted == labels
        return ClientTest(
            float(is_right.double().mean()),
            self.metrics.of_logits(outputs.logits, outputs.predicted, labels),
        )

    @cached_property
    def _joined(self) -> _JoinedTests:
        tests = self.sites.own_tests
        examples = Examples(
            torch.cat([test.values for test in tests.values()]),
            torch.cat([test.labels for test in tests.values()]),
        )
        sizes = torch.tensor([len(test) for test in tests.values()])
        owners = torch.repeat_interleave(torch.tensor([*tests]), sizes)
        return _JoinedTests(examples, owners)


@dataclass(frozen=True)
class _JoinedTests:
    """The test examples of all clients, and the client that owns each (n,)."""

    examples: Examples
    owners: Tensor


# ---- at real sites -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteTest:
    """The report of a real site on its test set.

    predictions: from the counts and histograms that it sent; None if the run has no metrics.
    """

    accuracy: float
    examples: int
    predictions: Predictions | None


@dataclass
class SiteTests(Observer):
    """Accuracies and metrics of the models that real sites test on their own test sets. Metrics are
    computed from the counts and histograms that sites send.

    personal: the stages after which a client's own model is its answer; empty if the server's model
    answers for all clients.
    """

    metrics: RunMetrics
    personal: Collection[str]
    _tests: dict[int, SiteTest] = field(default_factory=dict)

    def on_event(self, event: Event) -> None:
        """Store the reports of sites. Reports on the server's model are valid until the end of the
        round, and reports on a site's own model until its next test.
        """
        if event["event"] == "client" and self._is_test(event):
            predictions = None
            if "site_scores" in event:
                predictions = from_histograms(event["site_scores"], self.metrics.positive)
            self._tests[event["client"]] = SiteTest(
                accuracy=event["site_accuracy"],
                examples=event["site_test_examples"],
                predictions=predictions,
            )
        elif event["event"] == "round" and not self.personal:
            self._tests.clear()

    def _is_test(self, event: Event) -> bool:
        """Whether an event contains a site's report on its answer."""
        is_counted = event["name"] in (self.personal or TEST_STAGES)
        return is_counted and {"site_accuracy", "site_test_examples"} <= event.keys()

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """Fields of a round's event; none if no site reported.

        These are ``own_test_fields``; ``own_test_weighted``: the accuracy on the test examples of
        all sites together; and ``own_test_auc_error``: the largest possible difference of a site's
        AUC from the exact one. If the server has no test set, the metrics of its model are those on
        the test sets of all sites together.
        """
        if not self._tests:
            return {}
        tests = dict(sorted(self._tests.items()))
        fields = own_test_fields(
            {client: self._client_test(test) for client, test in tests.items()}
        )
        examples = sum(test.examples for test in tests.values())
        if examples:
            right = sum(test.accuracy * test.examples for test in tests.values())
            fields["own_test_weighted"] = right / examples
        known_predictions = [
            test.predictions for test in tests.values() if test.predictions is not None
        ]
        if not known_predictions:
            return fields
        errors = [auc_error(predictions) for predictions in known_predictions]
        known = [error for error in errors if error is not None]
        if "auc" in self.metrics.names and known:
            fields["own_test_auc_error"] = max(known)
        if self.personal or so_far.get("accuracy") is not None:
            return fields
        return {**self.metrics.of(concatenated(known_predictions)), **fields}

    def _client_test(self, test: SiteTest) -> ClientTest:
        if test.predictions is None:
            return ClientTest(test.accuracy)
        return ClientTest(test.accuracy, self.metrics.of(test.predictions))


# ---- the fields of a round's event ---------------------------------------------------------------


def own_test_fields(by_client: Mapping[int, ClientTest]) -> Fields:
    """The fields of a round's event on tests with the clients' own test sets.

    ``own_test_accuracy``: the mean over clients. ``own_test_worst``: the lowest accuracy of a
    client. ``own_test_by_client``: the accuracies by client; client ids are text, as in JSON. And
    the run's metrics, as in ``own_test_metrics``.
    """
    accuracies = {client: test.accuracy for client, test in sorted(by_client.items())}
    return {
        "own_test_accuracy": sum(test.accuracy for test in by_client.values()) / len(by_client),
        "own_test_worst": min(accuracies.values()),
        "own_test_by_client": {str(client): value for client, value in accuracies.items()},
        **own_test_metrics({client: test.metrics for client, test in by_client.items()}),
    }


def own_test_metrics(by_client: Mapping[int, Fields]) -> Fields:
    """The metrics of tests with the clients' own test sets, as fields of a round's event.

    ``own_test_METRIC``: the mean over the clients for which it is defined, None if there is none.
    ``own_test_METRIC_by_client``: the values by client where it is defined.
    ``own_test_confusions``: the confusion matrices by client.
    """
    fields: Fields = {}
    names = dict.fromkeys(name for metrics in by_client.values() for name in metrics)
    for name in names:
        values = {
            str(client): by_client[client][name]
            for client in sorted(by_client)
            if by_client[client].get(name) is not None
        }
        if name == CONFUSION:
            fields["own_test_confusions"] = values
            continue
        mean = None
        if values:
            mean = sum(values.values()) / len(values)
        fields[f"own_test_{name}"] = mean
        fields[f"own_test_{name}_by_client"] = values
    return fields
