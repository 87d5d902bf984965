"""The stage ``ridge``, which solves for a model's last layer in one step, from sums that clients
send. Any method can end with it.

Source: He et al., "AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained
Models" (2025).
Reading: the paper's clients send solved layers, and the server merges them pair by pair. Sums give
the same result in one step, with as many numbers and without an inverse at clients.
Reading: the paper's layer has no bias. Here the bias of the last layer is also solved for, without
a penalty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.extensions import StageActor, StageProvider
from fedstill.core.label_counts import Received, StatisticsWork, counts
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    SERVER,
    ModelSpec,
    Payload,
    Reply,
    Stage,
    State,
    View,
    World,
)
from fedstill.models.contract import width

RIDGE = "ridge"
"""The name of the stage."""


def no_linear_head(world: World) -> str:
    """The reason why the server's model has no last layer to solve for; empty if it has one."""
    spec = world.model(SERVER)
    entries = world.initial(SERVER)
    shapes = {name: tuple(v.shape) for name, v in entries.items() if name.startswith("head.")}
    if shapes == {"head.weight": (spec.classes, width(spec)), "head.bias": (spec.classes,)}:
        return ""
    return (
        f"the head of model {spec.label} is no linear layer with a bias that is trained and sent; "
        "choose another"
    )


def empty_sums(spec: ModelSpec, classes: int) -> Payload:
    """The sums over no examples, with the form of all clients' replies."""
    side = width(spec) + 1
    return Payload(
        gram=torch.zeros(side, side, dtype=torch.float64),
        cross=torch.zeros(side, classes, dtype=torch.float64),
    )


def feature_sums(
    features: Tensor, labels: Tensor, classes: int, weights: Tensor | None = None
) -> Payload:
    """The sums over examples for ridge regression: ``gram`` (D+1, D+1) and ``cross`` (D+1, C), both
    float64.

    features: (n, D); labels: (n,) int64 in [0, C); weights: (C,), the weight of an example of each
    class, default 1. With h the features and a 1 for the bias, ``gram`` is the sum of w h h^T, and
    ``cross`` is the sum of w h y^T with one-hot y. Both are additive over any split of the
    examples. Without weights, the last row of ``cross`` contains the label counts. Raises DataError
    for other labels.
    """
    counts(labels, classes)
    h = torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)
    weighted = h
    if weights is not None:
        weighted = h * weights.double()[labels].unsqueeze(1)
    zeros = torch.zeros(h.shape[1], classes, dtype=torch.float64)
    return Payload(gram=weighted.T @ h, cross=zeros.index_add_(1, labels, weighted.T))


def empty_group_sums(spec: ModelSpec, classes: int, groups: int) -> Payload:
    """The sums by group over no examples, with the form of clients' replies."""
    sums = torch.zeros(groups, classes, width(spec) + 1, dtype=torch.float64)
    return Payload(sums=sums, counts=torch.zeros(groups, classes, dtype=torch.int64))


def group_sums(
    features: Tensor, labels: Tensor, classes: int, group: Tensor, groups: int
) -> Payload:
    """For each group and class, ``sums`` (groups, C, D+1) of the features and a 1, and ``counts``
    (groups, C).

    features: (n, D); labels, group: (n,) int64 in [0, C) and [0, groups). Raises DataError for
    other labels.
    """
    counts(labels, classes)
    h = torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)
    cell = group * classes + labels
    zeros = torch.zeros(groups * classes, h.shape[1], dtype=torch.float64)
    sums = zeros.index_add_(0, cell, h).view(groups, classes, -1)
    cell_counts = torch.bincount(cell, minlength=groups * classes).view(groups, classes)
    return Payload(sums=sums, counts=cell_counts)


