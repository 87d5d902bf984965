"""FedMLB: branches continue from each level of the local model with frozen layers of the global
model, and regularise local training.

Source: Kim et al., "Multi-Level Branched Regularization for Federated Learning" (2022), and its
code.
Symbols: l1, l2, l3 = ``own``, ``branch``, ``agree``; tau = ``temperature``; a level is a position
at which the network can be split.
State: the global parameters, nothing more.
Memory: nothing.
Reading: the code does not detach the branches in the divergence, so that their gradient reaches the
local layers. ``detach`` stops it.
Reading: the divergence has no factor tau^2, as in the code.
Reading: the received layers are in evaluation mode. In the code they are in training mode, which is
the same under GroupNorm.
Reading: with L branches, a step costs 1 + L/2 times a step of FedAvg.
Reading: the code trains for 1,000 rounds at 0.1 with weight decay 1e-3, in batches of 50, with
gradients clipped at 10. Here clients train as in the other methods' tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstill.core.capabilities import Need
from fedstill.core.fields import NonNegative, Positive
from fedstill.core.method import ClientWork
from fedstill.core.records import Stage, Step, TrainingStart
from fedstill.core.registry import method
from fedstill.losses import cross_entropy, kd
from fedstill.methods.fedavg import FedAvg
from fedstill.methods.fedntd import FromGlobal
from fedstill.models.layer_chain import run_from_level, run_to_levels


@method("fedmlb")
@dataclass(frozen=True)
class FedMLB(FedAvg):
    """FedAvg with branches from local layers into the frozen global model: their losses, and their
    divergence from the local predictions.
    """

    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.LEVELS

    own: NonNegative = 1.0
    """Weight of the local model's cross-entropy (l1)."""
    branch: NonNegative = 1.0
    """Weight of the branches' mean cross-entropy (l2)."""
    agree: NonNegative = 1.0
    """Weight of the mean divergence of the local predictions from the branches' (l3)."""
    temperature: Positive = 1.0
    """Temperature of that divergence (tau)."""
    detach: bool = False
    """Whether the divergence does not train the branches."""

    def work(self, stage: Stage) -> ClientWork:
        return Branched(self)


@dataclass(frozen=True)
class Branched(FromGlobal):
    """Cross-entropy of the local model, cross-entropy of each branch, and the divergence from each
    branch.
    """

    method: FedMLB

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        m = self.method
        if not (m.branch or m.agree):
            return {"ce": m.own * step.weighted(cross_entropy(step.logits(), step.y))}
        local = step.run(run_to_levels)
        raw_logits = step.head(local.features)  # (B, C)
        branches = [
            step.on(step.run_teacher("global", run_from_level, activations, level))  # (B, C)
            for level, activations in local.activations.items()
        ]
        logits = step.on(raw_logits)
        targets = branches
        if m.detach:
            targets = [branch.detach() for branch in branches]

        tau = m.temperature
        own_loss = step.weighted(cross_entropy(logits, step.y))
        branch_losses = [step.weighted(cross_entropy(branch, step.y)) for branch in branches]
        divergences = [kd(logits, target, tau) / tau**2 for target in targets]
        return {
            "ce": m.own * own_loss,
            "branches": m.branch * torch.stack(branch_losses).mean(0),
            "agree": m.agree * torch.stack(divergences).mean(0),
        }
