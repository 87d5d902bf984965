"""Evaluation of a round's predictors on the common test set, by class.

A *predictor* maps inputs to logits: a model of the server's, or a group of them.
``answering_models`` and ``client_predictors_of`` say which predictors a round has and for which
clients they answer. ``running.client_evaluation`` evaluates the models of clients.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedstill.core.checks import bad_return, checked_return
from fedstill.core.errors import BadReturn
from fedstill.core.extensions import Fields, Predictors, common_predictor
from fedstill.core.files import counted
from fedstill.core.method import Method
from fedstill.core.records import RULED_OUT, SERVER, Examples, State, World
from fedstill.core.trees import same_bits
from fedstill.data.views import SiteViews
from fedstill.engines.hardware import workers
from fedstill.engines.passes import by_shard, correct_by_class, counted_right
from fedstill.metrics.accuracy import share_of
from fedstill.metrics.classification import CONFUSION
from fedstill.running.preparation import Prepared

log = logging.getLogger("fedstill.measuring")

Predict = Callable[[Tensor], Tensor]
"""A predictor: inputs (n, ...) to logits (n, C)."""


# ---- accuracies by class -------------------------------------------------------------------------


@dataclass(frozen=True)
class RightAnswers:
    """The counts of right answers by class (C,), and the metrics that the run records.

    An answer is the likeliest of the classes seen so far (``among_seen``), or of all classes
    (``among_all``, ``metrics``).
    """

    among_seen: Tensor
    among_all: Tensor
    metrics: Fields = field(default_factory=dict)


Answers = Callable[[Predict, Examples], RightAnswers]
"""The right answers of a predictor on a test set."""


class Evaluation:
    """Tests the predictors of a round on the common test set.

    One pass over the test set gives all of ``RightAnswers``. Passes are stored until the next
    round, so observers of the same round reuse them.
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
        """The accuracies of a round's predictors, as ``evaluated`` returns them; round 0 is before
        round 1.
        """
        # Passes are stored by the id of their predictor, so the predictors must live as long.
        self._passes = {}
        self._predictors = predictors
        has_tasks = self._sites.tasks is not None
        answers: Answers | None = None
        if has_tasks or self._metrics.names:
            stream = self._world.stream
            seen: Collection[int] = ()
            if has_tasks and round > 0:
                seen = stream.seen(stream.task(round))
            answers = partial(self.right_answers, seen=seen)
        return evaluated(predictors, self._sites, self._world.classes, answers, client_predictors)

    def right_answers(
        self, predict: Predict, test: Examples, seen: Collection[int]
    ) -> RightAnswers:
        """The right answers of a predictor.

        seen: the classes seen so far; empty for all classes.
        """
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
            kept_logits = None
            if self._metrics.names:
                kept_logits = logits.detach().cpu()
            return _ShardOutputs(
                among_seen=logits.where(is_seen, RULED_OUT).argmax(1),
                among_all=logits.argmax(1),
                logits=kept_logits,
            )

        shards = by_shard(outputs, predict, test, self._sites.inputs, workers())
        among_seen = counted_right([shard.among_seen for shard in shards], test.labels, classes)
        among_all = counted_right([shard.among_all for shard in shards], test.labels, classes)
        return RightAnswers(
            among_seen=among_seen.cpu(),
            among_all=among_all.cpu(),
            metrics=self._metrics_of(shards, test),
        )

    def _metrics_of(self, shards: Sequence[_ShardOutputs], test: Examples) -> Fields:
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
    predictors: Mapping[str, Predict],
    sites: SiteViews,
    classes: int,
    answers_of: Answers | None = None,
    client_predictors: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """The accuracies of a round's predictors, as fields of its event.

    ``accuracy``, ``class_accuracy`` (C,) and the metrics are those of the federation's model, which
    is the first predictor. ``others`` has the same numbers of all further predictors, by name. A
    number is None without a test set, or without a test example of the class.

    Two cases have no model of the federation. If ``client_predictors`` names the predictor that
    answers for each client, the numbers are means over clients, and ``others`` has all predictors.
    If it does not, and the first predictor is that of some clients ("client 3", "cluster 0"), the
    accuracies are None, and ``others`` has all predictors.

    answers_of: by default, a pass over the test set, without metrics.
    """
    test = sites.common_test
    no_common_model: Fields = {"accuracy": None, "class_accuracy": [None] * classes}
    if test is None or not predictors:
        return no_common_model

    totals = tests_by_class(sites, classes)
    by_name: dict[str, dict[str, Any]] = {}
    for name, predict in predictors.items():
        if answers_of is None:
            right = correct_by_class(predict, test, sites.inputs, classes)
            answers = RightAnswers(among_seen=right, among_all=right)
        else:
            answers = answers_of(predict, test)
        by_name[name] = {
            "accuracy": int(answers.among_all.sum()) / sum(totals),
            "class_accuracy": list(map(share_of, answers.among_all.tolist(), totals)),
            **answers.metrics,
        }

    if client_predictors:
        return {**mean_over_clients(by_name, client_predictors), "others": by_name}
    common = common_predictor(by_name)
    if not common:
        return {**no_common_model, "others": by_name}
    fields = by_name.pop(common)
    if by_name:
        fields["others"] = by_name
    return fields


