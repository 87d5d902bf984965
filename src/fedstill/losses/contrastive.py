"""Contrast between models: features near one model's, far from another's."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus


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
    near, far = near.to(features.dtype), far.to(features.dtype)
    closer = cosine_similarity(features, near, dim=-1) - cosine_similarity(features, far, dim=-1)
    return softplus(-closer / temperature)
