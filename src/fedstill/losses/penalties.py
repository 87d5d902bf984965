"""Penalties: on parameters that leave where they started, and on features (contrast)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

# Penalties on parameters: what a client pays for leaving where it started.


def proximal(
    params: Mapping[str, Tensor], anchor: Mapping[str, Tensor], mu: float | Tensor
) -> Tensor:
    """The proximal term, one number for the model: ``(mu / 2) ||params - anchor||²`` over all named
    tensors.

    params: {name: tensor}, the entries in training and no buffers; anchor: at least the same names,
    equal shapes; mu >= 0. Gives a () tensor, >= 0. Its gradient is ``mu (params - anchor)``, 0 at
    the anchor.

    Source: Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx).

    >>> proximal({"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)}, mu=0.1)
    tensor(1.2500)
    """
    if not params:
        return torch.zeros(())
    return (
        mu
        / 2
        * torch.stack([(w - anchor[name]).square().sum() for name, w in params.items()]).sum()
    )


def quadratic(
    params: Mapping[str, Tensor],
    anchor: Mapping[str, Tensor],
    importance: Mapping[str, Tensor],
    weight: float | Tensor,
) -> Tensor:
    """A pull back to an anchor, each entry as firmly as it mattered:
    ``weight sum_i Omega_i (w_i - a_i)²``.

    importance: {name: Omega}, the entries that count; params, anchor: at least the same names,
    equal shapes; weight >= 0. Gives a () tensor, 0 at the anchor, and negative only if an Omega is.

    Source: Zenke et al., "Continual Learning Through Synaptic Intelligence", eq. 4; CWC.

    >>> one = {"w": torch.tensor([1.0, 2.0])}
    >>> quadratic(one, {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 0.5])}, weight=2.0)
    tensor(6.)
    """
    if not importance:
        return torch.zeros(())
    return (
        weight
        * torch.stack(
            [(o * (params[k] - anchor[k]).square()).sum() for k, o in importance.items()]
        ).sum()
    )


# Contrast between models: features near one model's, far from another's.


def model_contrast(
    features: Tensor, near: Tensor, far: Tensor, temperature: float | Tensor = 0.5
) -> Tensor:
    """``-log(exp(cos(h, near)/T) / (exp(cos(h, near)/T) + exp(cos(h, far)/T)))``, one value per
    example.

    features, near, far: (B, D) float; temperature T > 0. Gives (B,) of the features' dtype, in
    nats, > 0; log 2 where near and far are the same. Features of length 0 have cosine 0 with
    everything.

    Source: Li et al., "Model-Contrastive Federated Learning" (MOON), eq. 3.

    >>> import torch
    >>> h = torch.tensor([[1.0, 0.0]])
    >>> round(model_contrast(h, h, h).item(), 4)
    0.6931
    """
    near_cosine = cosine_similarity(features, near.to(features.dtype), dim=-1)
    far_cosine = cosine_similarity(features, far.to(features.dtype), dim=-1)
    return softplus(-(near_cosine - far_cosine) / temperature)
