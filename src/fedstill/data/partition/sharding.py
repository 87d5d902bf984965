"""Partitions by equal parts, by classes, by a column and by Flower Datasets."""

from __future__ import annotations

import inspect
import math
import random
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval
from numpy.typing import ArrayLike, NDArray

from fedstill.core.errors import ConfigError, DataError, InfeasiblePartition, UnknownName
from fedstill.core.fields import Count, Positive, Seed
from fedstill.core.files import counted
from fedstill.core.keys import numpy_generator
from fedstill.core.registry import register
from fedstill.data.client_split import ClientSplit, Positions, ends_of
from fedstill.data.partition.rules import (
    ClassAllocation,
    Clients,
    Labels,
    Parts,
    check_enough_examples,
    class_indices,
    legacy_stream,
    partition,
    piece_sizes,
)


@partition("iid")
def iid(labels: Labels, clients: Count, seed: Seed) -> Parts:
    """Splits a random permutation into equal parts. Sizes differ by at most one; larger parts come
    first.

    Every example is used. Raises InfeasiblePartition if there are more clients than examples.

    labels: Class ids (n,).
    seed: The seed of the split; by default, the seed of the run.

    Reading: FedNTD's code drops the n mod N remaining examples; here the first clients get them.
    """
    check_enough_examples("iid", len(labels), clients)
    size, remainder = divmod(len(labels), clients)
    sizes = size + (np.arange(clients) < remainder)
    return ClientSplit(legacy_stream(seed).permutation(len(labels)), ends_of(sizes))


# sharding: each client gets equal blocks of classes.


@partition("sharding")
def sharding(labels: Labels, clients: Count, shards: Count, seed: Seed) -> Parts:
    """Divides every class into the same number of shards, and assigns shards to clients at random.

    Every example is used. With balanced classes, all clients have equally many examples. Raises
    InfeasiblePartition if shards × clients is not a multiple of the number of classes, or if a
    class has fewer examples than shards.

    labels: Class ids (n,) in the order of the data set, which shards keep.
    shards: The number of shards of each client.
    seed: The seed of the split; by default, the seed of the run.

    Source: FedNTD, "Sharding", with the random draws of its official code (Python's generator for
    labels, NumPy's for shards).
    Reading: a client may draw a class twice, so it has *at most* ``shards`` classes. With
    unbalanced classes, clients have equally many shards, but not equally many examples.
    """
    examples_of_class = class_indices(labels)
    block_count = _blocks_per_class(len(examples_of_class), clients, shards)
    for label, examples in zip(np.unique(labels), examples_of_class, strict=True):
        if len(examples) < block_count:
            raise InfeasiblePartition(
                f"sharding: class {label} has {counted(len(examples), 'example')} for "
                f"{counted(block_count, 'shard')}; lower shards ({shards}) or clients ({clients})"
            )
    blocks = [_blocks(examples, block_count) for examples in examples_of_class]
    # As in the official code, Python's generator draws the classes of the shards, and NumPy's
    # generator with the same seed draws the blocks.
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
    """The class of every shard (clients, shards); all classes have equally many shards.

    Raises InfeasiblePartition if shards × clients is not a multiple of ``classes``.
    """
    shard_classes = list(range(classes)) * _blocks_per_class(classes, clients, shards)
    random.Random(seed).shuffle(shard_classes)
    return np.array(shard_classes, dtype=np.int64).reshape(clients, shards)


def _blocks_per_class(classes: int, clients: int, shards: int) -> int:
    if clients * shards % classes:
        raise InfeasiblePartition(
            f"sharding: {clients} clients × {shards} shards = {clients * shards} shards, which is "
            f"not a multiple of the {classes} classes; change clients or shards"
        )
    return clients * shards // classes


def _blocks(examples: Positions, count: int) -> list[Positions]:
    """``count`` equal blocks of a class in order. The remaining examples at the end of the class go
    to the first blocks.
    """
    size, remainder = divmod(len(examples), count)
    blocks = list(examples[: size * count].reshape(count, size))
    for block, example in enumerate(examples[len(examples) - remainder :]):
        blocks[block] = np.append(blocks[block], example)
    return blocks


