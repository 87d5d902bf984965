"""Partitions by Dirichlet draws: ``dirichlet``, ``extended_dirichlet`` (each client holds a fixed
number of classes), ``hybrid`` (some clients hold an even share), ``hiper`` (one matrix of draws).
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
from fedstill.core.keys import generator, numpy_generator
from fedstill.data.client_split import ClientSplit
from fedstill.data.partition.rules import (
    Draw,
    Labels,
    Parts,
    check_enough_examples,
    class_indices,
    legacy_stream,
    partition,
    random_classes,
)

Stream = Literal["official", "fast"]

DRAWS_AT_ONCE = 64
"""Draws of sizes that the fast stream makes at once."""


# A class and the pieces of it that clients get.


@dataclass(frozen=True)
class ClassPieces:
    """The examples of a class, and how many of them each client gets, one client after another."""

    examples: Labels
    sizes: Labels
    """(clients,)"""


def cuts(shares: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """The positions at which ``size`` examples of a class are cut for shares (..., clients).

    There are clients - 1 positions, in ascending order.
    """
    return (np.cumsum(shares, axis=-1) * size).astype(np.int64)[..., :-1]


def piece_sizes(cut_positions: Labels, size: int) -> Labels:
    """How many of a class's ``size`` examples each client gets (..., clients)."""
    return np.diff(np.minimum(cut_positions, size), prepend=0, append=size)


def _draw_pieces(
    examples_of_class: Parts,
    clients: int,
    alpha: float,
    stream: np.random.RandomState,
    holders: Sequence[Labels] | None = None,
) -> list[ClassPieces] | None:
    """One draw of shares for all classes, one class after another, or None if it is no split.

    A client that has its even share of all examples gets no more. holders: the clients that may
    have examples of each class; None for all clients. The draw is no split if the shares of all
    clients that may get examples of a class are 0.
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
            # Rounding leaves examples over. The last holder takes them, not the last client.
            cut_positions[holders[position][-1] :] = len(examples)
        piece = ClassPieces(shuffled, piece_sizes(cut_positions, len(examples)))
        sizes += piece.sizes
        pieces.append(piece)
    return pieces


def _client_sizes(pieces: Sequence[ClassPieces] | None, clients: int) -> Labels:
    """The number of examples of each client (clients,); 0 for all where there is no split."""
    if pieces is None:
        return np.zeros(clients, dtype=np.int64)
    sizes: Labels = np.sum([piece.sizes for piece in pieces], axis=0, dtype=np.int64)
    return sizes


def _shuffled_split(
    pieces: Sequence[ClassPieces], stream: np.random.RandomState | np.random.Generator
) -> ClientSplit:
    """The split that gives each client its pieces of all classes, in random order."""
    clients = np.arange(len(pieces[0].sizes))
    owners = np.concatenate([np.repeat(clients, piece.sizes) for piece in pieces])
    examples = np.concatenate([piece.examples for piece in pieces])
    split = ClientSplit.of_owners(examples, owners, len(clients))
    for client in np.flatnonzero(split.sizes > 1).tolist():  # to shuffle one example draws nothing
        stream.shuffle(split[client])  # a view: in place
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
    """Splits every class over the clients by p ~ Dir(alpha), and redraws until all clients have
    min_size examples.

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
    draw = dirichlet_draw(
        labels, clients, alpha, seed, min_size=min_size, max_tries=max_tries, stream=stream
    )
    return draw.parts


