"""Partitions without draws of shares: ``iid`` (equal parts), ``sharding`` (equal blocks of one
class each), ``pathological`` (a few classes for each client, in random amounts), and ``column``
(each value of a column is a client).
"""

from __future__ import annotations

import math
import random
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval
from numpy.typing import ArrayLike, NDArray

from fedstill.core.errors import DataError, InfeasiblePartition
from fedstill.core.fields import Count, Positive, Seed
from fedstill.core.keys import numpy_generator
from fedstill.core.registry import register
from fedstill.data.client_split import ClientSplit, ends_of
from fedstill.data.partition.dirichlet import piece_sizes
from fedstill.data.partition.rules import (
    Labels,
    Parts,
    check_enough_examples,
    class_indices,
    legacy_stream,
    partition,
    random_classes,
)


@partition("iid")
def iid(labels: Labels, clients: Count, seed: Seed) -> Parts:
    """Splits a random permutation into equal parts; sizes differ by at most one, and larger parts
    come first.

    Every example is used. Raises InfeasiblePartition for more clients than examples.

    labels: Class ids (n,).
    seed: What the split is drawn from; unset in a config, it is the run's.

    Reading: FedNTD's code drops the n mod N examples left over; here they are dealt out.
    """
    check_enough_examples("iid", len(labels), clients)
    size, left_over = divmod(len(labels), clients)
    sizes = size + (np.arange(clients) < left_over)
    return ClientSplit(legacy_stream(seed).permutation(len(labels)), ends_of(sizes))


# sharding: each client gets equal blocks of classes.


@partition("sharding")
def sharding(labels: Labels, clients: Count, shards: Count, seed: Seed) -> Parts:
    """Cuts every class into the same number of shards, and assigns shards to clients at random.

    Every example is used; with balanced classes all clients are equally large. Raises
    InfeasiblePartition where shards × clients is no multiple of the classes, or a class has fewer
    examples than blocks.

    labels: Class ids (n,), in data-set order, which the blocks keep.
    shards: Blocks that each client gets.
    seed: What the split is drawn from; unset in a config, it is the run's.

    Source: FedNTD, "Sharding"; the stream is its official code's (labels by Python's generator,
    blocks by NumPy's).
    Reading: a client may draw one class twice, so it holds *at most* ``shards`` classes; sizes are
    equal in blocks, not in examples, where classes are unbalanced.
    """
    examples_of_class = class_indices(labels)
    block_count = _blocks_per_class(len(examples_of_class), clients, shards)
    for label, examples in zip(np.unique(labels), examples_of_class, strict=True):
        if len(examples) < block_count:
            raise InfeasiblePartition(
                f"sharding: class {label} has {len(examples)} examples for {block_count} shards; "
                f"take fewer shards ({shards}) or fewer clients ({clients})"
            )
    blocks = [_blocks(examples, block_count) for examples in examples_of_class]
    # Two generators with the same seed, as in the official code: Python's for the classes of the
    # shards, NumPy's for the blocks.
    class_rows = shard_rows(clients, len(examples_of_class), shards, seed)
    stream = legacy_stream(seed)
    parts = []
    for class_row in class_rows:
        client_blocks = []
        for position in class_row:
            choice = int(stream.choice(len(blocks[position]), replace=False))
            client_blocks.append(blocks[position].pop(choice))
        parts.append(np.concatenate(client_blocks))
    return parts


def shard_rows(clients: int, classes: int, shards: int, seed: int) -> NDArray[np.int64]:
    """The class of every shard of every client: (clients, shards), each class equally often.

    Raises InfeasiblePartition where shards × clients is no multiple of ``classes``.
    """
    deck = list(range(classes)) * _blocks_per_class(classes, clients, shards)
    random.Random(seed).shuffle(deck)
    return np.array(deck, dtype=np.int64).reshape(clients, shards)


def _blocks_per_class(classes: int, clients: int, shards: int) -> int:
    if clients * shards % classes:
        raise InfeasiblePartition(
            f"sharding: {clients} clients × {shards} shards = {clients * shards} shards cannot be "
            f"dealt evenly from {classes} classes; choose clients × shards as a multiple of "
            f"{classes}"
        )
    return clients * shards // classes


