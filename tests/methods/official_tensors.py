"""The tensors that a method and its authors' code compute with: a small network, a batch, counts.
All of them are drawn by name.

Every number is a multiple of 1/64, so that code that casts to float32 on the way loses nothing of
it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

INPUTS = 4
HIDDEN = 7
WIDTH = 5
CLASSES = 6
BATCH = 12

COUNTS = (9, 0, 4, 1, 16, 2)
"""A client's label counts: classes 0 and 4 are more than its mean, class 1 is missing."""

SHAPES = {
    "body.1.weight": (HIDDEN, INPUTS),
    "body.1.bias": (HIDDEN,),
    "body.3.weight": (WIDTH, HIDDEN),
    "body.3.bias": (WIDTH,),
    "head.weight": (CLASSES, WIDTH),
    "head.bias": (CLASSES,),
}
"""A network of two hidden layers with ReLU, body.1 and body.3, under a linear head."""


def drawn(name: str, *shape: int) -> Tensor:
    """Numbers in [-1, 1], always the same for a name and a shape, in float64."""
    draw = np.random.RandomState(zlib.crc32(name.encode()))
    return torch.from_numpy(np.asarray(draw.randint(-64, 65, size=shape) / 64))


def network(name: str, shapes: Mapping[str, Sequence[int]] = SHAPES) -> dict[str, Tensor]:
    """A network's parameters."""
    return {key: drawn(f"{name} {key}", *shape) for key, shape in shapes.items()}


class Batch(NamedTuple):
    """Inputs (B, 4) in float64, and labels."""

    x: Tensor
    y: Tensor


def batch(size: int = BATCH) -> Batch:
    """The first examples of the batch.

    Labels are of classes that the client has; the first two are of its small ones.
    """
    draw = np.random.RandomState(21)
    classes = [c for c, count in enumerate(COUNTS) if count]
    labels = [2, 5, *draw.choice(classes, size=BATCH - 2).tolist()]
    return Batch(drawn("x", BATCH, INPUTS)[:size], torch.tensor(labels[:size]))


class GradientSummary(NamedTuple):
    """A gradient in two numbers."""

    norm: float
    along: float
    """How far it goes along a direction that is the same for all codes."""


def summary_of(gradients: Mapping[str, Tensor]) -> GradientSummary:
    """The two numbers of a gradient."""
    squares = 0.0
    along = 0.0
    for name, gradient in gradients.items():
        squares += float(gradient.square().sum())
        along += float((gradient * drawn(f"along {name}", *gradient.shape)).sum())
    return GradientSummary(squares**0.5, along)
