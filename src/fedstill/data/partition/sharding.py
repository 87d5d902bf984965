"""Equal parts of the examples: of a random permutation (IID), or of blocks of one class each."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import InfeasiblePartition
from fedstill.core.fields import Count, Seed
from fedstill.data.client_split import ClientSplit, ends_of
from fedstill.data.partition.rules import (
    Labels,
    Parts,
    class_indices,
    legacy_stream,
    partition,
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
