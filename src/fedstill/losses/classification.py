"""Losses of labels, with or without the label counts of a client."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedstill.losses.distillation import other_logits

# What a model pays for not knowing the label of an example.


def cross_entropy(
    logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0, floor: float = 0.0
) -> Tensor:
    """Cross-entropy with the labels, one value per example:
    ``-log(softmax(logits / temperature)[label] + floor)``.

    logits: (B, C) float; labels: (B,) int64 in [0, C); temperature > 0, a number or a () tensor;
    floor >= 0. Gives (B,) of the logits' dtype, in nats. There is no factor for the temperature: a
    small one sharpens and multiplies the gradient. A floor bounds the loss by -log(floor), and
    where the probability is far below it, there is no gradient.

    Source: Malik and Nafees, "Adaptive Curriculum Learning for Bidirectional Federated
    Knowledge Distillation" (HiPer-FedKD), sec. 3.1.2: local training at the client's own
    temperature.
    Reading: the paper's formula has no floor, its code 1e-8. Without one we stay in log space,
    which keeps the gradient where a probability underflows.

    >>> cross_entropy(torch.tensor([[0.0, 0.0], [1e4, 0.0]]), torch.tensor([0, 1]))
    tensor([6.9315e-01, 1.0000e+04])
    """
    if isinstance(temperature, Tensor) or temperature != 1:
        logits = logits / temperature
    log_p = torch.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if floor > 0:
        log_p = torch.logaddexp(log_p, torch.full_like(log_p, math.log(floor)))
    return -log_p


# Objectives that know how many examples of each class a client has.


def adjusted_cross_entropy(
    logits: Tensor, labels: Tensor, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0
) -> Tensor:
    """Cross-entropy of logits scaled and shifted class by class, one value per example.

    logits: (B, C) float; labels: (B,) int64 in [0, C); scale, shift: (C,), or numbers. Gives (B,)
    of the logits' dtype, in nats, >= 0: the cross-entropy of ``scale * logits + shift``. A shift by
    log counts is balanced softmax.

    Source: Li & Zhan, "FedRS" (scale); Zhang et al., "Federated Learning with Label Distribution
    Skew via Logits Calibration" (shift).

    >>> adjusted_cross_entropy(
    ...     torch.zeros(1, 2), torch.tensor([0]), shift=torch.tensor([1.0, 3.0]).log()
    ... )
    tensor([1.3863])
    """
    if isinstance(scale, Tensor):
        scale = scale.to(logits.dtype)
    if isinstance(shift, Tensor):
        shift = shift.to(logits.dtype)
    return cross_entropy(logits * scale + shift, labels)


def minority_kd(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    majority: Tensor,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """Distillation of the classes that a client has little of, one value per example: tau² times a
    KL.

    The teacher's part is its softmax over the classes that are neither the label nor of the
    majority; the student's is its softmax over all C-1 classes other than the label. So the student
    is pushed down on majority classes too. student, teacher: (B, C) float logits, C >= 2; labels:
    (B,) int64 in [0, C); majority: (C,) or (B, C) bool; temperature tau > 0. Gives (B,) of the
    student's dtype, in nats, >= 0 up to rounding; 0 where no class is left for the teacher. Without
    a majority it is ``nckd``. The label's logit has exactly no influence and no gradient. Equal
    logits of the teacher are a uniform target.

    Source: Lu et al., "Federated Learning with Label-Masking Distillation" (FedLMD).
    Reading: the code subtracts 1000 from masked logits, which is removal, unless the label is the
    only minority class: then every class is masked and the loss is about 1000 times the teacher's
    probability of the label. Here it is 0.

    >>> minority_kd(
    ...     torch.zeros(1, 3),
    ...     torch.zeros(1, 3),
    ...     torch.tensor([0]),
    ...     torch.tensor([False, True, False]),
    ... )
    tensor([0.6931])
    """
    minority = other_logits((~majority).expand(student.shape), labels)  # (B, C-1) bool
    # Without a minority class nothing is masked: a softmax over no class is NaN.
    masked = ~minority & minority.any(-1, keepdim=True)
    q = torch.log_softmax(other_logits(student, labels) / temperature, dim=-1)
    t = other_logits(teacher.to(student.dtype), labels) / temperature
    p = torch.log_softmax(t.masked_fill(masked, -torch.inf), dim=-1)
    far = p.exp().masked_fill(~minority, 0.0) * (p.masked_fill(~minority, 0.0) - q)
    return temperature**2 * far.sum(-1)
