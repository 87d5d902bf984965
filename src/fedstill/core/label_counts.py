"""Label counts of clients: shares of classes, their skew, distances between them, the census, and
class weights.

Functions of label counts keep the dtype of floating tensors; everything else (lists, arrays,
integer tensors) becomes float64.

**The census** is a stage in which clients send their label counts, for methods and class weights
that need them. It takes place before round 1 (as round 0), and at the start of every task. In later
stages, the number of examples that a client claims is compared with the census.

The census is one of the stages in which clients only send statistics (``StatisticsWork``). Methods
have others.

State: labels = (clients, C) int64, the label counts; zeros for a client that did not answer.

**Class weights** (``plan.class_weights``) weigh the losses of labels by class. The weights are a
list in the config, or they are balanced: a class with half as many examples has twice the weight.
Balanced weights are computed from the labels that a client trains on, which stay at the client, or
from the label counts of all clients. The latter need a census, and the server sends its totals to
the clients (group ``label_totals``).

Definition: the weight of class c is n / (k n_c), where n is the number of examples, n_c of them are
of class c, and k is the number of classes that have examples. This is "balanced" in scikit-learn. A
class without examples has weight 0.

The engine averages the weighted losses over the examples of a batch, and does not divide by the
sum of their weights as PyTorch does. So an example has the same weight in every batch, the gradient
of a batch is an unbiased estimate of the gradient of the weighted objective, and single examples
have weighted gradients, which private training needs. Balanced weights have mean 1 over the
examples from which they are computed: the loss keeps its scale relative to other terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.errors import BadPayload, DataError
from fedstill.core.extensions import ClientHook, RoundHook, StageActor, StageProvider
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    KEEP,
    LABELS,
    Keep,
    Payload,
    Plan,
    Reply,
    Stage,
    State,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.topology import everyone

# ---- shares, skew and distances ------------------------------------------------------------------

TensorLike = Tensor | ArrayLike
Metric = Literal["l1", "l2", "kl", "js"]

SMOOTHING = 1e-4
"""Added to shares before a KL divergence, and to distances before a division; SFedKD's only
constant.
"""


def as_floats(values: TensorLike) -> Tensor:
    """The numbers as a floating tensor: a floating tensor unchanged, anything else as float64."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            return values
        return values.to(torch.float64)
    return torch.from_numpy(np.array(values, dtype=np.float64))


def counts(labels: TensorLike, classes: int) -> Tensor:
    """The label histogram: how often each class occurs.

    labels: (n,) integers in [0, classes). Gives (classes,) int64. Raises DataError for other
    labels.

    >>> counts([2, 0, 2], classes=4)
    tensor([1, 0, 2, 0])
    """
    ids = labels
    if not isinstance(ids, Tensor):
        ids = torch.from_numpy(np.array(ids))
    if ids.numel() == 0:
        return torch.zeros(classes, dtype=torch.int64)
    if ids.is_floating_point() or ids.is_complex() or ids.dim() != 1:
        raise DataError(
            f"labels must be a list of class ids, not {ids.dtype} of shape {tuple(ids.shape)}"
        )
    for label in (int(ids.min()), int(ids.max())):
        if not 0 <= label < classes:
            raise DataError(f"label {label} is outside [0, {classes}): check the number of classes")
    return torch.bincount(ids.to(torch.int64), minlength=classes)


def count_problem(reply: Reply, name: str, limit: int) -> str:
    """Why a client's counts of its examples are impossible; empty if they are possible.

    name: of the group of the reply with counts, int64, of disjoint sets of examples. limit: how
    many examples the client has. Counts are weights in means: without a limit, a client with a few
    examples could outweigh all others.
    """
    numbers = reply.content.get(name)
    if not isinstance(numbers, Tensor) or numbers.dtype != torch.int64 or not numbers.numel():
        return ""  # the screen checks the form
    total = float(numbers.double().sum())
    if total <= limit and bool((numbers >= 0).all()):
        return ""
    return f"its {name!r} count {total:g} examples, but it has {limit}"


