"""Several predictors as one: what an ensemble answers, or a model that votes with another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedstill.models.contract import Predictor


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
        first, *others = (
            share * z.softmax(1) for share, z in zip(self.shares, logits, strict=True)
        )
        return sum(others, first).log()


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

    each: Sequence[Predictor]
    join: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        """The joined answer (B, C), without gradients."""
        with torch.inference_mode():
            return self.join(*(predict(x) for predict in self.each))  # type: ignore[no-any-return]

    def as_module(self) -> nn.Module:
        """All networks in one module, each with a copy of its parameters, in evaluation mode."""
        return SideBySide([predict.as_module() for predict in self.each], self.join).eval()


def module_of(predict: Callable[[Tensor], Tensor]) -> nn.Module | None:
    """What a predictor computes, as a module with its weights: what its ``as_module`` gives, or
    itself if it is one.

    None for any other function: it may hold weights, but nobody can see them.
    """
    if isinstance(predict, nn.Module):
        return predict
    made = getattr(predict, "as_module", lambda: None)()
    return made if isinstance(made, nn.Module) else None
