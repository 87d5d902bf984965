"""Evaluation by class: on the common test set, on clients' test sets, and at real sites."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.checks import bad_return, returned
from fedstill.core.errors import BadReturn
from fedstill.core.extensions import (
    Event,
    Fields,
    Observer,
    Predictors,
    RoundResult,
    of_some_clients,
)
from fedstill.core.method import Method
from fedstill.core.records import RULED_OUT, SERVER, Examples, State, World
from fedstill.core.trees import same_bits
from fedstill.data.views import SiteViews
from fedstill.engines.cores import workers
from fedstill.engines.passes import (
    Outputs,
    by_shard,
    correct_by_class,
    correct_by_example,
    counted_right,
    outputs_by_example,
)
from fedstill.metrics import class_accuracy
from fedstill.metrics.classification import CONFUSION, NO_METRICS, Predictions, RunMetrics
from fedstill.metrics.local_models import personal_answers
from fedstill.metrics.score_histograms import auc_error, from_histograms, joined
from fedstill.metrics.values import Values
from fedstill.running.preparation import Prepared

# What the server's models are worth on the common test set, by class.


Predict = Callable[[Tensor], Tensor]

CountRight = Callable[[Predict, Examples], Tensor]
"""Counts a predictor's right answers on a test set by class: (C,)."""


Measured = Callable[[Predict, Examples], Fields]
"""Gives a predictor's metrics on a test set, by name."""


@dataclass(frozen=True)
class RightAnswers:
    """Right answers by class (C,): with the likeliest of the classes seen so far, and of all.

    ``metrics``: those that the run records, with the likeliest of all classes.
    """

    among_seen: Tensor
    among_all: Tensor
    metrics: Fields = field(default_factory=dict)


class Evaluation:
    """Tests the server's models on the common test set. Observers share its passes.

    With tasks, one pass counts the right answers among the classes seen so far, and among all. The
    same pass gives the metrics that the run records.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._sites = prepared.sites
        self._world = prepared.world
        self._metrics = prepared.metrics
        self._passes: dict[tuple[int, int, tuple[int, ...]], RightAnswers] = {}
        self._predictors: Predictors = {}

    def accuracies(
        self, round: int, predictors: Predictors, client_predictors: Mapping[int, str]
    ) -> dict[str, Any]:
        """The accuracies of a round's predictors (``evaluated``); 0 is before round 1."""
        # Passes are known by their predictor's id, so the predictors must live as long.
        self._passes = {}
        self._predictors = predictors
        has_tasks = self._sites.tasks is not None
        classes = self._world.classes
        if not has_tasks and not self._metrics.names:
            return evaluated(predictors, self._sites, classes, client_predictors=client_predictors)
        stream = self._world.stream
        seen: Collection[int] = ()
        if has_tasks and round > 0:
            seen = stream.seen(stream.task(round))

        def count(predict: Predict, test: Examples) -> Tensor:
            return self.right_answers(predict, test, seen).among_all

        def measure(predict: Predict, test: Examples) -> Fields:
            return self.right_answers(predict, test, seen).metrics

        return evaluated(
            predictors,
            self._sites,
            classes,
            count,
            measure,
            client_predictors=client_predictors,
        )

    def right_answers(
        self, predict: Predict, test: Examples, seen: Collection[int]
    ) -> RightAnswers:
        """Right answers of a predictor; ``seen``: the classes seen so far, empty for all."""
        key = (id(predict), id(test), tuple(seen))
        if key not in self._passes:
            self._passes[key] = self._pass(predict, test, seen)
        return self._passes[key]

    def _pass(self, predict: Predict, test: Examples, seen: Collection[int]) -> RightAnswers:
        classes = self._world.classes
        is_seen = torch.zeros(classes, dtype=torch.bool)
        is_seen[list(seen or range(classes))] = True
        is_seen = is_seen.to(test.labels.device)

        def outputs(logits: Tensor) -> _ShardOutputs:
            return _ShardOutputs(
                among_seen=logits.where(is_seen, RULED_OUT).argmax(1),
                among_all=logits.argmax(1),
                logits=logits.detach().cpu() if self._metrics.names else None,
            )

        shards = by_shard(outputs, predict, test, self._sites.inputs, workers())
        among_seen = counted_right([shard.among_seen for shard in shards], test.labels, classes)
        among_all = counted_right([shard.among_all for shard in shards], test.labels, classes)
        return RightAnswers(
            among_seen=among_seen.cpu(),
            among_all=among_all.cpu(),
            metrics=self._measured(shards, test),
        )

    def _measured(self, shards: Sequence[_ShardOutputs], test: Examples) -> Fields:
        """The metrics that the run records, from the outputs of a whole pass."""
        logits = [shard.logits for shard in shards if shard.logits is not None]
        if not logits:
            return {}
        predicted = torch.cat([shard.among_all for shard in shards])
        return self._metrics.of_logits(torch.cat(logits), predicted.cpu(), test.labels.cpu())


