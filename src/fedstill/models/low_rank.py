"""A network with a low-rank change beside each linear layer (LoRA): W x + (alpha / rank) B A x.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2022), section 4.1: A is
drawn, B is 0, so that the network starts as it is.
Reading: the mean over clients of B and of A is not that of B A. With
``train_only = ["head.", "*.lora_b"]`` A stays as it was drawn, the same for all, and the mean is
exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.core.errors import ConfigError
from fedstill.core.fields import Count, Positive
from fedstill.core.records import ModelSpec, as_table_again
from fedstill.core.registry import register
from fedstill.models import contract
from fedstill.models.network import InputShape
from fedstill.models.parameters import matches


class LowRankLinear(nn.Linear):
    """A linear layer with entries ``lora_a`` (rank, in) and ``lora_b`` (out, rank) beside its own,
    whose names stay.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, and that of the low-rank change."""
        return super().forward(x) + self.scale * ((x @ self.lora_a.T) @ self.lora_b.T)


@register("model", "low_rank")
def low_rank(
    input_shape: InputShape,
    classes: int,
    of: str,
    arguments: dict[str, Any] | None = None,
    rank: Count = 4,
    alpha: Positive = 8.0,
    layers: tuple[str, ...] = ("body.",),
    vocabulary: int = 0,
) -> nn.Module:
    """A network with a low-rank change beside its linear layers (LoRA), to train that alone.

    of: The network's name, or an import path.
    arguments: Its fields.
    rank: The rank of a change.
    alpha: What the change is multiplied by, times 1 / rank.
    layers: Which linear layers have one: names, beginnings with a point, or patterns with * and ?.

    With start_from, start_from_partial = true and train_only = ["head.", "*.lora_*"], the network's
    own weights stay as the file has them, and only the changes and the head are trained and sent.
    Raises ConfigError if no layer is named.
    """
    spec = ModelSpec(of, input_shape, classes, vocabulary=vocabulary)
    fields: Mapping[str, Any] = as_table_again(arguments or {})
    made = contract.construct(of, spec, fields)
    named = [
        (n, m) for n, m in made.named_modules() if type(m) is nn.Linear and matches(f"{n}.", layers)
    ]
    if not named:
        linear = [n for n, m in made.named_modules() if type(m) is nn.Linear]
        raise ConfigError(
            f"model.layers = {list(layers)} names none of {of}'s linear layers: "
            f"{', '.join(linear) or 'none'}"
        )
    for _, layer in named:
        a = torch.empty(rank, layer.in_features, dtype=layer.weight.dtype)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        layer.__class__ = LowRankLinear
        layer.lora_a = nn.Parameter(a)
        layer.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank, dtype=a.dtype))
        layer.scale = alpha / rank  # type: ignore[assignment]
    return made
