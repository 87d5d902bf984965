"""Distillation from several teachers, and from the combined logits of several clients.

Functions for several teachers return a divergence, or a weight, for each teacher and example.
Teachers are the leading axis: the logits of K teachers are (K, B, C), their divergences (K, B).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedstill.losses.decoupled import label_logit, tckd
from fedstill.losses.targets import kd, nckd

# ---- several teachers ----------------------------------------------------------------------------

Divergence = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def multi_kd(student: Tensor, teachers: Tensor, temperature: float = 1.0) -> Tensor:
    """``kd`` from each of K teachers: student (B, C), teachers (K, B, C), temperature > 0; returns
    (K, B) >= 0.

    >>> multi_kd(torch.zeros(1, 2), torch.zeros(3, 1, 2)).shape
    torch.Size([3, 1])
    """
    return kd(student.expand_as(teachers), teachers, temperature)


def multi_nckd(
    student: Tensor, teachers: Tensor, labels: Tensor, temperature: float = 1.0
) -> Tensor:
    """``nckd`` from each of K teachers: student (B, C), teachers (K, B, C), labels (B,); returns
    (K, B) >= 0.

    Source: SFedKD, eq. 3, before its sum over teachers.
    """
    return _by_teacher(nckd, student, teachers, labels, temperature)


def multi_tckd(
    student: Tensor, teachers: Tensor, labels: Tensor, temperature: float = 1.0
) -> Tensor:
    """``tckd`` from each of K teachers: student (B, C), teachers (K, B, C), labels (B,); returns
    (K, B) >= 0.

    Source: SFedKD, eq. 4, before its sum over teachers.
    """
    return _by_teacher(tckd, student, teachers, labels, temperature)


def _by_teacher(
    loss: Divergence, student: Tensor, teachers: Tensor, labels: Tensor, temperature: float
) -> Tensor:
    expanded = labels.expand(teachers.shape[:-1])
    return loss(student.expand_as(teachers), teachers, expanded, temperature)


def entropy_weights(teachers: Tensor) -> Tensor:
    """EBKD's weights ``1 - H_k / sum_j H_j``: teachers with a lower entropy have a higher weight.

    teachers: (K, B, C) logits, H their entropy at temperature 1. Returns (K, B) >= 0, summing to
    K - 1 over teachers. A single teacher has weight 1. If every H is 0, each weight is ``1 - 1/K``.

    Source: Kwon et al., "Adaptive Knowledge Distillation Based on Entropy", as in CA-MKD's code.
    Reading: in the code, the weight of a single teacher would be 0; here it is 1, which is plain
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
    is_positive = total > 0
    divisor = torch.where(is_positive, total, torch.ones_like(total))
    return 1 - torch.where(is_positive, entropy / divisor, 1 / k)


def confidence_weights(teachers: Tensor, labels: Tensor) -> Tensor:
    """CA-MKD's weights: teachers with a lower cross-entropy have a higher weight.

    teachers: (K, B, C) logits; labels: (B,) int64. With the cross-entropy l, the weights are ``(1 -
    softmax_k(l)_k) / (K - 1)``. Returns (K, B) >= 0, with sum 1 over teachers. A single teacher has
    weight 1.

    Source: Zhang et al., "Confidence-Aware Multi-Teacher Knowledge Distillation", eq. 3.
    Reading: the code divides 0 by 0 for a single teacher; here its weight is 1, which is plain
    distillation.

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


# ---- logits of several clients -------------------------------------------------------------------


def masked_kl(
    student: Tensor, teacher: Tensor, mask: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """Distillation of selected classes, one value per example:
    ``tau² sum_c mask_c p_c (log p_c - log q_c)``.

    student, teacher: (B, C) float logits, p and q their softmax over all C classes, not
    renormalised over the mask; mask: (C,) or (B, C), any dtype, >= 0; temperature tau > 0. Returns
    (B,) of the student's dtype, in nats. It may be negative, because only the sum over all classes
    is a divergence. With a mask of ones it equals ``kd``.

    Source: QKT, eq. 4.
    Reading: the paper prints ``p log q``, which decreases for a worse student; we change the sign.
    The part ``p log p`` does not depend on the student, so the gradient is that of a masked
    cross-entropy.

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
    """``masked_kl`` without the part that does not depend on the student, one value per example:
    ``-tau² sum_c mask_c p_c log q_c``.

    The arguments and the student's gradient are the same as for ``masked_kl``, but the loss is
    >= 0. If the teacher's logits have leading axes, the result has them too.

    Source: QKT, eq. 4, with the sign that makes it a loss.

    >>> masked_ce(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(2))
    tensor([0.6931])
    """
    q = torch.log_softmax(student / temperature, dim=-1)
    p = torch.softmax(teacher.to(student.dtype) / temperature, dim=-1)
    return -(temperature**2) * (mask.to(student.dtype) * p * q).sum(-1)


def soft_cross_entropy(student: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy with soft labels, one value per example: ``-sum_c p_c log softmax(student)_c``.

    student: (B, C) float logits; target: (B, C) probabilities p. Returns (B,) of the student's
    dtype, in nats, >= 0. It is the KL divergence plus the entropy of p, and has the same gradient.

    Source: DS-FL, its distillation step.

    >>> soft_cross_entropy(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    tensor([0.6931])
    """
    return -(target.to(student.dtype) * torch.log_softmax(student, dim=-1)).sum(-1)


def logit_error(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean over classes of the absolute difference of logits, one value per example.

    student, teacher: (B, C) float logits. Returns (B,) of the student's dtype, >= 0.

    Source: FedMD's code, where it is the loss of the digest phase.

    >>> logit_error(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0]]))
    tensor([1.5000])
    """
    return (student - teacher.to(student.dtype)).abs().mean(-1)


def standardize(logits: Tensor, eps: float = 1e-6) -> Tensor:
    """Z-scores of each example's logits across its classes: ``(z - mean) / (std + eps)``, with the
    unbiased std.

    logits: (B, C) float, C >= 2; eps > 0. Returns (B, C) of the same dtype. Equal logits give
    zeros, with a finite gradient.

    Source: HiPer-FedKD, sec. 3.2.2; Sun et al., "Logit Standardization in Knowledge Distillation".
    Reading: the latter's code has eps 1e-7, HiPer-FedKD's 1e-6; both use the unbiased std.

    >>> standardize(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[-1.0000,  0.0000,  1.0000]])
    """
    centred = logits - logits.mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / (logits.shape[-1] - 1)
    # The gradient of the square root is infinite at 0, so 0 is replaced by 1 before the root. The
    # outer torch.where restores the 0.
    spread = variance > 0
    std = torch.where(
        spread, torch.where(spread, variance, torch.ones_like(variance)).sqrt(), variance
    )
    return centred / (std + eps)