@dataclass(frozen=True)
class _ShardOutputs:
    """The likeliest classes (n,) of a shard's examples, among those seen so far and among all, and
    the logits (n, C) if the run records metrics.
    """

    among_seen: Tensor
    among_all: Tensor
    logits: Tensor | None


def tests_by_class(sites: SiteViews, classes: int) -> list[int]:
    """Test examples by class (C,); zeros without a common test set."""
    test = sites.common_test
    if test is None:
        return [0] * classes
    counts: list[int] = torch.bincount(test.labels, minlength=classes).tolist()
    return counts


def evaluated(
    predictors: Mapping[str, Callable[[Tensor], Tensor]],
    sites: SiteViews,
    classes: int,
    right_of: CountRight | None = None,
    metrics_of: Measured | None = None,
    *,
    client_predictors: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """``accuracy``, ``class_accuracy`` (C,) and metrics of the first predictor, those of further
    ones by name in ``others``.

    right_of: counts a predictor's right answers by class; unset, in a pass of its own. metrics_of:
    gives its metrics by name; unset, there are none. client_predictors: which predictor answers for
    each client, by name; then all are in ``others``, and the numbers are means over the clients.
    Without it, models of some clients ("client 3", "cluster 0") are in ``others``, too, and none of
    them is the federation's. None where there is no test set, or no test example of a class.
    """
    test = sites.common_test
    totals = tests_by_class(sites, classes)
    no_common_model: Fields = {"accuracy": None, "class_accuracy": [None] * classes}
    if test is None or not predictors:
        return no_common_model

    by_name: dict[str, dict[str, Any]] = {}
    for name, predict in predictors.items():
        if right_of is None:
            right = correct_by_class(predict, test, sites.inputs, classes)
        else:
            right = right_of(predict, test)
        by_name[name] = {
            "accuracy": int(right.sum()) / sum(totals),
            "class_accuracy": list(map(_share, right.tolist(), totals)),
        }
        if metrics_of is not None:
            by_name[name] |= metrics_of(predict, test)

    if client_predictors:
        return {**mean_over_clients(by_name, client_predictors), "others": by_name}
    first, *further = by_name
    if of_some_clients(first):
        return {**no_common_model, "others": by_name}
    fields = dict(by_name[first])
    if further:
        fields["others"] = {name: by_name[name] for name in further}
    return fields


def _share(right: int, total: int) -> float | None:
    if not total:
        return None
    return right / total


def mean_over_clients(
    by_name: Mapping[str, Fields], client_predictors: Mapping[int, str]
) -> Fields:
    """``accuracy``, ``class_accuracy`` (C,) and metrics of each client's predictor, the mean over
    clients. It leaves the confusion matrix out, and is None where a predictor has no number.

    by_name: the same of each predictor.

    >>> two = {"a": {"accuracy": 1.0, "class_accuracy": [1.0, None]}}
    >>> two["b"] = {"accuracy": 0.5, "class_accuracy": [0.5, None]}
    >>> mean_over_clients(two, {0: "a", 1: "b"})
    {'accuracy': 0.75, 'class_accuracy': [0.75, None]}
    """
    clients = Counter(client_predictors.values())

    def mean(values: Sequence[float | None]) -> float | None:
        if None in values:
            return None
        total = sum(n * v for n, v in zip(clients.values(), values, strict=True) if v is not None)
        return total / clients.total()

    means: dict[str, Any] = {}
    for key in next(iter(by_name.values())):
        columns = [by_name[name][key] for name in clients]
        if key == "class_accuracy":
            means[key] = [mean(column) for column in zip(*columns, strict=True)]
        elif key != CONFUSION:
            means[key] = mean(columns)
    return means


# What the clients' models could do when they were last measured: remembered over rounds, from
# journal events.


log = logging.getLogger("fedstill.measuring")

UNTRAINED = "round 1 left the server's model as it was, so its accuracy says nothing"


@dataclass
class OwnAnswers(Observer):
    """The answers of a method that gives clients different models; empty for all others.

    A client's model is its own, measured by the client, or one of the server's. ``stages``: those
    after which a client's own model is its answer; of several, the last in which it acted counts.
    ``label_counts``: (clients, C), empty where nobody knows them. ``totals``: test examples by
    class (C,).
    """

    stages: Collection[str]
    label_counts: Sequence[Sequence[int]]
    totals: Sequence[int]
    _now: dict[int, Values] = field(default_factory=dict)
    _best: dict[int, Values] = field(default_factory=dict)  # by class, of the rounds before
    _looked: set[int] = field(default_factory=set)  # clients that were measured in this round

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """What the clients' answers are worth; nothing if no client was measured in this round."""
        if result.client_predictors:
            return self._of_server(result)
        if not self._looked:
            return {}
        return personal_answers(self._now, self._best, self.label_counts)

    def on_event(self, event: Event) -> None:
        """Remember what clients measured, and at a round's end the best of each class."""
        if event["event"] == "client" and self._is_answer(event):
            self._now[event["client"]] = class_accuracy(event["correct_by_class"], self.totals)
            self._looked.add(event["client"])
        elif event["event"] == "round":
            names = event.get("client_predictors", {})
            if names and "others" in event:
                by_client = {int(client): name for client, name in names.items()}
                self._now = _accuracies_by_client(event["others"], by_client)
                self._looked = set(by_client)
            for client in self._looked:
                now = self._now[client]
                self._best[client] = np.fmax(self._best.get(client, now), now)
            self._looked.clear()

    def _of_server(self, result: RoundResult) -> Fields:
        """Which of the server's models answers for each client, and what these are worth."""
        names = result.client_predictors
        fields: Fields = {"client_predictors": {str(c): name for c, name in names.items()}}
        others = result.accuracies.get("others")
        if others and self.label_counts:
            now = _accuracies_by_client(others, names)
            fields |= personal_answers(now, self._best, self.label_counts)
        return fields

    def _is_answer(self, event: Event) -> bool:
        is_measured = event["name"] in self.stages and "correct_by_class" in event
        return is_measured and bool(self.label_counts)


def _accuracies_by_client(
    by_name: Mapping[str, Mapping[str, Any]], client_predictors: Mapping[int, str]
) -> dict[int, Values]:
    """Class accuracies (C,) of each client's predictor; NaN for a class without test examples."""
    arrays = {
        name: np.array(by_name[name]["class_accuracy"], dtype=np.float64)
        for name in set(client_predictors.values())
    }
    return {client: arrays[name] for client, name in client_predictors.items()}


def evaluated_answers(
    method: Method, state: State, world: World
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The method's predictors; none where clients have models of their own and nobody has trained
    the server's.
    """
    is_trained = method.has_client_predictors or not same_bits(state.params, world.initial(SERVER))
    if state.round == 1 or is_trained:
        return dict(method.predictors(state, world))
    if state.round == 2 and not method.personal:
        log.warning("%s: %s", UNTRAINED, _why_untrained(world))
    return {} if method.personal else dict(method.predictors(state, world))


def _why_untrained(world: World) -> str:
    """What most likely left it so, and what to do."""
    if not any(plan.epochs or plan.steps for plan in world.plans.values()):
        return "no plan has epochs or steps, so nobody trained; set plan.epochs above 0"
    own = "the method says after which stages: personal = frozenset({'train'})"
    return (
        f"if clients have models of their own, {own}; if not, look at what fold gives, and at "
        "plan.lr"
    )


# What answers are worth on the clients' own test sets, where a simulation has such.


@dataclass(frozen=True)
class ClientTest:
    """What an answer is worth on one client's own test set: its accuracy, and the run's metrics."""

    accuracy: float
    metrics: Fields = field(default_factory=dict)


@dataclass
class OwnTests(Observer):
    """The clients' own test sets of a run, and what the last answers were worth there.

    ``stages``: those after which a client's own model is its answer, as the method says.
    ``metrics``: those that the run records.
    """

    sites: SiteViews
    stages: Collection[str]
    metrics: RunMetrics = NO_METRICS
    _personal: dict[int, ClientTest] = field(default_factory=dict)

    @cached_property
    def everyone(self) -> tuple[Examples, Tensor]:
        """All own test examples, and whose each is (n,): one pass of a common model then serves all
        clients.
        """
        tests = self.sites.own_tests
        values, labels = (
            torch.cat([getattr(own, name) for own in tests.values()])
            for name in ("values", "labels")
        )
        owners = torch.repeat_interleave(
            torch.tensor([*tests]), torch.tensor([len(own) for own in tests.values()])
        )
        return Examples(values, labels), owners

    def on_event(self, event: Event) -> None:
        """Remember what clients with models of their own reported."""
        is_answer = event["event"] == "client" and event["name"] in self.stages
        if is_answer and "site_accuracy" in event:
            self._personal[event["client"]] = ClientTest(
                event["site_accuracy"], event.get("site_metrics", {})
            )

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """Fields of a round's event; empty where clients have no tests of their own.

        ``own_test_accuracy``: each client's answer on its own test set, the mean over
        clients; ``own_test_worst``: the least of them; ``own_test_by_client``: by client, as text.
        To these come the run's metrics (``own_test_metrics``).
        """
        if not self.sites.own_tests:
            return {}
        by_client = self._by_client(result)
        if not by_client:
            return {}
        return own_test_fields(by_client)

    def _by_client(self, result: RoundResult) -> dict[int, ClientTest]:
        if self.stages and self._personal:
            return dict(self._personal)
        predictors, tests = result.predictors, self.sites.own_tests
        single = {c: f"client {c}" for c in tests if f"client {c}" in predictors}
        names = result.client_predictors or single
        if names:
            return {
                client: self._tested(predictors[name], tests[client])
                for client, name in names.items()
                if client in tests
            }
        if not predictors:
            return {}
        examples, owners = self.everyone
        predict = next(iter(predictors.values()))
        if self.metrics.names:
            return self._tested_together(predict, examples, owners)
        right = correct_by_example(predict, examples, self.sites.inputs, workers()).double()
        most = int(owners.max()) + 1
        hits, counts = torch.bincount(owners, right, most), torch.bincount(owners, minlength=most)
        return {c: ClientTest(float(hits[c] / counts[c])) for c in self.sites.own_tests}

    def _tested(self, predict: Predict, examples: Examples) -> ClientTest:
        """A predictor on one client's test set."""
        if self.metrics.names:
            outputs = outputs_by_example(predict, examples, self.sites.inputs)
            return self._client_test(outputs, examples.labels.cpu())
        is_right = correct_by_example(predict, examples, self.sites.inputs)
        return ClientTest(float(is_right.double().mean()))

    def _tested_together(
        self, predict: Predict, examples: Examples, owners: Tensor
    ) -> dict[int, ClientTest]:
        """A predictor on all own test sets, in one pass."""
        outputs = outputs_by_example(predict, examples, self.sites.inputs, workers())
        labels = examples.labels.cpu()
        tests = {}
        for client in self.sites.own_tests:
            own = (owners == client).nonzero().flatten()
            tests[client] = self._client_test(outputs.take(own), labels[own])
        return tests

    def _client_test(self, outputs: Outputs, labels: Tensor) -> ClientTest:
        is_right = outputs.predicted == labels
        return ClientTest(
            float(is_right.double().mean()),
            self.metrics.of_logits(outputs.logits, outputs.predicted, labels),
        )


@dataclass
class SiteTests(Observer):
    """The metrics of models that real sites test on their own test sets, from the counts and
    histograms that they send.

    ``personal``: the stages after which a client's own model is its answer; empty if the server's
    model is.
    """

    metrics: RunMetrics
    personal: Collection[str]
    _predictions: dict[int, Predictions] = field(default_factory=dict)
    _accuracies: dict[int, float] = field(default_factory=dict)

    def on_event(self, event: Event) -> None:
        """Remember what sites reported: of the server's model in the round under way, or of their
        own models when these were last tested.
        """
        if event["event"] == "client" and "site_scores" in event:
            client = event["client"]
            self._predictions[client] = from_histograms(event["site_scores"], self.metrics.positive)
            self._accuracies[client] = event["site_accuracy"]
        elif event["event"] == "round" and not self.personal:
            self._predictions.clear()
            self._accuracies.clear()

    def round_fields(self, result: RoundResult, so_far: Fields) -> Fields:
        """Fields of a round's event; empty if no site reported.

        ``own_test_accuracy`` and so on as of a simulation (``OwnTests``). The server's model has
        its metrics on the test sets of all sites together, if the server has none.
        ``own_test_auc_error``: how far the AUC of a site may be from the exact one.
        """
        if not self._predictions:
            return {}
        by_client = {
            client: ClientTest(self._accuracies[client], self.metrics.of(predictions))
            for client, predictions in sorted(self._predictions.items())
        }
        fields = own_test_fields(by_client)
        errors = [auc_error(predictions) for predictions in self._predictions.values()]
        known = [error for error in errors if error is not None]
        if "auc" in self.metrics.names and known:
            fields["own_test_auc_error"] = max(known)
        if self.personal or so_far.get("accuracy") is not None:
            return fields
        return {**self.metrics.of(joined(list(self._predictions.values()))), **fields}


def own_test_fields(by_client: Mapping[int, ClientTest]) -> Fields:
    """The fields of a round's event on answers that are tested on clients' own test sets."""
    accuracies = {client: test.accuracy for client, test in sorted(by_client.items())}
    return {
        "own_test_accuracy": sum(by_client[c].accuracy for c in by_client) / len(by_client),
        "own_test_worst": min(accuracies.values()),
        "own_test_by_client": {str(client): value for client, value in accuracies.items()},
        **own_test_metrics({c: test.metrics for c, test in by_client.items()}),
    }


def own_test_metrics(by_client: Mapping[int, Fields]) -> Fields:
    """The metrics of answers on clients' own test sets as fields of a round's event.

    ``own_test_METRIC``: the mean over the clients for which it is defined, None if there is none.
    ``own_test_METRIC_by_client``: by client, as text, where it is defined.
    ``own_test_confusions``: the confusion matrix by client.
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
        fields[f"own_test_{name}"] = sum(values.values()) / len(values) if values else None
        fields[f"own_test_{name}_by_client"] = values
    return fields


# What real sites say of a model at a task's end: its accuracy on their own test sets, by task.


Row = Sequence[float | None]


def mean_row(rows: Collection[Row], tasks: int) -> list[float | None]:
    """The mean over sites of the accuracy on each task, (T,); None for one on which no site has
    tested.

    >>> mean_row([[1.0, None], [0.5, None]], 2)
    [0.75, None]
    """
    each = [[row[task] for row in rows] for task in range(tasks)]
    known = [[value for value in column if value is not None] for column in each]
    return [sum(column) / len(column) if column else None for column in known]


# Which of the server's models answers for each client.


LISTED = 6
"""The most clients or predictors that a message lists."""


def client_predictors_of(
    method: Method, predictors: Predictors, state: State, world: World
) -> dict[int, str]:
    """The name of the predictor that answers for each client; empty where one answers for all, or
    the clients' own models do.

    Raises BadReturn for a client without a predictor, and for a name that no predictor has.
    """
    declared = returned(
        method.client_predictors(state, world),
        dict,
        method.client_predictors,
        "a dict of clients to names of predictors",
    )
    if declared:
        _check_names(method, declared, predictors, world)
    elif method.personal or not predictors or not of_some_clients(next(iter(predictors))):
        return {}

    names = {client: f"client {client}" for client in range(world.clients)}
    answers = {client: name for client, name in names.items() if name in predictors}
    answers.update(declared)
    missing = [client for client in names if client not in answers]
    if not missing:
        return dict(sorted(answers.items()))
    if not declared and state.round > 1 and all(n.startswith("client ") for n in predictors):
        # Models of single clients may be made one by one, as their clients act.
        return {}
    raise _no_predictor(method, missing, predictors)


def _check_names(
    method: Method, declared: Mapping[Any, Any], predictors: Predictors, world: World
) -> None:
    """Raises BadReturn for keys that are no clients, and for names that no predictor has."""
    hook = method.client_predictors
    if method.personal:
        own = "personal says that clients have models of their own; leave one of both out"
        raise bad_return(hook, f"names predictors for clients, and {own}")
    for client, name in declared.items():
        if client not in range(world.clients):
            known = f"clients are numbered from 0 to {world.clients - 1}"
            raise bad_return(hook, f"names a predictor for client {client!r}; {known}")
        if name not in predictors:
            known = _listed(list(predictors)) or "none"
            raise bad_return(hook, f"names {name!r} for client {client}; predictors gives {known}")


def _no_predictor(method: Method, clients: Sequence[int], predictors: Predictors) -> BadReturn:
    """The error for clients that no predictor answers for."""
    numbers = _listed(clients)
    names = _listed(list(predictors))
    if method.has_client_predictors:
        what = f"names no predictor for {len(clients)} clients ({numbers}); give each of them one"
        return bad_return(method.client_predictors, f"{what} of {names}")
    example = f"return dict.fromkeys(range(world.clients), {next(iter(predictors))!r})"
    return bad_return(
        method.predictors,
        f"gives {names}, and nothing says which answers for {len(clients)} clients ({numbers}); "
        f"add client_predictors(self, state, world) to the method, such as: {example}",
    )


def _listed(values: Sequence[object]) -> str:
    """The first of some values, as a message lists them."""
    end = ", …" if len(values) > LISTED else ""
    return ", ".join(map(str, values[:LISTED])) + end
