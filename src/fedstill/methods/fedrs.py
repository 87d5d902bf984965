"""FedRS: the softmax is restricted for classes without examples at a client, so that the client
forgets less about them.

Source: Li & Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID
Data" (2021).
Symbols: alpha = ``alpha``, the factor for the logits of missing classes in training.
State: the global parameters, nothing more.
Memory: nothing.
Reading: the paper only restricts missing classes. Its code scales every class by (1 - alpha) n_c /
max n + alpha for n_c examples. ``scaling`` decides; the default is the paper's.
Reading: the paper's last layer has no bias. Here the complete logit is multiplied, including the
bias if there is one.
Reading: the paper's clients train at 0.03 in batches of 64 with gradients clipped at 100. Here they
train as in the other methods' tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedstill.core.capabilities import Permit
from fedstill.core.fields import Share
from fedstill.core.label_counts import trained_counts
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.core.trees import dtype_of
from fedstill.losses import adjusted_cross_entropy
from fedstill.methods.fedavg import FedAvg


@method("fedrs")
@dataclass(frozen=True)
class FedRS(FedAvg):
    """FedAvg with restricted softmax: in training, clients scale down the logits of classes that
    they lack.
    """

    # its objective has label counts
    permits: ClassVar[Permit] = FedAvg.permits & ~Permit.PRIVATE_TRAINING

    alpha: Share = 0.5
    """Factor by which the logits of missing classes are multiplied (alpha); 1: plain training."""
    scaling: Literal["missing", "share"] = "missing"
    """Which logits are scaled: those of missing classes, or all in proportion to their examples
    (the paper's code).
    """

    def work(self, stage: Stage) -> ClientWork:
        return Restricted(self)


@dataclass(frozen=True)
class Restricted(ClientWork):
    """Cross-entropy of the scaled logits."""

    method: FedRS

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        alpha = self.method.alpha
        counts = trained_counts(view).double()  # (C,)
        if self.method.scaling == "missing":
            share = (counts > 0).double()
        else:
            share = counts / counts.max().clamp(min=1)
        scale = torch.where(share < 1, alpha + (1 - alpha) * share, 1.0)  # (C,)
        return TrainingStart(
            payload.params, constants={"scale": scale.to(dtype_of(payload.params))}
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        scale = start["scale"]  # (C,)
        if start.head is not None:
            # Outputs that take no part have very low logits; times 0 they would take part again.
            scale = torch.where(start.head, scale, 1.0)
        losses = adjusted_cross_entropy(step.logits(), step.y, scale=scale)  # (B,)
        return {"restricted": step.weighted(losses)}
