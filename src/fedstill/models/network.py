"""A network in two parts: a body that sees, and a linear head that decides."""

from __future__ import annotations

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
        channels = layer.out_channels if isinstance(layer, nn.Conv2d) else channels
    return channels * reached[0] * reached[1]


def too_small(name: str, input_shape: ImageShape, least: int) -> str:
    """The line that refuses an image: what the model needs and what it was given."""
    _, height, width = input_shape
    return (
        f"model {name!r} needs images of at least {least} x {least}, these are {height} x {width}; "
        "use another model"
    )


def _side_after(layers: list[nn.Module], side: int) -> int:
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d)):
            kernel, stride, padding = (
                _one(n) for n in (layer.kernel_size, layer.stride, layer.padding)
            )
            side = (side + 2 * padding - kernel) // stride + 1 if side >= 1 else side
    return side


def _one(number: object) -> int:
    return int(number[0]) if isinstance(number, tuple) else int(number)  # type: ignore[call-overload]
