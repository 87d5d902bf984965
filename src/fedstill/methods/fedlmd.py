"""FedLMD: only the minority classes of a client are distilled, because local training would erase
global knowledge about them.

Source: Lu et al., "Federated Learning with Label-Masking Distillation" (2023), and its code.
Symbols: beta, tau = ``temperature``; majority = the classes with more examples than the client's
mean over all classes.
State: the global parameters, nothing more.
Memory: nothing.
Reading: if the label is the only minority class, the code masks all classes of the teacher, and the
loss is about 1000 times the probability of the label. Here the term is 0, because there is nothing
to distil.
Reading: the published form without a teacher does not run: a call has one argument too many, and
the target is negative. Here its target is uniform over the minority classes other than the label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core.capabilities import Permit
from fedstill.core.fields import NonNegative, Positive
from fedstill.core.label_counts import trained_counts
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.losses import minority_kd
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedntd import no_other_classes


@method("fedlmd")
@dataclass(frozen=True)
class FedLMD(FedAvg):
    """FedAvg with distillation of the minority classes from the global model."""

    # its objective has label counts
    permits: ClassVar[Permit] = FedAvg.permits & ~Permit.PRIVATE_TRAINING

    beta: NonNegative = 1.0
    """Weight of the distillation."""
    temperature: Positive = 1.0
    """Temperature of the distillation (tau)."""

    def setting_warnings(self, world: World) -> str:
        return no_other_classes(world)

    def work(self, stage: Stage) -> ClientWork:
        return Masked(self)


@method("fedlmd_tf")
@dataclass(frozen=True)
class FedLMDTeacherFree(FedLMD):
    """FedLMD without a teacher: the target is uniform over the minority classes."""

    def work(self, stage: Stage) -> ClientWork:
        return MaskedUniform(self)


@dataclass(frozen=True)
class MaskedUniform(ClientWork):
    """Cross-entropy and beta times the divergence from a teacher that is uniform over the minority
    classes.
    """

    method: FedLMD

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        counts = trained_counts(view)
        majority = counts > counts.double().mean()
        return TrainingStart(payload.params, constants={"majority": majority, "counts": counts})

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        m = self.method
        excluded = self.not_distilled(start)
        divergence = minority_kd(
            step.logits(), self.target(step), step.y, excluded, m.temperature
        )  # (B,)
        return {**super().terms(step, start), "minority": m.beta * divergence}

    def not_distilled(self, start: TrainingStart) -> Tensor:
        """The classes (C,) that are not distilled: majority classes, and classes that take no part
        in training.
        """
        active = start.head
        if active is None:
            majority: Tensor = start["majority"]
            return majority
        counts: Tensor = start["counts"]
        return ~active | (counts * active.sum() > counts.sum())

    def target(self, step: Step) -> Tensor:
        """The teacher's logits (B, C)."""
        return step.on(torch.zeros_like(step.logits()))


@dataclass(frozen=True)
class Masked(MaskedUniform):
    """The same objective with the received parameters as frozen teacher ``global``."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        constants = super().begin(payload, client_state, view, world).constants
        return TrainingStart(
            payload.params, teachers={"global": payload.params}, constants=constants
        )

    def target(self, step: Step) -> Tensor:
        return step.teacher("global")