# pathological: each client gets a few classes, and a random number of examples of each of them.


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
    """Assigns classes_per_client classes to every client, and divides each class among its clients
    at random positions.

    Every example is used. Let a be the mean number of a class's examples per client. All clients
    except the last get a uniform integer in [a/10, a), at least 1, and the last client gets the
    remaining examples. Raises InfeasiblePartition if a class has no client, or fewer examples than
    clients.

    labels: Class ids (n,).
    classes_per_client: The number of classes of each client.
    seed: The seed of the split; by default, the seed of the run.
    path_rule: Whether each client draws its classes at random ("random"), or all classes have about
    equally many clients ("pfllib").
    max_tries: The maximum number of draws of classes until each class has a client.

    Source: QKT, "Path", with the sizes of PFLlib.
    Reading: "exclusive classes" cannot mean disjoint classes (10 clients × 3 of 10 classes), but
    that a client has no other classes. The paper's rows of the constant predictor show that each
    client draws its classes at random.
    """
    examples_of_class = class_indices(labels)
    classes = len(examples_of_class)
    allocation = ClassAllocation(
        partition="pathological",
        clients=clients,
        per_client=classes_per_client,
        classes=classes,
    )
    allocation.check_possible()
    stream = legacy_stream(seed)
    if path_rule == "random":
        owners_of_class = allocation.drawn(
            stream, max_tries=max_tries, other_remedy=", or set path_rule = 'pfllib'"
        )
    else:
        owners_of_class = _even_owners(clients, classes_per_client, classes, stream)

    positions = []
    owner_of_position = []
    for label, examples, owners in zip(
        np.unique(labels), examples_of_class, owners_of_class, strict=True
    ):
        if len(examples) < len(owners):
            raise InfeasiblePartition(
                f"pathological: class {label} has {counted(len(examples), 'example')} for "
                f"{counted(len(owners), 'client')}; lower clients"
            )
        positions.append(stream.permutation(examples))
        cut_positions = _random_cuts(len(examples), len(owners), stream)
        sizes = piece_sizes(cut_positions, len(examples))
        owner_of_position.append(np.repeat(owners, sizes))
    return ClientSplit.of_owners(
        np.concatenate(positions), np.concatenate(owner_of_position), clients
    )


def _even_owners(
    clients: int, per_client: int, classes: int, stream: np.random.RandomState
) -> list[Clients]:
    """The clients of every class, about equally many. All clients get ``per_client`` classes.

    Each class goes to the clients that still need the most classes, with random order among ties.
    Their number is the number of open classes divided by the number of remaining classes, rounded
    up. It includes all clients that need every remaining class, so that all clients get enough.
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


def _random_cuts(size: int, owners: int, stream: np.random.RandomState) -> NDArray[np.int64]:
    """The positions that divide a class. All pieces except the last have a uniform size in [a/10,
    a), at least 1, where a is the mean size.
    """
    even_size = size / owners
    low = max(1, math.ceil(even_size / 10))
    high = max(low + 1, math.ceil(even_size))
    return np.cumsum(stream.randint(low, high, owners - 1), dtype=np.int64)


# column: the split that the data name.


# Registered without @partition, which rejects empty clients, because a client may have no examples
# in a task.
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
    """Each value of a column is a client, such as a hospital, a writer or a person.

    column: The name of the column. Its values in ascending order (texts alphabetically) are clients
    0, 1 and so on.
    own_test: The own test set of each client: "column" (its rows of the test split), or a share of
    its rows.
    own_test_take: Whether that share consists of random rows or of the last ones. Use "last" if
    neighbouring rows overlap, like windows of a signal.
    pool: Whether to combine the training and the test split first. The common test set is then the
    union of all own test sets.
    least: Values with fewer training examples are left out.
    alpha: The concentration of the Dirichlet distribution from which each client's class mix is
    drawn; the client keeps a subset of its rows with this mix. By default, it keeps all rows.
    seed: The seed of the class mixes; by default, the seed of the run.

    labels: (n,); groups: (n,) the number of each example's value. Raises DataError for data without
    such a column.
    """
    # Preparation of a run reads these keys of [partition] from the settings.
    del clients, own_test, own_test_take, pool
    if groups is None and column:
        raise DataError(
            f"partition.column = {column!r}, but the data have no clients; use a table with this "
            "column, pass the data by client, or set another partition.kind"
        )
    if groups is None:
        raise DataError(
            "partition.kind = 'column' needs a column of clients; set partition.column to its name"
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
    labels: Labels, examples: Positions, alpha: float, stream: np.random.Generator
) -> Positions:
    """The largest random subset of a client's examples with a class mix drawn from Dir(alpha).

    The subset uses all examples of at least one class. It has at least one example of the class
    with the largest share, so that no client is empty.
    """
    classes, counts = np.unique(labels[examples], return_counts=True)
    mix = stream.dirichlet(np.repeat(alpha, len(classes)))
    # Shares that underflow to 0 must not limit the scale.
    with np.errstate(over="ignore"):
        scale = (counts / np.maximum(mix, np.finfo(float).tiny)).min()
    min_counts = (mix == mix.max()).astype(int)
    subset = []
    for label, share, min_count in zip(classes, mix, min_counts, strict=True):
        shuffled = stream.permutation(examples[labels[examples] == label])
        subset.append(shuffled[: max(round(share * scale), min_count)])
    return np.sort(np.concatenate(subset))


# flower_datasets: the partitioners of Flower Datasets.

_LABEL_COLUMN = "label"
"""The column of labels in the data set for the partitioner."""

_POSITION_COLUMN = "position"
"""The column of the examples' positions."""


