"""FedSOL: each step uses the gradient at a perturbed point with a larger divergence from the global
model, so that local training interferes less with global knowledge.

Source: Lee et al., "FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated
Learning" (2024), and its code.
Symbols: rho = ``rho``; Lambda = ``scale``, "adaptive" |w - w_global| in units of its columns'
norms, "fixed" 1.
State: the global parameters, nothing more.
Memory: nothing.
Reading: the divergence from the global model has temperature 3 and no factor 9, as in the code.
Only the direction of its gradient matters.
Reading: the gradient is divided by its norm over all trained entries, not by the norm of Lambda
times the gradient, regardless of ``part``.
Reading: normalisation statistics are updated in the first pass only.
Reading: a client's first step is that of FedAvg. At this point, the gradient of the divergence is
zero up to rounding, and the code divides it by its norm if Lambda is 1. Here parameters are not
perturbed until they differ from the received ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedstill.core.capabilities import Need, Permit
from fedstill.core.fields import NonNegative, Positive
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, Tensors, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.losses import kd
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedntd import FromGlobal
from fedstill.methods.fedsam import unit
from fedstill.methods.partly_shared import in_head


@method("fedsol")
@dataclass(frozen=True)
class FedSOL(FedAvg):
    """FedAvg with gradients at parameters moved in the direction that increases the divergence from
    the global model.
    """

    # its first pass has no noise
    permits: ClassVar[Permit] = FedAvg.permits & ~Permit.PRIVATE_TRAINING

    rho: NonNegative = 1.0
    """Largest distance from the parameters at which the gradient is computed; 0: no perturbation.
    """
    scale: Literal["adaptive", "fixed"] = "adaptive"
    """Whether an entry is perturbed in proportion to its change in training, or all entries equally
    (Lambda).
    """
    temperature: Positive = 3.0
    """Temperature of the divergence from the global model."""
    part: Literal["all", "head", "body"] = "all"
    """Perturbed part: the whole network, its last layer, or all other layers."""

    def requires(self) -> Need:
        if self.part == "all":
            return self.needs
        return self.needs | Need.HEAD

    def work(self, stage: Stage) -> ClientWork:
        return Orthogonal(self)


@dataclass(frozen=True)
class Orthogonal(FromGlobal):
    """Training with the gradient of the cross-entropy at parameters with a larger divergence from
    the received model.
    """

    method: FedSOL

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return replace(
            super().begin(payload, client_state, view, world),
            constants={"received": payload.params},
        )

    def ascent_terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        tau = self.method.temperature
        return {"divergence": kd(step.logits(), step.teacher("global"), tau) / tau**2}

    def perturb(self, params: Tensors, grads: Tensors, start: TrainingStart) -> Tensors:
        received = start["received"]
        direction = unit(grads)
        if self.method.scale == "adaptive":
            direction = {
                k: g * normalize((params[k] - received[k]).abs(), dim=0)
                for k, g in direction.items()
            }
        else:
            # At the received parameters the divergence is 0, and has no direction.
            moved = torch.stack([(w != received[k]).any() for k, w in params.items()]).any()
            direction = {k: g * moved for k, g in direction.items()}

        perturbed = dict(params)
        for k, w in params.items():
            if self.is_moved(k):
                perturbed[k] = w + self.method.rho * direction[k]
        return perturbed

    def is_moved(self, name: str) -> bool:
        """Whether an entry is perturbed."""
        if self.method.part == "all":
            return True
        return in_head(name) == (self.method.part == "head")
