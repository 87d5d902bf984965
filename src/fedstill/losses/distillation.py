"""Distillation losses: divergences between a student's logits and those of one or several teachers.

Functions for several teachers return a divergence, or a weight, for each teacher and example.
Teachers are the leading axis: the logits of K teachers are (K, B, C), their divergences (K, B).

Decoupled losses split the divergence into a term for the true class and a term for the
distribution among the other classes. Let p and q be the softmax of teacher and student at the same
temperature, y the label, and p~, q~ the softmax over the C-1 other classes:
``KL(p || q) = KL((p_y, 1 - p_y) || (q_y, 1 - q_y)) + (1 - p_y) KL(p~ || q~)``, that is
``kd = tckd + (1 - p_y) nckd``; also ``kd = target_kl + nckd_slice``.

Source of the decoupled losses: Zhao et al., "Decoupled Knowledge Distillation" (DKD).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def label_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """The logit of each example's label: logits (B, C), labels (B,) int64 in [0, C), gives (B,)."""
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def other_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits of the C-1 classes other than the label, in class order: logits (B, C), labels
    (B,), gives (B, C-1).

    The label's logit is removed, not masked, so that it gets no gradient.

    >>> other_logits(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1]))
    tensor([[1., 3.]])
    """
    places = torch.arange(logits.shape[-1] - 1, device=logits.device)
    return logits.gather(-1, places + (places >= labels.unsqueeze(-1)).to(places.dtype))


def label_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-odds of the label, ``log p_y - log(1 - p_y)``: logits (B, C), labels (B,), gives
    (B,).

    Its log-sigmoid is ``log p_y``, and the log-sigmoid of its negative is ``log(1 - p_y)``. Both
    are exact for probabilities that round to 0 or 1.
    """
    return label_logit(logits, labels) - other_logits(logits, labels).logsumexp(-1)


