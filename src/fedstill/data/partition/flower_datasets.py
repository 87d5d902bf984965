"""The partition ``flower_datasets``: any partitioner of Flower Datasets, by the name of its
class.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from fedstill.core.errors import ConfigError, UnknownName
from fedstill.core.fields import Count, Seed
from fedstill.data.partition.rules import Labels, Parts, partition

LABEL = "label"
"""The column of labels in the data set for the partitioner."""

POSITION = "position"
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
    partitioner_class = _class(partitioner)
    parameters = inspect.signature(partitioner_class).parameters
    from_run = {"num_partitions": clients, "partition_by": LABEL, "seed": seed % 2**32}
    arguments = {name: value for name, value in from_run.items() if name in parameters}
    arguments |= options or {}
    for name in arguments:
        if name not in parameters:
            raise UnknownName("option", name, parameters, place=f"partition {partitioner}")
    try:
        parts = _parts(partitioner_class(**arguments), labels)
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


def _parts(partitioner: Any, labels: Labels) -> list[Labels]:
    """The positions of the examples in each part of a partitioner."""
    import datasets

    columns = {LABEL: labels, POSITION: np.arange(len(labels))}
    partitioner.dataset = datasets.Dataset.from_dict(columns)
    return [
        np.asarray(partitioner.load_partition(number)[POSITION], dtype=np.int64)
        for number in range(int(partitioner.num_partitions))
    ]


def _class(name: str) -> Any:
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
