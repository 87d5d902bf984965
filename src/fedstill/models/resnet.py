"""Residual networks for small images: a 3 x 3 stem without pooling, stages of blocks, the mean over
places, a head.

``norm`` is what follows each convolution (``models/network.py``). The last stage is slimmable: it
can run at a share of its width (FedAlign).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
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


@register("model", "resnet10")
def resnet10(
    input_shape: ImageShape, classes: int, norm: Norm = "group", projection: CountOrZero = 0
) -> Network:
    """ResNet-10: basic blocks [1, 1, 1, 1], widths 64 to 512; 4,903,242 parameters on CIFAR-10.

    norm: What follows each convolution: GroupNorm, or BatchNorm without ("batch_stats") or with
    ("batch") running statistics.
    projection: The width of a projection under the head, as MOON has it; 0 for none.

    Source: FedNTD, appendix G.3 (with ``norm = "batch_stats"``).
    """
    return _resnet("resnet10", input_shape, classes, basic, [1, 1, 1, 1], 64, norm, projection)


@register("model", "resnet18")
def resnet18(
    input_shape: ImageShape, classes: int, norm: Norm = "group", projection: CountOrZero = 0
) -> Network:
    """ResNet-18: basic blocks [2, 2, 2, 2], widths 64 to 512; 11,173,962 parameters on CIFAR-10.

    norm: What follows each convolution: GroupNorm, or BatchNorm without ("batch_stats") or with
    ("batch") running statistics.
    projection: The width of a projection under the head, as MOON has it; 0 for none.

    Source: He et al., "Deep Residual Learning for Image Recognition"; QKT, sec. 4.1 (with
    ``norm = "batch"``).
    Reading: QKT does not name the stem; on 28 to 32 pixels it is the small one. Weights are drawn
    as layers of torch draw them; torchvision's networks of this name draw those of convolutions
    from a normal distribution.
    """
    return _resnet("resnet18", input_shape, classes, basic, [2, 2, 2, 2], 64, norm, projection)


@register("model", "resnet50")
def resnet50(
    input_shape: ImageShape, classes: int, norm: Norm = "group", projection: CountOrZero = 0
) -> Network:
    """ResNet-50: bottleneck blocks [3, 4, 6, 3], widths 64 to 512, times 4; 23,520,842 parameters
    on CIFAR-10.

    norm: What follows each convolution: GroupNorm, or BatchNorm without ("batch_stats") or with
    ("batch") running statistics.
    projection: The width of a projection under the head, as MOON has it; 0 for none.

    Source: He et al., "Deep Residual Learning for Image Recognition".
    """
    return _resnet("resnet50", input_shape, classes, bottleneck, [3, 4, 6, 3], 64, norm, projection)


@register("model", "resnet56")
def resnet56(
    input_shape: ImageShape, classes: int, norm: Norm = "group", projection: CountOrZero = 0
) -> Network:
    """ResNet-56: bottleneck blocks [6, 6, 6], widths 16 to 64, times 4; 591,322 parameters on
    CIFAR-10.

    norm: What follows each convolution: GroupNorm, or BatchNorm without ("batch_stats") or with
    ("batch") running statistics.
    projection: The width of a projection under the head, as MOON has it; 0 for none.

    Source: Mendieta et al., "Local Learning Matters" (FedAlign), with ``norm = "batch"``; FedNTD,
    table 13.
    """
    return _resnet("resnet56", input_shape, classes, bottleneck, [6, 6, 6], 16, norm, projection)


class Residual(nn.Module):
    """``relu(path(x) + shortcut(x))``, the shortcut a 1 x 1 convolution where the shape changes."""

    def __init__(self, path: nn.Sequential, inside: int, out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.path = path
        same = stride == 1 and inside == out
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_conv(inside, out, 1, stride, norm))
        )
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        """(B, inside, H, W) into (B, out, H / stride, W / stride)."""
        return torch.relu(self.path(x) + self.shortcut(x))

    def slim(self, x: Tensor, share: float) -> Tensor:
        """The same with the first channels of every layer alone."""
        out, short = x, x
        for layer in self.path:
            out = _slim(layer, out, share)
        for layer in self.shortcut.children():
            short = _slim(layer, short, share)
        return torch.relu(out + short)


class SlimStage(nn.Sequential):
    """Blocks that can also run at a share of their width, on the first channels of their input.

    Source: Mendieta et al., "Local Learning Matters" (FedAlign), whose code rounds widths to
    multiples of 8.
    Reading: at less than full width BatchNorm takes the batch's statistics and keeps none, as in
    that code; GroupNorm keeps the groups' sizes, so that a channel is normalised with the same
    others.
    """

    def slim_width(self, channels: int, share: float) -> int:
        """How many of a layer's channels are used."""
        return slim_width(channels, share)

    def forward(self, x: Tensor, share: float = 1.0) -> Tensor:
        """(B, D, H, W) into (B, E, h, w): all channels, or ``slim_width`` of them in and out."""
        if share == 1:
            return super().forward(x)  # type: ignore[no-any-return,no-untyped-call]
        for block in self.children():
            x = cast(Residual, block).slim(x, share)
        return x


