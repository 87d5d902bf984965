"""Partitions: pure functions that split a labelled data set over clients. They take labels,
parameters and a seed, and return the positions of each client's examples.
"""

from fedstill.data.client_split import ClientSplit
from fedstill.data.partition.dirichlet import (
    dirichlet,
    extended_dirichlet,
    hiper,
    hybrid,
    public_split,
)
from fedstill.data.partition.rules import Parts, cached_split
from fedstill.data.partition.sharding import (
    column,
    flower_datasets,
    iid,
    pathological,
    shard_rows,
    sharding,
)

__all__ = [
    "ClientSplit",
    "Parts",
    "cached_split",
    "column",
    "dirichlet",
    "extended_dirichlet",
    "flower_datasets",
    "hiper",
    "hybrid",
    "iid",
    "pathological",
    "public_split",
    "shard_rows",
    "sharding",
]
