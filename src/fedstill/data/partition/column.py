"""The split that the data name: a column says whose each example is, and each of its values is a
client.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval
from numpy.typing import ArrayLike, NDArray

from fedstill.core.errors import DataError
from fedstill.core.fields import Count, Positive, Seed
from fedstill.core.keys import numpy_generator
from fedstill.core.registry import register
from fedstill.data.client_split import ClientSplit
from fedstill.data.partition.rules import Labels, Parts


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
