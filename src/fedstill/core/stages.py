"""Stages that any method can have: ``fit``, ``ridge``, ``census`` and ``task_test``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.keys import seed_for
from fedstill.core.labels import counts
from fedstill.core.method import Method
from fedstill.core.records import (
    KEEP,
    NOTHING,
    SERVER,
    ModelSpec,
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
from fedstill.core.reports import PROBE, WHY
from fedstill.core.teachers import as_inputs, noise_probe
from fedstill.core.topology import CENSUS, TASK_TEST
from fedstill.core.trees import dtype_of
from fedstill.core.work import Census, ClientWork
from fedstill.models.contract import predictor, width
from fedstill.querying.queries import Asking, Standing, Why, reasons, without_numbers

# The stage ``fit``: every client trains a model alone, before it asks others or is averaged with
# them.
#
# Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
# (QKT), appendix A.2.
# Reading: early stopping "after 10 epochs without improvement" on a validation set, which A.6.4
# says there is none of: a tenth of the client's own data is held out in this stage alone, and the
# best epoch's model is kept.
# Reading: in a later round, in which clients ask again, the stage goes on from the model that the
# client ended with.


FIT = "fit"

ASKS = "asks"
"""The group of a reply, (C,) int8, that is 1 for the classes that a client has reason to ask
for.
"""

GOES_ON = "goes_on"
"""The group of a message that tells a client to go on from the model that it ended with, and to
remember it.
"""

SAMPLES = 20
"""Examples of noise in a probe. Source: QKT, section 4.3."""

FITTING = Plan(
    epochs=100,
    batch=32,
    optimiser="adam",
    lr=0.001,
    weight_decay=4e-4,
    validation=0.1,
    patience=10,
    keep="best",
)
"""QKT's settings for models that clients train alone."""


def probe_seed(world: World) -> int:
    """The seed of the noise that all models of a run are shown."""
    return seed_for(world.seed, 0, 0, SERVER, "probe")


def probed(spec: ModelSpec, params: Tensors, world: World, samples: int = SAMPLES) -> Tensor:
    """What a model predicts on the noise that all models of a run are shown: (C,), its mean
    softmax.
    """
    predict, kind = predictor(spec, params), dtype_of(params)
    return noise_probe(
        lambda x: predict(as_inputs(x, kind)),
        spec.input_shape,
        samples,
        probe_seed(world),
        spec.vocabulary,
    )


def why_asked(asking: Asking, params: Tensors, view: View) -> dict[int, Why]:
    """The classes that a client has reason to ask for, and why, given the model that it trained
    alone.

    Raises ConfigError if accuracy is a reason and the client holds out no example.
    """
    right = held = None
    if "accuracy" in asking.by and view.validation is not None:
        y, classes = view.validation.labels.cpu(), len(view.counts)
        hits = view.passes.logits(params, view.validation).argmax(1).cpu() == y
        right, held = (torch.bincount(labels, minlength=classes) for labels in (y[hits], y))
    why = reasons(asking, view.client, Standing(view.counts, right, held))
    return {c: without_numbers(w) for c, w in why.items()} if asking.discreet else why


class Fit(ClientWork):
    """Plain local training; the journal then says what the model predicts on noise.

    Where queries are raised in the run, the client also says for which classes it has reason to
    ask, and why. What a client remembers is left as it is; but where the server does not keep its
    model it is told to remember that itself.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        if GOES_ON not in payload:
            return TrainingStart(params=payload.params)
        return TrainingStart(
            params=client_state.params if "params" in client_state else payload.params,
            constants={GOES_ON: 1},
        )

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        up = Payload(params=params)
        memory = up if GOES_ON in start.constants else KEEP
        if world.asking is None:
            return up, memory
        asks = torch.zeros(world.classes, dtype=torch.int8)
        asks[list(why_asked(world.asking, params, view))] = 1
        return Payload(up, **{ASKS: asks}), memory

    def report(
        self, params: Tensors, start: TrainingStart, view: View, world: World
    ) -> dict[str, Any]:
        """``probe``: (C,) mean softmax on Gaussian noise, by which a peer estimates what this model
        knows.

        ``why_asked``: by class, as text, why the client has reason to ask for it.
        """
        probe = [round(p, 6) for p in probed(view.model, params, world).double().tolist()]
        if world.asking is None:
            return {PROBE: probe}
        why = why_asked(world.asking, params, view)
        return {PROBE: probe, WHY: {str(c): w for c, w in why.items()}}


# The stage ``ridge``: a model's last layer solved in one step from sums that clients send; any
# method may end so.
#
# Source: He et al., "AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained
# Models" (2025).
# Reading: the paper's clients send solved layers, which the server merges pair by pair, to what
# sums of ours give at once: the sums need no inverse at clients, and are as many numbers.
# Reading: the paper has no bias; here the last layer's own is solved for too, and has no penalty.


RIDGE = "ridge"

NO_TRAINING = Plan(epochs=0)
"""The plan of a stage in which nothing is trained."""


def no_linear_head(world: World) -> str:
    """Why the server's model has no last layer to solve for; empty if it has."""
    spec, entries = world.model(SERVER), world.initial(SERVER)
    shapes = {name: tuple(v.shape) for name, v in entries.items() if name.startswith("head.")}
    if shapes == {"head.weight": (spec.classes, width(spec)), "head.bias": (spec.classes,)}:
        return ""
    return (
        f"the head of model {spec.label} is no linear layer with a bias that is trained and sent; "
        "choose another"
    )


