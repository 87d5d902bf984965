"""FedDF: after averaging, the server distils the clients' models into the average model, on public
images.

Source: Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning" (2020),
Algorithm 1 with its AvgLogits: the target is the softmax of the plain mean of the sampled clients'
logits.
Symbols: tau = ``temperature`` (1 in the paper, whose code multiplies the divergence by tau^2, as
here).
State: the global parameters; model.N = the model that client N sent in this round, until the server
has distilled.
Memory: nothing.
Reading: the paper's server takes up to 10,000 steps of 128 public images and stops after 1,000
steps without improvement on held-out labelled images. 10,000 steps are 25 passes over its 50,000
public images. Here the server has no labelled images and makes a fixed number of passes, 25 by
default. ``[plan.teach_server]`` sets it (also as ``steps`` instead of ``epochs``).
Reading: the paper's Adam starts at 0.001 and decays to 0 by a cosine within a round. Here it stays
at 0.001.
Reading: the paper's clients train for 40 epochs at 0.1 without momentum. Here they train as in the
other methods' tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedstill.core.capabilities import Need, Permit
from fedstill.core.fields import Positive
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    Payload,
    Plan,
    Reply,
    Stage,
    State,
    Step,
    TrainingStart,
    View,
    World,
    many,
)
from fedstill.core.registry import method
from fedstill.core.topology import has_chain
from fedstill.losses import kd
from fedstill.methods.fedavg import FEDNTD_PLAN, FedAvg

TEACH_SERVER = "teach_server"
"""The stage in which the server distils."""


@method("feddf")
@dataclass(frozen=True)
class FedDF(FedAvg):
    """FedAvg; the server then distils the mean of the clients' logits into the average, on
    unlabelled public data.
    """

    schedule: ClassVar[Mapping[str, Any]] = {"server": TEACH_SERVER}
    stages: ClassVar[frozenset[str]] = frozenset({"train", TEACH_SERVER})
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.PUBLIC_DATA
    permits: ClassVar[Permit] = Permit.NOTHING  # the server runs each client's model
    plans: ClassVar[Mapping[str, Plan]] = {
        "train": FEDNTD_PLAN,
        TEACH_SERVER: Plan(epochs=25, batch=128, optimiser="adam", lr=0.001),
    }

    temperature: Positive = 1.0
    """Temperature of the server's distillation (tau)."""

    def incompatibility(self, stages: Sequence[Stage], world: World) -> str:
        if has_chain(stages):
            return (
                "a chain ends with one model, and an ensemble needs several; set topology.kind = "
                "'parallel'"
            )
        if any(stage.name == TEACH_SERVER for stage in stages):
            return ""
        return f"it needs a server stage; set topology.server = {TEACH_SERVER!r}"

    def payload_for_client(self, state: State, client: int, stage: Stage, world: World) -> Payload:
        if stage.name != TEACH_SERVER:
            return Payload(params=state.params)
        return Payload({"params": state.params, **many("model", state.extra.many("model"))})

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == TEACH_SERVER:
            return Fused(self.temperature)
        return ClientWork()

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == TEACH_SERVER:
            return state.without("model.").next(params=replies[0].content.params)
        averaged = super().aggregate(state.without("model."), replies, stage, world)
        models = many("model", {r.client: r.content.params for r in replies})
        return averaged.next(groups=models)


@dataclass(frozen=True)
class Fused(ClientWork):
    """The divergence from the mean of the teachers' logits; no label is read."""

    temperature: float

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(
            payload.params, teachers={str(c): p for c, p in payload.many("model").items()}
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        mean = torch.stack([step.teacher(name) for name in start.teachers]).mean(0)  # (B, C)
        return {"ensemble": kd(step.logits(), mean, self.temperature)}
