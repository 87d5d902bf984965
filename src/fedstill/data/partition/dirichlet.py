"""Partitions by Dirichlet draws: ``dirichlet``, ``extended_dirichlet`` (each client holds a fixed
number of classes), ``hybrid`` (some clients hold an even share), ``hiper`` (one matrix of draws).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.core.errors import InfeasiblePartition
from fedstill.core.fields import Count, Positive, Seed, Share
from fedstill.core.keys import generator, numpy_generator
from fedstill.data.client_split import ClientSplit
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

Stream = Literal["official", "fast"]
DRAWS_AT_ONCE = 64
"""Draws of sizes that the fast stream makes at once."""


@partition("dirichlet")
def dirichlet(
    labels: Labels,
    clients: Count,
    alpha: Positive,
    seed: Seed,
    min_size: Count = 10,
    max_tries: Count = 20_000,
    stream: Stream = "official",
) -> Parts:
    """Share every class over the clients by p ~ Dir(alpha), redrawn until all hold ``min_size``
    examples.

    Every example is used. Raises InfeasiblePartition after ``max_tries`` draws, or at once where
    there are too few examples.

    labels: Class ids (n,).
    alpha: How even the shares are; small is skewed.
    seed: What the split is drawn from; unset in a config, it is the run's.
    min_size: Examples that each client gets at least.
    max_tries: Draws after which it gives up.
    stream: The draws of FedNTD's code ("official"), or sizes first and one shuffle, which is
    quicker ("fast").

    Source: FedNTD, "LDA"; the same routine is in FedSeq, MOON, NIID-Bench and PFNM.
    Reading: not a pure Dirichlet: a client that holds n / clients examples gets no more (the codes'
    balance rule).
    """
    return dirichlet_draw(labels, clients, alpha, seed, min_size, max_tries, stream).parts


def dirichlet_draw(
    labels: Labels,
    clients: int,
    alpha: float,
    seed: int,
    min_size: int = 10,
    max_tries: int = 20_000,
    stream: Stream = "official",
) -> Draw:
    """The split of ``dirichlet`` with the number of draws it took. Raises InfeasiblePartition where
    no draw fits.
    """
    refuse_too_many("dirichlet", len(labels), clients, min_size)
    owned = class_indices(labels)
    draw = _official if stream == "official" else _fast
    drawn = draw(owned, clients, alpha, seed, min_size, max_tries)
    if drawn is None:
        raise InfeasiblePartition(
            f"dirichlet: none of {max_tries:,} draws gave each of {clients} clients {min_size} "
            "examples "
            f"(alpha {alpha:g}, {len(owned)} classes, {len(labels):,} examples); "
            "raise alpha or max_tries, lower min_size or clients, or try another seed"
        )
    return drawn


def cuts(shares: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """Where a class of ``size`` examples is cut for shares (..., clients): clients - 1 ascending
    positions.
    """
    return (np.cumsum(shares, axis=-1) * size).astype(np.int64)[..., :-1]


def pieces_of(ends: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """How many of a class's ``size`` examples each client gets (clients,), given where it is cut
    (clients - 1,).
    """
    return np.diff(np.minimum(ends, size), prepend=0, append=size)


def _official(
    owned: Parts, clients: int, alpha: float, seed: int, min_size: int, max_tries: int
) -> Draw | None:
    stream = legacy_stream(seed)
    full = sum(map(len, owned)) / clients
    for tried in range(1, max_tries + 1):
        sizes = np.zeros(clients, dtype=np.int64)
        drawn: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for indices in owned:
            shuffled = indices.copy()
            stream.shuffle(shuffled)
            shares = stream.dirichlet(np.repeat(alpha, clients)) * (sizes < full)
            total = shares.sum()
            # every open client drew a share that underflowed to 0: no split, draw again
            if not total > 0:
                sizes[:] = 0
                break
            drawn.append((shuffled, pieces_of(cuts(shares / total, len(indices)), len(indices))))
            sizes += drawn[-1][1]
        if sizes.min() >= min_size:
            return Draw(shuffled_parts(drawn, stream), tried, min_size)
    return None


def shuffled_parts(
    drawn: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
    stream: np.random.RandomState | np.random.Generator,
) -> ClientSplit:
    """Each client's pieces of all classes, shuffled; drawn: of a class, its examples and the sizes
    of all pieces.
    """
    clients = len(drawn[0][1])
    owners = np.concatenate([np.repeat(np.arange(clients), sizes) for _, sizes in drawn])
    examples = np.concatenate([of_class for of_class, _ in drawn])
    parts = ClientSplit.of_owners(examples, owners, clients)
    for client in np.flatnonzero(parts.sizes > 1).tolist():  # to shuffle one example draws nothing
        stream.shuffle(parts[client])  # a view: in place
    return parts


def _fast(
    owned: Parts, clients: int, alpha: float, seed: int, min_size: int, max_tries: int
) -> Draw | None:
    rng = numpy_generator(seed)
    for start in range(0, max_tries, DRAWS_AT_ONCE):
        counts = _sizes(
            rng,
            [len(indices) for indices in owned],
            clients,
            alpha,
            min(DRAWS_AT_ONCE, max_tries - start),
        )
        accepted = np.flatnonzero(counts.sum(1).min(1) >= min_size)
        if len(accepted):
            first = int(accepted[0])
            drawn = [
                (rng.permutation(i), sizes) for i, sizes in zip(owned, counts[first], strict=True)
            ]
            return Draw(shuffled_parts(drawn, rng), start + first + 1, min_size)
    return None


def _sizes(
    rng: np.random.Generator, class_sizes: list[int], clients: int, alpha: float, tries: int
) -> NDArray[np.int64]:
    """Class counts of ``tries`` draws at once: (tries, classes, clients)."""
    counts = np.zeros((tries, len(class_sizes), clients), dtype=np.int64)
    held = np.zeros((tries, clients), dtype=np.int64)
    alive = np.ones(tries, dtype=bool)
    full = sum(class_sizes) / clients
    for k, size in enumerate(class_sizes):
        shares = rng.dirichlet(np.repeat(alpha, clients), tries) * (held < full)
        total = shares.sum(1, keepdims=True)
        alive &= total[:, 0] > 0
        ends = cuts(shares / np.where(total > 0, total, 1), size)
        counts[:, k] = np.diff(ends, prepend=0, append=size, axis=1)
        held += counts[:, k]
    counts[~alive] = 0  # shares that all underflowed to 0 are no split: too small for any min_size
    return counts


# Extended Dirichlet: every client holds a fixed number of classes; Dirichlet draws share a class
# among its clients.


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


# Hybrid: some clients hold an even share of every class, the others a skewed share of the rest.


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


# HiPer-FedKD's split: a public set apart, the rest by one Dirichlet matrix, a validation set for
# each client.


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
