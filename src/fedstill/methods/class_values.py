"""The common part of methods whose clients have their own models and agree on values for each
class, such as mean features or mean logits.

A client trains its own model, with a penalty on the distance between each example's values and the
received values of the example's class. Then it sends the mean of its values for each class, with
its number of examples of the class. Therefore, networks may differ, and the server learns the label
counts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core.aggregation import Weighting
from fedstill.core.fields import NonNegative
from fedstill.core.label_counts import count_problem, means_by_class
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    SERVER,
    ModelSpec,
    Payload,
    Plan,
    Reply,
    Stage,
    State,
    Step,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.topology import has_chain
from fedstill.core.trees import dtype_of
from fedstill.methods.fedavg import FEDNTD_PLAN
from fedstill.methods.public_logits import own_model


@dataclass(frozen=True)
class ClassValues(Method):
    """The server's part. A method defines the values, their distance, and their aggregation."""

    personal: ClassVar[frozenset[str]] = frozenset({"train"})
    plans: ClassVar[Mapping[str, Plan]] = {"train": FEDNTD_PLAN}

    strength: NonNegative = 1.0
    """Weight of the distance to the values of an example's class."""

    @abstractmethod
    def width(self, spec: ModelSpec) -> int:
        """V: the number of values for an example."""

    @abstractmethod
    def values(self, params: Tensors, view: View) -> Tensor:
        """The values of the client's own examples, (n, V)."""

    @abstractmethod
    def distance(self, step: Step, target: Tensor) -> Tensor:
        """The distance of each example's values to the values of its class, (B, V): (B,)."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if not has_chain(stages):
            return ""
        return (
            "the values of a class are means over clients, and a stage of a chain has one client; "
            "set topology.kind = 'parallel'"
        )

    def initial_state(self, world: World) -> State:
        return State(params={}).next(
            values=self.blank(SERVER, world), seen=torch.zeros(world.classes)
        )

    def blank(self, client: int, world: World) -> Tensor:
        """Values by class, (C, V), all zeros, of the type of the client's model."""
        return torch.zeros(
            world.classes, self.width(world.model(client)), dtype=dtype_of(world.initial(client))
        )

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        return Payload(values=state.extra["values"], seen=state.extra["seen"])

    def work(self, stage: Stage) -> ClientWork:
        return TowardsValues(self)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(
            means=self.blank(client, world), counts=torch.zeros(world.classes, dtype=torch.int64)
        )

    def refuses(self, reply: Reply, stage: Stage) -> str:
        return count_problem(reply, "counts", reply.examples)


def client_groups(replies: Sequence[Reply]) -> dict[str, Tensor]:
    """The means and counts of clients, as groups ``means.CLIENT`` and ``counts.CLIENT``."""
    groups = {}
    for reply in replies:
        groups[f"means.{reply.client}"] = reply.content.tensor("means")
        groups[f"counts.{reply.client}"] = reply.content.tensor("counts")
    return groups


@dataclass(frozen=True)
class TowardsValues(ClientWork):
    """Local training of the client's own model, with a penalty on the distance to the values of
    classes that have some.
    """

    method: ClassValues

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        constants = {"values": payload.tensor("values"), "seen": payload.tensor("seen")}
        return TrainingStart(own_model(client_state, view, world), constants=constants)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        distance = self.method.distance(step, start["values"][step.y])  # (B,)
        distance = start["seen"][step.y] * distance  # 0 for a class without values
        return {**super().terms(step, start), "apart": self.method.strength * distance}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        values = self.method.values(params, view)  # (n, V)
        means, counts = means_by_class(values, view.data.labels.cpu(), world.classes)
        return Payload(means=means.to(dtype_of(params)), counts=counts), Payload(params=params)


def mean_by_class(
    replies: Sequence[Reply], old: Tensor, weighting: Weighting = "examples", group: str = "means"
) -> tuple[Tensor, Tensor]:
    """The mean of the replies' values for each class, over the replies that have the class, and
    whether any reply has it.

    A reply has a group of values by class (C, V) and, as ``means_by_class`` gives them, ``counts``
    (C,) int64. weighting: whether replies are weighted by their number of examples of the class, or
    equally. Returns values (C, V) of the dtype of ``old``, summed in float64, and (C,) bool.
    Classes without a reply keep their values in ``old`` (C, V).

    Source: Tan et al. (2022), FedProto, eq. 6.
    """
    ordered = sorted(replies, key=lambda r: r.client)
    counts = torch.stack(
        [r.content.tensor("counts").clamp(min=0) for r in ordered]
    ).double()  # (K, C)
    weights = (counts > 0).double() if weighting == "uniform" else counts
    sums = torch.zeros_like(old, dtype=torch.float64)
    for reply, weight in zip(ordered, weights, strict=True):
        sums += weight.unsqueeze(1) * reply.content.tensor(group)
    total = weights.sum(0)  # whole numbers
    mean = (sums / total.clamp(min=1).unsqueeze(1)).to(old.dtype)
    return torch.where(total.unsqueeze(1) > 0, mean, old), total > 0
