"""Means of what clients sent: pure functions of replies, always summed in the order of client
ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedstill import trees
from fedstill.records import Reply, Tensors
from fedstill.robust import ROBUST, SUSPECTED, Robust, robust_mean

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
    (``robust.robust_mean``).

    Source: McMahan et al. (2017), Algorithm 1; FedNTD, eq. 2.
    Reading: FedNTD's Algorithm 1 prints the uniform mean; its code and eq. 2 weigh by size.
    """
    ordered = sorted(replies, key=lambda r: r.client)
    if weighting != "examples" and weighting != "uniform":
        return robust_mean(
            [r.up.tensors(group) for r in ordered], weighting, start, suspected or SUSPECTED
        )
    sizes = [float(r.examples) for r in ordered]
    if weighting == "uniform" or not sum(sizes) > 0:
        sizes = [1.0] * len(ordered)
    return trees.mean([r.up.tensors(group) for r in ordered], sizes)


def alike(aggregation: Aggregation) -> Aggregation:
    """What takes the place of a uniform mean: itself, or the robust one that was chosen."""
    return aggregation if aggregation in ROBUST else "uniform"


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
    counts = torch.stack([r.up.tensor("counts").clamp(min=0) for r in ordered]).double()  # (K, C)
    weights = (counts > 0).double() if weighting == "uniform" else counts
    sums = torch.zeros_like(old, dtype=torch.float64)
    for reply, weight in zip(ordered, weights, strict=True):
        sums += weight.unsqueeze(1) * reply.up.tensor(group)
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
            change = trees.sub(start, trees.only(reply.up.params, start))
            out = trees.sub(out, trees.scale(change, reach * p / a))
    return out
