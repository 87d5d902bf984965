"""Losses without a teacher: cross-entropies with labels, penalties on the distance of parameters
from an anchor, and contrastive losses of features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

# ---- labels --------------------------------------------------------------------------------------


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


# ---- parameters ----------------------------------------------------------------------------------


def proximal(
    params: Mapping[str, Tensor], anchor: Mapping[str, Tensor], mu: float | Tensor
) -> Tensor:
    """The proximal term, one number for the model: ``(mu / 2) ||params - anchor||²`` over all
    parameters.

    params: {name: tensor}, the trained parameters without buffers; anchor: at least the same names,
    with equal shapes; mu >= 0. Returns a scalar tensor, >= 0. Its gradient is ``mu (params -
    anchor)``.

    Source: Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx).

    >>> proximal({"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)}, mu=0.1)
    tensor(1.2500)
    """
    if not params:
        return torch.zeros(())
    squares = [(w - anchor[name]).square().sum() for name, w in params.items()]
    return mu / 2 * torch.stack(squares).sum()


def quadratic(
    params: Mapping[str, Tensor],
    anchor: Mapping[str, Tensor],
    importance: Mapping[str, Tensor],
    weight: float | Tensor,
) -> Tensor:
    """A quadratic penalty on the distance from an anchor, with an importance for each parameter:
    ``weight sum_i Omega_i (w_i - a_i)²``.

    importance: {name: Omega}, the penalised entries; params, anchor: at least the same names, with
    equal shapes; weight >= 0. Returns a scalar tensor, 0 at the anchor; negative only if an Omega
    is negative.

    Source: Zenke et al., "Continual Learning Through Synaptic Intelligence", eq. 4; CWC.

    >>> one = {"w": torch.tensor([1.0, 2.0])}
    >>> quadratic(one, {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 0.5])}, weight=2.0)
    tensor(6.)
    """
    if not importance:
        return torch.zeros(())
    penalties = [
        (omega * (params[name] - anchor[name]).square()).sum() for name, omega in importance.items()
    ]
    return weight * torch.stack(penalties).sum()


# ---- features ------------------------------------------------------------------------------------


def model_contrast(
    features: Tensor, near: Tensor, far: Tensor, temperature: float | Tensor = 0.5
) -> Tensor:
    """``-log(exp(cos(h, near)/T) / (exp(cos(h, near)/T) + exp(cos(h, far)/T)))``, one value per
    example.

    features, near, far: (B, D) float; temperature T > 0. Returns (B,) of the features' dtype, in
    nats, > 0; log 2 if near and far are equal. Features of norm 0 have cosine 0.

    Source: Li et al., "Model-Contrastive Federated Learning" (MOON), eq. 3.

    >>> import torch
    >>> h = torch.tensor([[1.0, 0.0]])
    >>> round(model_contrast(h, h, h).item(), 4)
    0.6931
    """
    near_cosine = cosine_similarity(features, near.to(features.dtype), dim=-1)
    far_cosine = cosine_similarity(features, far.to(features.dtype), dim=-1)
    return softplus(-(near_cosine - far_cosine) / temperature)
