"""AFL, analytic federated learning: the features are frozen, and the last layer is solved for
exactly in one step.

Source: He et al., "AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained
Models" (2025), and its code.
Symbols: gamma = ``ridge``; G = ``gram``, X^T Y = ``cross``, where X has the features and a 1 for
the bias.
State: the global parameters, of which only the head changes; gram = the sum of all clients' G,
(D+1, D+1); cross = the sum of their X^T Y, (D+1, C), both in float64; labels = with ``balanced``,
the census's label counts (clients, C); first = with ``balanced``, the first task's label counts
(C,), whose mean is the weight of each class in the sums; counted = with ``balanced``, the label
counts of all tasks so far (C,).
Memory: gram = the client's own G; cross = its own X^T Y; task = the task of these examples.
Reading: the method takes one round, in which all clients act. ``start_from`` names the pretrained
network. With fewer clients per round, or with growing data, a client sends the change of its sums
since its last reply. Therefore, the layer is always the solution for all examples that clients have
reported, and no task of a stream is forgotten.
Reading: the paper's clients send solved layers, and the server merges them pair by pair. Sums give
the same layer.
Reading: the paper adds its penalty once for each client and removes it afterwards (``clean_reg``).
Here it is added once, at the server.
Reading: the paper's layer has no bias. Here it has one, without a penalty.
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
    NO_TRAINING,
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
from fedstill.core.stream import Stream
from fedstill.core.trees import dtype_of
from fedstill.methods.ridge import empty_sums, feature_sums, no_linear_head, solved

SUMS = ("gram", "cross")


@method("afl")
@dataclass(frozen=True)
class AFL(Method):
    """Solves for the last layer on frozen features by ridge regression; the result does not depend
    on how the data are split.
    """

    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.FEATURES | Need.HEAD
    plans: ClassVar[Mapping[str, Plan]] = {"train": NO_TRAINING}

    ridge: NonNegative = 1.0
    """Weight of the L2 penalty on the last layer (gamma); 0: least squares."""
    balanced: bool = False
    """Whether all classes have equal weight, regardless of their numbers of examples."""

    def requires(self) -> Need:
        if self.balanced:
            return self.needs | Need.LABEL_COUNTS
        return self.needs

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        stream = world.stream
        if self.balanced and stream.tasks > 1 and not stream.keeps_data and classes_recur(stream):
            return (
                "balanced = true weighs a class by its examples of one task, all counted when the "
                "task begins; set method.balanced = false, or give each class to one task, without "
                "stream.lag and stream.stay"
            )
        return no_linear_head(world)

    def initial_state(self, world: World) -> State:
        sums = empty_sums(world.model(SERVER), world.classes)
        return super().initial_state(world).next(groups=sums)

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        """No parameters: every client has the initial ones, whose body never changes."""
        if not self.balanced:
            return Payload()
        total = state.extra.tensor("labels").sum(0).double()  # (C,)
        first = self.label_counts(state, world)["first"].double()  # (C,)
        return Payload(weights=first.sum() / (total.clamp(min=1) * (first > 0).sum()))

    def work(self, stage: Stage) -> ClientWork:
        return SendChange(stage.round)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return empty_sums(world.model(client), world.classes)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        sums = added_sums(state.extra, [reply.content for reply in replies])
        if not self.balanced:
            return self.with_layer(state, sums)

        # A balanced sum has each class at the mean of the first task's counts. Scaled to the mean
        # of all counts, it is as large as a plain sum, and the penalty has the same effect.
        counts = self.label_counts(state, world)
        scale = mean_count(counts["counted"]) / mean_count(counts["first"])
        scaled = {group: value * scale for group, value in sums.items()}
        return self.with_layer(state, scaled).next(groups={**sums, **counts})

    def with_layer(self, state: State, sums: Mapping[str, Tensor]) -> State:
        """The state with these sums, and with the last layer that solves them."""
        layer = solved(sums["gram"], sums["cross"], ridge=self.ridge)
        head = {name: value.to(dtype_of(state.params)) for name, value in layer.items()}
        return state.next(params={**state.params, **head}, groups=sums)

    def label_counts(self, state: State, world: World) -> dict[str, Tensor]:
        """The groups ``first`` and ``counted``; if the stream keeps data, both count all
        examples.
        """
        total = state.extra.tensor("labels").sum(0)  # (C,)
        if world.stream.keeps_data:
            return {"first": total, "counted": total}
        first = state.extra.get("first", total)
        counted = state.extra.get("counted", total)
        return {"first": first, "counted": torch.maximum(counted, total)}


def classes_recur(stream: Stream) -> bool:
    """Whether a class can have examples in several of a stream's tasks at once or in turn."""
    classes = [c for task in stream.by_task for c in task]
    return len(classes) > len(set(classes)) or stream.lag > 0 or stream.stay > 0


def added_sums(total: Payload, contents: Sequence[Payload]) -> dict[str, Tensor]:
    """The sums of ``gram`` and ``cross`` over the total and all contents, added in this order."""
    return {
        group: torch.stack([total.tensor(group), *(c.tensor(group) for c in contents)]).sum(0)
        for group in SUMS
    }


def mean_count(counts: Tensor) -> Tensor:
    """The mean of label counts (C,) over the classes that have examples."""
    return counts.sum().double() / (counts > 0).sum()


@dataclass(frozen=True)
class SendChange(ClientWork):
    """The client sends the sums of its features minus the sums of the same task that it sent
    before; nothing is trained.
    """

    round: int

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        task = 0
        if not world.stream.keeps_data:
            task = world.stream.task(self.round, view.client)
        previous = empty_sums(self.network(view), world.classes)
        if client_state and client_state.number("task") == task:
            previous = client_state

        constants = {
            "features": self.features(payload, view, world),
            "weights": payload.get("weights"),
            "task": task,
            "previous": previous,
        }
        return TrainingStart(params={}, constants=constants)

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
        labels = view.data.labels.cpu()
        sums = feature_sums(start["features"], labels, world.classes, start["weights"])
        change = {group: sums.tensor(group) - start["previous"].tensor(group) for group in SUMS}
        return Payload(change), Payload(sums, task=start["task"])