def tckd(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """True-class distillation, one value per example: tau² times the KL of the pair (true class,
    all others).

    student, teacher: (B, C) float logits, C >= 2; labels: (B,) int64 in [0, C); temperature tau
    > 0. Gives (B,) of the student's dtype, in nats, >= 0 up to rounding. The loss pulls the
    student's confidence towards the teacher's.

    Source: SFedKD, eq. 4; DKD.
    Reading: SFedKD has neither a temperature nor a factor tau²; we multiply by tau², as DKD's code
    does.

    >>> tckd(torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([0]))
    tensor([0.])
    """
    s = label_margin(student / temperature, labels)
    t = label_margin(teacher.to(student.dtype) / temperature, labels)
    true_class = t.sigmoid() * (logsigmoid(t) - logsigmoid(s))
    other_classes = (-t).sigmoid() * (logsigmoid(-t) - logsigmoid(-s))
    return temperature**2 * (true_class + other_classes)


def target_kl(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """The term of the true class in the KL divergence, one value per example:
    ``tau² p_y (log p_y - log q_y)``.

    student, teacher: (B, C) float logits, C >= 2; labels: (B,) int64 in [0, C); temperature tau
    > 0. Gives (B,) of the student's dtype, in nats; negative if the student's probability of the
    label is higher than the teacher's. Its gradient is that of cross-entropy, weighted by the
    teacher's confidence: it always increases q_y.

    Source: FedADKD, eq. 3.
    Reading: the equation sums over classes, but its term only exists for the label; we take this
    one term. The paper has no temperature (tau = 1); for others, we multiply by tau².

    >>> target_kl(torch.tensor([[5.0, 0.0]]), torch.zeros(1, 2), torch.tensor([0])) < 0
    tensor([True])
    """
    s = logsigmoid(label_margin(student / temperature, labels))
    t = logsigmoid(label_margin(teacher.to(student.dtype) / temperature, labels))
    return temperature**2 * t.exp() * (t - s)


def nckd(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """Not-true-class distillation, one value per example: tau² times the KL over the C-1 classes
    other than the label.

    student, teacher: (B, C) float logits, C >= 2; labels: (B,) int64 in [0, C); temperature tau
    > 0. Gives (B,) of the student's dtype, in nats, >= 0 up to rounding. The label's logit has
    neither influence nor gradient.

    Source: FedNTD, eq. 10 and 11; FedADKD eq. 4; SFedKD eq. 3; DKD's NCKD.
    Reading: FedNTD's eq. 10 has no tau², but its code has; we follow the code. DKD's code subtracts
    1000 from the label's logit, which gives the same value.

    >>> sure, unsure = torch.tensor([[9.0, 1.0, 2.0]]), torch.tensor([[-9.0, 1.0, 2.0]])
    >>> nckd(sure, unsure, torch.tensor([0]))
    tensor([0.])
    """
    q = torch.log_softmax(other_logits(student, labels) / temperature, dim=-1)
    p = torch.log_softmax(other_logits(teacher.to(student.dtype), labels) / temperature, dim=-1)
    return temperature**2 * (p.exp() * (p - q)).sum(-1)


def nckd_zero(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """``nckd`` with the label's logit set to 0 instead of removed: our version of FedDKD's
    "original" form.

    Shapes and ranges as in ``nckd``. The label contributes ``exp(0)`` to the softmax, so the term
    also depends on the size of the other logits, unlike ``nckd``.

    Source: FedADKD, sec. II.B, "original" against "dimension-removed".
    Reading: the paper does not define "original". DKD's formula equals removal of the dimension;
    this formula does not.
    """
    q = torch.log_softmax(_zero_label(student, labels) / temperature, dim=-1)
    p = torch.log_softmax(_zero_label(teacher.to(student.dtype), labels) / temperature, dim=-1)
    return temperature**2 * (p.exp() * (p - q)).sum(-1)


def nckd_slice(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """The terms of the other classes in the KL divergence, one value per example.

    ``tau² sum_{c != y} p_c (log p_c - log q_c)``, not renormalised, so it may be negative. The sum
    with ``target_kl`` is ``kd``. Shapes and ranges as in ``nckd``.

    Source: FedADKD, sec. II.B: a second reading of the "original" form.
    """
    q = other_logits(torch.log_softmax(student / temperature, dim=-1), labels)
    p = other_logits(torch.log_softmax(teacher.to(student.dtype) / temperature, dim=-1), labels)
    return temperature**2 * (p.exp() * (p - q)).sum(-1)


def minority_kd(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    majority: Tensor,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """Distillation of the minority classes of a client, one value per example: tau² times a KL.

    The target is the teacher's softmax over the minority classes other than the label. The
    student's distribution is its softmax over all C-1 classes other than the label, so the loss
    also lowers the student's logits of majority classes. student, teacher: (B, C) float logits, C
    >= 2;
    labels: (B,) int64 in [0, C); majority: (C,) or (B, C) bool; temperature tau > 0. Gives (B,) of
    the student's dtype, in nats, >= 0 up to rounding; 0 if there is no minority class other than
    the label. Without majority classes it equals ``nckd``. The label's logit has neither influence
    nor gradient. A teacher with equal logits is a uniform target.

    Source: Lu et al., "Federated Learning with Label-Masking Distillation" (FedLMD).
    Reading: the code subtracts 1000 from masked logits. This equals removal, unless the label is
    the only minority class: then all classes are masked, and the loss is about 1000 times the
    teacher's probability of the label. Here it is 0.

    >>> minority_kd(
    ...     torch.zeros(1, 3),
    ...     torch.zeros(1, 3),
    ...     torch.tensor([0]),
    ...     torch.tensor([False, True, False]),
    ... )
    tensor([0.6931])
    """
    minority = other_logits((~majority).expand(student.shape), labels)  # (B, C-1) bool
    # Without a minority class nothing is masked, because a softmax over no class is NaN.
    masked = ~minority & minority.any(-1, keepdim=True)
    q = torch.log_softmax(other_logits(student, labels) / temperature, dim=-1)
    t = other_logits(teacher.to(student.dtype), labels) / temperature
    p = torch.log_softmax(t.masked_fill(masked, -torch.inf), dim=-1)
    divergence = p.exp().masked_fill(~minority, 0.0) * (p.masked_fill(~minority, 0.0) - q)
    return temperature**2 * divergence.sum(-1)


def _zero_label(logits: Tensor, labels: Tensor) -> Tensor:
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels.unsqueeze(-1)
    return torch.where(is_label, torch.zeros_like(logits), logits)


def kd(student: Tensor, teacher: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Knowledge distillation, one value per example:
    ``tau² KL(softmax(teacher / tau) || softmax(student / tau))``.

    student, teacher: (B, C) float logits; temperature tau > 0. Gives (B,) of the student's dtype,
    in nats, >= 0 up to rounding. With the factor tau², the size of the gradient hardly depends on
    tau.

    Source: Hinton et al., "Distilling the Knowledge in a Neural Network"; FedNTD eq. 3, HiPer-FedKD
    Algorithm 1.
    Reading: HiPer-FedKD's Algorithm 1 and SFedKD have no factor tau². HiPer-FedKD's code has it, so
    we always use it.

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
    """Distillation of selected classes, one value per example:
    ``tau² sum_c mask_c p_c (log p_c - log q_c)``.

    student, teacher: (B, C) float logits, p and q their softmax over all C classes, not
    renormalised over the mask; mask: (C,) or (B, C), any dtype, >= 0; temperature tau > 0. Gives
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

    Arguments, and the gradient to the student, are those of ``masked_kl``; but the loss is >= 0. If
    the teacher's logits have leading axes, so has the result.

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
    in nats, >= 0. It is the KL divergence plus the entropy of p, and has the same gradient.

    Source: DS-FL, its distillation step.

    >>> soft_cross_entropy(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    tensor([0.6931])
    """
    return -(target.to(student.dtype) * torch.log_softmax(student, dim=-1)).sum(-1)


def logit_error(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean over classes of the absolute difference of logits, one value per example.

    student, teacher: (B, C) float logits. Gives (B,) of the student's dtype, >= 0.

    Source: FedMD's code, where it is the loss of the digest phase.

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
    # The gradient of the square root is infinite at 0, so the root is taken of 1 there. The outer
    # torch.where restores the 0.
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
    C-1 classes. Gives (B,) of the student's dtype, >= 0. The label's logit gets no gradient.

    Source: FedNTD, appendix L, "FedNTD (MSE)".
    Reading: the paper does not state the reduction. Its weights (0.005 already helps, 0.3 diverges
    at a learning rate of 0.01) fit a sum over classes, not a mean.

    >>> other_mse(
    ...     torch.tensor([[9.0, 1.0, 2.0]]), torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([0])
    ... )
    tensor([4.])
    """
    error = (
        other_logits(student, labels) - other_logits(teacher.to(student.dtype), labels)
    ).square()
    if reduction == "sum":
        return error.sum(-1)
    return error.mean(-1)


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
    return _by_teacher(nckd, student, teachers, labels, temperature)


def multi_tckd(
    student: Tensor, teachers: Tensor, labels: Tensor, temperature: float = 1.0
) -> Tensor:
    """``tckd`` from each of K teachers: student (B, C), teachers (K, B, C), labels (B,); gives (K,
    B) >= 0.

    Source: SFedKD, eq. 4, before its sum over teachers.
    """
    return _by_teacher(tckd, student, teachers, labels, temperature)


def entropy_weights(teachers: Tensor) -> Tensor:
    """EBKD's weights ``1 - H_k / sum_j H_j``: teachers with a lower entropy have a higher weight.

    teachers: (K, B, C) logits, H their entropy at temperature 1. Gives (K, B) >= 0, with sum K - 1
    over teachers. A single teacher has weight 1. If every H is 0, each weight is ``1 - 1/K``.

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
    softmax_k(l)_k) / (K - 1)``. Gives (K, B) >= 0, with sum 1 over teachers. A single teacher has
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


def _by_teacher(
    loss: Divergence, student: Tensor, teachers: Tensor, labels: Tensor, temperature: float
) -> Tensor:
    expanded = labels.expand(teachers.shape[:-1])
    return loss(student.expand_as(teachers), teachers, expanded, temperature)