def estimated_gram(sums: Tensor, counts: Tensor) -> Tensor:
    """An unbiased estimate (D+1, D+1) of the sum of h h^T over examples, if groups were drawn at
    random; exact for groups of one example.

    sums: (K, C, D+1) float64 and counts: (K, C) of all clients' groups, from ``group_sums``. A
    class with N examples in K non-empty groups adds (N - 1) / (K - 1) of the sum of s s^T / n over
    groups, less (N - K) / ((K - 1) N) of s s^T for the sum over all groups; both factors are at
    least 0. A class in one group adds s s^T / N.

    >>> one = torch.tensor([[[2.0, 1.0]], [[3.0, 1.0]]], dtype=torch.float64)
    >>> estimated_gram(one, torch.ones(2, 1, dtype=torch.int64)).tolist()
    [[13.0, 5.0], [5.0, 2.0]]
    """
    total = torch.zeros(sums.shape[-1], sums.shape[-1], dtype=torch.float64)
    for c in range(sums.shape[1]):
        present = counts[:, c] > 0
        n = counts[present, c].double()
        s = sums[present, c]
        examples = float(n.sum())
        groups = len(n)
        if groups == 0:
            continue
        within = (s / n.unsqueeze(1)).T @ s
        if groups == 1:
            total += within
            continue
        class_sum = s.sum(0)
        outer = torch.outer(class_sum, class_sum)
        total += max(0.0, (examples - 1) / (groups - 1)) * within
        total -= max(0.0, (examples - groups) / ((groups - 1) * examples)) * outer
    return total


def solved(gram: Tensor, cross: Tensor, ridge: float) -> dict[str, Tensor]:
    """The last layer, ``head.weight`` (C, D) and ``head.bias`` (C,), that minimises the squared
    error to one-hot labels.

    gram, cross: as in ``feature_sums``; ridge >= 0 penalises the squares of the weights. Raises
    ConfigError if there is no unique solution: without examples, for linearly dependent features
    without a penalty, or for sums that no examples have, such as those of a hostile client.

    >>> exact = solved(
    ...     *feature_sums(torch.tensor([[0.0], [2.0]]), torch.tensor([0, 1]), 2).values(), ridge=0.0
    ... )
    >>> exact["head.weight"].tolist(), exact["head.bias"].tolist()
    ([[-0.5], [0.5]], [1.0, 0.0])
    """
    penalty = torch.full((len(gram),), ridge, dtype=torch.float64)
    penalty[-1] = 0.0
    root, failed = torch.linalg.cholesky_ex(gram + torch.diag(penalty))
    if failed:
        remedy = "set method.ridge above 0, and give clients examples"
        if ridge > 0:
            remedy = (
                "give clients examples, leave out hostile clients, and raise the method's ridge, "
                "if it has one"
            )
        raise ConfigError(
            f"the sums of the clients' features have no one solution at ridge = {ridge:g}: {remedy}"
        )
    layer = torch.cholesky_solve(cross, root)  # (D+1, C)
    return {"head.weight": layer[:-1].T.contiguous(), "head.bias": layer[-1].clone()}


class SendSums(StatisticsWork):
    """The client sends the sums of its features under the received model."""

    def statistics(self, received: Received, view: View, world: World) -> Payload:
        features = view.features(received["params"])
        return feature_sums(features, view.data.labels.cpu(), world.classes)


@dataclass(frozen=True)
class OnlyRidge(Method):
    """The stage ``ridge`` for methods without it: the global model's last layer is solved from
    clients' sums.
    """

    stages: ClassVar[frozenset[str]] = frozenset({RIDGE})

    def work(self, stage: Stage) -> ClientWork:
        return SendSums()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return empty_sums(world.model(client), world.classes)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        gram = torch.stack([reply.content.tensor("gram") for reply in replies]).sum(0)
        cross = torch.stack([reply.content.tensor("cross") for reply in replies]).sum(0)
        layer = solved(gram, cross, ridge=1.0)
        head = {name: value.to(state.params[name].dtype) for name, value in layer.items()}
        return state.next(params={**state.params, **head})


class RidgeStage(StageProvider):
    """Provides the actor of the stage for methods that do not have their own."""

    def actors(self) -> Mapping[str, StageActor]:
        """The actor of the stage, by the stage's name."""
        return {RIDGE: OnlyRidge()}
