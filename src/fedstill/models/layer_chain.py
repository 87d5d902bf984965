"""Networks that are chains of layers: their layers, and the same chain with other layer widths.

A *plain chain* has a linear head and a body of convolutions, linear layers, ReLU, pooling, dropout
and one flattening. Its hidden units can be permuted, and their number can change. Its first layer
may be an ``nn.Unflatten``, which turns series into images with one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from fedstill.core.errors import ConfigError
from fedstill.core.payload import Tensors
from fedstill.models.functional import head, run_part
from fedstill.models.resnet import Residual

WITHOUT_WEIGHTS = (nn.ReLU, nn.MaxPool2d, nn.AvgPool2d, nn.Dropout, nn.Flatten, nn.Unflatten)


def plain_chain(m: nn.Module) -> list[str] | None:
    """The names of a plain chain's layers with weight and bias, from the first one to the head;
    None for other networks.

    The inputs of the linear layer after the flattening are the positions of the first channel,
    then those of the second channel, and so on.
    """
    body = getattr(m, "body", None)
    if not isinstance(body, nn.Sequential) or not _biased(getattr(m, "head", None)):
        return None
    names: list[str] = []
    for name, layer in body.named_children():
        if _biased(layer):
            names.append(f"body.{name}")
        elif not isinstance(layer, WITHOUT_WEIGHTS):
            return None
        elif names and isinstance(layer, nn.Unflatten):
            return None  # an Unflatten here would turn units into channels
    return [*names, "head"]


@dataclass(frozen=True)
class ConvolutionPart:
    """The name of a convolution, and the names of the layers before the next convolution."""

    convolution: str
    followers: list[str] = field(default_factory=list)


def last_block(m: nn.Module) -> list[ConvolutionPart]:
    """The convolutions of a residual network's last block; none for a network without residual
    blocks.
    """
    blocks = {name: part for name, part in m.named_modules() if isinstance(part, Residual)}
    if not blocks:
        return []
    block_name, block = list(blocks.items())[-1]
    parts: list[ConvolutionPart] = []
    for child, layer in block.path.named_children():
        name = f"{block_name}.path.{child}"
        if isinstance(layer, nn.Conv2d):
            parts.append(ConvolutionPart(name))
        elif parts:
            parts[-1].followers.append(name)
    return parts


def levels(m: nn.Module) -> list[str]:
    """The names of the layers after which a sequential body can be cut. The remaining layers of
    another network can continue from there.

    These are all ReLU layers and blocks of layers, and the last layer if layers with weights follow
    the last ReLU or block. Empty if the body is not an ``nn.Sequential``.
    """
    body = getattr(m, "body", None)
    if not isinstance(body, nn.Sequential) or not len(body):
        return []
    children = list(body.named_children())
    cuts: list[str] = []
    has_weights_after = True  # a body without ReLU and blocks is cut at its end
    for name, layer in children:
        if isinstance(layer, (nn.ReLU, nn.Sequential)):
            cuts.append(name)
            has_weights_after = False
        elif list(layer.parameters()):
            has_weights_after = True
    if has_weights_after:
        cuts.append(children[-1][0])
    return cuts


class LevelPass(NamedTuple):
    """The activations of a forward pass at each level, by name, and its features (B, D)."""

    activations: dict[str, Tensor]
    features: Tensor


def run_to_levels(m: nn.Module, params: Tensors, x: Tensor) -> LevelPass:
    """The activations at all levels, and the features, of a forward pass of the body."""
    activations = {}
    cuts = set(levels(m))
    for name, _ in m.get_submodule("body").named_children():
        x = run_part(m, params, x, f"body.{name}")
        if name in cuts:
            activations[name] = x
    return LevelPass(activations, features=x)


def run_from_level(m: nn.Module, params: Tensors, x: Tensor, level: str) -> Tensor:
    """The logits (B, C) of a network that continues from activations at a level."""
    names = [name for name, _ in m.get_submodule("body").named_children()]
    for name in names[names.index(level) + 1 :]:
        x = run_part(m, params, x, f"body.{name}")
    return head(m, params, x)


def with_widths(m: nn.Module, widths: Sequence[int]) -> nn.Module:
    """Change the numbers of units of a plain chain's hidden layers, in place. The new layers have
    new weights.

    Raises ConfigError for other networks, and for another number of hidden layers.
    """
    names = plain_chain(m)
    if names is None or len(names) - 1 != len(widths):
        raise ConfigError(
            f"{type(m).__name__} is not a plain chain with {len(widths)} hidden layers, whose "
            "widths could be set"
        )
    layers = [m.get_submodule(name) for name in names]
    units = [_units(layer) for layer in layers]
    new_units = [*widths, units[-1]]  # the head keeps its classes
    for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
        inputs = _inputs(layer)
        if i > 0:
            inputs = inputs // units[i - 1] * new_units[i - 1]
        m.set_submodule(name, _like(layer, inputs, new_units[i]))
    return m


def _biased(layer: object) -> bool:
    # Subclasses may compute something else, with other entries, as low_rank's layers do.
    plain = type(layer) is nn.Linear or (type(layer) is nn.Conv2d and layer.groups == 1)
    return plain and layer.bias is not None  # type: ignore[attr-defined]


def _units(layer: Any) -> int:
    if isinstance(layer, nn.Conv2d):
        return layer.out_channels
    return int(layer.out_features)


def _inputs(layer: Any) -> int:
    if isinstance(layer, nn.Conv2d):
        return layer.in_channels
    return int(layer.in_features)


def _like(layer: Any, inputs: int, units: int) -> nn.Module:
    if not isinstance(layer, nn.Conv2d):
        return nn.Linear(inputs, units)
    options = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    return nn.Conv2d(inputs, units, **{name: getattr(layer, name) for name in options})
