"""A network for a stack of clients: convolutions and poolings of all clients at once, channels next to each other.

Under ``torch.func.vmap`` a convolution with a weight for every client becomes one with groups, and so it is computed
here too, but in the memory order that torch's kernels are fastest in, (image, row, column, client, channel), from one
layer to the next: torch's own rule would copy its input and its output into another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstill.models.network import Network, OnCircle
from fedstill.models.pooling import MaxPool2d

KNOWN = (nn.Sequential, Network, OnCircle, nn.Conv2d, nn.MaxPool2d, MaxPool2d, nn.ReLU, nn.Flatten, nn.Linear)
"""Layers that may stand in such a network: others may ask for an order of memory that ``vmap`` does not tell."""


def stacked(m: nn.Module) -> nn.Module:
    """The module, its layers changed in place to those of a stack; it then runs under ``vmap`` only.

    One with other layers than ``KNOWN``, or changed before, is left as it is: other layers run by torch's own rules.
    """
    layers = list(m.modules())
    if all(type(layer) in KNOWN and _plain(layer) for layer in layers):
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                layer.__class__ = _Conv2d
            elif isinstance(layer, nn.MaxPool2d):
                layer.__class__ = _MaxPool2d
    return m


def _plain(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros"
    return not (isinstance(layer, nn.MaxPool2d) and layer.return_indices)


class _Conv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        stride, padding, dilation, groups = self.stride, self.padding, self.dilation, self.groups

        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, clients: int) -> Tensor:
            return functional.conv2d(x, weight, bias, stride, padding, dilation, groups * clients)

        return _AllAtOnce.apply(convolve, x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]


class _MaxPool2d(nn.MaxPool2d):
    def forward(self, x: Tensor) -> Tensor:
        how = (self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)

        def pool(x: Tensor, weight: None, bias: None, clients: int) -> Tensor:
            return functional.max_pool2d(x, *how)

        return _AllAtOnce.apply(pool, x, None, None)  # type: ignore[no-any-return, no-untyped-call]


class _AllAtOnce(torch.autograd.Function):
    """A layer whose rule under ``vmap`` runs it once, on images (B, K C, H, W) and weights (K O, C, h, w)."""

    @staticmethod
    def forward(*_: Any) -> Tensor:
        """Not outside of ``vmap``."""
        raise RuntimeError("a layer of a stack runs under torch.func.vmap only")

    @staticmethod
    def setup_context(*_: Any) -> None:
        """Nothing: autograd records what the rule does."""

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], run: Callable[..., Tensor], x: Tensor, *weights: Tensor | None
    ) -> tuple[Tensor, int]:
        """The layer for all clients, and where the output (B, K, O, H, W) has their axis."""
        clients: int = info.batch_size
        images = _with_axis(x, dims[1], 1, clients).flatten(1, 2).contiguous(memory_format=torch.channels_last)
        own = (
            w if w is None else _with_axis(w, dim, 0, clients).flatten(0, 1)
            for w, dim in zip(weights, dims[2:], strict=True)
        )
        out = run(images, *own, clients)
        return out.view(len(out), clients, -1, *out.shape[2:]), 1


def _with_axis(value: Tensor, dim: int | None, at: int, clients: int) -> Tensor:
    """The clients' axis moved to ``at``; what all share is repeated along it, without a copy."""
    if dim is not None:
        return value.movedim(dim, at)
    return value.unsqueeze(at).expand(*value.shape[:at], clients, *value.shape[at:])