def means_by_class(values: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean of each class's values, and how many examples each has.

    values: (n, V) float; labels: (n,) int64 in [0, classes). Gives (classes, V) of the values'
    dtype, summed in float64, zeros for a class without examples; and (classes,) int64. Raises
    DataError for other labels.

    >>> means_by_class(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([2, 2, 0]), classes=3)
    (tensor([[5.],
            [0.],
            [2.]]), tensor([1, 0, 2]))
    """
    size = counts(labels, classes)
    zeros = torch.zeros(classes, values.shape[1], dtype=torch.float64)
    sums = zeros.index_add_(0, labels, values.double())
    return (sums / size.clamp(min=1).unsqueeze(1)).to(values.dtype), size


def proportions(counts: TensorLike) -> Tensor:
    """Label shares from label histograms: each histogram divided by its sum.

    counts: (..., C) >= 0, at least one label each. Gives (..., C) float, summing to 1. Raises
    DataError for a client without labels, which has no shares.

    >>> proportions([1, 0, 3])
    tensor([0.2500, 0.0000, 0.7500], dtype=torch.float64)
    """
    numbers = as_floats(counts)
    total = numbers.sum(-1, keepdim=True)
    if not bool((total > 0).all()) or not bool((numbers >= 0).all()):
        raise DataError(
            "label counts must be >= 0 with at least one label for each client; leave empty "
            "clients out"
        )
    return numbers / total


def gini_index(proportions: TensorLike) -> Tensor:
    """The Gini index of label shares, ``1 - sum_c p_c²``: 0 for one class, 1 - 1/C for equal
    shares.

    proportions: (..., C) summing to 1. Gives (...,) in [0, 1 - 1/C].

    Source: FedADKD, eq. 5.

    >>> gini_index([[1.0, 0.0], [0.5, 0.5]])
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    return (1 - as_floats(proportions).square().sum(-1)).clamp(min=0)


def distance(p: TensorLike, q: TensorLike, metric: Metric, smoothing: float = SMOOTHING) -> Tensor:
    """The distance between two label distributions, over the last axis.

    p, q: (..., C) summing to 1, broadcast against each other; metric: "l1" (sum of differences),
    "l2" (Euclidean), "kl" (KL(p || q), each first smoothed to ``(D + s) / (1 + C s)``), "js" (mean
    KL to the midpoint, not smoothed). In nats where there is a logarithm. Gives (...,) >= 0;
    symmetric except "kl".

    Source: SFedKD, sec. 3.2.
    Reading: the paper does not say what to do where q is 0 and KL infinite; we smooth both with its
    only constant.

    >>> distance([1.0, 0.0], [0.0, 1.0], "l1")
    tensor(2., dtype=torch.float64)
    """
    return DISTANCES[metric](as_floats(p), as_floats(q), smoothing)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1).clamp(min=0)


def _smooth_kl(p: Tensor, q: Tensor, s: float) -> Tensor:
    return _kl((p + s) / (1 + p.shape[-1] * s), (q + s) / (1 + q.shape[-1] * s))


def _js(p: Tensor, q: Tensor) -> Tensor:
    middle = (p + q) / 2
    return (_kl(p, middle) + _kl(q, middle)) / 2


DISTANCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "l1": lambda p, q, s: (p - q).abs().sum(-1),
    "l2": lambda p, q, s: (p - q).square().sum(-1).sqrt(),
    "kl": _smooth_kl,
    "js": lambda p, q, s: _js(p, q),
}
"""The distances by name; the last argument is the smoothing of "kl"."""


# ---- stages in which clients only send statistics, such as the census ----------------------------


Received = Mapping[str, Any]
"""The groups of a received payload, by name, on the client's device."""


class StatisticsWork(ClientWork):
    """Work of a client that only sends statistics of its data: nothing is trained, and the client's
    state does not change. A stage with this work has the plan ``NO_TRAINING``.
    """

    def statistics(self, received: Received, view: View, world: World) -> Payload:
        """The statistics of the client's data; override this method."""
        raise NotImplementedError

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        """Start without parameters to train."""
        return TrainingStart(params={}, constants=dict(payload))

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload | Keep]:
        """The reply with the statistics."""
        return self.statistics(start.constants, view, world), KEEP


def trained_counts(view: View) -> Tensor:
    """The label counts (C,) of the examples on which a client trains, without held-out ones."""
    return torch.bincount(view.data.labels.cpu(), minlength=len(view.counts))


CENSUS = "census"
"""The name of the stage."""


class Census(StatisticsWork):
    """Send the label counts."""

    def statistics(self, received: Received, view: View, world: World) -> Payload:
        return Payload(labels=view.counts)


@dataclass(frozen=True)
class CensusTaker(Method):
    """The actor of the stage. Each client's label counts replace its earlier ones.

    A client that is absent or fails has zeros.
    """

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        return Payload()

    def work(self, stage: Stage) -> ClientWork:
        return Census()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(labels=torch.zeros(world.classes, dtype=torch.int64))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        labels = torch.zeros(world.clients, world.classes, dtype=torch.int64)
        for reply in replies:
            labels[reply.client] = reply.content.tensor(LABELS)
        return state.next(labels=labels)


class CensusStages(StageProvider):
    """Adds the stage before round 1, for all clients, and when the clients' task changes."""

    def actors(self) -> Mapping[str, StageActor]:
        """The actor of the census."""
        return {CENSUS: CensusTaker()}

    def schedule(self, stages: Sequence[Stage], round: int, world: World) -> Sequence[Stage]:
        """The stages of a round, preceded by a census if one is due."""
        if round == 0:
            return [census_stage(world), *stages]
        if not world.stream.changes(round):
            return stages
        return [Stage(round, 0, CENSUS, everyone(world, round)), *stages]


def census_stage(world: World) -> Stage:
    """The stage before round 1."""
    return Stage(0, 0, CENSUS, tuple(range(world.clients)))


