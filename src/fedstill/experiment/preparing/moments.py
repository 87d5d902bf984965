"""Mean and spread of columns or channels: of some examples, or from sums that clients send."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstill.errors import ConfigError

LEAST = 1e-6
"""A spread below this share of the mean's size is none, as sums of squares tell no less: the column
is constant.
"""

NO_SPREAD = 1e300
"""The spread that a constant column is given: whatever a number of 32 bits is divided by it, is 0
in 32 bits.
"""


@dataclass(frozen=True)
class Moments:
    """A mean and a spread (population) for each column (D,) or channel; ``constant``: columns given
    ``NO_SPREAD``.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    constant: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sums:
    """What one client says of its examples, by column: how many values it knows, their sum, and
    that of their squares.

    Each (D,) float64.
    """

    count: Tensor
    total: Tensor
    squares: Tensor


def sums_of(values: Tensor) -> Sums:
    """The sums of values (n, D) or (n, C, L), in which NaN stands for one that is missing."""
    by_column = values.double().transpose(0, 1).flatten(1)
    known = ~by_column.isnan()
    there = by_column.nan_to_num(0.0)
    return Sums(known.sum(1).double(), there.sum(1), (there * there).sum(1))


def moments(values: Tensor, fixed: Collection[int] = ()) -> Moments:
    """The mean and spread of values (n, D) or (n, C, L); columns in ``fixed`` keep mean 0 and
    spread 1.
    """
    return _from(sums_of(values), fixed)


def moments_of(each: Sequence[Sums], fixed: Collection[int]) -> Moments:
    """The same from the sums that clients send, in the order of the clients."""
    count, total, squares = (
        torch.stack([getattr(own, name) for own in each]).sum(0)
        for name in ("count", "total", "squares")
    )
    return _from(Sums(count, total, squares), fixed)


def _from(sums: Sums, fixed: Collection[int]) -> Moments:
    count = sums.count.clamp(min=1)
    mean = sums.total / count
    std = (sums.squares / count - mean * mean).clamp(min=0).sqrt()
    small = std <= LEAST * mean.abs()
    means, stds = mean.tolist(), std.masked_fill(small, NO_SPREAD).tolist()
    for column in fixed:
        means[column], stds[column] = 0.0, 1.0
    if not all(map(math.isfinite, (*means, *stds))):
        raise ConfigError(
            "a column's mean or spread is not finite; its numbers are too large, scale them"
        )
    constant = [i for i in small.nonzero().flatten().tolist() if i not in set(fixed)]
    return Moments(tuple(means), tuple(stds), tuple(constant))
