"""A network for a stack of clients: convolutions and poolings of all clients at once, channels next
to each other.

Under ``torch.func.vmap`` a convolution with a weight for every client becomes one with groups, and
so it is computed here too, but in the memory order that torch's kernels are fastest in, (image,
row, column, client, channel), from one layer to the next: torch's own rule would copy its input and
its output into another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstill.models.layers import MaxPool2d
from fedstill.models.network import Network, OnCircle

SHAPES = (nn.Flatten, nn.Unflatten)
KNOWN = (
    nn.Sequential,
    Network,
    OnCircle,
    nn.Conv2d,
    nn.MaxPool2d,
    MaxPool2d,
    nn.ReLU,
    *SHAPES,
    nn.Linear,
)
"""Layers that may stand in such a network: others may ask for an order of memory that ``vmap`` does
not tell.
"""


def stacked(m: nn.Module) -> nn.Module:
    """The module, its layers changed in place to those of a stack; it then runs under ``vmap``
    only.

    One with other layers than ``KNOWN``, or changed before, is left as it is: other layers run by
    torch's own rules.
    """
    layers = list(m.modules())
    if all(type(layer) in KNOWN and _plain(layer) for layer in layers):
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                layer.__class__ = _Conv2d
            elif isinstance(layer, nn.MaxPool2d):
                layer.__class__ = _MaxPool2d
            elif isinstance(layer, nn.Linear):
                layer.__class__ = _Linear
    return m


def _plain(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros"
    return not (isinstance(layer, nn.MaxPool2d) and layer.return_indices)


class _Conv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        stride, padding, dilation, groups = self.stride, self.padding, self.dilation, self.groups

        def convolve(
            clients: int, x: Tensor, weight: Tensor, bias: Tensor | None
        ) -> tuple[Tensor, int]:
            own = weight.flatten(0, 1), bias if bias is None else bias.flatten()
            return _apart(
                functional.conv2d(
                    _side_by_side(x), *own, stride, padding, dilation, groups * clients
                ),
                clients,
            )

        return _Layer.apply(convolve, x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]


class _MaxPool2d(nn.MaxPool2d):
    def forward(self, x: Tensor) -> Tensor:
        how = (self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)

        def pool(clients: int, x: Tensor) -> tuple[Tensor, int]:
            return _apart(functional.max_pool2d(_side_by_side(x), *how), clients)

        return _Layer.apply(pool, x)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(nn.Linear):
    """As W x, not x W': so the gradient of W comes out in the memory order that W has."""

    def forward(self, x: Tensor) -> Tensor:
        def multiply(
            clients: int, x: Tensor, weight: Tensor, bias: Tensor | None
        ) -> tuple[Tensor, int]:
            columns = x.transpose(1, 2)
            out = (
                weight @ columns
                if bias is None
                else torch.baddbmm(bias.unsqueeze(2), weight, columns)
            )
            return out.transpose(1, 2), 0

        if x.dim() != 2:
            return super().forward(x)
        return _Layer.apply(multiply, x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]


def _side_by_side(x: Tensor) -> Tensor:
    """Clients' images (K, B, C, H, W) as (B, K C, H, W), channels next to each other in memory."""
    return x.movedim(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)


def _apart(x: Tensor, clients: int) -> tuple[Tensor, int]:
    """Images (B, K C, H, W) as (B, K, C, H, W), nothing copied, and where the clients' axis is."""
    return x.view(len(x), clients, -1, *x.shape[2:]), 1


class _Layer(torch.autograd.Function):
    """A layer with a rule of its own under ``vmap``: from tensors (K, ...) to one, and where that
    has the clients.
    """

    @staticmethod
    def forward(*_: Any) -> Tensor:
        """Not outside of ``vmap``."""
        raise RuntimeError("a layer of a stack runs under torch.func.vmap only")

    @staticmethod
    def setup_context(*_: Any) -> None:
        """Nothing: autograd records what the rule does."""

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[int | None, ...],
        rule: Callable[..., tuple[Tensor, int]],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, int]:
        """The layer for all clients at once."""
        return rule(
            info.batch_size,
            *(_of_all(t, d, info.batch_size) for t, d in zip(tensors, dims[1:], strict=True)),
        )


def _of_all(value: Tensor | None, dim: int | None, clients: int) -> Tensor | None:
    """The clients' axis first; what all share is repeated along it, without a copy."""
    if value is None:
        return None
    return value.expand(clients, *value.shape) if dim is None else value.movedim(dim, 0)