def mean_over_clients(
    by_name: Mapping[str, Fields], client_predictors: Mapping[int, str]
) -> Fields:
    """The mean over clients of ``accuracy``, ``class_accuracy`` (C,) and the metrics of the
    predictors that answer for them.

    A mean is None if a predictor lacks the number. The confusion matrix, which has no mean, is left
    out.

    by_name: the numbers of each predictor.
    client_predictors: the name of each client's predictor.

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


# ---- which models are evaluated ------------------------------------------------------------------


UNTRAINED = "round 1 left the server's model as it was, so its accuracy says nothing"


def answering_models(
    method: Method, state: State, world: World, *, clients_acted: bool = True
) -> dict[str, Predict]:
    """The method's predictors; none if clients have models of their own and the server's model was
    never trained.

    Logs a warning if the server's model was not trained and clients have no models of their own.
    ``clients_acted``: whether any client acted in the last round. There may be none in a run that
    has forgotten clients, and then there is no warning.
    """
    is_trained = method.has_client_predictors or not same_bits(state.params, world.initial(SERVER))
    if state.round == 1 or is_trained:
        return dict(method.predictors(state, world))
    if method.personal:
        return {}
    if state.round == 2 and clients_acted:
        log.warning("%s: %s", UNTRAINED, _why_untrained(world))
    return dict(method.predictors(state, world))


def _why_untrained(world: World) -> str:
    """The likely reason, and what to do."""
    if not any(plan.epochs or plan.steps for plan in world.plans.values()):
        return "no plan has epochs or steps, so nobody trained; set plan.epochs above 0"
    return (
        "if clients have models of their own, the method says after which stages: personal = "
        "frozenset({'train'}); if not, look at what aggregate returns, and at plan.lr"
    )


LISTED = 6
"""The most clients or predictors that a message lists."""


def client_predictors_of(
    method: Method, predictors: Predictors, state: State, world: World
) -> dict[int, str]:
    """The name of the predictor that answers for each client; empty if one answers for all clients,
    or if each client's own model does.

    The method names them (``Method.client_predictors``), or a predictor is called "client 3".
    Raises BadReturn for a client without a predictor, and for a name that no predictor has.
    """
    declared = checked_return(
        method.client_predictors(state, world),
        dict,
        method.client_predictors,
        "a dict of clients to names of predictors",
    )
    if declared:
        _check_names(method, declared, predictors, world)
    elif method.personal or not predictors or common_predictor(predictors):
        return {}

    names = {client: f"client {client}" for client in range(world.clients)}
    by_client = {client: name for client, name in names.items() if name in predictors}
    by_client.update(declared)
    missing = [client for client in names if client not in by_client]
    if not missing:
        return dict(sorted(by_client.items()))
    are_of_single_clients = all(name.startswith("client ") for name in predictors)
    if not declared and state.round > 1 and are_of_single_clients:
        # Models of single clients may be made one by one, as their clients act.
        return {}
    raise _no_predictor(method, missing, predictors)


def _check_names(
    method: Method, declared: Mapping[Any, Any], predictors: Predictors, world: World
) -> None:
    """Raise BadReturn for keys that are no clients and for names of no predictor."""
    hook = method.client_predictors
    if method.personal:
        raise bad_return(
            hook,
            "names predictors for clients, but with personal = True clients have models of their "
            "own; remove one of the two",
        )
    for client, name in declared.items():
        if client not in range(world.clients):
            known = f"clients are numbered from 0 to {world.clients - 1}"
            raise bad_return(hook, f"names a predictor for client {client!r}; {known}")
        if name not in predictors:
            known = _listed(list(predictors)) or "none"
            raise bad_return(
                hook, f"names {name!r} for client {client}; predictors returns {known}"
            )


def _no_predictor(method: Method, clients: Sequence[int], predictors: Predictors) -> BadReturn:
    """The error for clients without a predictor."""
    numbers = _listed(clients)
    names = _listed(list(predictors))
    if method.has_client_predictors:
        return bad_return(
            method.client_predictors,
            f"names no predictor for {counted(len(clients), 'client')} ({numbers}); give each of "
            f"them one of {names}",
        )
    example = f"return dict.fromkeys(range(world.clients), {next(iter(predictors))!r})"
    return bad_return(
        method.predictors,
        f"returns {names}, but no predictor is assigned to {counted(len(clients), 'client')} "
        f"({numbers}); add client_predictors(self, state, world) to the method, such as: {example}",
    )


def _listed(values: Sequence[object]) -> str:
    """The first values, as a message lists them."""
    texts = [str(value) for value in values[:LISTED]]
    if len(values) > LISTED:
        texts.append("…")
    return ", ".join(texts)
