"""A network with a wide layer of fixed random weights and a ReLU under its head, which then can
tell more apart.

Source: McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual Learning"
(2023), section 4.
Reading: the weights are the same in all runs, and no entry of the model: they are neither trained
nor sent.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.core.errors import ConfigError
from fedstill.core.fields import Count
from fedstill.core.keys import generator
from fedstill.core.payload import Tensors
from fedstill.core.records import ModelSpec, as_pairs, as_table_again
from fedstill.core.registry import register
from fedstill.models import contract
from fedstill.models.network import InputShape


@functools.lru_cache(maxsize=16)
def random_directions(features: int, width: int) -> Tensor:
    """Fixed random weights (D, M), of mean 0 and spread 1: always the same."""
    return torch.randn(features, width, generator=generator(0))


class Lift(nn.Module):
    """ReLU of features (B, D) times fixed random weights: (B, M)."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.directions = random_directions(features, width)

    def forward(self, h: Tensor) -> Tensor:
        """Features of the wider space, none below 0."""
        return torch.relu(h @ self.directions.to(h.device, h.dtype))


@register("model", "lifted")
def lifted(
    input_shape: InputShape,
    classes: int,
    of: str,
    arguments: dict[str, Any] | None = None,
    width: Count = 1250,
    vocabulary: int = 0,
) -> nn.Module:
    """A network with a wide layer of fixed random weights and a ReLU under its head.

    of: The network's name, or an import path; it has a body and a linear head, which is replaced.
    arguments: Its fields.
    width: How many numbers the head sees (M).

    Raises ConfigError for a network without body and head.
    """
    spec = ModelSpec(of, input_shape, classes, vocabulary=vocabulary)
    made = contract.construct(of, spec, as_table_again(arguments or {}))
    body, head = getattr(made, "body", None), getattr(made, "head", None)
    if not isinstance(body, nn.Module) or not isinstance(head, nn.Linear):
        raise ConfigError(
            f"model.of = {of!r} has no body and linear head; choose a network that has"
        )
    made.body = nn.Sequential(body, Lift(head.in_features, width))
    made.head = nn.Linear(width, classes, head.bias is not None)
    return made


def lifted_spec(spec: ModelSpec, width: int) -> ModelSpec:
    """The same network with a wide random layer under its head; as it is for a width of 0."""
    if not width:
        return spec
    fields = {"of": spec.name, "arguments": as_table_again(spec.fields), "width": width}
    return ModelSpec(
        "lifted", spec.input_shape, spec.classes, as_pairs(fields), vocabulary=spec.vocabulary
    )


def lifted_body(params: Tensors, width: int) -> dict[str, Tensor]:
    """The entries of a network's body as they are named in the lifted one; as they are for a width
    of 0.
    """
    body = {name.removeprefix("body."): v for name, v in params.items() if name.startswith("body.")}
    return {f"body.0.{name}" if width else f"body.{name}": v for name, v in body.items()}
