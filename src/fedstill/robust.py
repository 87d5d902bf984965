"""Means that a few hostile clients cannot move far: pure functions of named tensors, all trees
weighed alike.

A client says itself how many examples it has, so what it says has no part in any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from statistics import median
from typing import Literal, get_args

import torch

from fedstill import trees
from fedstill.payload import Tensors

Robust = Literal["trimmed_mean", "median", "norm_clipping", "krum"]
ROBUST: frozenset[str] = frozenset(get_args(Robust))
SUSPECTED = 0.3
"""The share of hostile clients that is reckoned with where nothing else is said."""


def robust_mean(
    many: Sequence[Tensors], how: Robust, start: Tensors | None, suspected: float
) -> dict[str, torch.Tensor]:
    """One tree in the place of the mean of several of equal names and shapes.

    start: what the clients started from, for "norm_clipping"; None: zeros, as for
    changes. suspected: the share of hostile trees, in (0, 0.5), of which "trimmed_mean" and "krum"
    make a number, rounded down. Integer entries are the first tree's; with "krum", those of the
    tree that is taken.
    """
    if how == "krum":
        return dict(trees.clone(many[krum(many, part_of(suspected, len(many)))]))
    if how == "norm_clipping":
        return clipped_mean(many, start)
    return trimmed_mean(
        many, (len(many) - 1) // 2 if how == "median" else part_of(suspected, len(many))
    )


def part_of(share: float, many: int) -> int:
    """A share of a number, rounded down; of the share as it is written, so that 0.29 of 100
    are 29.
    """
    return int(Fraction(str(share)) * many)


def trimmed_mean(many: Sequence[Tensors], off: int) -> dict[str, torch.Tensor]:
    """The mean of each entry without its ``off`` largest and ``off`` smallest values; at most what
    leaves one or two.

    With all but one or two left out it is the median of each entry.

    Source: Yin et al. (2018), "Byzantine-Robust Distributed Learning", definitions 1 and 2.

    >>> {
    ...     k: v.tolist()
    ...     for k, v in trimmed_mean(
    ...         [{"a": torch.tensor([x])} for x in (1.0, 2.0, 6.0, 99.0)], 1
    ...     ).items()
    ... }
    {'a': [4.0]}
    """
    off = min(off, (len(many) - 1) // 2)
    out = trees.clone(many[0])
    for name in trees.floats(many[0]):
        inner = torch.stack([tree[name] for tree in many]).sort(0).values[off : len(many) - off]
        out[name] = inner.mean(0)
    return out


def clipped_mean(many: Sequence[Tensors], start: Tensors | None) -> dict[str, torch.Tensor]:
    """``start`` moved by the mean of the trees' changes, each cut to at most the median of their
    norms.

    Source: Sun et al. (2019), "Can You Really Backdoor Federated Learning?", section 4.
    Reading: the paper's bound is a number to choose; here it is the round's median norm.
    """
    names = list(trees.floats(many[0]))
    near = (
        trees.only(start, names)
        if start is not None
        else trees.zeros_like(trees.only(many[0], names))
    )
    changes = [trees.sub(trees.only(tree, names), near) for tree in many]
    norms = [trees.norm(change) for change in changes]
    most = median(norms)
    cut = [
        trees.scale(c, most / norm) if norm > most else c
        for c, norm in zip(changes, norms, strict=True)
    ]
    return {**trees.clone(many[0]), **trees.add(near, trees.mean(cut, [1.0] * len(cut)))}


def krum(many: Sequence[Tensors], hostile: int) -> int:
    """Which tree lies nearest to its n - hostile - 2 nearest others, by the sum of squared
    distances; ties: the first.

    hostile: how many may be so, of which at most (n - 3) / 2 are reckoned with.

    Source: Blanchard et al. (2017), "Machine Learning with Adversaries", section 4.
    """
    n = len(many)
    hostile = max(0, min(hostile, (n - 3) // 2))
    apart = torch.zeros(n, n, dtype=torch.float64)
    for name in trees.floats(many[0]):
        values = torch.stack([tree[name].flatten() for tree in many]).double()
        apart += torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist").cpu() ** 2
    # the first is the tree itself
    nearest = apart.sort(1).values[:, 1 : 1 + max(1, n - hostile - 2)]
    return int(nearest.sum(1).argmin())