def dirichlet_draw(
    labels: Labels,
    clients: int,
    alpha: float,
    seed: int,
    *,
    min_size: int = 10,
    max_tries: int = 20_000,
    stream: Stream = "official",
) -> Draw:
    """The split of ``dirichlet`` with the number of draws it took. Raises InfeasiblePartition where
    no draw fits.
    """
    check_enough_examples("dirichlet", len(labels), clients, min_size)
    settings = _DrawSettings(class_indices(labels), clients, alpha, min_size)
    accepted: Draw | None
    if stream == "official":
        accepted = _official_draw(settings, legacy_stream(seed), max_tries)
    else:
        accepted = _fast_draw(settings, numpy_generator(seed), max_tries)
    if accepted is None:
        classes = len(settings.examples_of_class)
        raise InfeasiblePartition(
            f"dirichlet: none of {max_tries:,} draws gave each of {clients} clients {min_size} "
            f"examples (alpha {alpha:g}, {classes} classes, {len(labels):,} examples); raise alpha "
            "or max_tries, lower min_size or clients, or try another seed"
        )
    return accepted


@dataclass(frozen=True)
class _DrawSettings:
    """The examples of each class, and the settings of their division over clients."""

    examples_of_class: Parts
    clients: int
    alpha: float
    min_size: int


def _official_draw(
    settings: _DrawSettings, stream: np.random.RandomState, max_tries: int
) -> Draw | None:
    """The first accepted draw in the order of FedNTD's code: shuffles and shares in turn."""
    for tries in range(1, max_tries + 1):
        pieces = _draw_pieces(settings.examples_of_class, settings.clients, settings.alpha, stream)
        smallest = _client_sizes(pieces, settings.clients).min()
        if pieces is not None and smallest >= settings.min_size:
            return Draw(_shuffled_split(pieces, stream), tries, settings.min_size)
    return None


def _fast_draw(settings: _DrawSettings, stream: np.random.Generator, max_tries: int) -> Draw | None:
    """The first accepted draw of sizes. Only its examples are shuffled."""
    for start in range(0, max_tries, DRAWS_AT_ONCE):
        counts = _class_counts(settings, stream, min(DRAWS_AT_ONCE, max_tries - start))
        accepted = np.flatnonzero(counts.sum(1).min(1) >= settings.min_size)
        if not len(accepted):
            continue
        first = int(accepted[0])
        pieces = [
            ClassPieces(stream.permutation(examples), sizes)
            for examples, sizes in zip(settings.examples_of_class, counts[first], strict=True)
        ]
        return Draw(_shuffled_split(pieces, stream), start + first + 1, settings.min_size)
    return None