@dataclass(frozen=True)
class CensusChecks(RoundHook):
    """Refuses impossible label counts, and claims that contradict the census.

    ``max_examples``: the most examples that a client may claim.
    """

    max_examples: int

    def check_reply(self, reply: Reply, stage: Stage, needs: Need, state: State) -> str:
        if stage.name == CENSUS:
            return self._check_counts(reply)
        if Need.LABEL_COUNTS not in needs or LABELS not in state.extra or reply.client < 0:
            return ""
        return self._check_claim(reply, state.extra.tensor(LABELS))

    def _check_counts(self, reply: Reply) -> str:
        """Why label counts do not match the number of examples that the client claims.

        The screen checks their form.
        """
        labels = reply.content.get(LABELS)
        if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
            return ""
        total = float(labels.double().sum())
        is_negative = bool((labels < 0).any())
        if is_negative or not reply.examples <= total <= self.max_examples:
            return f"its census counts {total:g} examples, and it claims {reply.examples}"
        return ""

    def _check_claim(self, reply: Reply, labels: Tensor) -> str:
        claimed = reply.examples
        counted = int(labels[reply.client].sum())
        if counted > 0:
            if claimed > counted:
                return f"claims {claimed} examples, and {counted} in the census"
            return ""
        # The client reported no examples, or its reply to the census was refused.
        largest = int(labels.sum(1).max())
        if 0 < largest < claimed:
            return f"claims {claimed} examples, and the largest client {largest} in the census"
        return ""


# ---- class weights -------------------------------------------------------------------------------


BALANCED = "balanced"
"""Weights from the labels that a client trains on."""

BALANCED_OVERALL = "balanced_overall"
"""Weights from the label counts of all clients."""

LABEL_TOTALS = "label_totals"
"""The group of a payload, (C,) int64: the label counts of all clients together."""


def balanced_weights(counts: Tensor) -> Tensor:
    """The balanced weight of each class, (C,) float64, from label counts (C,).

    >>> balanced_weights(torch.tensor([3, 1, 0])).tolist()
    [0.6666666666666666, 2.0, 0.0]
    """
    present = counts > 0
    balanced_count = counts.sum().double() / present.sum().clamp(min=1)
    return torch.where(present, balanced_count / counts.clamp(min=1), 0.0)


def class_weights(plan: Plan, labels: Tensor, view: View) -> Tensor | None:
    """The class weights (C,) float64 of a client's losses; None if all classes weigh the same.

    labels: (n,), of the examples that the client trains on. Examples without labels (-1) have no
    weights. Raises BadPayload if the plan needs the label totals and the server did not send them.
    """
    setting = plan.class_weights
    if setting == "none" or not len(labels) or int(labels.min()) < 0:
        return None
    if isinstance(setting, tuple):
        return torch.tensor(setting, dtype=torch.float64)
    counts = torch.bincount(labels.cpu(), minlength=len(view.counts))
    if setting == BALANCED:
        return balanced_weights(counts)
    if view.label_totals is None:
        raise BadPayload("class_weights = 'balanced_overall' needs the server's label totals")
    # The census may lack this client's answer.
    return balanced_weights(view.label_totals.maximum(counts))


def needs_label_totals(plans: Mapping[str, Plan]) -> bool:
    """Whether any stage has weights from the label counts of all clients."""
    return any(plan.class_weights == BALANCED_OVERALL for plan in plans.values())


@dataclass(frozen=True)
class LabelTotals:
    """The label counts (C,) of all clients together, as the server's world has them."""

    counts: Tensor


class TotalsAtServer(RoundHook):
    """Sends the label totals with the payloads of stages that have weights from them."""

    def extend_world(self, world: World, state: State) -> World:
        if LABELS not in state.extra:
            return world
        return world.extend(LabelTotals(state.extra.tensor(LABELS).sum(0)))

    def extend_payload(
        self, payload: Payload, client: int, stage: Stage, needs: Need, world: World
    ) -> Payload:
        plan = world.plans.get(stage.name)
        if plan is None or plan.class_weights != BALANCED_OVERALL:
            return payload
        totals = world.get(LabelTotals)
        # Without a census, payloads are only made to compute their size.
        counts = torch.zeros(world.classes, dtype=torch.int64)
        if totals is not None:
            counts = totals.counts
        return Payload(payload, **{LABEL_TOTALS: counts})


@dataclass(frozen=True)
class TotalsAtClient(ClientHook):
    """Shows a client the label totals that the server sent."""

    def extend_view(self, view: View, payload: Payload, stage: Stage) -> View:
        """The view with the totals. Raises BadPayload unless they are (C,)."""
        if LABEL_TOTALS not in payload:
            return view
        totals = payload.tensor(LABEL_TOTALS)
        if totals.shape != view.counts.shape:
            raise BadPayload(
                f"label totals of shape {tuple(totals.shape)} for {len(view.counts)} classes"
            )
        return replace(view, label_totals=totals)

    def payload_for_work(self, payload: Payload) -> Payload:
        """The payload without the totals."""
        groups = {name: group for name, group in payload.items() if name != LABEL_TOTALS}
        return Payload(groups)
