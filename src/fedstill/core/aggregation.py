"""Aggregation: means of clients' replies, always summed in the order of client ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from fedstill.core import trees
from fedstill.core.payload import Tensors
from fedstill.core.records import Reply

Weighting = Literal["examples", "uniform"]
Robust = Literal["trimmed_mean", "median", "norm_clipping", "krum"]
Aggregation = Literal[Weighting, Robust]

ROBUST: frozenset[str] = frozenset(get_args(Robust))
"""Means that a few hostile clients can hardly move (``core.robust_means``)."""

SUSPECTED = 0.3
"""The default share of hostile clients that a robust mean tolerates."""


def weighted_mean(
    replies: Sequence[Reply],
    group: str = "params",
    weighting: Aggregation = "examples",
    start: Tensors | None = None,
    suspected: float | None = None,
) -> dict[str, Tensor]:
    """The mean of one group of tensors over replies.

    weighting: "examples" weighs each reply by its number of examples, "uniform" weighs all alike,
    and the others are robust means, which use start and suspected (``robust_means.robust_mean``).
    Buffers are averaged like parameters; integer entries are the first client's. A reply without
    examples has no weight, unless no reply has examples.

    Source: McMahan et al. (2017), Algorithm 1; FedNTD, eq. 2.
    Reading: FedNTD's Algorithm 1 prints the uniform mean; its code and eq. 2 weigh by size.
    """
    ordered = sorted(replies, key=lambda r: r.client)
    models = [reply.content.tensors(group) for reply in ordered]
    if weighting in ROBUST:
        from fedstill.core.robust_means import robust_mean  # few runs expect hostile clients

        if suspected is None:
            suspected = SUSPECTED
        return robust_mean(models, weighting, start, suspected)

    weights = [float(reply.examples) for reply in ordered]
    if weighting == "uniform" or not sum(weights) > 0:
        weights = [1.0] * len(ordered)
    return trees.mean(models, weights)


def uniform_unless_robust(aggregation: Aggregation) -> Aggregation:
    """The chosen aggregation if it is robust, else the uniform mean."""
    if aggregation in ROBUST:
        return aggregation
    return "uniform"
