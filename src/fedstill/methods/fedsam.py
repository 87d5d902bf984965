"""FedSAM: each step uses the gradient at the nearby point with the largest loss, so that clients
reach flat minima.

Source: Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization" (2022),
Algorithm 1, as in the code of FedSOL; Foret et al., "Sharpness-Aware Minimization for Efficiently
Improving Generalization" (2021).
State: the global parameters, nothing more.
Memory: nothing.
Reading: rho is 0.5, the value that FedSOL uses for FedSAM.
Reading: normalisation statistics are updated in the first pass only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fedstill.core.capabilities import Permit
from fedstill.core.fields import NonNegative
from fedstill.core.method import ClientWork
from fedstill.core.records import Stage, Step, Tensors, TrainingStart
from fedstill.core.registry import method
from fedstill.methods.fedavg import FedAvg


@method("fedsam")
@dataclass(frozen=True)
class FedSAM(FedAvg):
    """FedAvg with sharpness-aware minimisation: gradients at parameters moved by rho along the
    gradient of the client's loss.
    """

    # its first pass has no noise
    permits: ClassVar[Permit] = FedAvg.permits & ~Permit.PRIVATE_TRAINING

    rho: NonNegative = 0.5
    """Distance from the parameters at which the gradient is computed; 0: no perturbation."""

    def work(self, stage: Stage) -> ClientWork:
        return Sharp(self.rho)


@dataclass(frozen=True)
class Sharp(ClientWork):
    """Training with the gradient at perturbed parameters, where the cross-entropy is larger."""

    rho: float

    def ascent_terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        return super().terms(step, start)

    def perturb(self, params: Tensors, grads: Tensors, start: TrainingStart) -> Tensors:
        direction = unit(grads)
        return {k: w + self.rho * direction[k] for k, w in params.items()}


def unit(grads: Tensors) -> dict[str, Tensor]:
    """g / ||g||, with the norm over all entries; zeros remain zeros."""
    length = vector_norm(torch.stack([vector_norm(g) for g in grads.values()])) + 1e-12
    return {k: g / length for k, g in grads.items()}
