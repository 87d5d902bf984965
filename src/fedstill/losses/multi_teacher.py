"""Distillation from several teachers at once: one divergence for each teacher and example, and
weights to add them by.

Teachers stand along a leading axis: K teachers' logits are (K, B, C), a divergence or weight of
each is (K, B).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedstill.losses.decoupled import label_logit, nckd, tckd
from fedstill.losses.distillation import kd

Divergence = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def multi_kd(student: Tensor, teachers: Tensor, temperature: float = 1.0) -> Tensor:
    """``kd`` from each of K teachers: student (B, C), teachers (K, B, C), temperature > 0; gives
    (K, B) >= 0.

    >>> multi_kd(torch.zeros(1, 2), torch.zeros(3, 1, 2)).shape
    torch.Size([3, 1])
    """
    return kd(student.expand_as(teachers), teachers, temperature)


def multi_nckd(
    student: Tensor, teachers: Tensor, labels: Tensor, temperature: float = 1.0
) -> Tensor:
    """``nckd`` from each of K teachers: student (B, C), teachers (K, B, C), labels (B,); gives (K,
    B) >= 0.

    Source: SFedKD, eq. 3, before its sum over teachers.
    """
    return _each(nckd, student, teachers, labels, temperature)


def multi_tckd(
    student: Tensor, teachers: Tensor, labels: Tensor, temperature: float = 1.0
) -> Tensor:
    """``tckd`` from each of K teachers: student (B, C), teachers (K, B, C), labels (B,); gives (K,
    B) >= 0.

    Source: SFedKD, eq. 4, before its sum over teachers.
    """
    return _each(tckd, student, teachers, labels, temperature)


def entropy_weights(teachers: Tensor) -> Tensor:
    """EBKD's weights: the surer a teacher is of an example, the more it counts:
    ``1 - H_k / sum_j H_j``.

    teachers: (K, B, C) logits, H their entropy at temperature 1. Gives (K, B) >= 0 that sum to K -
    1 over teachers. One teacher alone gets 1; where all are certain (every H is 0), each gets
    ``1 - 1/K``.

    Source: Kwon et al., "Adaptive Knowledge Distillation Based on Entropy", in the form of CA-MKD's
    code.
    Reading: the code has no guard for one teacher, whose weight would be 0; there it is plain
    distillation.

    >>> sure, unsure = torch.tensor([[1e4, 0.0]]), torch.zeros(1, 2)
    >>> entropy_weights(torch.stack([sure, unsure])).flatten()
    tensor([1., 0.])
    """
    k = teachers.shape[0]
    if k == 1:
        return torch.ones_like(teachers[..., 0])
    logs = torch.log_softmax(teachers, dim=-1)
    entropy = -(logs.exp() * logs).sum(-1)  # (K, B)
    total = entropy.sum(0, keepdim=True)
    some = total > 0
    return 1 - torch.where(some, entropy / torch.where(some, total, torch.ones_like(total)), 1 / k)


def confidence_weights(teachers: Tensor, labels: Tensor) -> Tensor:
    """CA-MKD's weights: the better a teacher knows an example's label, the more it counts.

    teachers: (K, B, C) logits; labels: (B,) int64. With l their cross-entropy,
    ``(1 - softmax_k(l)_k) / (K - 1)``. Gives (K, B) >= 0 that sum to 1 over teachers; one teacher
    alone gets 1.

    Source: Zhang et al., "Confidence-Aware Multi-Teacher Knowledge Distillation", eq. 3.
    Reading: the code divides 0 by 0 for one teacher; there it is plain distillation.

    >>> right, wrong = torch.tensor([[1e4, 0.0]]), torch.tensor([[0.0, 1e4]])
    >>> confidence_weights(torch.stack([right, wrong]), torch.tensor([0])).flatten()
    tensor([1., 0.])
    """
    k = teachers.shape[0]
    if k == 1:
        return torch.ones_like(teachers[..., 0])
    # (K, B)
    cost = -label_logit(torch.log_softmax(teachers, dim=-1), labels.expand(teachers.shape[:-1]))
    return (1 - torch.softmax(cost, dim=0)) / (k - 1)


def _each(
    loss: Divergence, student: Tensor, teachers: Tensor, labels: Tensor, temperature: float
) -> Tensor:
    every = labels.expand(teachers.shape[:-1])
    return loss(student.expand_as(teachers), teachers, every, temperature)
