"""FedAlign: a regulariser aligns the Lipschitz constants of the last stage at full width and at a
quarter of its width.

Source: Mendieta et al., "Local Learning Matters: Rethinking Data Heterogeneity in Federated
Learning" (2022), and its code, with ResNet-56 (``[model] name = "resnet56"``, there with
``norm = "batch"``).
Symbols: mu = ``mu``; omega_S = ``width``; K = TM TM^T, TM = the transmitting matrix of a stage;
s(K) = the root of K's spectral norm by ``iterations`` of the power method.
State: the global parameters, nothing more.
Memory: nothing.
Reading: the term is scaled to mu times the cross-entropy: it is multiplied by their ratio, which is
a constant for the gradient. A term of 0 is left out.
Reading: the code's optimiser has Nesterov momentum and belongs to a worker process, so that
momentum carries over between clients; the code drops the last batch. Here momentum is plain and
starts at 0 in every round, and the last batch is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from fedstill.core.capabilities import Need, Permit
from fedstill.core.fields import Count, NonNegative
from fedstill.core.method import ClientWork
from fedstill.core.records import Plan, Stage, Step, TrainingStart
from fedstill.core.registry import method
from fedstill.losses import cross_entropy
from fedstill.methods.fedavg import FedAvg
from fedstill.models.resnet import run_slim


@method("fedalign")
@dataclass(frozen=True)
class FedAlign(FedAvg):
    """FedAvg whose clients align the Lipschitz constants of the last block of the network at
    reduced and full width.
    """

    # its penalty is of a whole batch
    permits: ClassVar[Permit] = FedAvg.permits & ~Permit.PRIVATE_TRAINING
    needs: ClassVar[Need] = Need.SAME_SHAPES | Need.SLIM
    plans: ClassVar[Mapping[str, Plan]] = {
        "train": Plan(epochs=20, batch=64, lr=0.01, momentum=0.9, weight_decay=1e-4, clip_norm=10.0)
    }

    mu: NonNegative = 0.45
    """Size of the alignment term, relative to that of the cross-entropy."""
    width: Annotated[float, Interval(gt=0, lt=1)] = 0.25
    """Width of the slim last block, as a share of the full width (omega_S)."""
    iterations: Count = 10
    """Steps of the power method that finds the largest singular value."""

    def work(self, stage: Stage) -> ClientWork:
        return Aligned(self)


@dataclass(frozen=True)
class Aligned(ClientWork):
    """Cross-entropy, and the regulariser scaled to mu times the cross-entropy."""

    method: FedAlign

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        iterations = self.method.iterations
        both = step.run(run_slim, self.method.width)
        ce = step.weighted(cross_entropy(step.on(both.logits), step.y))
        with torch.no_grad():
            target = steepness(both.whole.input, both.whole.output, iterations)
        slim = steepness(both.slim.input, both.slim.output, iterations)
        penalty = (slim - target).square()  # (B,)

        # The penalty is as large as the cross-entropy; where it is 0, nothing is divided by it.
        size = step.mean(penalty).detach()
        divisor = torch.where(size > 0, size, torch.ones_like(size))
        ratio = torch.where(size > 0, step.mean(ce).detach() / divisor, 0.0)
        return {"ce": ce, "alignment": self.method.mu * ratio * penalty}


def steepness(inputs: Tensor, outputs: Tensor, iterations: int) -> Tensor:
    """The largest singular value of each example's transmitting matrix, by the power method: (B,)
    > 0.

    inputs: (B, D, H, W) of a stage; outputs: (B, E, h, w), h <= H. The matrix (D, E) is the mean of
    their products over positions, with ``inputs`` pooled to the size of ``outputs``. Zeros give
    1e-6.

    >>> steepness(torch.full((1, 1, 2, 2), 3.0), torch.full((1, 1, 1, 1), 2.0), 10)
    tensor([6.])
    """
    a = adaptive_avg_pool2d(inputs, (outputs.shape[2], outputs.shape[3])).flatten(2)  # (B, D, hw)
    matrix = a @ outputs.flatten(2).transpose(1, 2) / a.shape[2]  # (B, D, E)
    k = matrix @ matrix.transpose(1, 2)  # (B, D, D)
    v = torch.ones_like(k[:, :, :1])
    size = torch.ones_like(k[:, :1, :1])
    for _ in range(iterations):
        v = k @ v
        size = (v.square().sum(1, keepdim=True) + 1e-24).sqrt()
        v = v / size
    return size.flatten().sqrt()
