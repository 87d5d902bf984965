"""FedNTD: distillation of only the not-true classes from the global model, so that local training
forgets less about them.

Source: Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning" (2022), eq. 10, with the mix of appendix H and the squared-error variant of appendix L.
Symbols: beta = weight of not-true distillation; tau = ``temperature``; lambda = ``mix``.
State: the global parameters, nothing more.
Memory: nothing.
Reading: eq. 10 has no tau^2, but the authors' code has. We keep it; it matters only if tau is not
1.
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
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.losses import kd, nckd, other_mse
from fedstill.methods.fedavg import FedAvg


@method("fedntd")
@dataclass(frozen=True)
class FedNTD(FedAvg):
    """FedAvg with not-true distillation from the global model."""

    beta: NonNegative = 1.0
    """Weight of the not-true distillation."""
    temperature: Positive = 1.0
    """Temperature of the distillation (tau)."""

    def setting_warnings(self, world: World) -> str:
        return no_other_classes(world)

    def work(self, stage: Stage) -> ClientWork:
        return NotTrue(self)


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


def no_other_classes(world: World) -> str:
    """Returns a warning if the divergence over the not-true classes is always 0 because there is
    only one such class. Empty for more than two classes.
    """
    stream = world.stream
    if max(len(stream.outputs(task, world.classes)) for task in range(stream.tasks)) > 2:
        return ""
    reason = ""
    if world.classes > 2:
        reason = f", as stream.head = {stream.head!r} leaves two in each task"
    return (
        f"of two classes one is not the true one{reason}; nothing is distilled, and this trains as "
        "fedavg; choose kd"
    )


class FromGlobal(ClientWork):
    """Local training with the received parameters as frozen teacher ``global``."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(params=payload.params, teachers={"global": payload.params})


@dataclass(frozen=True)
class NotTrue(FromGlobal):
    """Cross-entropy and beta times the divergence over the not-true classes."""

    method: FedNTD

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        m = self.method
        divergence = nckd(step.logits(), step.teacher("global"), step.y, m.temperature)  # (B,)
        return {**super().terms(step, start), "not_true": m.beta * divergence}


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
