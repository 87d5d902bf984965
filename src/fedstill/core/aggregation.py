"""Aggregation: means of replies, summed in the order of client ids, and robust means."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from statistics import median
from typing import Literal, get_args

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.payload import Tensors
from fedstill.core.records import Reply

# Means that a few hostile clients cannot move far: pure functions of named tensors.
#
# All trees have the same weight, because hostile clients could claim any number of examples.


Robust = Literal["trimmed_mean", "median", "norm_clipping", "krum"]
ROBUST: frozenset[str] = frozenset(get_args(Robust))
SUSPECTED = 0.3
"""The default of the share of hostile clients that a robust mean allows for."""


def robust_mean(
    many: Sequence[Tensors], how: Robust, start: Tensors | None, suspected: float
) -> dict[str, torch.Tensor]:
    """One tree in the place of the mean of several of equal names and shapes.

    start: what the clients started from, for "norm_clipping"; None: zeros, as for
    changes. suspected: the share of hostile trees, in (0, 0.5), of which "trimmed_mean" and "krum"
    make a number, rounded down. Integer entries are the first tree's; with "krum", those of the
    tree that is taken.
    """
    if how == "norm_clipping":
        return clipped_mean(many, start)
    if how == "median":
        return trimmed_mean(many, (len(many) - 1) // 2)
    hostile = part_of(suspected, len(many))
    if how == "krum":
        return dict(trees.clone(many[krum(many, hostile)]))
    return trimmed_mean(many, hostile)


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
    if start is None:
        start = trees.zeros_like(many[0])
    start = trees.only(start, names)
    changes = [trees.sub(trees.only(tree, names), start) for tree in many]
    norms = [trees.norm(change) for change in changes]
    bound = median(norms)
    clipped = [
        trees.scale(change, bound / norm) if norm > bound else change
        for change, norm in zip(changes, norms, strict=True)
    ]
    mean_change = trees.mean(clipped, [1.0] * len(clipped))
    return {**trees.clone(many[0]), **trees.add(start, mean_change)}


def krum(many: Sequence[Tensors], hostile: int) -> int:
    """The index of the tree with the smallest sum of squared distances to its n - hostile - 2
    nearest others; the first in a tie.

    hostile: the assumed number of hostile trees, at most (n - 3) / 2.

    Source: Blanchard et al. (2017), "Machine Learning with Adversaries", section 4.
    """
    n = len(many)
    hostile = max(0, min(hostile, (n - 3) // 2))
    apart = torch.zeros(n, n, dtype=torch.float64)
    for name in trees.floats(many[0]):
        values = torch.stack([tree[name].flatten() for tree in many]).double()
        apart += torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist").cpu() ** 2
    # The nearest of all is the tree itself.
    nearest = apart.sort(1).values[:, 1 : 1 + max(1, n - hostile - 2)]
    return int(nearest.sum(1).argmin())


# Means of what clients sent: pure functions of replies, always summed in the order of client ids.


Weighting = Literal["examples", "uniform"]
Aggregation = Literal[Weighting, Robust]


def weighted_mean(
    replies: Sequence[Reply],
    group: str = "params",
    weighting: Aggregation = "examples",
    start: Tensors | None = None,
    suspected: float | None = None,
) -> dict[str, Tensor]:
    """The mean of one group of the replies, weighted by their numbers of examples, or uniform; or a
    robust one.

    Buffers are averaged too; integer entries are the first client's. Replies of clients without
    examples weigh nothing, unless none has any. start, suspected: for robust means
    (``robust_mean``).

    Source: McMahan et al. (2017), Algorithm 1; FedNTD, eq. 2.
    Reading: FedNTD's Algorithm 1 prints the uniform mean; its code and eq. 2 weigh by size.
    """
    ordered = sorted(replies, key=lambda r: r.client)
    if weighting != "examples" and weighting != "uniform":
        if suspected is None:
            suspected = SUSPECTED
        return robust_mean([r.content.tensors(group) for r in ordered], weighting, start, suspected)
    sizes = [float(r.examples) for r in ordered]
    if weighting == "uniform" or not sum(sizes) > 0:
        sizes = [1.0] * len(ordered)
    return trees.mean([r.content.tensors(group) for r in ordered], sizes)


def alike(aggregation: Aggregation) -> Aggregation:
    """The chosen aggregation if it is robust, else the uniform mean."""
    if aggregation in ROBUST:
        return aggregation
    return "uniform"


def mean_by_class(
    replies: Sequence[Reply], old: Tensor, weighting: Weighting = "examples", group: str = "means"
) -> tuple[Tensor, Tensor]:
    """The mean of what the replies say of each class, over those that have it; and which classes
    any has.

    A reply has a group of values by class (C, V) and, as ``labels.means_by_class`` gives them,
    ``counts`` (C,) int64.
    weighting: each weighs by its number of examples of the class, or alike. Gives (C, V) of the
    type of ``old``, summed in float64, in which a class that no reply has is as in ``old``, (C, V);
    and (C,) bool.

    Source: Tan et al. (2022), FedProto, eq. 6.
    """
    ordered = sorted(replies, key=lambda r: r.client)
    counts = torch.stack(
        [r.content.tensor("counts").clamp(min=0) for r in ordered]
    ).double()  # (K, C)
    weights = (counts > 0).double() if weighting == "uniform" else counts
    sums = torch.zeros_like(old, dtype=torch.float64)
    for reply, weight in zip(ordered, weights, strict=True):
        sums += weight.unsqueeze(1) * reply.content.tensor(group)
    total = weights.sum(0)  # whole numbers
    mean = (sums / total.clamp(min=1).unsqueeze(1)).to(old.dtype)
    return torch.where(total.unsqueeze(1) > 0, mean, old), total > 0


def effective_steps(steps: int, momentum: float) -> float:
    """How far a client's steps reach, momentum counted: a_i of FedNova; the steps themselves
    without momentum.

    steps: tau >= 0; momentum: rho in [0, 1). Source: Wang et al. (2020), FedNova, section 4.

    >>> effective_steps(10, 0.0), round(effective_steps(2, 0.5), 3)
    (10.0, 2.5)
    """
    if momentum == 0:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def normalised_mean(
    start: Tensors,
    replies: Sequence[Reply],
    steps: Sequence[float],
    weighting: Aggregation = "examples",
) -> dict[str, Tensor]:
    """``start`` moved by the clients' changes, each divided by its effective steps, times their
    mean steps.

    start: trained entries as they were sent; steps: a_i >= 0 of each reply, in the replies' order;
    a client without steps has moved nothing. With p_i its share:
    ``w - (sum_j p_j a_j) sum_i p_i (w - w_i) / a_i``.

    Source: Wang et al. (2020), FedNova, eq. 6.
    """
    total = sum(r.examples for r in replies)
    by_size = weighting == "examples" and total > 0
    shares = [r.examples / total if by_size else 1 / len(replies) for r in replies]
    reach = sum(p * a for p, a in zip(shares, steps, strict=True))
    out = dict(start)
    for reply, p, a in zip(replies, shares, steps, strict=True):
        if a > 0:
            change = trees.sub(start, trees.only(reply.content.params, start))
            out = trees.sub(out, trees.scale(change, reach * p / a))
    return out