def empty_sums(spec: ModelSpec, classes: int) -> Payload:
    """The sums of no examples: what all clients send looks like this."""
    side = width(spec) + 1
    return Payload(
        gram=torch.zeros(side, side, dtype=torch.float64),
        cross=torch.zeros(side, classes, dtype=torch.float64),
    )


def feature_sums(
    features: Tensor, labels: Tensor, classes: int, weights: Tensor | None = None
) -> Payload:
    """What ridge regression must know of examples: ``gram`` (D+1, D+1) and ``cross`` (D+1, C), both
    float64.

    features: (n, D); labels: (n,) int64 in [0, C); weights: (C,) of an example of each class, 1 if
    left out. With h the features and a 1 for the bias, ``gram`` is the sum of w h h^T, ``cross``
    that of w h y^T, y one-hot. Both add up over any split of the examples. The last row of
    ``cross`` is the label counts, if they are not weighed. Raises DataError for other labels.
    """
    counts(labels, classes)
    h = torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)
    w = h if weights is None else h * weights.double()[labels].unsqueeze(1)
    cross = torch.zeros(h.shape[1], classes, dtype=torch.float64).index_add_(1, labels, w.T)
    return Payload(gram=w.T @ h, cross=cross)


def empty_group_sums(spec: ModelSpec, classes: int, groups: int) -> Payload:
    """The sums by group of no examples: what a client sends that sends these."""
    sums = torch.zeros(groups, classes, width(spec) + 1, dtype=torch.float64)
    return Payload(sums=sums, counts=torch.zeros(groups, classes, dtype=torch.int64))


def group_sums(
    features: Tensor, labels: Tensor, classes: int, group: Tensor, groups: int
) -> Payload:
    """Of each group and class ``sums`` (groups, C, D+1) of the features and a 1, and ``counts``
    (groups, C).

    features: (n, D); labels, group: (n,) int64 in [0, C) and [0, groups). Raises DataError for
    other labels.
    """
    counts(labels, classes)
    h = torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)
    cell = group * classes + labels
    flat = torch.zeros(groups * classes, h.shape[1], dtype=torch.float64).index_add_(0, cell, h)
    many = torch.bincount(cell, minlength=groups * classes)
    return Payload(sums=flat.view(groups, classes, -1), counts=many.view(groups, classes))


def estimated_gram(sums: Tensor, counts: Tensor) -> Tensor:
    """What the sum of h h^T over examples is on average, (D+1, D+1), if groups were drawn at
    random; exact for ones.

    sums: (K, C, D+1) float64 and counts: (K, C) of all clients' groups, as ``group_sums`` gives
    them. Of a class with N examples in K groups that have any: (N - 1) / (K - 1) of the sum of s
    s^T / n over groups, less (N - K) / ((K - 1) N) of that of the whole; both factors at least 0.
    Of a class in one group it is s s^T / N.

    >>> one = torch.tensor([[[2.0, 1.0]], [[3.0, 1.0]]], dtype=torch.float64)
    >>> estimated_gram(one, torch.ones(2, 1, dtype=torch.int64)).tolist()
    [[13.0, 5.0], [5.0, 2.0]]
    """
    total = torch.zeros(sums.shape[-1], sums.shape[-1], dtype=torch.float64)
    for c in range(sums.shape[1]):
        there = counts[:, c] > 0
        n, s = counts[there, c].double(), sums[there, c]
        many, groups, whole = float(n.sum()), len(n), s.sum(0)
        if groups == 0:
            continue
        apart = (s / n.unsqueeze(1)).T @ s
        if groups == 1:
            total += apart
            continue
        total += max(0.0, (many - 1) / (groups - 1)) * apart
        total -= max(0.0, (many - groups) / ((groups - 1) * many)) * torch.outer(whole, whole)
    return total


