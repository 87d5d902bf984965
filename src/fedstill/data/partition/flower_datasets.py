"""Any partitioner of Flower Datasets as a split, by the name of its class."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from fedstill.core.errors import ConfigError, UnknownName
from fedstill.core.fields import Count, Seed
from fedstill.data.partition.rules import Labels, Parts, partition

LABEL, PLACE = "label", "place"


@partition("flower_datasets")
def flower_datasets(
    labels: Labels,
    clients: Count,
    seed: Seed,
    partitioner: str = "IidPartitioner",
    options: dict[str, bool | int | float | str] | None = None,
) -> Parts:
    """A partitioner of Flower Datasets, e.g. DirichletPartitioner with options alpha = 0.3; it sees
    only the labels.

    Raises UnknownName for an unknown class, ConfigError for what it refuses, or if it is not
    installed.

    labels: Class ids (n,).
    seed: What the split is drawn from; unset in a config, it is the run's.
    partitioner: The name of its class.
    options: What its constructor takes; num_partitions, partition_by and seed are given by the run.
    """
    wanted = _class(partitioner)
    legal = inspect.signature(wanted).parameters
    given = {"num_partitions": clients, "partition_by": LABEL, "seed": seed % 2**32}
    fields = {**{k: v for k, v in given.items() if k in legal}, **(options or {})}
    for key in fields:
        if key not in legal:
            raise UnknownName("option", key, legal, where=f"partition {partitioner}")
    import datasets

    data = datasets.Dataset.from_dict({LABEL: labels, PLACE: np.arange(len(labels))})
    try:
        split = wanted(**fields)
        split.dataset = data
        count = int(split.num_partitions)
        if count != clients:
            raise ConfigError(
                f"partition {partitioner} makes {count} parts, not one for each of {clients} "
                "clients"
            )
        return [np.asarray(split.load_partition(i)[PLACE], dtype=np.int64) for i in range(count)]
    except ConfigError:
        raise
    # what their partitioners raise for options or labels that don't fit, at construction and at the
    # first load
    except (TypeError, ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(
            f"partition {partitioner} refuses: {type(error).__name__}: {error}"
        ) from error


def _class(name: str) -> Any:
    try:
        from flwr_datasets import partitioner as known
    except ImportError as error:
        raise ConfigError(
            "partition flower_datasets needs Flower Datasets: pip install "
            f"'fedstill[flower-datasets]' ({error})"
        ) from error
    names = [n for n in dir(known) if n.endswith("Partitioner") and n != "Partitioner"]
    if name not in names:
        raise UnknownName("partitioner", name, names, where="Flower Datasets")
    return getattr(known, name)