def _class_counts(settings: _DrawSettings, stream: np.random.Generator, tries: int) -> Labels:
    """How many examples of each class each client gets in several draws: (tries, classes, clients).

    The rule is that of ``_draw_pieces``. A draw that is no split has counts of 0.
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
    by Dir(alpha).

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
    draw = extended_dirichlet_draw(
        labels,
        clients,
        classes_per_client,
        alpha,
        seed,
        min_size=min_size,
        max_tries=max_tries,
        allocations=allocations,
        lower_min_size=lower_min_size,
    )
    return draw.parts


def extended_dirichlet_draw(  # noqa: PLR0913 - the fields of the partition's config table
    labels: Labels,
    clients: int,
    classes_per_client: int,
    alpha: float,
    seed: int,
    *,
    min_size: int = 10,
    max_tries: int = 200,
    allocations: int = 5,
    lower_min_size: bool = False,
) -> Draw:
    """The split of ``extended_dirichlet`` with the draws it took and the minimum size it reached.

    Raises InfeasiblePartition where no draw fits.
    """
    check_enough_examples("extended_dirichlet", len(labels), clients, min_size)
    settings = _DrawSettings(class_indices(labels), clients, alpha, min_size)
    stream = legacy_stream(seed)
    accepted_sizes = [min_size]
    if lower_min_size:
        accepted_sizes = list(range(min_size, 0, -1))

    tries = 0
    best: _Attempt | None = None
    for accepted_size in accepted_sizes:
        for _ in range(allocations):
            for attempt in _attempts(settings, classes_per_client, stream, max_tries):
                tries += 1
                if attempt.pieces is not None and attempt.smallest >= accepted_size:
                    return Draw(_shuffled_split(attempt.pieces, stream), tries, accepted_size)
                if best is None or attempt.smallest > best.smallest:
                    best = attempt
    assert best is not None
    raise InfeasiblePartition(
        f"extended_dirichlet: none of {tries:,} draws gave each of {clients} clients {min_size} "
        f"examples; the best gave {best.shortage(labels, settings.examples_of_class)}; lower "
        "min_size, set lower_min_size = true, raise alpha, or take fewer clients"
    )


@dataclass(frozen=True)
class _Attempt:
    """A draw of shares for an allocation of classes."""

    holders: Sequence[Labels]
    """The clients that hold each class."""
    pieces: Sequence[ClassPieces] | None
    sizes: Labels
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
    settings: _DrawSettings, classes_per_client: int, stream: np.random.RandomState, max_tries: int
) -> Iterator[_Attempt]:
    """Draws of shares for one allocation of classes."""
    classes = len(settings.examples_of_class)
    holders = allocate_classes(settings.clients, classes, classes_per_client, stream)
    for _ in range(max_tries):
        pieces = _draw_pieces(
            settings.examples_of_class, settings.clients, settings.alpha, stream, holders
        )
        yield _Attempt(holders, pieces, _client_sizes(pieces, settings.clients))


def allocate_classes(
    clients: int,
    classes: int,
    classes_per_client: int,
    stream: np.random.RandomState,
    max_tries: int = 10_000,
) -> list[Labels]:
    """The clients of every class, in ascending order.

    Each client draws its classes uniformly. All draw again until each class has at least a fifth of
    the clients of an even allocation, and at least one. Raises InfeasiblePartition if that is
    impossible, or does not happen in ``max_tries`` draws.
    """
    if classes_per_client > classes:
        raise InfeasiblePartition(
            f"extended_dirichlet: classes_per_client = {classes_per_client}, the data have "
            f"{classes} classes"
        )
    if clients * classes_per_client < classes:
        raise InfeasiblePartition(
            f"extended_dirichlet: {clients} clients × {classes_per_client} classes cannot hold "
            f"{classes} classes; take more clients or more classes per client"
        )
    least_holders = max(classes_per_client * clients // classes // 5, 1)
    for _ in range(max_tries):
        holders = random_classes(clients, classes_per_client, classes, stream)
        if min(map(len, holders)) >= least_holders:
            return holders
    raise InfeasiblePartition(
        f"extended_dirichlet: none of {max_tries:,} draws gave every class {least_holders} "
        f"client(s) ({clients} clients × {classes_per_client} of {classes} classes); take more "
        "classes per client or clients"
    )


# hybrid: some clients get an even share of every class, the others a skewed share of the rest.


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
    """Gives stratified equal parts to the first iid_share of the clients, and splits the rest over
    the others by Dir(alpha).

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
        parts = dirichlet_draw(
            labels[remaining], skewed_clients, alpha, seed, min_size=min_size, max_tries=max_tries
        ).parts
    skewed = ClientSplit.of_parts(parts)
    positions = np.concatenate([even.split.positions, remaining[skewed.positions]])
    ends = np.concatenate([even.split.ends, skewed.ends + len(even.split.positions)])
    return ClientSplit(positions, ends)


class _StratifiedParts(NamedTuple):
    """The split of the clients with an even share, and the positions of all other examples."""

    split: ClientSplit
    remaining: Labels


