"""What a method and its authors' code are both given: a small network, a batch, counts. All of it
is drawn by name.

Every number is a multiple of 1/64, so that code that casts to float32 in between loses nothing of
it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

INPUTS, HIDDEN, WIDTH, CLASSES, BATCH = 4, 7, 5, 6, 12
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
    return {k: drawn(f"{name} {k}", *shape) for k, shape in shapes.items()}


def batch(size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Inputs (B, 4) float64, and labels of the classes that the client has; the first two are of
    its small ones.
    """
    draw = np.random.RandomState(21)
    there = [c for c, n in enumerate(COUNTS) if n]
    labels = [2, 5, *draw.choice(there, size=BATCH - 2)]
    return drawn("x", BATCH, INPUTS)[:size], torch.tensor([int(y) for y in labels[:size]])


def summed_up(grads: Mapping[str, Tensor]) -> tuple[float, float]:
    """A gradient in two numbers: its length, and how far it goes along a given direction."""
    length = sum(float(g.square().sum()) for g in grads.values()) ** 0.5
    return length, sum(float((g * drawn(f"along {k}", *g.shape)).sum()) for k, g in grads.items())
