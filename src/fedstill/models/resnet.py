"""Residual networks for small images: a 3 x 3 stem without pooling, stages of residual blocks,
global average pooling, and a head.

``norm`` is the normalisation after each convolution (``models/network.py``). The last stage is
slimmable: it can run at a share of its width (FedAlign).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, group_norm

from fedstill.core.errors import ConfigError, IncompatibleMethod
from fedstill.core.fields import CountOrZero
from fedstill.core.payload import Tensors
from fedstill.core.registry import register
from fedstill.models.functional import head, run_part
from fedstill.models.network import ImageShape, Network, Norm, norm_layer, projected, too_small

Block = Callable[[int, int, int, Norm], "Residual"]


@dataclass(frozen=True)
class ResNetShape:
    """The architecture of a residual network: its name, the kind of its blocks, the number of
    blocks of each stage, and the width of the first stage, which doubles with each further stage.
    """

    name: str
    block: Block
    depths: Sequence[int]
    width: int


@register("model", "resnet10")
def resnet10(
    input_shape: ImageShape, classes: int, norm: Norm = "group", projection: CountOrZero = 0
) -> Network:
    """ResNet-10: basic blocks [1, 1, 1, 1], widths 64 to 512; 4,903,242 parameters on CIFAR-10.

    norm: The normalisation after each convolution: GroupNorm ("group"), or BatchNorm without
    ("batch_stats") or with ("batch") running statistics.
    projection: The width of a projection before the head, as in MOON; 0 for none.

    Source: FedNTD, appendix G.3 (with ``norm = "batch_stats"``).
    """
    shape = ResNetShape("resnet10", basic, depths=[1, 1, 1, 1], width=64)
    return _resnet(shape, input_shape, classes, norm, projection)


@register("model", "resnet18")
def resnet18(
    input_shape: ImageShape, classes: int, norm: Norm = "group", projection: CountOrZero = 0
) -> Network:
    """ResNet-18: basic blocks [2, 2, 2, 2], widths 64 to 512; 11,173,962 parameters on CIFAR-10.

    norm: The normalisation after each convolution: GroupNorm ("group"), or BatchNorm without
    ("batch_stats") or with ("batch") running statistics.
    projection: The width of a projection before the head, as in MOON; 0 for none.

    Source: He et al., "Deep Residual Learning for Image Recognition"; QKT, sec. 4.1 (with
    ``norm = "batch"``).
    Reading: QKT does not describe the stem; for images of 28 to 32 pixels we use the small stem.
    Initial weights are torch's defaults for each layer; torchvision's ResNets initialise
    convolutions from a normal distribution.
    """
    shape = ResNetShape("resnet18", basic, depths=[2, 2, 2, 2], width=64)
    return _resnet(shape, input_shape, classes, norm, projection)


@register("model", "resnet50")
def resnet50(
    input_shape: ImageShape, classes: int, norm: Norm = "group", projection: CountOrZero = 0
) -> Network:
    """ResNet-50: bottleneck blocks [3, 4, 6, 3] of widths 64 to 512 with expansion 4; 23,520,842
    parameters on CIFAR-10.

    norm: The normalisation after each convolution: GroupNorm ("group"), or BatchNorm without
    ("batch_stats") or with ("batch") running statistics.
    projection: The width of a projection before the head, as in MOON; 0 for none.

    Source: He et al., "Deep Residual Learning for Image Recognition".
    """
    shape = ResNetShape("resnet50", bottleneck, depths=[3, 4, 6, 3], width=64)
    return _resnet(shape, input_shape, classes, norm, projection)


@register("model", "resnet56")
def resnet56(
    input_shape: ImageShape, classes: int, norm: Norm = "group", projection: CountOrZero = 0
) -> Network:
    """ResNet-56: bottleneck blocks [6, 6, 6] of widths 16 to 64 with expansion 4; 591,322
    parameters on CIFAR-10.

    norm: The normalisation after each convolution: GroupNorm ("group"), or BatchNorm without
    ("batch_stats") or with ("batch") running statistics.
    projection: The width of a projection before the head, as in MOON; 0 for none.

    Source: Mendieta et al., "Local Learning Matters" (FedAlign), with ``norm = "batch"``; FedNTD,
    table 13.
    """
    shape = ResNetShape("resnet56", bottleneck, depths=[6, 6, 6], width=16)
    return _resnet(shape, input_shape, classes, norm, projection)


class Residual(nn.Module):
    """A residual block, ``relu(path(x) + shortcut(x))``. The shortcut is a 1 x 1 convolution if the
    shape changes.
    """

    def __init__(self, path: nn.Sequential, inside: int, out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.path = path
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != out:
            self.shortcut = nn.Sequential(*_conv(inside, out, 1, stride, norm))
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, inside, H, W) to (B, out, H / stride, W / stride)."""
        return torch.relu(self.path(x) + self.shortcut(x))

    def slim(self, x: Tensor, share: float) -> Tensor:
        """The forward pass with only the first channels of every layer, a share of them."""
        out = x
        for layer in self.path:
            out = _slim(layer, out, share)
        shortcut = x
        for layer in self.shortcut.children():
            shortcut = _slim(layer, shortcut, share)
        return torch.relu(out + shortcut)


