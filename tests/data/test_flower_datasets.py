"""Partitioners of Flower Datasets as splits: the parts are theirs, wrong names and options are
named.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from fedstill.core.errors import ConfigError, UnknownName
from fedstill.data.partition.sharding import flower_datasets

pytestmark = pytest.mark.skipif(
    find_spec("flwr_datasets") is None,
    reason="Flower Datasets is not installed: pip install 'fedstill[flower-datasets]', as make "
    "test does",
)
LABELS = np.random.RandomState(0).randint(0, 5, 400)


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("IidPartitioner", {}),
        ("DirichletPartitioner", {"alpha": 0.5, "min_partition_size": 5}),
        ("PathologicalPartitioner", {"num_classes_per_partition": 2}),
        ("ShardPartitioner", {"num_shards_per_partition": 2}),
        ("LinearPartitioner", {}),
    ],
)
def test_the_parts_are_the_partitioners_own(name: str, options: dict[str, object]) -> None:
    import datasets
    from flwr_datasets import partitioner as partitioners

    parts = flower_datasets(LABELS, 5, 3, name, options)  # type: ignore[arg-type]
    again = flower_datasets(LABELS, 5, 3, name, options)  # type: ignore[arg-type]
    assert [part.tolist() for part in again] == [part.tolist() for part in parts]
    positions = np.concatenate(parts)
    assert len(np.unique(positions)) == len(positions)

    required: dict[str, object] = {}
    if name not in ("IidPartitioner", "LinearPartitioner"):
        required = {"partition_by": "label", "seed": 3}
    kind = getattr(partitioners, name)
    theirs = kind(num_partitions=5, **required, **options)
    columns = {"label": LABELS, "position": np.arange(len(LABELS))}
    theirs.dataset = datasets.Dataset.from_dict(columns)
    for client, part in enumerate(parts):
        assert list(theirs.load_partition(client)["position"]) == part.tolist()


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(UnknownName, match="did you mean 'DirichletPartitioner'"):
        flower_datasets(LABELS, 5, 3, "DirichletPartioner")
    with pytest.raises(UnknownName, match="unknown option 'alfa'"):
        flower_datasets(LABELS, 5, 3, "DirichletPartitioner", {"alfa": 0.5})
    with pytest.raises(ConfigError, match="partition DirichletPartitioner"):
        flower_datasets(LABELS, 5, 3, "DirichletPartitioner", {"alpha": -1.0})
    with pytest.raises(ConfigError, match="5 parts"):
        flower_datasets(LABELS, 4, 3, "NaturalIdPartitioner")
