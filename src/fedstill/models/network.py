"""A network in two parts, a body and a linear head, and layers that several networks share:
pooling, normalisation and attention.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.functional import normalize

from fedstill.core.errors import ConfigError

ImageShape = tuple[int, int, int]
"""(channels, height, width). A network whose ``input_shape`` is annotated so takes images only."""

SeriesShape = tuple[int, int]
"""(channels, steps). A network whose ``input_shape`` is annotated so takes series only."""

RowShape = tuple[int]
"""(columns,). A network whose ``input_shape`` is annotated so takes rows of numbers only."""

InputShape = tuple[int, ...]
"""The shape of one example of any kind, as ``ModelSpec`` says it."""


class Network(nn.Module):
    """``forward(x) = head(body(x))``: body gives the (B, D) penultimate features, head is the last
    linear layer.

    x: (B, *input_shape), float or token ids. Gives (B, C) logits.
    """

    def __init__(self, body: nn.Module, features: int, classes: int, bias: bool = True) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(features, classes, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C) of a batch."""
        return self.head(self.body(x))  # type: ignore[no-any-return]


def projected(width: int, projection: int) -> tuple[list[nn.Module], int]:
    """The layers of a projection on ``width`` features, and the width after them: none, if
    ``projection`` is 0.

    Source: MOON's network, whose head sits on top of a linear layer of the same width, ReLU, and a
    narrower one.
    """
    if not projection:
        return [], width
    return [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, projection)], projection


class OnCircle(nn.Module):
    """(B, 2) vectors divided by their Euclidean norm; the zero vector stays."""

    def forward(self, x: Tensor) -> Tensor:
        """Vectors of norm 1."""
        return normalize(x, dim=1)


def flat_size(name: str, layers: list[nn.Module], input_shape: ImageShape) -> int:
    """How many numbers an image becomes after convolutions and max-pools with square kernels.

    Raises ConfigError, in the name of the model, if the image is too small for them.
    """
    channels, *sides = input_shape
    reached = [_side_after(layers, side) for side in sides]
    if min(reached) < 1:
        least = next(side for side in range(1, 10_000) if _side_after(layers, side) >= 1)
        raise ConfigError(too_small(name, input_shape, least))
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            channels = layer.out_channels
    return channels * reached[0] * reached[1]


def too_small(name: str, input_shape: ImageShape, least: int) -> str:
    """The line that refuses an image: what the model needs and what it was given."""
    _, height, width = input_shape
    return (
        f"model {name!r} needs images of at least {least} x {least}, these are {height} x {width}; "
        "use another model"
    )


def _side_after(layers: list[nn.Module], side: int) -> int:
    """The side of an image after layers with square kernels; below 1 if it is too small."""
    for layer in layers:
        if side >= 1 and isinstance(layer, (nn.Conv2d, nn.MaxPool2d)):
            kernel = _first(layer.kernel_size)
            stride = _first(layer.stride)
            padding = _first(layer.padding)
            side = (side + 2 * padding - kernel) // stride + 1
    return side


def _first(number: Any) -> int:
    """The first number of a pair, or the number itself."""
    if isinstance(number, tuple):
        return int(number[0])
    return int(number)


# Max pooling in channels-last order.


class MaxPool2d(nn.MaxPool2d):
    """``torch.nn.MaxPool2d`` on images whose channels are next to each other in memory, whatever
    order they came in.

    The maxima are the same. torch's kernel for the CPU is several times as fast in this order, and
    a stack of clients (``torch.func.vmap``) would leave it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Pool images (n, C, H, W); nothing is copied if they are already."""
        pooled: Tensor = super().forward(x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))
        return pooled


# What may follow a convolution to normalise its channels: the models' field ``norm``.
#
# - ``"group"`` (default): GroupNorm, each example by itself. No running statistics, nothing depends
#   on the batch.
# - ``"batch_stats"``: BatchNorm without running statistics, in evaluation too: predictions depend
# on
#   the batch. FedNTD's.
# - ``"batch"``: BatchNorm with running statistics, which are buffers, travel and are averaged.
# QKT's.
#
# Parameters are as many in all three.


Norm = Literal["group", "batch_stats", "batch"]


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    """The layer for images (B, channels, H, W); raises ConfigError for another ``norm``."""
    if norm == "group":
        return nn.GroupNorm(min(32, channels // 4), channels)
    if norm in ("batch", "batch_stats"):
        return nn.BatchNorm2d(channels, track_running_stats=norm == "batch")
    raise ConfigError(f"norm = {norm!r} must be group, batch_stats or batch")


def of_the_batch(m: nn.Module) -> bool:
    """Whether a network's answers depend on the other images of a batch, in evaluation mode too."""
    return any(
        isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None
        for part in m.modules()
    )


# Attention between the parts of an example, in products that can be stacked and derived twice; and
# masked means.
#
# torch's own attention (``scaled_dot_product_attention``) has no rule under ``torch.func.vmap``
# and, on the CPU, no second derivative: so this is plain matrix products and a softmax.


FAR = -1e9
"""What stands in place of a score that does not count; finite, so that a text of padding alone
gives numbers.
"""


def masked_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean (B, D) of the parts (B, L, D) with a mask (B, L) bool, of all without one; 0 if no
    part is in the mask.
    """
    if mask is None:
        return x.mean(1)
    weights = mask.unsqueeze(2).to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


class Attention(nn.Module):
    """Self-attention with several heads: (B, L, D) in and out; parts that are not there are not
    looked at.

    Source: Vaswani et al., "Attention Is All You Need" (2017), sec. 3.2.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"width = {width} must be a multiple of heads = {heads}")
        self.heads = heads
        self.asked = nn.Linear(width, width)
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Each part's weighted mean of the values of all parts; parts outside the mask have weight
        0.
        """
        queries = self.asked(x).unflatten(2, (self.heads, -1))  # (B, L, heads, D / heads)
        keys = self.keys(x).unflatten(2, (self.heads, -1))
        values = self.values(x).unflatten(2, (self.heads, -1))
        products = queries.transpose(1, 2) @ keys.permute(0, 2, 3, 1)  # (B, heads, L, L)
        scores = products / math.sqrt(queries.shape[3])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], FAR)
        mixed = scores.softmax(3) @ values.transpose(1, 2)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class AttentionBlock(nn.Module):
    """x + attention(norm(x)), and then x + two linear layers of norm(x): (B, L, D) in and out.

    Source: Xiong et al., "On Layer Normalization in the Transformer Architecture" (2020): norms
    come first.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The parts after attention and the linear layers."""
        x = x + self.attention(self.norm(x), mask)
        return x + self.dense(x)  # type: ignore[no-any-return]
