"""FedDBE: each client adds its own vector to the features, and a penalty aligns the mean of its
features with that of all clients.

Source: Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space"
(2023), and its code.
Symbols: m_k = ``body.shift``; g = ``consensus``; kappa = ``kappa``.
State: the global parameters, in which the shift is zero; consensus = g, (D,), from the first stage
on.
Memory: params = the client's complete model, including its shift.
Reading: the paper's running mean of features has a momentum mu. The setting in the code is 1, which
gives the mean of the batch. This is the only option here.
Reading: g is the mean over clients, by size, of their mean features after one visit that starts
from the initial model and is then discarded. It is computed over all examples in evaluation mode;
the code uses the last batch.
Reading: kappa is the code's value for Fashion-MNIST. Its parser's default, 0, is FedAvg with
shifts.
Reading: the code's clients train for one epoch at 0.005 in batches of 10. Here they train as in the
other methods' tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core.aggregation import Aggregation
from fedstill.core.capabilities import Addition, Need
from fedstill.core.fields import NonNegative
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
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
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of
from fedstill.methods.fedavg import FEDNTD_PLAN
from fedstill.methods.partly_shared import KeepsItsOwn, PartlyShared
from fedstill.models.building import ADDED
from fedstill.models.contract import width

MEANS = "means"
"""The stage before round 1, in which all clients send the mean of their features."""


@method("feddbe")
@dataclass(frozen=True)
class FedDBE(PartlyShared):
    """FedAvg with a personal shift of the features at each client, and a penalty that aligns the
    mean features of the clients.
    """

    schedule: ClassVar[Mapping[str, Any]] = {"first": MEANS}
    stages: ClassVar[frozenset[str]] = frozenset({MEANS, "train"})
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.FEATURES | Need.HEAD
    adds: ClassVar[Addition] = Addition.SHIFT
    has_global_model: ClassVar[bool] = True
    """The averaged model, without a shift."""
    plans: ClassVar[Mapping[str, Plan]] = {MEANS: FEDNTD_PLAN, "train": FEDNTD_PLAN}

    aggregation: Aggregation = "examples"
    kappa: NonNegative = 50.0
    """Weight of the penalty on the distance between a batch's mean features and the consensus."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if any(stage.name == MEANS for stage in stages):
            return ""
        return (
            "clients compute a common mean in a first stage; set topology.kind = 'parallel' and "
            f"topology.first = {MEANS!r}"
        )

    def shares(self, entries: Sequence[str]) -> Sequence[str]:
        return [name for name in entries if name != ADDED["shift"]]

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        payload = super().payload_for_client(state, client, stage, world)
        if stage.name == MEANS:
            return payload
        return Payload(payload, consensus=state.extra.tensor("consensus"))

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == MEANS:
            return SendMean(self, stage.name)
        return Shifted(self, stage.name, self.kappa)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name != MEANS:
            return super().expected_reply(client, stage, world)
        dtype = dtype_of(world.initial(client))
        return Payload(mean={"h": torch.zeros(width(world.model(client)), dtype=dtype)})

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == MEANS:
            return state.next(consensus=self.averaged(replies, None, "mean")["h"])
        return super().aggregate(state, replies, stage, world)


class SendMean(KeepsItsOwn):
    """Plain local training; only the mean of the features is sent, and the model is discarded."""

    def trainable(self, name: str) -> bool:
        return name != ADDED["shift"]

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        h = view.features(params)  # (n, D)
        return Payload(mean={"h": h.sum(0) / max(len(h), 1)}), NOTHING


@dataclass(frozen=True)
class Shifted(KeepsItsOwn):
    """Cross-entropy of the shifted features, and the distance between their mean without the shift
    and the consensus.
    """

    kappa: float

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return replace(
            super().begin(payload, client_state, view, world),
            constants={"consensus": payload.tensor("consensus")},
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        h = step.features() - step.params[ADDED["shift"]]  # (B, D)
        mean = (h * step.mask.to(h.dtype).unsqueeze(1)).sum(0) / step.mask.sum()  # (D,)
        distance = (mean - start["consensus"]).square().mean() / 2
        return {**super().terms(step, start), "mean": self.kappa * distance}
