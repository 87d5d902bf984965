"""Dirichlet: every class is shared among the clients by a Dirichlet draw, and full clients stop
receiving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import InfeasiblePartition
from fedstill.core.fields import Count, Positive, Seed
from fedstill.core.keys import numpy_generator
from fedstill.data.client_split import ClientSplit
from fedstill.data.partition.rules import (
    Draw,
    Labels,
    Parts,
    class_indices,
    legacy_stream,
    partition,
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
