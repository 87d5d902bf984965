"""Several networks as one: ensembles, weighted votes, and pairs of a personal and a shared
network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.core.payload import Tensors
from fedstill.core.records import ModelSpec, as_pairs
from fedstill.core.registry import register
from fedstill.models import building
from fedstill.models.contract import Predictor
from fedstill.models.network import InputShape


class MeanOfProbabilities(nn.Module):
    """The logarithm of the mean of several models' probabilities."""

    def forward(self, *logits: Tensor) -> Tensor:
        """Log-probabilities (B, C) from the logits (B, C) of each model."""
        return torch.stack([z.softmax(1) for z in logits]).mean(0).log()


class WeightedVote(nn.Module):
    """The logarithm of the weighted mean of several models' probabilities."""

    def __init__(self, shares: Sequence[float]) -> None:
        """shares: the weight of each model; they sum to 1."""
        super().__init__()
        self.shares = tuple(shares)

    def forward(self, *logits: Tensor) -> Tensor:
        """Log-probabilities (B, C) from the logits (B, C) of each model."""
        first, *following = (
            share * z.softmax(1) for share, z in zip(self.shares, logits, strict=True)
        )
        return sum(following, first).log()


class CombinedNetwork(nn.Module):
    """Networks with the same input, whose logits a module ``combine`` combines."""

    def __init__(self, networks: Sequence[nn.Module], combine: nn.Module) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        """The combined logits (B, C) of inputs (B, channels, H, W)."""
        return self.combine(*(network(x) for network in self.networks))  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class CombinedPredictor:
    """Several predictors whose logits a module ``combine`` combines. Called with inputs (B,
    channels, H, W), it returns logits (B, C).
    """

    predictors: Sequence[Predictor]
    combine: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        """The combined logits (B, C), without gradients."""
        with torch.inference_mode():
            return self.combine(*(predict(x) for predict in self.predictors))  # type: ignore[no-any-return]

    def as_module(self) -> nn.Module:
        """All networks in one module, each with a copy of its parameters, in evaluation mode."""
        networks = [predict.as_module() for predict in self.predictors]
        return CombinedNetwork(networks, self.combine).eval()


def module_of(predict: Callable[[Tensor], Tensor]) -> nn.Module | None:
    """A predictor as a module with its weights: the result of its ``as_module``, or itself if it is
    a module.

    None for any other function: its weights, if it has any, are not accessible.
    """
    if isinstance(predict, nn.Module):
        return predict
    module = getattr(predict, "as_module", lambda: None)()
    if not isinstance(module, nn.Module):
        return None
    return module


class Pair(nn.Module):
    """A personal network ``own`` and a network ``shared``. The pair's output is that of
    ``shared``.
    """

    def __init__(self, own: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.own = own
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """The shared network's logits (B, C)."""
        return self.shared(x)  # type: ignore[no-any-return]


@register("model", "pair")
def pair(
    input_shape: InputShape,
    classes: int,
    own: str = "cnn",
    shared: str = "cnn",
    *,
    own_arguments: dict[str, Any] | None = None,
    shared_arguments: dict[str, Any] | None = None,
    vocabulary: int = 0,
) -> nn.Module:
    """Two networks in one: a personal network for each client, and a shared network, which is the
    server's model.

    own: The name or import path of the personal network; clients.models can give clients different
    pairs.
    shared: The name or import path of the shared network.
    own_arguments: The fields of the personal network.
    shared_arguments: The fields of the shared network.

    Source: Shen et al., "Federated Mutual Learning" (2020).
    """
    spec = ModelSpec("pair", input_shape, classes, vocabulary=vocabulary)
    own_network = building.construct(own, spec, building.from_pairs(own_arguments or {}))
    shared_network = building.construct(shared, spec, building.from_pairs(shared_arguments or {}))
    return Pair(own_network, shared_network)


def personal_network(spec: ModelSpec, params: Tensors) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The spec and the parameters of a pair's personal network."""
    fields = dict(spec.fields)
    table = building.from_pairs(fields.get("own_arguments") or {})
    personal_spec = ModelSpec(
        fields["own"], spec.input_shape, spec.classes, as_pairs(table), vocabulary=spec.vocabulary
    )
    personal_params = {k.removeprefix("own."): v for k, v in params.items() if k.startswith("own.")}
    return personal_spec, personal_params