def solved(gram: Tensor, cross: Tensor, ridge: float) -> dict[str, Tensor]:
    """The last layer, ``head.weight`` (C, D) and ``head.bias`` (C,), with the least sum of squares
    to one-hot labels.

    gram, cross: as in ``feature_sums``; ridge >= 0 penalises the squares of the weights. Raises
    ConfigError where there is no one solution: no example at all, or features that depend on each
    other, without a penalty.

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
        raise ConfigError(
            f"the sums of the clients' features have no one solution at ridge = {ridge:g}: "
            "set method.ridge above 0, and give clients examples"
        )
    both = torch.cholesky_solve(cross, root)  # (D+1, C)
    return {"head.weight": both[:-1].T.contiguous(), "head.bias": both[-1].clone()}


@dataclass(frozen=True)
class SendSums(ClientWork):
    """The sums of the client's features under the model it was sent; nothing is trained, and
    memories stay.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(params={}, constants={"params": payload.params})

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return feature_sums(
            view.features(start["params"]), view.data.labels.cpu(), world.classes
        ), KEEP


# Stages that any method may have, and the methods that act in them alone: fit, ridge, census,
# task_test.


@dataclass(frozen=True)
class OnlyFit(Method):
    """The stage ``fit`` for a method that has none: models trained alone are measured, and not
    folded.
    """

    stages: ClassVar[frozenset[str]] = frozenset({FIT})
    reusable: ClassVar[frozenset[str]] = frozenset({FIT})

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        return Payload(params=world.initial(client))

    def work(self, stage: Stage) -> ClientWork:
        return Fit()

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return state


@dataclass(frozen=True)
class OnlyRidge(Method):
    """The stage ``ridge`` for a method that has none: the global model's last layer is solved from
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
        gram, cross = (
            torch.stack([r.content.tensor(g) for r in replies]).sum(0) for g in ("gram", "cross")
        )
        head = {k: v.to(state.params[k].dtype) for k, v in solved(gram, cross, ridge=1.0).items()}
        return state.next(params={**state.params, **head})


@dataclass(frozen=True)
class OnlyCensus(Method):
    """The stage ``census`` of a later task, for any method: each client's label counts take the
    place of its old ones.

    A client that is not there, or fails, has zeros, as it has no example that could count.
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
            labels[reply.client] = reply.content.tensor("labels")
        return state.next(labels=labels)


class BeTested(ClientWork):
    """Test the model that was sent: nothing is trained, sent or remembered; the engine reports the
    accuracy.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(params=payload.params)

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return NOTHING, KEEP


@dataclass(frozen=True)
class OnlyTest(Method):
    """The stage ``task_test`` for any method with a global model: real sites test it on their own
    data, by task.

    A client with a network of its own is not asked.
    """

    stages: ClassVar[frozenset[str]] = frozenset({TASK_TEST})

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        same = world.model(client) == (state.model or world.model(SERVER))
        return Payload(params=state.params) if state.params and same else None

    def work(self, stage: Stage) -> ClientWork:
        return BeTested()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return NOTHING

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return state


ONLY_FIT = OnlyFit()
ANYWHERE: Mapping[str, Method] = {
    FIT: ONLY_FIT,
    RIDGE: OnlyRidge(),
    CENSUS: OnlyCensus(),
    TASK_TEST: OnlyTest(),
}
"""Stages that any method may have, and who acts in them where the method has none of that name."""


def acting(method: Method, stage: Stage) -> Method:
    """The method that acts in a stage: of ``ANYWHERE``, in a stage that the method does not know,
    else itself.
    """
    return method if stage.name in method.stages else ANYWHERE.get(stage.name, method)