def _blocks(examples: Labels, count: int) -> list[Labels]:
    """``count`` equal blocks of a class in order. Each example that is left over at the end of the
    class goes to one of the first blocks.
    """
    size, left_over = divmod(len(examples), count)
    blocks = list(examples[: size * count].reshape(count, size))
    for block, example in enumerate(examples[len(examples) - left_over :]):
        blocks[block] = np.append(blocks[block], example)
    return blocks


# pathological: each client gets a few classes only, and a random number of examples of each.


@partition("pathological")
def pathological(
    labels: Labels,
    clients: Count,
    classes_per_client: Count,
    seed: Seed,
    path_rule: Literal["random", "pfllib"] = "random",
    *,
    max_tries: Count = 10_000,
) -> Parts:
    """Assigns classes_per_client classes to every client, and cuts each class at random positions
    among its clients.

    Every example is used. With a = examples of a class / its owners, all owners but the last get a
    uniform whole number in [a/10, a), at least 1, the last the rest. Raises InfeasiblePartition
    where classes cannot all be owned or have fewer examples than owners.

    labels: Class ids (n,).
    classes_per_client: Classes that each client holds.
    seed: What the split is drawn from; unset in a config, it is the run's.
    path_rule: Whether each client draws its classes at random, or every class has about as many
    owners ("pfllib").
    max_tries: Draws of classes after which it gives up; a draw must leave no class without an
    owner.

    Source: QKT, "Path"; sizes by PFLlib's rule.
    Reading: "exclusive classes" cannot mean disjoint (10 clients × 3 of 10 classes): a client holds
    only these classes. The published constant-predictor rows show that class sets are drawn per
    client, not dealt out evenly.
    """
    examples_of_class = class_indices(labels)
    classes = len(examples_of_class)
    _check_all_can_be_owned(clients, classes_per_client, classes)
    stream = legacy_stream(seed)
    if path_rule == "random":
        owners_of_class = _random_owners(clients, classes_per_client, classes, stream, max_tries)
    else:
        owners_of_class = _even_owners(clients, classes_per_client, classes, stream)

    positions = []
    owner_of_position = []
    for label, examples, owners in zip(
        np.unique(labels), examples_of_class, owners_of_class, strict=True
    ):
        if len(examples) < len(owners):
            raise InfeasiblePartition(
                f"pathological: class {label} has {len(examples)} examples for {len(owners)} "
                "clients; take fewer clients"
            )
        positions.append(stream.permutation(examples))
        cut_positions = _random_cuts(len(examples), len(owners), stream)
        sizes = piece_sizes(cut_positions, len(examples))
        owner_of_position.append(np.repeat(owners, sizes))
    return ClientSplit.of_owners(
        np.concatenate(positions), np.concatenate(owner_of_position), clients
    )


def _check_all_can_be_owned(clients: int, per_client: int, classes: int) -> None:
    if per_client > classes:
        raise InfeasiblePartition(
            f"pathological: classes_per_client = {per_client}, the data have {classes} classes"
        )
    if clients * per_client < classes:
        raise InfeasiblePartition(
            f"pathological: {clients} clients × {per_client} classes cannot own {classes} classes; "
            "take more clients or more classes per client"
        )


def _random_owners(
    clients: int, per_client: int, classes: int, stream: np.random.RandomState, max_tries: int
) -> list[Labels]:
    for _ in range(max_tries):
        owners_of_class = random_classes(clients, per_client, classes, stream)
        if all(map(len, owners_of_class)):
            return owners_of_class
    raise InfeasiblePartition(
        f"pathological: none of {max_tries:,} draws gave each of {classes} classes an owner "
        f"({clients} clients × {per_client} classes); take more clients, more classes per client "
        "or path_rule = 'pfllib'"
    )


