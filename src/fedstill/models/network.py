"""The class of all networks with a body and a linear head, and layers that several networks use:
pooling, normalisation and attention.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.functional import normalize

from fedstill.core.errors import ConfigError

ImageShape = tuple[int, int, int]
"""(channels, height, width). Annotates the ``input_shape`` of networks that only take images."""

SeriesShape = tuple[int, int]
"""(channels, steps). Annotates the ``input_shape`` of networks that only take series."""

RowShape = tuple[int]
"""(columns,). Annotates the ``input_shape`` of networks that only take rows of numbers."""

InputShape = tuple[int, ...]
"""The shape of one example of any kind, as in ``ModelSpec``."""


class Network(nn.Module):
    """``forward(x) = head(body(x))``: the body returns the penultimate features (B, D), and the
    head is the last linear layer.

    Inputs are (B, *input_shape), float or token ids; outputs are logits (B, C).
    """

    def __init__(self, body: nn.Module, features: int, classes: int, bias: bool = True) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(features, classes, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C) of a batch."""
        return self.head(self.body(x))  # type: ignore[no-any-return]


def projected(width: int, projection: int) -> tuple[list[nn.Module], int]:
    """The layers of a projection of ``width`` features, and their output width. There are none if
    ``projection`` is 0.

    Source: MOON's network, which has a linear layer of the same width, ReLU and a narrower linear
    layer before its head.
    """
    if not projection:
        return [], width
    return [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, projection)], projection


class UnitVectors(nn.Module):
    """Divides vectors (B, D) by their Euclidean norm; the zero vector does not change."""

    def forward(self, x: Tensor) -> Tensor:
        """Vectors of norm 1."""
        return normalize(x, dim=1)


def flat_size(name: str, layers: list[nn.Module], input_shape: ImageShape) -> int:
    """The number of values of an image after convolutions and max-pooling with square kernels.

    Raises ConfigError if the image is too small; ``name`` is the model's name in the message.
    """
    channels, *sides = input_shape
    output_sides = [_side_after(layers, side) for side in sides]
    if min(output_sides) < 1:
        min_side = next(side for side in range(1, 10_000) if _side_after(layers, side) >= 1)
        raise ConfigError(too_small(name, input_shape, min_side))
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            channels = layer.out_channels
    return channels * output_sides[0] * output_sides[1]


def too_small(name: str, input_shape: ImageShape, min_side: int) -> str:
    """The error message about images that are too small for a model."""
    _, height, width = input_shape
    return (
        f"model {name!r} needs images of at least {min_side} x {min_side}, but the data have "
        f"{height} x {width}; use another model"
    )


def _side_after(layers: list[nn.Module], side: int) -> int:
    """The side of an image after layers with square kernels; below 1 if the image is too small."""
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
    """``torch.nn.MaxPool2d`` that converts its input to channels-last memory format.

    The maxima are the same. torch's CPU kernel is several times as fast in this format, which
    stacked clients (``torch.func.vmap``) would not preserve.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Pool images (n, C, H, W). Images in channels-last format are not copied."""
        pooled: Tensor = super().forward(x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))
        return pooled


# The normalisation after a convolution: the field ``norm`` of models.
#
# - ``"group"`` (default): GroupNorm, which has no running statistics and does not depend on the
#   other examples of the batch.
# - ``"batch_stats"``: BatchNorm without running statistics, as in FedNTD. Predictions depend on the
#   batch, in evaluation too.
# - ``"batch"``: BatchNorm with running statistics, as in QKT. They are buffers, which are sent and
#   averaged.
#
# All three have the same number of parameters.


Norm = Literal["group", "batch_stats", "batch"]


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    """The normalisation layer for images (B, channels, H, W); raises ConfigError for an unknown
    ``norm``.
    """
    if norm == "group":
        return nn.GroupNorm(min(32, channels // 4), channels)
    if norm in ("batch", "batch_stats"):
        return nn.BatchNorm2d(channels, track_running_stats=norm == "batch")
    raise ConfigError(f"norm = {norm!r} must be group, batch_stats or batch")


def depends_on_batch(m: nn.Module) -> bool:
    """Whether predictions depend on the other images of the batch, in evaluation mode too."""
    return any(
        isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None
        for part in m.modules()
    )


# Self-attention and masked means.
#
# Attention consists of plain matrix products and a softmax, because torch's own function
# (``scaled_dot_product_attention``) does not support ``torch.func.vmap`` and has no second
# derivative on CPUs.


MASKED_SCORE = -1e9
"""The attention score of padding. It is finite, so that a text of padding only has finite features.
"""


def masked_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean (B, D) of tokens (B, L, D): of those in the mask (B, L) bool, or of all without a
    mask. It is 0 for an empty mask.
    """
    if mask is None:
        return x.mean(1)
    weights = mask.unsqueeze(2).to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


class Attention(nn.Module):
    """Multi-head self-attention, (B, L, D) in and out; padding gets no attention.

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
        """Tokens (B, L, D) after attention; tokens outside the mask (B, L) have weight 0."""
        queries = self.asked(x).unflatten(2, (self.heads, -1))  # (B, L, heads, D / heads)
        keys = self.keys(x).unflatten(2, (self.heads, -1))
        values = self.values(x).unflatten(2, (self.heads, -1))
        products = queries.transpose(1, 2) @ keys.permute(0, 2, 3, 1)  # (B, heads, L, L)
        scores = products / math.sqrt(queries.shape[3])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], MASKED_SCORE)
        mixed = scores.softmax(3) @ values.transpose(1, 2)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class AttentionBlock(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + dense(norm(x)); (B, L, D) in and out.

    Source: Xiong et al., "On Layer Normalization in the Transformer Architecture" (2020), the
    variant with layer normalisation first.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (B, L, D) after attention and the dense layers."""
        x = x + self.attention(self.norm(x), mask)
        return x + self.dense(x)  # type: ignore[no-any-return]
