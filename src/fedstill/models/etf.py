"""A network whose last layer is a fixed simplex: C unit vectors with one angle between any two, and
one trained scale.

Source: Li et al., "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with
Synthetic and Fixed Classifier" (FedETF, 2023), section 3, and its code.
Reading: the code draws the simplex anew in every run; here it is the same in all, and no entry of
the model.
Reading: its old linear head stays in the model, unused and decayed; here there is none.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedstill.core.errors import ConfigError
from fedstill.core.fields import CountOrZero, Positive
from fedstill.core.keys import generator
from fedstill.core.records import ModelSpec, as_table_again
from fedstill.core.registry import register
from fedstill.models import contract
from fedstill.models.network import InputShape


@functools.lru_cache(maxsize=64)
def simplex(width: int, classes: int) -> Tensor:
    """C >= 2 unit vectors (D, C) float64 with mutual cosines -1/(C-1), which sum to 0: always the
    same; D >= C.
    """
    q, r = torch.linalg.qr(torch.rand(width, classes, generator=generator(0), dtype=torch.float64))
    # one of the factorisations of a matrix, whoever's routine it is
    corners = q * r.diagonal().sign()
    vertices: Tensor = (classes / (classes - 1)) ** 0.5 * (corners - corners.mean(1, keepdim=True))
    return vertices


class SimplexHead(nn.Module):
    """Logits (B, C) of features (B, D): scale times the cosine to each class's vertex; only the
    scale is trained.
    """

    simplex = True
    """By this ``models.contract.capabilities`` knows it."""

    def __init__(self, features: int, classes: int, scale: float) -> None:
        super().__init__()
        self.vertices = simplex(features, classes)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, h: Tensor) -> Tensor:
        """Logits that do not change where features are doubled."""
        return self.scale * (normalize(h, dim=1) @ self.vertices.to(h.device, h.dtype))


@register("model", "etf")
def etf(
    input_shape: InputShape,
    classes: int,
    of: str,
    arguments: dict[str, Any] | None = None,
    projection: CountOrZero = 0,
    scale: Positive = 10.0,
    vocabulary: int = 0,
) -> nn.Module:
    """A network with a fixed simplex as its last layer (FedETF).

    of: The network's name, or an import path; it has a body and a head, which is replaced.
    arguments: Its fields.
    projection: The width of a linear layer under the simplex; 0 for none.
    scale: What the cosines are multiplied by at first; it is trained. FedETF's ResNets begin
    with 1.

    Raises ConfigError for a network without body and head, and for fewer features than classes.
    """
    spec = ModelSpec(of, input_shape, classes, vocabulary=vocabulary)
    made = contract.construct(of, spec, as_table_again(arguments or {}))
    body = getattr(made, "body", None)
    if not isinstance(body, nn.Module) or not isinstance(getattr(made, "head", None), nn.Module):
        raise ConfigError(f"model.of = {of!r} has no body and head; choose a network that has")
    with torch.no_grad():
        given = body.eval()(contract.example(spec, 2)).shape[1]
    width = projection or given
    if width < max(2, classes):
        raise ConfigError(
            f"model.of = {of!r} has {width} features under the simplex, and {classes} classes need "
            "as many; "
            f"set model.projection to {max(2, classes)} or more"
        )
    if projection:
        made.body = nn.Sequential(body, nn.Linear(given, projection))
    made.head = SimplexHead(width, classes, scale)
    return made.train()
