"""FedDKD: distil from the global model with the true class and the other classes apart.

Source: Jang & Chou, "Mitigating Global Knowledge Forgetting via Adaptive Decoupled Knowledge
Distillation", section II.B, after Zhao et al., "Decoupled Knowledge Distillation" (2022).
Symbols: alpha, beta = weights of true-class (TCKD) and not-true-class distillation (NCKD); tau =
``temperature``.
State: the global parameters, nothing more.
Memory: nothing.
Reading: the paper's "original" NCKD keeps the true class's dimension and does worse, but DKD's
published formula equals removing it; ``nckd_mode`` "zero" (the true logit set to 0) stands in for
it. "mask1000" is DKD's formula, "slice" the not-true part of the divergence over all classes.
Reading: figure 4 varies alpha for the IID or the other clients of a hybrid split, and does not
say how: here one group is the first clients, as the partition ``hybrid`` numbers them, and each
group has an alpha (``feddkd_groups``).
Reading: ``tckd`` of ``feddkd`` is "binary", DKD's own two-way form; FedADKD's eq. 3, read as
"target", is the default of ``feddkd_groups`` and of ``fedadkd``.
Reading: no temperature is given; both terms are multiplied by tau^2, as DKD's code does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedstill.core.fields import NonNegative, Positive, Share
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.core.work import ClientWork
from fedstill.losses import nckd, nckd_slice, nckd_zero, target_kl, tckd
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedntd import FromGlobal

Loss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
NCKD: dict[str, Loss] = {"removed": nckd, "mask1000": nckd, "zero": nckd_zero, "slice": nckd_slice}
TCKD: dict[str, Loss] = {"target": target_kl, "binary": tckd}


@method("feddkd")
@dataclass(frozen=True)
class FedDKD(FedAvg):
    """FedAvg with true-class and not-true-class distillation from the round's global model, the
    same on all clients.
    """

    alpha: NonNegative = 1.0
    """Weight of the true-class distillation (TCKD)."""
    beta: NonNegative = 1.0
    """Weight of the not-true-class distillation (NCKD)."""
    temperature: Positive = 1.0
    """Temperature of both (tau)."""
    tckd: Literal["target", "binary"] = "binary"
    """The true-class term: FedADKD's eq. 3 ("target"), or the divergence of true class and rest
    ("binary").
    """
    nckd_mode: Literal["removed", "mask1000", "zero", "slice"] = "removed"
    """How the true class is treated in NCKD: removed ("mask1000" alike), its logit 0, or its part
    left out.
    """

    def work(self, stage: Stage) -> ClientWork:
        return Decoupled(self)


@method("feddkd_groups")
@dataclass(frozen=True)
class FedDKDOfGroups(FedDKD):
    """FedDKD in which the first clients have a true-class weight of their own.

    Source: FedADKD's paper, section II.B and figure 4.
    """

    tckd: Literal["target", "binary"] = "target"
    first: Share = 0.1
    """Share of all clients, rounded to whole ones, in the first group; a ``hybrid`` split's IID
    share, for one.
    """
    alpha_first: NonNegative = 1.0
    """Weight of the true-class distillation on clients of the first group."""

    def work(self, stage: Stage) -> ClientWork:
        return OfGroups(self)


@dataclass(frozen=True)
class Decoupled(FromGlobal):
    """Cross-entropy, alpha times TCKD (times phi, if the client was sent one), beta times NCKD."""

    method: FedDKD

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        student, teacher, m = step.logits(), step.teacher("global"), self.method  # (B, C) each
        alpha = start.constants.get("phi", 1.0) * start.constants.get("alpha", m.alpha)
        return {
            **super().terms(step, start),
            "true_class": alpha * TCKD[m.tckd](student, teacher, step.y, m.temperature),
            "other_classes": m.beta * NCKD[m.nckd_mode](student, teacher, step.y, m.temperature),
        }


@dataclass(frozen=True)
class OfGroups(Decoupled):
    """FedDKD's objective with the alpha of the client's group."""

    method: FedDKDOfGroups

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        carry, m = super().begin(payload, client_state, view, world), self.method
        alpha = m.alpha_first if view.client < round(m.first * world.clients) else m.alpha
        return TrainingStart(carry.params, carry.teachers, constants={"alpha": alpha})