def _even_owners(
    clients: int, per_client: int, classes: int, stream: np.random.RandomState
) -> list[Labels]:
    """The owners of every class, about as many for each. All clients get ``per_client`` classes.

    A class gets the clients that still need most classes, in random order among equals. They are as
    many as use up all needs if the later classes get as many; clients that need each of the classes
    that remain are always among them, so that no client lacks a class at the end.
    """
    needed = np.full(clients, per_client)
    owners_of_class = []
    for remaining in range(classes, 0, -1):
        order = stream.permutation(clients)
        order = order[np.argsort(-needed[order], kind="stable")]
        fair_count = math.ceil(needed.sum() / remaining)
        forced_count = int((needed >= remaining).sum())
        owners = order[: max(fair_count, forced_count)]
        owners = np.sort(owners[needed[owners] > 0])
        needed[owners] -= 1
        owners_of_class.append(owners)
    return owners_of_class


def _random_cuts(size: int, owners: int, stream: np.random.RandomState) -> Labels:
    """The positions at which a class is cut.

    All pieces but the last have a uniform size in [a/10, a), where a is the even size, and at least
    1.
    """
    even_size = size / owners
    low = max(1, math.ceil(even_size / 10))
    high = max(low + 1, math.ceil(even_size))
    return np.cumsum(stream.randint(low, high, owners - 1), dtype=np.int64)


# column: the split that the data name.


# It is not registered by @partition, which checks that no client is empty: a task may have no
# examples of a client.
@register("partition", "column")
def column(  # noqa: PLR0913 - the fields of the partition's config table
    labels: ArrayLike,
    clients: int,
    groups: ArrayLike | None,
    *,
    column: str = "",
    own_test: Literal["column"] | Annotated[float, Interval(gt=0, lt=1)] | None = None,
    own_test_take: Literal["random", "last"] = "random",
    pool: bool = False,
    least: Count = 1,
    alpha: Positive | None = None,
    seed: Seed = 0,
) -> Parts:
    """Each value of a column is a client: a hospital, a writer, a person.

    column: Its name. Its values in order, numbers by size and texts by letter, are clients 0, 1 and
    so on.
    own_test: A test set for each client: "column", the test split's rows of its own value, or a
    share of its rows.
    own_test_take: Which rows that share is: drawn, or the last (where neighbours overlap, as
    windows of a signal do).
    pool: Whether the training and the test split are put together first; the common test is then
    all own tests.
    least: Values with fewer training examples are left out.
    alpha: How even the mix of classes is that each client keeps of its own rows, drawn by
    Dirichlet; unset, all rows.
    seed: What that mix is drawn from; unset in a config, it is the run's.

    labels: (n,); groups: (n,) the number of each example's value. Raises DataError for data without
    owners.
    """
    # These are keys of [partition], which code that prepares a run reads from its settings.
    del clients, column, own_test, own_test_take, pool
    if groups is None:
        raise DataError(
            "partition.kind = 'column' needs data with such a column; set partition.column to its "
            "name"
        )
    group_of_example = np.asarray(groups)
    group_sizes = np.zeros(0, dtype=np.int64)
    if len(group_of_example):
        group_sizes = np.bincount(group_of_example)

    is_client = group_sizes >= least
    client_of_group = np.cumsum(is_client) - 1
    examples = np.flatnonzero(is_client[group_of_example])
    owners = client_of_group[group_of_example[examples]]
    split = ClientSplit.of_owners(examples, owners, int(np.count_nonzero(is_client)))
    if alpha is None:
        return split

    stream = numpy_generator(seed)
    all_labels = np.asarray(labels)
    return ClientSplit.of_parts([_with_mix(all_labels, part, alpha, stream) for part in split])


def _with_mix(
    labels: NDArray[np.int64], examples: Labels, alpha: float, stream: np.random.Generator
) -> Labels:
    """As many of a client's examples as have a mix of classes that is drawn by Dir(alpha).

    The mix is scaled until it uses up one class. Its largest class keeps one example at least, so
    that no client is empty.
    """
    classes, counts = np.unique(labels[examples], return_counts=True)
    mix = stream.dirichlet(np.repeat(alpha, len(classes)))
    # A share that underflowed to 0 uses up no class.
    scale = (counts / np.maximum(mix, np.finfo(float).tiny)).min()
    least_counts = (mix == mix.max()).astype(int)
    kept = []
    for label, share, least_count in zip(classes, mix, least_counts, strict=True):
        of_class = stream.permutation(examples[labels[examples] == label])
        kept.append(of_class[: max(round(share * scale), least_count)])
    return np.sort(np.concatenate(kept))
