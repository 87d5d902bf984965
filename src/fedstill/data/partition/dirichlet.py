"""Partitions with Dirichlet distributions: ``dirichlet``, ``extended_dirichlet`` (each client has a
fixed number of classes), ``hybrid`` (some clients have IID data), and ``hiper`` (HiPer-FedKD).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedstill.core.errors import InfeasiblePartition
from fedstill.core.fields import Count, Positive, Seed, Share
from fedstill.core.files import counted
from fedstill.core.keys import generator, numpy_generator
from fedstill.data.client_split import ClientSplit, Positions, RandomStream
from fedstill.data.partition.rules import (
    ClassAllocation,
    Clients,
    Counts,
    Labels,
    Parts,
    check_enough_examples,
    class_indices,
    cuts,
    legacy_stream,
    partition,
    piece_sizes,
)

Stream = Literal["official", "fast"]

DRAWS_AT_ONCE = 64
"""The number of draws that the fast stream computes at once."""


_IGNORES_UNDERFLOW = np.errstate(invalid="ignore")
"""With a tiny alpha, the numbers of which NumPy makes shares underflow to 0, and shares are NaN.
Such draws are invalid and are repeated, so users need no warning about them.
"""


# The division of a class among clients.


@dataclass(frozen=True)
class ClassPieces:
    """The examples of a class, divided into consecutive pieces for clients 0, 1 and so on."""

    examples: Positions
    sizes: Counts
    """(clients,)"""


@_IGNORES_UNDERFLOW
def _draw_pieces(
    examples_of_class: Parts,
    clients: int,
    alpha: float,
    stream: np.random.RandomState,
    holders: Sequence[Clients] | None = None,
) -> list[ClassPieces] | None:
    """A draw of shares for all classes in order; None if it is invalid.

    A client with at least n / clients examples gets no more. holders: the clients that may have
    examples of each class; None for all clients. A draw is invalid if the shares of all clients
    that may get examples of a class are 0.
    """
    even_share = sum(map(len, examples_of_class)) / clients
    sizes = np.zeros(clients, dtype=np.int64)
    pieces = []
    for position, examples in enumerate(examples_of_class):
        shuffled = examples.copy()
        stream.shuffle(shuffled)
        may_receive = sizes < even_share
        if holders is not None:
            may_receive &= np.isin(np.arange(clients), holders[position])
        shares = stream.dirichlet(np.repeat(alpha, clients)) * may_receive
        total = shares.sum()
        if not total > 0:
            return None
        cut_positions = cuts(shares / total, len(examples))
        if holders is not None and len(cut_positions) and cut_positions[-1] != len(examples):
            # The last holder, not the last client, gets the examples that rounding leaves over.
            cut_positions[holders[position][-1] :] = len(examples)
        piece = ClassPieces(shuffled, piece_sizes(cut_positions, len(examples)))
        sizes += piece.sizes
        pieces.append(piece)
    return pieces


def _client_sizes(pieces: Sequence[ClassPieces] | None, clients: int) -> Counts:
    """The number of examples of each client (clients,); all 0 for an invalid draw."""
    if pieces is None:
        return np.zeros(clients, dtype=np.int64)
    sizes: Counts = np.sum([piece.sizes for piece in pieces], axis=0, dtype=np.int64)
    return sizes


def _shuffled_split(pieces: Sequence[ClassPieces], stream: RandomStream) -> ClientSplit:
    """The split that gives each client its pieces of all classes, in random order."""
    clients = np.arange(len(pieces[0].sizes))
    owners = np.concatenate([np.repeat(clients, piece.sizes) for piece in pieces])
    examples = np.concatenate([piece.examples for piece in pieces])
    split = ClientSplit.of_owners(examples, owners, len(clients))
    split.shuffle_in_place(lambda client: stream)
    return split


# dirichlet: all clients may get examples of all classes.


@partition("dirichlet")
def dirichlet(
    labels: Labels,
    clients: Count,
    alpha: Positive,
    seed: Seed,
    *,
    min_size: Count = 10,
    max_tries: Count = 20_000,
    stream: Stream = "official",
) -> Parts:
    """Splits every class over the clients with shares p ~ Dir(alpha), and repeats the draw until
    all clients have min_size examples.

    Every example is used. Raises InfeasiblePartition after ``max_tries`` draws, or immediately if
    there are too few examples.

    labels: Class ids (n,).
    alpha: The concentration of the Dirichlet distribution; the smaller, the more skewed are the
    shares.
    seed: The seed of the split; by default, the seed of the run.
    min_size: The minimum number of examples of each client.
    max_tries: The maximum number of draws.
    stream: The order of random draws: that of FedNTD's code ("official"), or sizes first and a
    single shuffle, which is faster ("fast").

    Source: FedNTD, "LDA"; the same algorithm is in FedSeq, MOON, NIID-Bench and PFNM.
    Reading: shares are not exactly Dirichlet, because a client with n / clients examples gets no
    more (the balance rule of the official code).
    """
    check_enough_examples("dirichlet", len(labels), clients, min_size)
    settings = _DrawSettings(
        examples_of_class=class_indices(labels),
        clients=clients,
        alpha=alpha,
        min_size=min_size,
        max_tries=max_tries,
    )
    if stream == "official":
        accepted = _official_draw(settings, legacy_stream(seed))
    else:
        accepted = _fast_draw(settings, numpy_generator(seed))
    if accepted is None:
        classes = len(settings.examples_of_class)
        raise InfeasiblePartition(
            f"dirichlet: none of {max_tries:,} draws gave each of {counted(clients, 'client')} "
            f"{counted(min_size, 'example')} (alpha {alpha:g}, "
            f"{counted(classes, 'class', 'classes')}, {counted(len(labels), 'example')}); raise "
            "alpha or max_tries, lower min_size or clients, or try another seed"
        )
    return accepted


@dataclass(frozen=True)
class _DrawSettings:
    """The examples of each class, and the settings of their division over clients."""

    examples_of_class: Parts
    clients: int
    alpha: float
    min_size: int
    max_tries: int


def _official_draw(settings: _DrawSettings, stream: np.random.RandomState) -> ClientSplit | None:
    """The first accepted draw in the order of FedNTD's code, which alternates shuffles and
    shares.
    """
    for _ in range(settings.max_tries):
        pieces = _draw_pieces(settings.examples_of_class, settings.clients, settings.alpha, stream)
        smallest = _client_sizes(pieces, settings.clients).min()
        if pieces is not None and smallest >= settings.min_size:
            return _shuffled_split(pieces, stream)
    return None


def _fast_draw(settings: _DrawSettings, stream: np.random.Generator) -> ClientSplit | None:
    """The first accepted draw of sizes. Examples are shuffled only for this draw."""
    for start in range(0, settings.max_tries, DRAWS_AT_ONCE):
        counts = _class_counts(settings, stream, min(DRAWS_AT_ONCE, settings.max_tries - start))
        accepted = np.flatnonzero(counts.sum(1).min(1) >= settings.min_size)
        if not len(accepted):
            continue
        pieces = [
            ClassPieces(stream.permutation(examples), sizes)
            for examples, sizes in zip(settings.examples_of_class, counts[accepted[0]], strict=True)
        ]
        return _shuffled_split(pieces, stream)
    return None


@_IGNORES_UNDERFLOW
def _class_counts(settings: _DrawSettings, stream: np.random.Generator, tries: int) -> Counts:
    """The number of examples of each class and client in several draws: (tries, classes, clients).

    The rules are those of ``_draw_pieces``. The counts of an invalid draw are 0.
    """
    class_sizes = [len(examples) for examples in settings.examples_of_class]
    even_share = sum(class_sizes) / settings.clients
    counts = np.zeros((tries, len(class_sizes), settings.clients), dtype=np.int64)
    sizes = np.zeros((tries, settings.clients), dtype=np.int64)
    is_split = np.ones(tries, dtype=bool)
    for position, class_size in enumerate(class_sizes):
        drawn = stream.dirichlet(np.repeat(settings.alpha, settings.clients), tries)
        drawn *= sizes < even_share
        totals = drawn.sum(1, keepdims=True)
        is_split &= totals[:, 0] > 0
        divisors = np.where(totals > 0, totals, 1)
        counts[:, position] = piece_sizes(cuts(drawn / divisors, class_size), class_size)
        sizes += counts[:, position]
    counts[~is_split] = 0
    return counts


# extended_dirichlet: each client gets examples of a fixed number of classes.


@partition("extended_dirichlet")
def extended_dirichlet(  # noqa: PLR0913 - the fields of the partition's config table
    labels: Labels,
    clients: Count,
    classes_per_client: Count,
    alpha: Positive,
    seed: Seed,
    *,
    min_size: Count = 10,
    max_tries: Count = 200,
    allocations: Count = 5,
    lower_min_size: bool = False,
) -> Parts:
    """Assigns classes_per_client classes to every client, then splits each class over its clients
    with shares from Dir(alpha).

    Every example is used. After ``max_tries`` draws of shares, the assignment of classes is drawn
    again, up to ``allocations`` assignments. Then ``min_size`` is lowered by one with
    ``lower_min_size``; otherwise, the partition raises InfeasiblePartition.

    labels: Class ids (n,).
    classes_per_client: The number of classes of each client.
    alpha: The concentration of the Dirichlet distribution; the smaller, the more skewed are the
    shares.
    seed: The seed of the split; by default, the seed of the run.
    min_size: The minimum number of examples of each client.
    max_tries: The maximum number of draws of shares for an assignment of classes.
    allocations: The maximum number of assignments of classes.
    lower_min_size: Whether to lower ``min_size`` if no draw reaches it.

    Source: FedSeq and SFedKD, "ExDir(C, alpha)", with the random draws of the official code
    (NumPy's legacy generator).
    Reading: the official code never draws the assignment again, so it does not terminate for an
    infeasible assignment.
    """
    accepted_sizes = [min_size]
    if lower_min_size:
        largest_size = min(min_size, len(labels) // clients)
        accepted_sizes = list(range(largest_size, 0, -1))
    smallest_size = min(accepted_sizes, default=1)
    check_enough_examples("extended_dirichlet", len(labels), clients, smallest_size)
    settings = _DrawSettings(
        examples_of_class=class_indices(labels),
        clients=clients,
        alpha=alpha,
        min_size=min_size,
        max_tries=max_tries,
    )
    stream = legacy_stream(seed)
    tries = 0
    best: _Attempt | None = None
    for accepted_size in accepted_sizes:
        for _ in range(allocations):
            for attempt in _attempts(settings, classes_per_client, stream):
                tries += 1
                if attempt.pieces is not None and attempt.smallest >= accepted_size:
                    return _shuffled_split(attempt.pieces, stream)
                if best is None or attempt.smallest > best.smallest:
                    best = attempt
    assert best is not None
    raise InfeasiblePartition(
        f"extended_dirichlet: none of {tries:,} draws gave each of {counted(clients, 'client')} "
        f"{counted(min_size, 'example')}; the best gave "
        f"{best.shortage(labels, settings.examples_of_class)}; lower min_size, set "
        "lower_min_size = true, raise alpha, or lower clients"
    )


@dataclass(frozen=True)
class _Attempt:
    """A draw of shares for an assignment of classes."""

    holders: Sequence[Clients]
    """The clients that hold each class."""
    pieces: Sequence[ClassPieces] | None
    sizes: Counts
    """The number of examples of each client (clients,)."""

    @property
    def smallest(self) -> int:
        """The number of examples of the smallest client."""
        return int(self.sizes.min())

    def shortage(self, labels: Labels, examples_of_class: Parts) -> str:
        """The smallest client, and the scarcest of its classes, for a message."""
        client = int(self.sizes.argmin())
        per_holder = {
            position: len(examples) / len(self.holders[position])
            for position, examples in enumerate(examples_of_class)
            if client in self.holders[position]
        }
        scarcest = min(per_holder, key=lambda position: per_holder[position])
        return (
            f"client {client} only {self.sizes[client]} (class {np.unique(labels)[scarcest]}: "
            f"{len(examples_of_class[scarcest])} examples for {len(self.holders[scarcest])} "
            "clients)"
        )


def _attempts(
    settings: _DrawSettings, classes_per_client: int, stream: np.random.RandomState
) -> Iterator[_Attempt]:
    """Draws of shares for one assignment of classes."""
    classes = len(settings.examples_of_class)
    holders = allocate_classes(settings.clients, classes, classes_per_client, stream)
    for _ in range(settings.max_tries):
        pieces = _draw_pieces(
            settings.examples_of_class, settings.clients, settings.alpha, stream, holders
        )
        yield _Attempt(holders, pieces, _client_sizes(pieces, settings.clients))


def allocate_classes(
    clients: int, classes: int, classes_per_client: int, stream: np.random.RandomState
) -> list[Clients]:
    """The clients of every class, in ascending order.

    Each client draws its classes uniformly. The draw is repeated until each class has at least one
    client, and at least a fifth of the clients of an even assignment. Raises InfeasiblePartition if
    this is impossible, or does not happen in 10,000 draws.
    """
    allocation = ClassAllocation(
        partition="extended_dirichlet",
        clients=clients,
        per_client=classes_per_client,
        classes=classes,
    )
    allocation.check_possible()
    least_holders = max(classes_per_client * clients // classes // 5, 1)
    return allocation.drawn(stream, min_clients=least_holders)


# hybrid: some clients get IID data, the others a skewed split of the remaining data.


@partition("hybrid")
def hybrid(
    labels: Labels,
    clients: Count,
    iid_share: Share,
    seed: Seed,
    *,
    alpha: Positive = 0.05,
    min_size: Count = 1,
    max_tries: Count = 20_000,
    hybrid_share: Literal["proportional", "equal_per_client"] = "proportional",
) -> Parts:
    """Gives stratified equal parts to a share of the clients, and splits the remaining data over
    the other clients by Dir(alpha).

    Every example is used.

    labels: Class ids (n,).
    iid_share: The share of clients with IID data, which get the same share of the data. They are
    the first clients; their number is rounded.
    seed: The seed of the split; by default, the seed of the run.
    alpha: The concentration of the Dirichlet distribution of the other clients; the smaller, the
    more skewed are their shares.
    min_size: The minimum number of examples of these clients, if ``dirichlet`` splits their data.
    max_tries: The maximum number of draws of ``dirichlet``.
    hybrid_share: The sizes of these clients: drawn by ``dirichlet`` ("proportional"), or n /
    clients each with classes from Dir(alpha) ("equal_per_client").

    Source: FedADKD, IID / non-IID ratios 1:9, 3:7, 5:5 with alpha 0.05.
    Reading: the paper does not describe the division of the data between both groups. With alpha
    0.05 and a minimum of 10, almost no draw is accepted for 90 or 50 clients; hence min_size 1.
    """
    check_enough_examples("hybrid", len(labels), clients, min_size)
    iid_clients = round(iid_share * clients)
    skewed_clients = clients - iid_clients
    stream = legacy_stream(seed)
    even = _stratified_parts(labels, iid_clients, clients, stream)
    if not skewed_clients:
        return even.split

    remaining = even.remaining
    parts: Parts
    if hybrid_share == "equal_per_client":
        parts = _equal_parts(labels[remaining], skewed_clients, alpha, stream)
    else:
        parts = dirichlet(
            labels[remaining], skewed_clients, alpha, seed, min_size=min_size, max_tries=max_tries
        )
    skewed = ClientSplit.of_parts(parts)
    positions = np.concatenate([even.split.positions, remaining[skewed.positions]])
    ends = np.concatenate([even.split.ends, skewed.ends + len(even.split.positions)])
    return ClientSplit(positions, ends)


class _StratifiedParts(NamedTuple):
    """The split of the clients with IID data, and the positions of all other examples."""

    split: ClientSplit
    remaining: Positions


def _stratified_parts(
    labels: Labels, iid_clients: int, clients: int, stream: np.random.RandomState
) -> _StratifiedParts:
    """Give each of ``iid_clients`` clients a ``clients``-th of every class.

    The examples that remain after an even division go to successive clients. The next class
    continues with the next client, so that sizes differ by at most one.
    """
    owners = []
    examples = []
    remaining = []
    next_client = 0
    for members in class_indices(labels):
        shuffled = stream.permutation(members)
        count = round(len(members) * iid_clients / clients)
        sizes = np.zeros(iid_clients, dtype=np.int64)
        if iid_clients:
            size, remainder = divmod(count, iid_clients)
            turn = (np.arange(iid_clients) - next_client) % iid_clients
            sizes = size + (turn < remainder)
            next_client = (next_client + remainder) % iid_clients
        owners.append(np.repeat(np.arange(iid_clients), sizes))
        examples.append(shuffled[:count])
        remaining.append(shuffled[count:])
    split = ClientSplit.of_owners(np.concatenate(examples), np.concatenate(owners), iid_clients)
    return _StratifiedParts(split, np.sort(np.concatenate(remaining)))


@_IGNORES_UNDERFLOW
def _equal_parts(
    labels: Labels, clients: int, alpha: float, stream: np.random.RandomState
) -> list[Positions]:
    """Parts of equal size with classes from Dir(alpha): the positions in ``labels`` by client.

    Each client draws the classes of its examples. If a class has too few examples, the client draws
    the missing ones again, until its part is full. Raises InfeasiblePartition for too few examples,
    and if the shares of all classes underflow to 0.
    """
    if len(labels) < clients:
        raise InfeasiblePartition(
            f"hybrid: {counted(len(labels), 'remaining example')} for "
            f"{counted(clients, 'skewed client')}; lower clients or iid_share"
        )
    stock = [list(stream.permutation(members)) for members in class_indices(labels)]
    parts = []
    for part_size in map(len, np.array_split(labels, clients)):
        mix = stream.dirichlet(np.repeat(alpha, len(stock)))
        if not np.isfinite(mix).all():
            raise InfeasiblePartition(
                f"hybrid: with alpha {alpha:g}, the shares of all classes underflow to 0; raise "
                "alpha, or try another seed"
            )
        part: list[int] = []
        while len(part) < part_size:
            available = np.array([len(members) for members in stock])
            counts = _drawn_classes(part_size - len(part), mix, available, stream)
            for members, count in zip(stock, counts, strict=True):
                part += [members.pop() for _ in range(count)]
        parts.append(np.array(part, dtype=np.int64))
    return parts


def _drawn_classes(
    size: int, mix: NDArray[np.float64], available: Counts, stream: np.random.RandomState
) -> Counts:
    """A draw of up to ``size`` examples, as counts by class, limited by the available examples."""
    shares = mix * (available > 0)
    if not shares.sum() > 0:
        # No examples of the mix's classes remain, so draw from all remaining ones in proportion.
        shares = available.astype(np.float64)
    shares = shares / shares.sum()
    return np.minimum(stream.multinomial(size, shares), available)


# hiper: HiPer-FedKD's split.


class PublicSplit(NamedTuple):
    """The positions of the clients' examples (the pool), and of the public examples."""

    pool: Positions
    public: Positions


def public_split(examples: int, public: int, seed: int = 42) -> PublicSplit:
    """Draw ``public`` examples as the public set. Both parts have the order of the draw.

    Raises InfeasiblePartition if no examples remain for the clients.

    Source: HiPer-FedKD's notebooks: torch's random_split with seed 42, into 45,000 and 5,000
    examples of CIFAR-10.
    """
    if not 0 <= public < examples:
        raise InfeasiblePartition(
            f"a public set of {public:,} from {examples:,} examples leaves none for the clients; "
            f"choose 0 to {examples - 1:,}"
        )
    order = torch.randperm(examples, generator=generator(seed)).numpy()
    return PublicSplit(order[: examples - public], order[examples - public :])


@partition("hiper")
def hiper(labels: Labels, clients: Count, alpha: Positive, seed: Seed = 42) -> Parts:
    """Splits every class with shares from Dir(alpha), all drawn at once, as in HiPer-FedKD. The
    last client gets the examples that rounding leaves over.

    There is no minimum size and no balance rule. Each class is divided in order, then each client's
    examples are shuffled with seed + client. The notebooks hold out the last 20 % of each part:
    ``data.held_out = "last"``, ``plan.validation = 0.2``. Raises InfeasiblePartition for a client
    without examples.

    labels: Class ids (n,) of the pool (``labels[pool]`` of ``public_split``); the result contains
    positions in the pool.
    alpha: The concentration of the Dirichlet distribution; the smaller, the more skewed are the
    shares.
    seed: The seed of the split; by default, the seed of the run.

    Source: HiPer-FedKD's notebooks, seed 42, 4 clients, alpha 1 and 0.1.
    """
    examples_of_class = class_indices(labels)
    matrix = legacy_stream(seed).dirichlet(np.repeat(alpha, clients), size=len(examples_of_class))
    if clients > 1 and not np.isfinite(matrix).all():
        raise InfeasiblePartition(
            f"hiper: with alpha {alpha:g}, the shares of all clients underflow to 0; raise alpha"
        )
    owners = []
    for examples, shares in zip(examples_of_class, matrix, strict=True):
        # The notebooks round each share down. ``cuts`` would round their sums down.
        cut_positions = np.cumsum((shares * len(examples)).astype(np.int64)[:-1])
        owners.append(np.repeat(np.arange(clients), piece_sizes(cut_positions, len(examples))))
    split = ClientSplit.of_owners(
        np.concatenate(examples_of_class), np.concatenate(owners), clients
    )
    split.shuffle_in_place(lambda client: legacy_stream(seed + client))
    return split
