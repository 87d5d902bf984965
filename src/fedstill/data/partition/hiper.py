"""HiPer-FedKD's split: a public set apart, the rest by one Dirichlet matrix, a validation set for
each client.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.core.errors import InfeasiblePartition
from fedstill.core.fields import Count, Positive, Seed
from fedstill.core.keys import generator
from fedstill.data.client_split import ClientSplit
from fedstill.data.partition.dirichlet import pieces_of
from fedstill.data.partition.rules import Labels, Parts, class_indices, legacy_stream, partition


def public_split(
    examples: int, public: int, seed: int = 42
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(pool, public): the positions that the clients share, and the public ones that all see.

    Both keep the order of the draw. Raises InfeasiblePartition where nothing would be left for the
    clients.
    Source: HiPer-FedKD's notebooks: torch's random_split with seed 42; 45,000 and 5,000 of
    CIFAR-10.
    """
    if not 0 <= public < examples:
        raise InfeasiblePartition(
            f"public set of {public:,} from {examples:,} examples: choose 0 to {examples - 1:,}"
        )
    order = torch.randperm(examples, generator=generator(seed)).numpy()
    return order[: examples - public], order[examples - public :]


@partition("hiper")
def hiper(labels: Labels, clients: Count, alpha: Positive, seed: Seed = 42) -> Parts:
    """Share the pool by one matrix of Dir(alpha) rows, a row a class; the last client takes what
    rounding leaves.

    No minimum size, no balance rule; classes are cut in order, then each client's examples are
    shuffled with seed + client. The notebooks hold out the last 20 % of each part:
    ``data.held_out = "last"``, ``plan.validation = 0.2``. Raises InfeasiblePartition for a client
    without examples.

    labels: Class ids (n,) of the pool alone (``labels[pool]`` of ``public_split``); indices point
    into it.
    alpha: How even the shares are; small is skewed.
    seed: What the split is drawn from; unset in a config, it is the run's.

    Source: HiPer-FedKD's notebooks, seed 42, 4 clients, alpha 1 and 0.1.
    """
    owned = class_indices(labels)
    matrix = legacy_stream(seed).dirichlet(np.repeat(alpha, clients), size=len(owned))
    owners = []
    for indices, shares in zip(owned, matrix, strict=True):
        ends = np.cumsum((shares * len(indices)).astype(np.int64)[:-1])
        owners.append(np.repeat(np.arange(clients), pieces_of(ends, len(indices))))
    parts = ClientSplit.of_owners(np.concatenate(owned), np.concatenate(owners), clients)
    for client in np.flatnonzero(parts.sizes > 1).tolist():  # to shuffle one example draws nothing
        legacy_stream(seed + client).shuffle(parts[client])  # a view: in place
    return parts
