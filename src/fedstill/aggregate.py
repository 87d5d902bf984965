"""Means of what clients sent: pure functions of replies, always summed in the order of client ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from fedstill import trees
from fedstill.records import Reply

Weighting = Literal["examples", "uniform"]


def weighted_mean(
    replies: Sequence[Reply], group: str = "params", weighting: Weighting = "examples"
) -> dict[str, Tensor]:
    """The mean of one group of the replies, weighted by their numbers of examples, or uniform.

    Buffers are averaged too; integer entries are the first client's. Replies of clients without examples weigh nothing,
    unless none has any.

    Source: McMahan et al. (2017), Algorithm 1; FedNTD, eq. 2.
    Reading: FedNTD's Algorithm 1 prints the uniform mean; its code and eq. 2 weigh by size.
    """
    ordered = sorted(replies, key=lambda r: r.client)
    sizes = [float(r.examples) for r in ordered]
    if weighting == "uniform" or not sum(sizes) > 0:
        sizes = [1.0] * len(ordered)
    return trees.mean([r.up.tensors(group) for r in ordered], sizes)
