"""Distillation taken apart: what a teacher says of the true class, and what it says of the others
among themselves.

With p, q the softmax of teacher and student at one temperature, y the label, and p~, q~ the softmax
over the C-1 other classes:
``KL(p || q) = KL((p_y, 1 - p_y) || (q_y, 1 - q_y)) + (1 - p_y) KL(p~ || q~)``, that is
``kd = tckd + (1 - p_y) nckd``; also ``kd = target_kl + nckd_slice``.

Source: Zhao et al., "Decoupled Knowledge Distillation" (DKD).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def label_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """The logit of each example's label: logits (B, C), labels (B,) int64 in [0, C), gives (B,)."""
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def other_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits of the C-1 classes other than the label, in class order: logits (B, C), labels
    (B,), gives (B, C-1).

    The label's logit is taken out, not masked, so that nothing can flow back to it.

    >>> other_logits(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1]))
    tensor([[1., 3.]])
    """
    places = torch.arange(logits.shape[-1] - 1, device=logits.device)
    return logits.gather(-1, places + (places >= labels.unsqueeze(-1)).to(places.dtype))


def label_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The log odds of the label against all others, ``log p_y - log(1 - p_y)``: logits (B, C),
    labels (B,), gives (B,).

    Its log-sigmoids are ``log p_y`` and, of its negative, ``log(1 - p_y)``, exact where the
    probabilities are 0 or 1.
    """
    return label_logit(logits, labels) - other_logits(logits, labels).logsumexp(-1)


def tckd(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """True-class distillation, one value per example: tau² times the KL of the pair (true class,
    all others).

    student, teacher: (B, C) float logits, C >= 2; labels: (B,) int64 in [0, C); temperature tau
    > 0. Gives (B,) of the student's dtype, in nats, >= 0 up to rounding. It holds the student's
    confidence near the teacher's.

    Source: SFedKD, eq. 4; DKD.
    Reading: SFedKD names no temperature and prints no tau²; as in DKD's code the term is multiplied
    by it.

    >>> tckd(torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([0]))
    tensor([0.])
    """
    s = label_margin(student / temperature, labels)
    t = label_margin(teacher.to(student.dtype) / temperature, labels)
    true = t.sigmoid() * (logsigmoid(t) - logsigmoid(s))
    rest = (-t).sigmoid() * (logsigmoid(-t) - logsigmoid(-s))
    return temperature**2 * (true + rest)


def target_kl(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """The true class's own entry of the KL, one value per example:
    ``tau² p_y (log p_y - log q_y)``.

    student, teacher: (B, C) float logits, C >= 2; labels: (B,) int64 in [0, C); temperature tau
    > 0. Gives (B,) of the student's dtype, in nats; negative where the student is surer of the
    label than the teacher. Its gradient is that of cross-entropy weighted by the
    teacher's confidence: it always pushes q_y up.

    Source: FedADKD, eq. 3.
    Reading: the equation sums over classes a quantity that exists for the label only; we take that
    one entry. No temperature is named (tau = 1); another one multiplies by tau².

    >>> target_kl(torch.tensor([[5.0, 0.0]]), torch.zeros(1, 2), torch.tensor([0])) < 0
    tensor([True])
    """
    s = logsigmoid(label_margin(student / temperature, labels))
    t = logsigmoid(label_margin(teacher.to(student.dtype) / temperature, labels))
    return temperature**2 * t.exp() * (t - s)


def nckd(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """Not-true-class distillation, one value per example: tau² times the KL over the C-1 classes,
    the label removed.

    student, teacher: (B, C) float logits, C >= 2; labels: (B,) int64 in [0, C); temperature tau
    > 0. Gives (B,) of the student's dtype, in nats, >= 0 up to rounding. The label's logit has
    exactly no influence and no gradient.

    Source: FedNTD, eq. 10 and 11; FedADKD eq. 4; SFedKD eq. 3; DKD's NCKD.
    Reading: FedNTD's eq. 10 has no tau², its code does; we keep it. DKD's code subtracts 1000 from
    the label's logit, which is the same number.

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
    """``nckd`` with the label's place kept at logit 0 instead of removed: a stand-in for FedDKD's
    "original" form.

    Shapes and ranges as in ``nckd``. The place keeps a share of ``exp(0)`` in the softmax, so the
    term also depends on how large the other logits are, which ``nckd`` does not.

    Source: FedADKD, sec. II.B, "original" against "dimension-removed".
    Reading: the paper does not define "original", and DKD's own formula cannot differ from removal;
    this one does.
    """
    q = torch.log_softmax(_zero_label(student, labels) / temperature, dim=-1)
    p = torch.log_softmax(_zero_label(teacher.to(student.dtype), labels) / temperature, dim=-1)
    return temperature**2 * (p.exp() * (p - q)).sum(-1)


def nckd_slice(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """The other classes' own entries of the full KL, one value per example.

    ``tau² sum_{c != y} p_c (log p_c - log q_c)``, not renormalised, so it may be negative; with
    ``target_kl`` it adds up to ``kd``. Shapes and ranges as in ``nckd``.

    Source: FedADKD, sec. II.B: a second reading of the "original" form.
    """
    q = other_logits(torch.log_softmax(student / temperature, dim=-1), labels)
    p = other_logits(torch.log_softmax(teacher.to(student.dtype) / temperature, dim=-1), labels)
    return temperature**2 * (p.exp() * (p - q)).sum(-1)


def _zero_label(logits: Tensor, labels: Tensor) -> Tensor:
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels.unsqueeze(-1)
    return torch.where(is_label, torch.zeros_like(logits), logits)
