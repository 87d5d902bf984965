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
from fedstill.data.partition.rules import Parts


@register("partition", "column")
def column(
    labels: ArrayLike,
    clients: int,
    groups: ArrayLike | None,
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
    if groups is None:
        raise DataError(
            "partition.kind = 'column' needs data with such a column; set partition.column to its "
            "name"
        )
    codes = np.asarray(groups)
    counts = np.bincount(codes) if len(codes) else np.zeros(0, dtype=np.int64)
    # what preparing does with them, it reads from the config
    del clients, own_test, own_test_take, pool
    client = np.cumsum(counts >= least) - 1
    theirs = np.flatnonzero(counts[codes] >= least)
    clients_with_enough = int(np.count_nonzero(counts >= least))
    parts = ClientSplit.of_owners(theirs, client[codes[theirs]], clients_with_enough)
    if alpha is None:
        return parts
    draw = numpy_generator(seed)
    return ClientSplit.of_parts([_mixed(np.asarray(labels), part, alpha, draw) for part in parts])


def _mixed(
    labels: NDArray[np.int64], part: NDArray[np.int64], alpha: float, draw: np.random.Generator
) -> NDArray[np.int64]:
    """The most of a client's examples whose mix of classes is a draw of Dir(alpha) over those that
    it has.
    """
    classes, counts = np.unique(labels[part], return_counts=True)
    shares = draw.dirichlet(np.repeat(alpha, len(classes)))
    wanted = shares * (counts / np.maximum(shares, np.finfo(float).tiny)).min()
    kept = [
        draw.permutation(part[labels[part] == of])[: max(round(size), int(share == shares.max()))]
        for of, size, share in zip(classes, wanted, shares, strict=True)
    ]
    return np.sort(np.concatenate(kept))
