"""Partitions by permutations and blocks: ``iid`` (equal parts), ``sharding`` (equal blocks of one
class each) and ``pathological`` (a few classes for each client, in random amounts).
"""

from __future__ import annotations

import math
import random
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import InfeasiblePartition
from fedstill.core.fields import Count, Seed
from fedstill.data.client_split import ClientSplit, ends_of
from fedstill.data.partition.dirichlet import pieces_of
from fedstill.data.partition.rules import (
    Labels,
    Parts,
    class_indices,
    legacy_stream,
    partition,
    random_classes,
    refuse_too_many,
)


@partition("iid")
def iid(labels: Labels, clients: Count, seed: Seed) -> Parts:
    """Equal parts of a random permutation; sizes differ by one at most, the larger ones first.

    Every example is used. Raises InfeasiblePartition for more clients than examples.

    labels: Class ids (n,).
    seed: What the split is drawn from; unset in a config, it is the run's.

    Reading: FedNTD's code drops the n mod N examples left over; here they are dealt out.
    """
    refuse_too_many("iid", len(labels), clients)
    size, more = divmod(len(labels), clients)
    sizes = size + (np.arange(clients) < more)
    return ClientSplit(legacy_stream(seed).permutation(len(labels)), ends_of(sizes))


@partition("sharding")
def sharding(labels: Labels, clients: Count, shards: Count, seed: Seed) -> Parts:
    """Cut every class into the same number of blocks and give each client ``shards`` of them at
    random.

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
    owned = class_indices(labels)
    per_class = _blocks_per_class(len(owned), clients, shards)
    for c, indices in zip(np.unique(labels), owned, strict=True):
        if len(indices) < per_class:
            raise InfeasiblePartition(
                f"sharding: class {c} has {len(indices)} examples for {per_class} shards; "
                f"take fewer shards ({shards}) or fewer clients ({clients})"
            )
    rows = shard_rows(clients, len(owned), shards, seed)
    blocks = [_blocks(indices, per_class) for indices in owned]
    stream = legacy_stream(seed)
    parts = []
    for row in rows:
        drawn = [blocks[c].pop(int(stream.choice(len(blocks[c]), replace=False))) for c in row]
        parts.append(np.concatenate(drawn))
    return parts


def shard_rows(clients: int, classes: int, shards: int, seed: int) -> NDArray[np.int64]:
    """The class of every shard of every client: (clients, shards), each class equally often.

    Raises InfeasiblePartition where shards × clients is no multiple of ``classes``.
    """
    per_class = _blocks_per_class(classes, clients, shards)
    deck = list(range(classes)) * per_class
    random.Random(seed).shuffle(deck)
    return np.array(deck, dtype=np.int64).reshape(clients, shards)


def _blocks_per_class(classes: int, clients: int, shards: int) -> int:
    if clients * shards % classes:
        raise InfeasiblePartition(
            f"sharding: {clients} clients × {shards} shards = {clients * shards} shards cannot be "
            "dealt evenly from "
            f"{classes} classes; choose clients × shards as a multiple of {classes}"
        )
    return clients * shards // classes


def _blocks(indices: NDArray[np.int64], count: int) -> Parts:
    """``count`` equal runs of a class; what is left over at its end goes to the first runs, one
    each.
    """
    size, left = divmod(len(indices), count)
    runs = list(indices[: size * count].reshape(count, size))
    for k, extra in enumerate(indices[len(indices) - left :]):
        runs[k] = np.append(runs[k], extra)
    return runs


# Pathological: every client holds a few classes only, of each a random number of examples.


@partition("pathological")
def pathological(
    labels: Labels,
    clients: Count,
    classes_per_client: Count,
    seed: Seed,
    path_rule: Literal["random", "pfllib"] = "random",
    max_tries: Count = 10_000,
) -> Parts:
    """Give every client ``classes_per_client`` classes and cut each class among its owners at
    random sizes.

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
    owned = class_indices(labels)
    stream = legacy_stream(seed)
    _refuse_impossible(clients, classes_per_client, len(owned))
    if path_rule == "random":
        owners = _random_owners(clients, classes_per_client, len(owned), stream, max_tries)
    else:
        owners = _even_owners(clients, classes_per_client, len(owned), stream)
    examples, takers = [], []
    for c, indices, mine in zip(np.unique(labels), owned, owners, strict=True):
        if len(indices) < len(mine):
            raise InfeasiblePartition(
                f"pathological: class {c} has {len(indices)} examples for {len(mine)} clients; "
                "take fewer clients"
            )
        examples.append(stream.permutation(indices))
        takers.append(
            np.repeat(mine, pieces_of(_random_cuts(len(indices), len(mine), stream), len(indices)))
        )
    return ClientSplit.of_owners(np.concatenate(examples), np.concatenate(takers), clients)


def _refuse_impossible(clients: int, per_client: int, classes: int) -> None:
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
        owners = random_classes(clients, per_client, classes, stream)
        if all(map(len, owners)):
            return owners
    raise InfeasiblePartition(
        f"pathological: none of {max_tries:,} draws gave each of {classes} classes an owner "
        f"({clients} clients × "
        f"{per_client} classes); take more clients, more classes per client or path_rule = 'pfllib'"
    )


def _even_owners(
    clients: int, per_client: int, classes: int, stream: np.random.RandomState
) -> list[Labels]:
    """Owners of every class: those that still need most classes, in random order among equals, so
    that none is left.
    """
    needs = np.full(clients, per_client)
    owners = []
    for left in range(classes, 0, -1):
        order = stream.permutation(clients)
        order = order[np.argsort(-needs[order], kind="stable")]
        wanted = math.ceil(needs.sum() / left)
        must = int((needs >= left).sum())  # these need every class that is left
        mine = order[: max(wanted, must)]
        mine = np.sort(mine[needs[mine] > 0])
        needs[mine] -= 1
        owners.append(mine)
    return owners


def _random_cuts(size: int, owners: int, stream: np.random.RandomState) -> Labels:
    """Where a class is cut: all pieces but the last are uniform in [a/10, a), a the even size, and
    at least 1.
    """
    even = size / owners
    low = max(1, math.ceil(even / 10))
    high = max(low + 1, math.ceil(even))
    return np.cumsum(stream.randint(low, high, owners - 1), dtype=np.int64)
