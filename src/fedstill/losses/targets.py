"""Losses of logits with a target: the labels (cross-entropy), or the logits of one teacher
(distillation).

``fedstill.losses.decoupled`` has other terms of the divergence between teacher and student.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor


def cross_entropy(
    logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0, floor: float = 0.0
) -> Tensor:
    """Cross-entropy with the labels, one value per example:
    ``-log(softmax(logits / temperature)[label] + floor)``.

    logits: (B, C) float; labels: (B,) int64 in [0, C); temperature > 0, a number or a () tensor;
    floor >= 0. Returns (B,) of the logits' dtype, in nats. The loss has no factor for the
    temperature, so a low temperature increases the gradient. A floor bounds the loss by
    -log(floor); for probabilities far below the floor, the gradient vanishes.

    Source: Malik and Nafees, "Adaptive Curriculum Learning for Bidirectional Federated
    Knowledge Distillation" (HiPer-FedKD), sec. 3.1.2: local training at the client's own
    temperature.
    Reading: the paper's formula has no floor, but its code has 1e-8. Without a floor we compute in
    log space, so that the gradient does not vanish if a probability underflows.

    >>> cross_entropy(torch.tensor([[0.0, 0.0], [1e4, 0.0]]), torch.tensor([0, 1]))
    tensor([6.9315e-01, 1.0000e+04])
    """
    if isinstance(temperature, Tensor) or temperature != 1:
        logits = logits / temperature
    log_p = torch.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if floor > 0:
        log_p = torch.logaddexp(log_p, torch.full_like(log_p, math.log(floor)))
    return -log_p


def adjusted_cross_entropy(
    logits: Tensor, labels: Tensor, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0
) -> Tensor:
    """Cross-entropy of logits with a scale and a shift for each class, one value per example.

    logits: (B, C) float; labels: (B,) int64 in [0, C); scale, shift: (C,), or numbers. Returns (B,)
    of the logits' dtype, in nats, >= 0: the cross-entropy of ``scale * logits + shift``. With the
    logarithms of class counts as shift, it is balanced softmax.

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


def other_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits of the C-1 classes other than the label, in class order: logits (B, C), labels
    (B,); returns (B, C-1).

    The label's logit is removed, not masked, so that it gets no gradient.

    >>> other_logits(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1]))
    tensor([[1., 3.]])
    """
    places = torch.arange(logits.shape[-1] - 1, device=logits.device)
    return logits.gather(-1, places + (places >= labels.unsqueeze(-1)).to(places.dtype))


def kd(student: Tensor, teacher: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Knowledge distillation, one value per example:
    ``tau² KL(softmax(teacher / tau) || softmax(student / tau))``.

    student, teacher: (B, C) float logits; temperature tau > 0. Returns (B,) of the student's dtype,
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


def nckd(
    student: Tensor, teacher: Tensor, labels: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """Not-true-class distillation, one value per example: tau² times the KL over the C-1 classes
    other than the label.

    student, teacher: (B, C) float logits, C >= 2; labels: (B,) int64 in [0, C); temperature tau
    > 0. Returns (B,) of the student's dtype, in nats, >= 0 up to rounding. The label's logit has
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


def other_mse(
    student: Tensor, teacher: Tensor, labels: Tensor, reduction: Literal["sum", "mean"] = "sum"
) -> Tensor:
    """Squared error of the logits of the C-1 classes other than the label, one value per example.

    student, teacher: (B, C) float logits, C >= 2; labels: (B,) int64 in [0, C); reduction over the
    C-1 classes. Returns (B,) of the student's dtype, >= 0. The label's logit gets no gradient.

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
