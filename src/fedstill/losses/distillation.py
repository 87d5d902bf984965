"""Distillation over all classes: how far a student's logits are from one teacher's, or several's.

Several teachers give one divergence for each teacher and example, and weights to add them by. They
stand along a leading axis: K teachers' logits are (K, B, C), a divergence or weight of each is
(K, B).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fedstill.losses.decoupled import label_logit, nckd, other_logits, tckd


def kd(student: Tensor, teacher: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Knowledge distillation, one value per example:
    ``tau² KL(softmax(teacher / tau) || softmax(student / tau))``.

    student, teacher: (B, C) float logits; temperature tau > 0. Gives (B,) of the student's dtype,
    in nats, >= 0 up to rounding. The factor tau² keeps the gradient's size when tau changes.

    Source: Hinton et al., "Distilling the Knowledge in a Neural Network"; FedNTD eq. 3, HiPer-FedKD
    Algorithm 1.
    Reading: HiPer-FedKD's Algorithm 1 and SFedKD print no tau²; the code of the first has it, so we
    keep it everywhere.

    >>> # A certain teacher costs an undecided student log 2.
    >>> kd(torch.zeros(1, 2), torch.tensor([[1e4, 0.0]]))
    tensor([0.6931])
    """
    q = torch.log_softmax(student / temperature, dim=-1)
    p = torch.log_softmax(teacher.to(student.dtype) / temperature, dim=-1)
    return temperature**2 * (p.exp() * (p - q)).sum(-1)


def masked_kl(
    student: Tensor, teacher: Tensor, mask: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """Distillation of chosen classes, one value per example:
    ``tau² sum_c mask_c p_c (log p_c - log q_c)``.

    student, teacher: (B, C) float logits, p and q their softmax over all C classes, not
    renormalised over the mask; mask: (C,) or (B, C), any dtype, >= 0; temperature tau > 0. Gives
    (B,) of the student's dtype, in nats. It may be negative: only the whole sum is a divergence. A
    mask of ones gives ``kd``.

    Source: QKT, eq. 4.
    Reading: the paper prints ``p log q`` as its element, which falls when the student is worse; the
    sign is ours. The part ``p log p`` does not depend on the student, so the gradient is that of a
    masked cross-entropy.

    >>> two_of_three = torch.tensor([1.0, 0.0, 1.0])
    >>> masked_kl(torch.zeros(1, 3), torch.zeros(1, 3), two_of_three)
    tensor([0.])
    """
    q = torch.log_softmax(student / temperature, dim=-1)
    p = torch.log_softmax(teacher.to(student.dtype) / temperature, dim=-1)
    return temperature**2 * (mask.to(student.dtype) * p.exp() * (p - q)).sum(-1)


def masked_ce(
    student: Tensor, teacher: Tensor, mask: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """``masked_kl`` without what the student cannot change, one value per example:
    ``-tau² sum_c mask_c p_c log q_c``.

    As ``masked_kl``, whose gradient to the student it has; but >= 0. A teacher with leading axes
    gives them back.

    Source: QKT, eq. 4, with the sign that makes it a loss.

    >>> masked_ce(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(2))
    tensor([0.6931])
    """
    q = torch.log_softmax(student / temperature, dim=-1)
    p = torch.softmax(teacher.to(student.dtype) / temperature, dim=-1)
    return -(temperature**2) * (mask.to(student.dtype) * p * q).sum(-1)


def soft_cross_entropy(student: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy with soft labels, one value per example: ``-sum_c p_c log softmax(student)_c``.

    student: (B, C) float logits; target: (B, C) probabilities p. Gives (B,) of the student's dtype,
    in nats, >= 0. Its gradient is that of the divergence from p, which differs by p's own entropy.

    Source: DS-FL, its distillation step.

    >>> soft_cross_entropy(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    tensor([0.6931])
    """
    return -(target.to(student.dtype) * torch.log_softmax(student, dim=-1)).sum(-1)


def logit_error(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean over classes of the absolute difference of logits, one value per example.

    student, teacher: (B, C) float logits. Gives (B,) of the student's dtype, >= 0.

    Source: FedMD's code, which digests the consensus by it.

    >>> logit_error(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0]]))
    tensor([1.5000])
    """
    return (student - teacher.to(student.dtype)).abs().mean(-1)


def standardize(logits: Tensor, eps: float = 1e-6) -> Tensor:
    """Z-scores of each example's logits across its classes: ``(z - mean) / (std + eps)``, with the
    unbiased std.

    logits: (B, C) float, C >= 2; eps > 0. Gives (B, C) of the same dtype. Equal logits give zeros,
    with a finite gradient.

    Source: HiPer-FedKD, sec. 3.2.2; Sun et al., "Logit Standardization in Knowledge Distillation".
    Reading: the latter's code has eps 1e-7, HiPer-FedKD's 1e-6; both use the unbiased std.

    >>> standardize(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[-1.0000,  0.0000,  1.0000]])
    """
    centred = logits - logits.mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / (logits.shape[-1] - 1)
    # The root's slope at 0 is infinite: it is taken of 1 there, and the outer choice puts 0 back.
    spread = variance > 0
    std = torch.where(
        spread, torch.where(spread, variance, torch.ones_like(variance)).sqrt(), variance
    )
    return centred / (std + eps)


def other_mse(
    student: Tensor, teacher: Tensor, labels: Tensor, reduction: Literal["sum", "mean"] = "sum"
) -> Tensor:
    """Squared error of the logits of the C-1 classes other than the label, one value per example.

    student, teacher: (B, C) float logits, C >= 2; labels: (B,) int64 in [0, C); reduction over the
    C-1 classes. Gives (B,) of the student's dtype, >= 0. The label's logit gets exactly no
    gradient.

    Source: FedNTD, appendix L, "FedNTD (MSE)".
    Reading: the reduction is not documented. The paper's weights (0.005 already helps, 0.3 diverges
    at a learning rate of 0.01) fit a sum over classes, not a mean.

    >>> other_mse(
    ...     torch.tensor([[9.0, 1.0, 2.0]]), torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([0])
    ... )
    tensor([4.])
    """
    error = (
        other_logits(student, labels) - other_logits(teacher.to(student.dtype), labels)
    ).square()
    return error.sum(-1) if reduction == "sum" else error.mean(-1)


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
