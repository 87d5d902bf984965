"""Decoupled distillation: terms of the divergence between teacher and student.

Decoupled losses split the divergence into a term for the true class and a term for the
distribution among the other classes. Let p and q be the softmax of teacher and student at the same
temperature, y the label, and p~, q~ the softmax over the C-1 other classes:
``KL(p || q) = KL((p_y, 1 - p_y) || (q_y, 1 - q_y)) + (1 - p_y) KL(p~ || q~)``, that is
``kd = tckd + (1 - p_y) nckd``; also ``kd = target_kl + nckd_slice``.

Source: Zhao et al., "Decoupled Knowledge Distillation" (DKD).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedstill.losses.targets import other_logits


def label_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """The logit of each example's label (B,): logits (B, C), labels (B,) int64 in [0, C)."""
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def label_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-odds of the label, ``log p_y - log(1 - p_y)``: logits (B, C), labels (B,); returns
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
    > 0. Returns (B,) of the student's dtype, in nats, >= 0 up to rounding. The loss pulls the
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
    > 0. Returns (B,) of the student's dtype, in nats; negative if the student's probability of the
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


def _zero_label(logits: Tensor, labels: Tensor) -> Tensor:
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels.unsqueeze(-1)
    return torch.where(is_label, torch.zeros_like(logits), logits)


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
    also lowers the student's logits of majority classes.

    student, teacher: (B, C) float logits, C >= 2; labels: (B,) int64 in [0, C); majority: (C,) or
    (B, C) bool; temperature tau > 0. Returns (B,) of the student's dtype, in nats, >= 0 up to
    rounding; 0 if there is no minority class other than the label. Without majority classes, it
    equals ``nckd``. The label's logit has neither influence nor gradient. A teacher with equal
    logits is a uniform target.

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
