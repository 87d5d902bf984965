"""Several networks as one: what an ensemble answers, a model that votes with another one, and a
pair of which a client keeps one, of whatever architecture, and all share the other.
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
    """Logits (B, C) of several models -> log of the mean (B, C) of their probabilities."""

    def forward(self, *logits: Tensor) -> Tensor:
        """Log-probabilities, which are logits too."""
        return torch.stack([z.softmax(1) for z in logits]).mean(0).log()


class WeightedVote(nn.Module):
    """Logits (B, C) of several models -> log of the weighted mean (B, C) of their probabilities."""

    def __init__(self, shares: Sequence[float]) -> None:
        """shares: One for each model, summing to 1."""
        super().__init__()
        self.shares = tuple(shares)

    def forward(self, *logits: Tensor) -> Tensor:
        """Log-probabilities, which are logits too."""
        first, *following = (
            share * z.softmax(1) for share, z in zip(self.shares, logits, strict=True)
        )
        return sum(following, first).log()


class SideBySide(nn.Module):
    """Networks that see the same inputs, and what makes one answer of theirs."""

    def __init__(self, networks: Sequence[nn.Module], join: nn.Module) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        """The joined answer (B, C) to inputs (B, channels, H, W)."""
        return self.join(*(network(x) for network in self.networks))  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Joined:
    """Predictors that answer together: called with inputs (B, channels, H, W), it gives ``join`` of
    their logits.
    """

    predictors: Sequence[Predictor]
    join: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        """The joined answer (B, C), without gradients."""
        with torch.inference_mode():
            return self.join(*(predict(x) for predict in self.predictors))  # type: ignore[no-any-return]

    def as_module(self) -> nn.Module:
        """All networks in one module, each with a copy of its parameters, in evaluation mode."""
        networks = [predict.as_module() for predict in self.predictors]
        return SideBySide(networks, self.join).eval()


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
    """Networks ``own`` and ``shared``; what the pair gives is what the shared one does."""

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
    """Two networks in one: a personal one at each client, and a shared one, which is the server's
    model.

    own: The name of the client's own network, or an import path; clients.models can give each
    client another pair.
    shared: The name of the network that all share.
    own_arguments: Fields of the client's own network.
    shared_arguments: Fields of the network that all share.

    Source: Shen et al., "Federated Mutual Learning" (2020).
    """
    spec = ModelSpec("pair", input_shape, classes, vocabulary=vocabulary)
    own_network = building.construct(own, spec, building.from_pairs(own_arguments or {}))
    shared_network = building.construct(shared, spec, building.from_pairs(shared_arguments or {}))
    return Pair(own_network, shared_network)


def own_of(spec: ModelSpec, params: Tensors) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The client's own network of a pair, with its parameters."""
    fields = dict(spec.fields)
    table = building.from_pairs(fields.get("own_arguments") or {})
    own_spec = ModelSpec(
        fields["own"], spec.input_shape, spec.classes, as_pairs(table), vocabulary=spec.vocabulary
    )
    own_params = {k.removeprefix("own."): v for k, v in params.items() if k.startswith("own.")}
    return own_spec, own_params
