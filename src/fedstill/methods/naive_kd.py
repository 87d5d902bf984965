"""Naive KD: a client distils the models of all its peers into its own, on its own data.

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(QKT), eq. 1.
Symbols: alpha = weight of the distillation; tau = ``temperature``; T = the teachers, all other
clients.
State: no global parameters; model.N = the model that client N trained alone; size.N = its number of
examples; student.N = client N's model after it has learned from its peers.
Memory: nothing.
Reading: eq. 1 prints a sum over all teachers, which is the default of ``over_teachers``. With the
sum, a client forgets over three times as much as in the published rows, and is on average worse
than alone, although the published rows are better. The mean is closer to these rows
(docs/results/qkt.md), so the recipes of the paper's tables use it.
Reading: 25 epochs are for CIFAR-10 and CINIC-10. Other data have 10: set ``[plan.transfer]
epochs``.
Reading: ``participants`` is the number of clients that take part in a client's exchange, including
itself (0: all).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from fedstill.core.fields import CountOrZero, NonNegative, Positive
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    ModelSpec,
    Payload,
    Plan,
    Reply,
    Stage,
    State,
    Step,
    Tensors,
    TrainingStart,
    View,
    World,
    many,
)
from fedstill.core.registry import method
from fedstill.losses import kd
from fedstill.methods.fit import FIT, FITTING, Fit, fitted_models, queries_of, with_students
from fedstill.methods.local_only import LocalOnly, asked_peers

TRANSFER = "transfer"
"""The stage in which clients learn from their peers."""

TRANSFERRING = replace(FITTING, epochs=25, validation=0.0, patience=0, keep="last")
"""QKT's settings for learning from peers; each phase has its own optimiser."""


@method("naive_kd")
@dataclass(frozen=True)
class NaiveKD(LocalOnly):
    """Each client distils all classes from all peers' models into its own model."""

    schedule: ClassVar[Mapping[str, Any]] = {"refine": False}
    stages: ClassVar[frozenset[str]] = frozenset({FIT, TRANSFER})
    plans: ClassVar[Mapping[str, Plan]] = {FIT: FITTING, TRANSFER: TRANSFERRING}
    personal: ClassVar[frozenset[str]] = frozenset({FIT, TRANSFER})

    alpha: NonNegative = 1.0
    """Weight of the distillation from the teachers."""
    temperature: Positive = 1.0
    """Temperature of the distillation (tau)."""
    participants: CountOrZero = 0
    """Number of clients in a client's exchange, including itself; 0: all."""
    over_teachers: Literal["sum", "mean"] = "sum"
    """Whether the distillation is the sum over the teachers, or their mean."""

    def payload_for_client(
        self, state: State, client: int, stage: Stage, world: World
    ) -> Payload | None:
        if stage.name == FIT:
            return super().payload_for_client(state, client, stage, world)
        queries = queries_of(world)
        if queries and client not in queries:
            return None
        return self.with_peers(state, client, world)

    def with_peers(self, state: State, client: int, world: World) -> Payload | None:
        """A client's own model and those of its peers; None if the client has no trained model."""
        return own_and_peers(state, client, self.participants, world)

    def joined(self, divergences: Tensor) -> Tensor:
        """The divergences (T, B) from all teachers as one value per example, (B,)."""
        if self.over_teachers == "mean":
            return divergences.mean(0)
        return divergences.sum(0)

    def work(self, stage: Stage) -> ClientWork:
        if stage.name == FIT:
            return Fit()
        return Distilled(self)

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        if stage.name == FIT:
            return super().aggregate(state, replies, stage, world)
        return with_students(state, replies)

    def predictors(self, state: State, world: World) -> dict[str, Callable[[Tensor], Tensor]]:
        return {}


def own_and_peers(state: State, client: int, participants: int, world: World) -> Payload | None:
    """A client's own model and those of its peers, ``participants`` models in total; None if the
    client has no trained model.
    """
    models = fitted_models(state)
    if client not in models:
        return None
    peers = {c: models[c] for c in asked_peers(client, participants, world) if c in models}
    return Payload({"params": models[client], **many("peer", peers)})


def peer_teachers(payload: Payload, world: World) -> dict[str, tuple[ModelSpec, Tensors]]:
    """The peers' models in a payload as teachers, by client."""
    return {
        str(client): (world.model(client), params)
        for client, params in payload.many("peer").items()
    }


def peers_of(start: TrainingStart) -> dict[int, tuple[ModelSpec, Tensors]]:
    """The teachers of a start from ``peer_teachers``, by client."""
    teachers = cast("Mapping[str, tuple[ModelSpec, Tensors]]", start.teachers)
    return {int(name): teacher for name, teacher in teachers.items()}


@dataclass(frozen=True)
class Distilled(ClientWork):
    """Cross-entropy, and alpha times the sum or the mean of the divergences over teachers."""

    method: NaiveKD

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(payload.params, teachers=peer_teachers(payload, world))

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = super().terms(step, start)
        if start.teachers:
            teachers = torch.stack([step.teacher(name) for name in start.teachers])  # (T, B, C)
            divergences = kd(step.logits(), teachers, self.method.temperature)  # (T, B)
            terms["teachers"] = self.method.alpha * self.method.joined(divergences)
        return terms
