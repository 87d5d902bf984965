"""FedMD: networks of any architecture agree on public images: each moves its logits towards the
mean, and then trains on its own data.

Source: Li & Wang, "FedMD: Heterogenous Federated Learning via Model Distillation" (2019), Algorithm
1, with its code.
Stages: once, ``pretrain`` on the public images and their labels, and ``transfer`` on the client's
own data; then, in each round, the consensus and its digest (``distil``), and the revisit of the
client's own data, which is the next round's ``local`` or, after the last round, ``revisit``. Only
``pretrain`` reads public labels; ``topology.first = ""`` leaves it out.
State: the parameters of the server's model; subset = positions (P,) of the round's public images,
if ``subset`` is smaller than their number; target = the consensus on these, (P, C), until the
clients have learned from it.
Memory: params = the client's own model.
Reading: the paper's pre-training and transfer continue "to convergence". Here they take 20 and 25
epochs, the maximum of its code.
Reading: the paper exchanges "class scores". In its code these are logits, and their distance is the
absolute error.
Reading: the consensus covers ``subset`` public images, drawn anew in each round (5,000 in the
code). The default, 0, means all.
Reading: FedMD has no model on the server. Here the server has one that learns from the consensus
like a client, so that a global model can be measured. No client learns from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
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
from fedstill.losses import logit_error
from fedstill.methods.public_logits import (
    DISTIL,
    LOCAL,
    TEACH,
    LogitExchange,
    TrainThenPredict,
    own_model,
)

PRETRAIN = "pretrain"
"""The stage before round 1, in which clients train on the labelled public images."""

TRANSFER = "transfer"
"""The stage after the pre-training, in which clients train on their own data."""

REVISIT = "revisit"
"""The stage after the last round, in which clients train on their own data once more."""

NO_UPLOAD = (PRETRAIN, REVISIT)
"""The stages in which a client sends nothing."""

DIGEST = Plan(epochs=1, batch=256, optimiser="adam", lr=0.001)
OWN = Plan(epochs=4, batch=5, optimiser="adam", lr=0.001)


@method("fedmd")
@dataclass(frozen=True)
class FedMD(LogitExchange):
    """Clients learn from the mean of the clients' logits on public images, after they pre-train on
    these images with labels.
    """

    schedule: ClassVar[Mapping[str, Any]] = {"first": PRETRAIN, "start": TRANSFER, "last": REVISIT}
    stages: ClassVar[frozenset[str]] = frozenset(
        {LOCAL, TEACH, DISTIL, PRETRAIN, TRANSFER, REVISIT}
    )
    personal: ClassVar[frozenset[str]] = frozenset({DISTIL, REVISIT})
    labelled: ClassVar[frozenset[str]] = frozenset({PRETRAIN})
    plans: ClassVar[Mapping[str, Plan]] = {
        PRETRAIN: Plan(epochs=20, batch=128, optimiser="adam", lr=0.001),
        TRANSFER: Plan(epochs=25, batch=32, optimiser="adam", lr=0.001),
        LOCAL: OWN,
        TEACH: DIGEST,
        DISTIL: DIGEST,
        REVISIT: OWN,
    }

    def work(self, stage: Stage) -> ClientWork:
        if stage.name in NO_UPLOAD:
            return TrainWithoutUpload(self)
        return super().work(stage)

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        if stage.name in NO_UPLOAD:
            return NOTHING
        return super().expected_reply(client, stage, world)

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if stage.name in NO_UPLOAD:
            return NOTHING
        return super().payload_for_client(state, client, stage, world)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name in NO_UPLOAD:
            return state
        return super().aggregate(state, replies, stage, world)

    def sent_logits(self, logits: Tensor) -> Tensor:
        return logits

    def distance(self, logits: Tensor, target: Tensor) -> Tensor:
        return logit_error(logits, target)


@dataclass(frozen=True)
class TrainWithoutUpload(TrainThenPredict):
    """A client trains its own model with labels, without an upload: on public images or on its own
    data.
    """

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(own_model(client_state, view, world), constants={"temperature": 1.0})

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        return NOTHING, Payload(params=params)
