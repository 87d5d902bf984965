"""AFL, analytic federated learning: features stay as they are, and one step solves for the last
layer, exactly.

Source: He et al., "AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained
Models" (2025), and its code.
Symbols: gamma = ``ridge``; G = ``gram``, X^T Y = ``cross``, where X has the features and a 1 for
the bias.
State: the global parameters, of which only the head is ever changed; gram = the sum of all clients'
G, (D+1, D+1); cross = of their X^T Y, (D+1, C), both in float64; labels = the census's label counts
(clients, C), where ``balanced``, as are those that follow; first = the first task's label counts
(C,), whose mean is what each class weighs in the sums; counted = those of all tasks so far (C,).
Memory: gram = the client's own G; cross = its own X^T Y; task = the task whose examples these are
of.
Reading: one round in which all clients act is all of it; the pretrained network is named by
``start_from``. With fewer clients a round, or with data that grow, a client sends by how much its
sums have changed since it last sent: the layer is always that of all that the server was told. So
of tasks that come one after another none is forgotten: the layer is that of their examples
together.
Reading: the paper's clients send solved layers, which the server merges pair by pair; it gives what
sums give.
Reading: its penalty counts once a client and is removed afterwards (``clean_reg``); here it counts
once, at the server.
Reading: it has no bias; here there is one, without a penalty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.fields import NonNegative
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
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
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of
from fedstill.methods.ridge import NO_TRAINING, empty_sums, feature_sums, no_linear_head, solved

SUMS = ("gram", "cross")


@method("afl")
@dataclass(frozen=True)
class AFL(Method):
    """The last layer on frozen features by ridge regression, the same however the data are
    split.
    """

    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.FEATURES | Need.HEAD
    plans: ClassVar[Mapping[str, Plan]] = {"train": NO_TRAINING}

    ridge: NonNegative = 1.0
    """Weight of the squares of the last layer's weights (gamma); 0: least squares."""
    balanced: bool = False
    """Whether every class weighs alike, whatever its number of examples."""

    def requires(self) -> Need:
        if self.balanced:
            return self.needs | Need.LABEL_COUNTS
        return self.needs

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        stream = world.stream
        by_task = [c for task in stream.by_task for c in task]
        several = len(by_task) > len(set(by_task)) or stream.lag > 0 or stream.stay > 0
        if self.balanced and stream.tasks > 1 and not stream.kept and several:
            return (
                "balanced = true weighs a class by its examples of one task, all counted when that "
                "begins: set "
                "method.balanced = false, or give each class to one task, without stream.lag and "
                "stream.stay"
            )
        return no_linear_head(world)

    def initial_state(self, world: World) -> State:
        return (
            super().initial_state(world).next(groups=empty_sums(world.model(SERVER), world.classes))
        )

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        """No parameters: every client has the initial ones, whose body never changes."""
        if not self.balanced:
            return Payload()
        total = state.extra.tensor("labels").sum(0).double()  # (C,)
        first = self.counts(state, world)["first"].double()
        return Payload(weights=first.sum() / (total.clamp(min=1) * (first > 0).sum()))

    def work(self, stage: Stage) -> ClientWork:
        return SendChange(stage.round)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return empty_sums(world.model(client), world.classes)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        sums = {
            g: torch.stack([state.extra.tensor(g), *(r.content.tensor(g) for r in replies)]).sum(0)
            for g in SUMS
        }
        counts = self.counts(state, world) if self.balanced else {}
        scale = by_class(counts["counted"]) / by_class(counts["first"]) if counts else 1.0
        layer = solved(**{g: v * scale for g, v in sums.items()}, ridge=self.ridge)
        head = {k: v.to(dtype_of(state.params)) for k, v in layer.items()}
        return state.next(params={**state.params, **head}, groups={**sums, **counts})

    def counts(self, state: State, world: World) -> dict[str, Tensor]:
        """``first`` and ``counted`` now; with data that are kept both are of all that there is."""
        total = state.extra.tensor("labels").sum(0)  # (C,)
        if world.stream.kept:
            return {"first": total, "counted": total}
        known = {g: state.extra.get(g, total) for g in ("first", "counted")}
        return {**known, "counted": torch.maximum(known["counted"], total)}


def by_class(counts: Tensor) -> Tensor:
    """The mean of label counts (C,) over the classes that there are."""
    return counts.sum().double() / (counts > 0).sum()


@dataclass(frozen=True)
class SendChange(ClientWork):
    """The sums of the client's features, less those of the same task that it sent before; nothing
    is trained.
    """

    round: int

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        task = 0 if world.stream.kept else world.stream.task(self.round, view.client)
        again = bool(client_state) and client_state.number("task") == task
        sent = client_state if again else empty_sums(self.network(view), world.classes)
        more = {"weights": payload.get("weights"), "task": task}
        more |= {"features": self.features(payload, view, world)}
        return TrainingStart(params={}, constants={**more, **{g: sent.tensor(g) for g in SUMS}})

    def network(self, view: View) -> ModelSpec:
        """The network whose features these are."""
        return view.model

    def features(self, payload: Payload, view: View, world: World) -> Tensor:
        """The features of the client's examples, (n, D)."""
        return view.features(world.initial(view.client))

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        now = feature_sums(
            start["features"], view.data.labels.cpu(), world.classes, start["weights"]
        )
        return Payload({g: now.tensor(g) - start[g] for g in SUMS}), Payload(
            now, task=start["task"]
        )
