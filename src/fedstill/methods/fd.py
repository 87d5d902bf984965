"""FD, federated distillation: clients send their mean logits for each class, and learn from the
others'.

Source: Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated Distillation
and Augmentation under Non-IID Private Data" (2018), Algorithm 1; FedDistill+ of Zhu et al.,
"Data-Free Knowledge Distillation for Heterogeneous Federated Learning" (2021), where weights are
averaged too (``average_weights``).
Symbols: gamma = ``strength``; F_{k,c} = client k's mean logits on its examples of class c.
State: no global parameters, but with ``average_weights``; sums = the sum of the last round's F, (C,
C), in float64; holders = how many of its clients have each class, (C,); means.N = F of its client
N; counts.N = its label counts.
Memory: params = the client's own model.
Reading: for each class, a client receives the mean over the other clients that had it in the last
round. A class that no other client has teaches it nothing.
Reading: the paper averages F over the steps of local training. Here F is computed after training,
in evaluation mode.
Reading: the paper's regulariser compares normalised logits. There is no official code, and
implementations differ. Here it is the divergence from the softmax of F, ``kd`` at temperature 1.
Reading: the paper does not state gamma. We use 1, as in FedDistill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstill.core.aggregation import weighted_mean
from fedstill.core.capabilities import Need
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    SERVER,
    ModelSpec,
    Payload,
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
from fedstill.core.registry import method
from fedstill.losses import kd
from fedstill.methods.class_values import ClassValues, TowardsValues, client_groups


@method("fd")
@dataclass(frozen=True)
class FD(ClassValues):
    """Clients distil from the other clients' mean logits of each class; networks may differ."""

    average_weights: bool = False
    """Whether clients also send their models to be averaged (FedDistill+); all networks must then
    be equal.
    """

    def requires(self) -> Need:
        if self.average_weights:
            return Need.SAME_SHAPES
        return Need.NOTHING

    def width(self, spec: ModelSpec) -> int:
        return spec.classes

    def values(self, params: Tensors, view: View) -> Tensor:
        return view.logits(params)

    def distance(self, step: Step, target: Tensor) -> Tensor:
        return kd(step.logits(), step.on(target))

    def initial_state(self, world: World) -> State:
        params: Tensors = {}
        if self.average_weights:
            params = world.initial(SERVER)
        sums = self.blank(SERVER, world).double()
        holders = torch.zeros(world.classes, dtype=torch.int64)
        return State(params=params).next(sums=sums, holders=holders)

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        """The mean over the others, for each class: the sum less the client's own, by one holder
        fewer.
        """
        sums = state.extra.tensor("sums")
        holders = state.extra.tensor("holders")
        if f"means.{client}" in state.extra:
            sums = sums - state.extra.tensor(f"means.{client}")
            holders = holders - (state.extra.tensor(f"counts.{client}") > 0).long()
        mean = (sums / holders.clamp(min=1).unsqueeze(1)).to(self.blank(client, world).dtype)
        return Payload(self.model_group(state.params), values=mean, seen=(holders > 0).float())

    def model_group(self, params: Tensors) -> Payload:
        """A model as a payload, if models are averaged; else an empty payload."""
        if not self.average_weights:
            return Payload()
        return Payload(params=params)

    def work(self, stage: Stage) -> ClientWork:
        return FromOthers(self)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        reply = super().expected_reply(client, stage, world)
        return Payload({**reply, **self.model_group(world.initial(client))})

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        has_class = [(reply.content.tensor("counts") > 0).long() for reply in replies]
        sums = sum(
            holder.unsqueeze(1) * reply.content.tensor("means").double()
            for holder, reply in zip(has_class, replies, strict=True)
        )
        holders = torch.stack(has_class).sum(0)
        params = None
        if self.average_weights:
            params = weighted_mean(replies)
        emptied = state.without("means.", "counts.")
        return emptied.next(
            params=params, groups=client_groups(replies), sums=sums, holders=holders
        )


@dataclass(frozen=True)
class FromOthers(TowardsValues):
    """Training towards the others' mean logits, of the client's own model or, where weights are
    averaged, theirs.
    """

    method: FD

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        if self.method.average_weights:
            client_state = Payload(params=payload.params)
        return super().begin(payload, client_state, view, world)

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        content, client_state = super().end(params, start, result, view, world)
        return Payload({**content, **self.method.model_group(params)}), client_state