def _stratified_parts(
    labels: Labels, iid_clients: int, clients: int, stream: np.random.RandomState
) -> _StratifiedParts:
    """Give each of ``iid_clients`` clients a ``clients``-th of every class.

    The examples that are left over after an even division go to one client more each. Where one
    class ends with that, the next one goes on, so that the clients' sizes stay equal.
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
            size, left_over = divmod(count, iid_clients)
            turn = (np.arange(iid_clients) - next_client) % iid_clients
            sizes = size + (turn < left_over)
            next_client = (next_client + left_over) % iid_clients
        owners.append(np.repeat(np.arange(iid_clients), sizes))
        examples.append(shuffled[:count])
        remaining.append(shuffled[count:])
    split = ClientSplit.of_owners(np.concatenate(examples), np.concatenate(owners), iid_clients)
    return _StratifiedParts(split, np.sort(np.concatenate(remaining)))


def _equal_parts(
    labels: Labels, clients: int, alpha: float, stream: np.random.RandomState
) -> list[Labels]:
    """Positions in ``labels`` for each client: parts of equal size, with classes by Dir(alpha).

    Each client draws its examples' classes, but no more of a class than there are. It draws the
    classes of the missing ones again, until its part is full.
    """
    if len(labels) < clients:
        raise InfeasiblePartition(
            f"hybrid: {len(labels)} examples are left for {clients} skewed clients; take fewer "
            "clients"
        )
    stock = [list(stream.permutation(members)) for members in class_indices(labels)]
    parts = []
    for part_size in map(len, np.array_split(labels, clients)):
        mix = stream.dirichlet(np.repeat(alpha, len(stock)))
        part: list[int] = []
        while len(part) < part_size:
            available = np.array([len(members) for members in stock])
            counts = _drawn_classes(part_size - len(part), mix, available, stream)
            for members, count in zip(stock, counts, strict=True):
                part += [members.pop() for _ in range(count)]
        parts.append(np.array(part, dtype=np.int64))
    return parts


def _drawn_classes(
    size: int, mix: NDArray[np.float64], available: Labels, stream: np.random.RandomState
) -> Labels:
    """How many examples of each class are drawn, up to ``size`` in all and to those available."""
    shares = mix * (available > 0)
    if not shares.sum() > 0:
        # The classes of the mix are used up: draw from all that is left, in proportion.
        shares = available.astype(np.float64)
    shares = shares / shares.sum()
    return np.minimum(stream.multinomial(size, shares), available)


# hiper: HiPer-FedKD's split.


class PublicSplit(NamedTuple):
    """The positions of the examples that clients share, and of the public ones, which all see."""

    pool: Labels
    public: Labels


def public_split(examples: int, public: int, seed: int = 42) -> PublicSplit:
    """Set ``public`` of the examples apart. Both parts keep the order of the draw.

    Raises InfeasiblePartition where nothing would be left for the clients.

    Source: HiPer-FedKD's notebooks: torch's random_split with seed 42; 45,000 and 5,000 of
    CIFAR-10.
    """
    if not 0 <= public < examples:
        raise InfeasiblePartition(
            f"public set of {public:,} from {examples:,} examples: choose 0 to {examples - 1:,}"
        )
    order = torch.randperm(examples, generator=generator(seed)).numpy()
    return PublicSplit(order[: examples - public], order[examples - public :])


@partition("hiper")
def hiper(labels: Labels, clients: Count, alpha: Positive, seed: Seed = 42) -> Parts:
    """Splits the data by one matrix of Dir(alpha) with a row for each class; the last client gets
    the remainder of rounding.

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
    examples_of_class = class_indices(labels)
    matrix = legacy_stream(seed).dirichlet(np.repeat(alpha, clients), size=len(examples_of_class))
    owners = []
    for examples, shares in zip(examples_of_class, matrix, strict=True):
        # The notebooks round each share down. ``cuts`` would round their sums down.
        cut_positions = np.cumsum((shares * len(examples)).astype(np.int64)[:-1])
        owners.append(np.repeat(np.arange(clients), piece_sizes(cut_positions, len(examples))))
    split = ClientSplit.of_owners(
        np.concatenate(examples_of_class), np.concatenate(owners), clients
    )
    for client in np.flatnonzero(split.sizes > 1).tolist():  # to shuffle one example draws nothing
        legacy_stream(seed + client).shuffle(split[client])  # a view: in place
    return split