def slim_width(channels: int, share: float) -> int:
    """A share of channels, to the nearest multiple of 8, at least 8 and not over a tenth too few.

    >>> slim_width(256, 0.25), slim_width(16, 0.25), slim_width(36, 0.5)
    (64, 8, 24)
    """
    width = max(8, int(channels * share + 4) // 8 * 8)
    return min(channels, width if width >= 0.9 * channels * share else width + 8)


class StageEnds(NamedTuple):
    """The input (B, D, H, W) and the output (B, E, h, w) of a network's stage."""

    input: Tensor
    output: Tensor


class SlimPass(NamedTuple):
    """Logits (B, C) of a whole network, and the ends of its slimmable stage at full width and
    slim.
    """

    logits: Tensor
    whole: StageEnds
    slim: StageEnds


def slim_stage(m: nn.Module) -> str:
    """The name of the part of a body that can run slim; empty if there is none.

    It is a child of an ``nn.Sequential`` that has ``slim_width(channels, share)`` and takes
    ``(x, share)``.
    """
    body = getattr(m, "body", None)
    children = body.named_children() if isinstance(body, nn.Sequential) else []
    return next((name for name, part in children if hasattr(part, "slim_width")), "")


def run_slim(m: nn.Module, params: Tensors, x: Tensor, share: float) -> SlimPass:
    """One pass at full width, and one of the slimmable stage at a share of it, on the first
    channels of its input.

    share: in (0, 1). The slim pass has no gradient to the layers below it. Raises
    IncompatibleMethod if no stage is slimmable.
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
    first, second = _conv(inside, width, 3, stride, norm), _conv(width, width, 3, 1, norm)
    return Residual(nn.Sequential(*first, nn.ReLU(), *second), inside, width, stride, norm)


def bottleneck(inside: int, width: int, stride: int, norm: Norm) -> Residual:
    """A 1 x 1, a 3 x 3 (which strides) and a 1 x 1 convolution to four times the width."""
    down, across = _conv(inside, width, 1, 1, norm), _conv(width, width, 3, stride, norm)
    up = _conv(width, 4 * width, 1, 1, norm)
    return Residual(
        nn.Sequential(*down, nn.ReLU(), *across, nn.ReLU(), *up), inside, 4 * width, stride, norm
    )


def _resnet(
    name: str,
    input_shape: ImageShape,
    classes: int,
    block: Block,
    depths: list[int],
    width: int,
    norm: Norm,
    projection: int = 0,
) -> Network:
    # Batch statistics of one example with one place are no statistics: torch refuses them in
    # mid-training.
    least = 1 if norm == "group" else 2 ** (len(depths) - 1) + 1
    if min(input_shape[1:]) < least:
        raise ConfigError(too_small(name, input_shape, least) + ", or norm = 'group'")
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["stem"] = nn.Sequential(*_conv(input_shape[0], width, 3, 1, norm), nn.ReLU())
    channels = width
    for i, depth in enumerate(depths):
        blocks = []
        for j in range(depth):
            blocks.append(block(channels, width * 2**i, 2 if i > 0 and j == 0 else 1, norm))
            channels = blocks[-1].out
        parts[f"stage{i + 1}"] = (SlimStage if i + 1 == len(depths) else nn.Sequential)(*blocks)
    parts["pool"] = nn.AdaptiveAvgPool2d(1)
    parts["flat"] = nn.Flatten()
    more, features = projected(channels, projection)
    parts.update({f"projection{i + 1}": layer for i, layer in enumerate(more)})
    return Network(nn.Sequential(parts), features, classes)


def _conv(inside: int, out: int, kernel: int, stride: int, norm: Norm) -> list[nn.Module]:
    return [
        nn.Conv2d(inside, out, kernel, stride, padding=kernel // 2, bias=False),
        norm_layer(norm, out),
    ]
