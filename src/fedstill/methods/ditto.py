"""Ditto: in addition to the global model, each client trains a personal model, with a penalty on
its distance to the global model.

Source: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization" (2021),
Algorithm 1, and its code.
Symbols: lambda = ``strength``; v_k = a client's own model.
State: the global parameters, nothing more.
Memory: params = v_k, the client's own model.
Reading: the code trains both models on the same batches in turn. Here the client's own model is
trained first, in the stage ``personal`` with its own number of epochs, near the model with which
the round began. The models do not interact in either order.
Reading: lambda is the same for all clients. The paper also selects it for each client on validation
data.
Reading: the code's server adds the unweighted mean of differences. ``aggregation`` decides; the
default weighs clients by size.
Reading: the paper's clients train at 0.05 in batches of 16 without momentum. Here they train as in
the other methods' tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstill.core.capabilities import Permit
from fedstill.core.fields import NonNegative
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    KEEP,
    NOTHING,
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
from fedstill.core.registry import method
from fedstill.methods.fedavg import FEDNTD_PLAN, FedAvg
from fedstill.methods.fedprox import LocalTraining
from fedstill.methods.public_logits import own_model
from fedstill.models.contract import trainable_entries

PERSONAL = "personal"
"""The stage in which a client trains its own model."""


@method("ditto")
@dataclass(frozen=True)
class Ditto(FedAvg):
    """FedAvg; each client also trains a personal model with (lambda/2) ||v - w_global||^2 added to
    its loss.
    """

    schedule: ClassVar[Mapping[str, Any]] = {"before": PERSONAL}
    stages: ClassVar[frozenset[str]] = frozenset({PERSONAL, "train"})
    # in one of its stages nothing is sent
    permits: ClassVar[Permit] = Permit.ROBUST_AGGREGATE
    plans: ClassVar[Mapping[str, Plan]] = {PERSONAL: FEDNTD_PLAN, "train": FEDNTD_PLAN}
    personal: ClassVar[frozenset[str]] = frozenset({PERSONAL})

    strength: NonNegative = 1.0
    """Weight of the penalty on the distance between the personal and the global model (lambda); 0:
    independent training.
    """

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if any(stage.name == PERSONAL for stage in stages):
            return ""
        return (
            "clients train personal models in an earlier stage; set topology.kind = 'parallel' and "
            f"topology.before = {PERSONAL!r}"
        )

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == PERSONAL:
            return NearGlobal(self.strength)
        return GlobalTraining()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name == PERSONAL:
            return NOTHING
        return super().expected_reply(client, stage, world)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == PERSONAL:
            return state
        return super().aggregate(state, replies, stage, world)


@dataclass(frozen=True)
class NearGlobal(LocalTraining):
    """Training of the client's own model near the global one; the model is not sent."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        anchor = trainable_entries(view.model, payload.params)
        return TrainingStart(own_model(client_state, view, world), constants={"anchor": anchor})

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return NOTHING, Payload(params=params)


class GlobalTraining(ClientWork):
    """Plain local training of the global model; the client keeps its personal model."""

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload | Keep]:
        return Payload(params=params), KEEP