@partition("flower_datasets")
def flower_datasets(
    labels: Labels,
    clients: Count,
    seed: Seed,
    partitioner: str = "IidPartitioner",
    options: dict[str, bool | int | float | str] | None = None,
) -> Parts:
    """Uses a partitioner of Flower Datasets, such as DirichletPartitioner with options alpha = 0.3.
    It only gets the labels.

    Raises UnknownName for an unknown class, and ConfigError if the partitioner raises an error, or
    if Flower Datasets is not installed.

    labels: Class ids (n,).
    seed: The seed of the split; by default, the seed of the run.
    partitioner: The name of the partitioner's class.
    options: The arguments of its constructor. fedstill sets num_partitions, partition_by and seed.
    """
    partitioner_class = _partitioner_class(partitioner)
    parameters = inspect.signature(partitioner_class).parameters
    from_run = {"num_partitions": clients, "partition_by": _LABEL_COLUMN, "seed": seed % 2**32}
    arguments = {name: value for name, value in from_run.items() if name in parameters}
    arguments |= options or {}
    for name in arguments:
        if name not in parameters:
            raise UnknownName("option", name, parameters, place=f"partition {partitioner}")
    try:
        parts = _loaded_parts(partitioner_class(**arguments), labels)
    # Partitioners raise these for unsuitable options or labels, in the constructor or at the first
    # load.
    except (TypeError, ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(
            f"partition {partitioner} failed: {type(error).__name__}: {error}"
        ) from error
    if len(parts) != clients:
        raise ConfigError(
            f"partition {partitioner} returned {len(parts)} parts for {clients} clients; change "
            "its options"
        )
    return parts


def _loaded_parts(partitioner: Any, labels: Labels) -> list[Positions]:
    """The positions of the examples in each part of a partitioner."""
    import datasets

    columns = {_LABEL_COLUMN: labels, _POSITION_COLUMN: np.arange(len(labels))}
    partitioner.dataset = datasets.Dataset.from_dict(columns)
    return [
        np.asarray(partitioner.load_partition(number)[_POSITION_COLUMN], dtype=np.int64)
        for number in range(int(partitioner.num_partitions))
    ]


def _partitioner_class(name: str) -> Any:
    try:
        from flwr_datasets import partitioner as partitioners
    except ImportError as error:
        raise ConfigError(
            "partition flower_datasets needs Flower Datasets: pip install "
            f"'fedstill[flower-datasets]' ({error})"
        ) from error
    names = [
        class_name
        for class_name in dir(partitioners)
        if class_name.endswith("Partitioner") and class_name != "Partitioner"
    ]
    if name not in names:
        raise UnknownName("partitioner", name, names, place="Flower Datasets")
    return getattr(partitioners, name)
