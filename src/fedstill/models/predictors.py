"""Models with frozen parameters as functions from inputs to logits: one network, ensembles, and
weighted votes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedstill.core.errors import CorruptFile, on_one_line
from fedstill.core.keys import restoring_global_state
from fedstill.core.payload import Tensors
from fedstill.core.records import ModelSpec
from fedstill.models import contract


@dataclass(frozen=True, eq=False)
class Predictor:
    """A model with frozen parameters. Called with inputs (B, ...), it returns logits (B, C)."""

    spec: ModelSpec
    params: Tensors
    _here: dict[torch.device, Tensors] = field(default_factory=dict, repr=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Logits in evaluation mode, without gradients."""
        if x.device not in self._here:
            self._here[x.device] = {k: v.to(x.device) for k, v in self.params.items()}
        m = contract.module(self.spec, "frozen").eval()
        with torch.inference_mode():
            return contract.forward(m, self._here[x.device], x)

    def as_module(self) -> nn.Module:
        """A new module with a copy of the parameters, in evaluation mode.

        Raises CorruptFile if the parameters do not fit the architecture.
        """
        with restoring_global_state(cuda=True):
            network = contract.build(self.spec)
        state = dict(self.params)
        if self.spec.held:
            state = {**network.state_dict(), **self.params}
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            raise CorruptFile(
                f"the weights do not fit {self.spec}: {on_one_line(error)}"
            ) from error
        return network.eval()


def predictor(spec: ModelSpec, params: Tensors) -> Predictor:
    """A function from inputs to the logits of frozen parameters, in evaluation mode."""
    return Predictor(spec, params)


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