class SlimStage(nn.Sequential):
    """A stage that can also run at a share of its width, on the first channels of its input.

    Source: Mendieta et al., "Local Learning Matters" (FedAlign), whose code rounds widths to
    multiples of 8.
    Reading: at reduced width, BatchNorm uses the statistics of the batch and does not update its
    running statistics, as in that code. GroupNorm has fewer groups of the same size, so that the
    groups of the used channels do not change.
    """

    def slim_width(self, channels: int, share: float) -> int:
        """The number of channels of a layer that are used."""
        return slim_width(channels, share)

    def forward(self, x: Tensor, share: float = 1.0) -> Tensor:
        """Maps (B, D, H, W) to (B, E, h, w); with a share below 1, D and E are slim widths."""
        if share == 1:
            return super().forward(x)  # type: ignore[no-any-return,no-untyped-call]
        for block in self.children():
            x = cast(Residual, block).slim(x, share)
        return x


def slim_width(channels: int, share: float) -> int:
    """A share of channels, rounded to a multiple of 8: at least 8, and at least 90 % of the share.

    >>> slim_width(256, 0.25), slim_width(16, 0.25), slim_width(36, 0.5)
    (64, 8, 24)
    """
    width = max(8, int(channels * share + 4) // 8 * 8)
    if width < 0.9 * channels * share:
        width += 8
    return min(channels, width)


class StageEnds(NamedTuple):
    """The input (B, D, H, W) and the output (B, E, h, w) of a stage."""

    input: Tensor
    output: Tensor


class SlimPass(NamedTuple):
    """The logits (B, C) of a network at full width, and input and output of its slimmable stage at
    full and at reduced width.
    """

    logits: Tensor
    whole: StageEnds
    slim: StageEnds


def slim_stage(m: nn.Module) -> str:
    """The name of the slimmable stage of a body; empty if there is none.

    The stage is a child of an ``nn.Sequential``. It has ``slim_width(channels, share)``, and its
    forward pass takes ``(x, share)``.
    """
    body = getattr(m, "body", None)
    if not isinstance(body, nn.Sequential):
        return ""
    for name, part in body.named_children():
        if hasattr(part, "slim_width"):
            return name
    return ""


def run_slim(m: nn.Module, params: Tensors, x: Tensor, share: float) -> SlimPass:
    """A pass at full width, and a pass of the slimmable stage at a share of its width.

    share: in (0, 1). The second pass takes the first channels of the stage's input, and its
    gradient does not reach earlier layers. Raises IncompatibleMethod if no stage is slimmable.
    """
    slimmable = slim_stage(m)
    if not slimmable:
        raise IncompatibleMethod(f"{type(m).__name__} has no slimmable stage")
    stage_input = x
    stage_output = x
    for name, _ in m.get_submodule("body").named_children():
        if name == slimmable:
            stage_input = x
        x = run_part(m, params, x, f"body.{name}")
        if name == slimmable:
            stage_output = x
    logits = head(m, params, x)

    stage = cast(SlimStage, m.get_submodule(f"body.{slimmable}"))
    width = stage.slim_width(stage_input.shape[1], share)
    narrow_input = stage_input[:, :width].detach()
    narrow_output = run_part(m, params, narrow_input, f"body.{slimmable}", share)
    return SlimPass(
        logits,
        whole=StageEnds(stage_input, stage_output),
        slim=StageEnds(narrow_input, narrow_output),
    )


def _slim(layer: nn.Module, x: Tensor, share: float) -> Tensor:
    c = x.shape[1]
    if isinstance(layer, nn.Conv2d):
        weight = layer.weight[: slim_width(layer.out_channels, share), :c]
        return conv2d(x, weight, None, layer.stride, layer.padding)
    if isinstance(layer, nn.GroupNorm):
        return group_norm(
            x,
            c * layer.num_groups // layer.num_channels,
            layer.weight[:c],
            layer.bias[:c],
            layer.eps,
        )
    if isinstance(layer, nn.BatchNorm2d):
        return batch_norm(
            x, None, None, layer.weight[:c], layer.bias[:c], training=True, eps=layer.eps
        )
    return layer(x)  # type: ignore[no-any-return]


def basic(inside: int, width: int, stride: int, norm: Norm) -> Residual:
    """Two 3 x 3 convolutions."""
    first = _conv(inside, width, 3, stride, norm)
    second = _conv(width, width, 3, 1, norm)
    return Residual(nn.Sequential(*first, nn.ReLU(), *second), inside, width, stride, norm)


def bottleneck(inside: int, width: int, stride: int, norm: Norm) -> Residual:
    """A 1 x 1 convolution, a 3 x 3 convolution with the stride, and a 1 x 1 convolution to four
    times the width.
    """
    down = _conv(inside, width, 1, 1, norm)
    across = _conv(width, width, 3, stride, norm)
    up = _conv(width, 4 * width, 1, 1, norm)
    return Residual(
        nn.Sequential(*down, nn.ReLU(), *across, nn.ReLU(), *up), inside, 4 * width, stride, norm
    )


def _resnet(
    shape: ResNetShape, input_shape: ImageShape, classes: int, norm: Norm, projection: int = 0
) -> Network:
    stages = len(shape.depths)
    if norm != "group":
        # BatchNorm cannot normalise one value per channel, and a last batch of one example at one
        # position would fail in the middle of training.
        min_side = 2 ** (stages - 1) + 1
        if min(input_shape[1:]) < min_side:
            raise ConfigError(too_small(shape.name, input_shape, min_side) + ", or norm = 'group'")

    parts: OrderedDict[str, nn.Module] = OrderedDict()
    stem = _conv(input_shape[0], shape.width, 3, 1, norm)
    parts["stem"] = nn.Sequential(*stem, nn.ReLU())
    channels = shape.width
    for i, depth in enumerate(shape.depths):
        blocks = []
        for j in range(depth):
            stride = 1
            if i > 0 and j == 0:
                stride = 2
            blocks.append(shape.block(channels, shape.width * 2**i, stride, norm))
            channels = blocks[-1].out
        parts[f"stage{i + 1}"] = nn.Sequential(*blocks)
        if i + 1 == stages:
            parts[f"stage{i + 1}"] = SlimStage(*blocks)
    parts["pool"] = nn.AdaptiveAvgPool2d(1)
    parts["flat"] = nn.Flatten()
    projection_layers, features = projected(channels, projection)
    for i, layer in enumerate(projection_layers):
        parts[f"projection{i + 1}"] = layer
    return Network(nn.Sequential(parts), features, classes)


def _conv(inside: int, out: int, kernel: int, stride: int, norm: Norm) -> list[nn.Module]:
    return [
        nn.Conv2d(inside, out, kernel, stride, padding=kernel // 2, bias=False),
        norm_layer(norm, out),
    ]
