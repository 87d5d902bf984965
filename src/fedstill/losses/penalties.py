"""Penalties: the distance of parameters from an anchor, and the contrast of features with those of
other models.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus


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
