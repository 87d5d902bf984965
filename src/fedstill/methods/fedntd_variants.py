"""Variants of FedNTD: the squared error of not-true logits, and a mix of the distillation of all
classes and of the not-true classes.

Source: Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning" (2022), the mix of appendix H and the squared error of appendix L.
Symbols: beta = weight of the squared error; tau = ``temperature``; lambda = ``mix``.
State: the global parameters, nothing more.
Memory: nothing.
Reading: the mix of appendix H has coefficient 1 on the cross-entropy (eq. 17, 18), unlike eq. 3. We
follow appendix H.
Reading: appendix L does not state the reduction. The divergence at beta = 0.3 fits a sum over the
C-1 logits, not a mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedstill.core.fields import NonNegative, Positive, Share
from fedstill.core.method import ClientWork
from fedstill.core.records import Stage, Step, TrainingStart, World
from fedstill.core.registry import method
from fedstill.losses import kd, nckd, other_mse
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedntd import FromGlobal, no_other_classes


@method("fedntd_mse")
@dataclass(frozen=True)
class FedNTDSquared(FedAvg):
    """FedNTD with the squared error between not-true logits instead of the divergence."""

    beta: NonNegative = 0.01
    """Weight of the squared error of the not-true logits."""
    reduction: Literal["sum", "mean"] = "sum"
    """Whether squared errors are summed over the not-true classes, or averaged."""

    def work(self, stage: Stage) -> ClientWork:
        return NotTrueSquared(self)


@method("kd_ntd")
@method("kd", about="FedAvg with distillation of all classes from the global model.", mix=0.0)
@dataclass(frozen=True)
class KDToNTD(FedAvg):
    """A mix of the distillation of all classes (mix 0) and of the not-true classes (mix 1)."""

    mix: Share = 0.5
    """Share of the not-true distillation; the remainder is the distillation of all classes
    (lambda).
    """
    temperature: Positive = 1.0
    """Temperature of both distillations (tau)."""

    def setting_warnings(self, world: World) -> str:
        if self.mix < 1:
            return ""
        return no_other_classes(world)

    def work(self, stage: Stage) -> ClientWork:
        return Mixed(self)


@dataclass(frozen=True)
class NotTrueSquared(FromGlobal):
    """Cross-entropy and beta times the squared error of the not-true logits."""

    method: FedNTDSquared

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        m = self.method
        error = other_mse(step.logits(), step.teacher("global"), step.y, m.reduction)  # (B,)
        return {**super().terms(step, start), "not_true": m.beta * error}


@dataclass(frozen=True)
class Mixed(FromGlobal):
    """Cross-entropy, (1 - mix) times the divergence over all classes, and mix times the divergence
    over the not-true classes.
    """

    method: KDToNTD

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        m = self.method
        student = step.logits()  # (B, C)
        teacher = step.teacher("global")  # (B, C)
        return {
            **super().terms(step, start),
            "all_classes": (1 - m.mix) * kd(student, teacher, m.temperature),
            "not_true": m.mix * nckd(student, teacher, step.y, m.temperature),
        }
