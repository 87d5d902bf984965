"""Extended Dirichlet: every client holds a fixed number of classes; Dirichlet draws share a class
among its clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import InfeasiblePartition
from fedstill.core.fields import Count, Positive, Seed
from fedstill.data.partition.dirichlet import cuts, pieces_of, shuffled_parts
from fedstill.data.partition.rules import (
    Draw,
    Labels,
    Parts,
    class_indices,
    legacy_stream,
    partition,
    random_classes,
    refuse_too_many,
)


@partition("extended_dirichlet")
def extended_dirichlet(
    labels: Labels,
    clients: Count,
    classes_per_client: Count,
    alpha: Positive,
    seed: Seed,
    min_size: Count = 10,
    max_tries: Count = 200,
    allocations: Count = 5,
    lower_min_size: bool = False,
) -> Parts:
    """Give every client ``classes_per_client`` classes, then share each class among its clients by
    Dir(alpha).

    Every example is used. A class allocation that ``max_tries`` draws of shares could not fill is
    drawn again, ``allocations`` times in all; then InfeasiblePartition, or with ``lower_min_size``
    the same again with a ``min_size`` one smaller (``extended_dirichlet_draw`` says which was
    reached).

    labels: Class ids (n,).
    classes_per_client: Classes that each client holds.
    alpha: How even a class's shares are; small is skewed.
    seed: What the split is drawn from; unset in a config, it is the run's.
    min_size: Examples that each client gets at least.
    max_tries: Draws of shares for one allocation of classes.
    allocations: Allocations of classes that are tried.
    lower_min_size: Whether ``min_size`` is lowered where no draw reaches it, or the split is
    refused.

    Source: FedSeq and SFedKD, "ExDir(C, alpha)"; the stream is the official code's (NumPy, legacy).
    Reading: the official code never redraws the allocation, and so never ends where that one is
    infeasible.
    """
    return extended_dirichlet_draw(
        labels,
        clients,
        classes_per_client,
        alpha,
        seed,
        min_size,
        max_tries,
        allocations,
        lower_min_size,
    ).parts


def extended_dirichlet_draw(
    labels: Labels,
    clients: int,
    classes_per_client: int,
    alpha: float,
    seed: int,
    min_size: int = 10,
    max_tries: int = 200,
    allocations: int = 5,
    lower_min_size: bool = False,
) -> Draw:
    """The split of ``extended_dirichlet`` with the draws it took and the minimum size it reached.

    Raises InfeasiblePartition where no draw fits.
    """
    refuse_too_many("extended_dirichlet", len(labels), clients, min_size)
    owned = class_indices(labels)
    stream = legacy_stream(seed)
    tries, best, why = 0, -1, ""
    for wanted in range(min_size, 0 if lower_min_size else min_size - 1, -1):
        for _ in range(allocations):
            holders = allocate_classes(clients, len(owned), classes_per_client, stream)
            for _ in range(max_tries):
                tries += 1
                drawn, sizes = _share(owned, holders, clients, alpha, stream)
                if sizes.min() >= wanted:
                    return Draw(shuffled_parts(drawn, stream), tries, wanted)
                if sizes.min() > best:
                    best, why = int(sizes.min()), _smallest(labels, owned, holders, sizes)
    raise InfeasiblePartition(
        f"extended_dirichlet: none of {tries:,} draws gave each of {clients} clients {min_size} "
        "examples; "
        f"the best gave {why}; lower min_size, set lower_min_size = true, raise alpha, or take "
        "fewer clients"
    )


def allocate_classes(
    clients: int,
    classes: int,
    classes_per_client: int,
    stream: np.random.RandomState,
    max_tries: int = 10_000,
) -> list[Labels]:
    """The clients of every class, ascending: each draws its classes uniformly, until no class has
    too few clients.

    Too few: less than a fifth of an even deal (at least 1). Raises InfeasiblePartition if no
    assignment is possible.
    """
    if classes_per_client > classes:
        raise InfeasiblePartition(
            f"extended_dirichlet: classes_per_client = {classes_per_client}, the data have "
            f"{classes} classes"
        )
    if clients * classes_per_client < classes:
        raise InfeasiblePartition(
            f"extended_dirichlet: {clients} clients × {classes_per_client} classes cannot hold "
            f"{classes} classes; "
            "take more clients or more classes per client"
        )
    needed = max(classes_per_client * clients // classes // 5, 1)
    for _ in range(max_tries):
        holders = random_classes(clients, classes_per_client, classes, stream)
        if min(map(len, holders)) >= needed:
            return holders
    raise InfeasiblePartition(
        f"extended_dirichlet: none of {max_tries:,} deals gave every class {needed} client(s) "
        f"({clients} clients × {classes_per_client} of {classes} classes); take more classes per "
        "client or clients"
    )


def _share(
    owned: Parts,
    holders: Sequence[Labels],
    clients: int,
    alpha: float,
    stream: np.random.RandomState,
) -> tuple[list[tuple[Labels, Labels]], NDArray[np.int64]]:
    """One draw of shares: of each class its examples and how many each client gets; and the
    clients' sizes.

    The sizes are all 0 where the draw is no split.
    """
    full = sum(map(len, owned)) / clients
    sizes = np.zeros(clients, dtype=np.int64)
    drawn = []
    for indices, held_by in zip(owned, holders, strict=True):
        shuffled = indices.copy()
        stream.shuffle(shuffled)
        allowed = np.zeros(clients, dtype=bool)
        allowed[held_by] = True
        shares = stream.dirichlet(np.repeat(alpha, clients)) * (allowed & (sizes < full))
        total = shares.sum()
        if not total > 0:  # all clients of this class are full already
            return [], np.zeros(clients, dtype=np.int64)
        ends = cuts(shares / total, len(indices))
        # rounding left some over: the class's last client takes them
        if len(ends) and ends[-1] != len(indices):
            ends[held_by[-1] :] = len(indices)
        drawn.append((shuffled, pieces_of(ends, len(indices))))
        sizes += drawn[-1][1]
    return drawn, sizes


def _smallest(
    labels: Labels, owned: Parts, holders: Sequence[Labels], sizes: NDArray[np.int64]
) -> str:
    """The reason in words: the smallest client, and the scarcest of its classes."""
    client = int(sizes.argmin())
    mine = [c for c, held_by in enumerate(holders) if client in held_by]
    scarce = min(mine, key=lambda c: len(owned[c]) / len(holders[c]))
    name = int(np.unique(labels)[scarce])
    return (
        f"client {client} only {sizes[client]} (class {name}: {len(owned[scarce])} examples "
        f"for {len(holders[scarce])} clients)"
    )
