"""The split that the data name: a column says whose each example is, and each of its values is a client."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval
from numpy.typing import ArrayLike

from fedstill.data.partition.flat import FlatParts
from fedstill.data.partition.rules import Parts
from fedstill.errors import DataError
from fedstill.fields import Count
from fedstill.registry import register


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
) -> Parts:
    """Each value of a column is a client: a hospital, a writer, a person.

    column: Its name. Its values in order, numbers by size and texts by letter, are clients 0, 1 and so on.
    own_test: A test set for each client: "column", the test split's rows of its own value, or a share of its rows.
    own_test_take: Which rows that share is: drawn, or the last (where neighbours overlap, as windows of a signal do).
    pool: Whether the training and the test split are put together first; the common test is then all own tests.
    least: Values with fewer training examples are left out.

    labels: (n,); groups: (n,) the number of each example's value. Raises DataError for data without owners.
    """
    if groups is None:
        raise DataError("partition.kind = 'column' needs data with such a column; set partition.column to its name")
    codes = np.asarray(groups)
    counts = np.bincount(codes) if len(codes) else np.zeros(0, dtype=np.int64)
    del labels, clients, own_test, own_test_take, pool  # what preparing does with them, it reads from the config
    client = np.cumsum(counts >= least) - 1
    theirs = np.flatnonzero(counts[codes] >= least)
    return FlatParts.dealt(theirs, client[codes[theirs]], int(np.count_nonzero(counts >= least)))
