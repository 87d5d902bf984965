"""ASD: the distillation of each example is weighted by the global model's certainty and by the
rarity of its label at the client.

Source: Yashwanth et al., "Federated Learning on Heterogeneous Data via Adaptive Self-Distillation",
as used on top of FedNTD and FedAvg by Jang & Chou (FedADKD).
Symbols: lambda = ``weight``; T = ``temperature``; b1, b2 = powers of certainty and rarity; H =
entropy of the global model's prediction; p = the client's label proportions. w_i is in proportion
to exp(-b1 H_i) / p(y_i)^b2 in the batch.
State: the global parameters, nothing more.
Memory: nothing.
Reading: the repository's lambda is 2 or 20 and its T is 2; FedADKD gives no values for its rows. We
use 1 and 1.
Reading: the repository has no T^2 in this term. H always has temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fedstill.core.capabilities import Permit
from fedstill.core.fields import NonNegative, Positive
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of
from fedstill.losses import kd, nckd
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedntd import FromGlobal, no_other_classes


@method("fedavg_asd", about="FedAvg with adaptive self-distillation of all classes.", classes="all")
@method(
    "fedntd_asd",
    about="FedNTD with adaptive self-distillation of the not-true classes.",
    classes="not_true",
)
@dataclass(frozen=True)
class ASD(FedAvg):
    """Adaptive self-distillation from the round's global model, of all or of the not-true
    classes.
    """

    # its objective has label shares
    permits: ClassVar[Permit] = FedAvg.permits & ~Permit.PRIVATE_TRAINING

    classes: Literal["all", "not_true"] = "not_true"
    """Which classes are distilled: all, or the not-true ones."""
    weight: NonNegative = 1.0
    """Weight of the self-distillation (lambda)."""
    temperature: Positive = 1.0
    """Temperature of the distillation (T)."""
    b1: NonNegative = 1.0
    """Exponent of the global model's certainty in the weight of an example."""
    b2: NonNegative = 1.0
    """Exponent of the rarity of the label at the client in the weight of an example."""

    def setting_warnings(self, world: World) -> str:
        if self.classes == "all":
            return ""
        return no_other_classes(world)

    def work(self, stage: Stage) -> ClientWork:
        return Weighted(self)


@dataclass(frozen=True)
class Weighted(FromGlobal):
    """Cross-entropy and the weighted mean of the divergences in the batch."""

    method: ASD

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        start = super().begin(payload, client_state, view, world)
        log_shares = view.proportions.log().to(dtype_of(start.params))  # (C,)
        return replace(start, constants={"log_shares": log_shares})

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        teacher = step.teacher("global")  # (B, C)
        log_probabilities = teacher.log_softmax(1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(1)  # (B,)

        # In log space, with the largest weight at 1, so that no weight overflows.
        m = self.method
        log_weights = -m.b1 * entropy - m.b2 * start["log_shares"][step.y]
        weights = (log_weights - log_weights.max()).exp() * step.mask

        divergence = self.divergence(step.logits(), teacher, step.y)  # (B,)
        weighted = (weights / weights.sum() * divergence).sum() / m.temperature**2
        return {**super().terms(step, start), "self_distillation": m.weight * weighted}

    def divergence(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        """The divergence over the classes that are distilled, (B,)."""
        if self.method.classes == "not_true":
            return nckd(student, teacher, labels, self.method.temperature)
        return kd(student, teacher, self.method.temperature)
