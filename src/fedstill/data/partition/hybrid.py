"""Hybrid: some clients hold an even share of every class, the others a skewed share of the rest."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedstill.core.errors import InfeasiblePartition
from fedstill.core.fields import Count, Positive, Seed, Share
from fedstill.data.client_split import ClientSplit
from fedstill.data.partition.dirichlet import dirichlet_draw
from fedstill.data.partition.rules import (
    Labels,
    Parts,
    class_indices,
    legacy_stream,
    partition,
    refuse_too_many,
)


@partition("hybrid")
def hybrid(
    labels: Labels,
    clients: Count,
    iid_share: Share,
    seed: Seed,
    alpha: Positive = 0.05,
    min_size: Count = 1,
    max_tries: Count = 20_000,
    hybrid_share: Literal["proportional", "equal_per_client"] = "proportional",
) -> Parts:
    """The first ``iid_share`` of the clients get stratified equal parts, the others split the rest
    by Dir(alpha).

    Every example is used.

    labels: Class ids (n,).
    iid_share: Share of the clients, rounded to whole ones, and of the data, that is split evenly.
    seed: What the split is drawn from; unset in a config, it is the run's.
    alpha: How even the other clients' shares are; small is skewed.
    min_size: Examples that each skewed client gets at least, where the rest is split by
    ``dirichlet``.
    max_tries: Draws after which that gives up.
    hybrid_share: Skewed clients' sizes: as ``dirichlet`` draws them, or n / clients each, with
    classes by Dir(alpha).

    Source: FedADKD, IID / non-IID ratios 1:9, 3:7, 5:5 with alpha 0.05.
    Reading: the paper does not say how the data divide between the groups. Dirichlet 0.05 with a
    minimum of 10 almost never succeeds for 90 or 50 clients, hence min_size 1.
    """
    refuse_too_many("hybrid", len(labels), clients, min_size)
    even = round(iid_share * clients)
    stream = legacy_stream(seed)
    first, rest = _stratified(labels, even, clients, stream)
    if even == clients:
        return first
    if hybrid_share == "equal_per_client":
        others = ClientSplit.of_parts(_equal_sizes(labels, rest, clients - even, alpha, stream))
    else:
        drawn = ClientSplit.of_parts(
            dirichlet_draw(labels[rest], clients - even, alpha, seed, min_size, max_tries).parts
        )
        others = ClientSplit(rest[drawn.positions], drawn.ends)
    positions = np.concatenate([first.positions, others.positions])
    ends = np.concatenate([first.ends, others.ends + len(first.positions)])
    return ClientSplit(positions, ends)


def _stratified(
    labels: Labels, even: int, clients: int, stream: np.random.RandomState
) -> tuple[ClientSplit, Labels]:
    """``even`` parts that each hold a ``clients``-th of every class, and the examples left, in
    data-set order.
    """
    given, owners, rest = [], [], []
    # the odd examples of a class go to the next clients in turn, so that sizes stay equal
    spare = 0
    for indices in class_indices(labels):
        shuffled = stream.permutation(indices)
        size, odd = divmod(round(len(indices) * even / clients), even) if even else (0, 0)
        takes = size + ((np.arange(even) - spare) % max(even, 1) < odd)
        owners.append(np.repeat(np.arange(even), takes))
        spare = (spare + odd) % even if even else 0
        given.append(shuffled[: len(owners[-1])])
        rest.append(shuffled[len(owners[-1]) :])
    first = ClientSplit.of_owners(np.concatenate(given), np.concatenate(owners), even)
    return first, np.sort(np.concatenate(rest))


def _equal_sizes(
    labels: Labels, rest: Labels, clients: int, alpha: float, stream: np.random.RandomState
) -> Parts:
    """Parts of equal size whose class mixes are Dir(alpha) as long as examples of the classes
    remain.
    """
    if len(rest) < clients:
        raise InfeasiblePartition(
            f"hybrid: {len(rest)} examples are left for {clients} skewed clients; take fewer "
            "clients"
        )
    stock = [list(stream.permutation(rest[i])) for i in class_indices(labels[rest])]
    parts = []
    for quota in map(len, np.array_split(rest, clients)):
        mix = stream.dirichlet(np.repeat(alpha, len(stock)))
        mine: list[int] = []
        while len(mine) < quota:
            left = np.array([len(pile) for pile in stock])
            shares = mix * (left > 0)
            # A client whose classes are used up takes from all that is left, in proportion.
            shares = shares / shares.sum() if shares.sum() > 0 else left / left.sum()
            counts = np.minimum(stream.multinomial(quota - len(mine), shares), left)
            for pile, count in zip(stock, counts, strict=True):
                mine += [pile.pop() for _ in range(count)]
        parts.append(np.array(mine, dtype=np.int64))
    return parts
