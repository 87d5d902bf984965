"""A column whose values are names, as columns of 0 and 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedstill.data.form import Value
from fedstill.errors import DataError

MOST = 1000
"""Categories of a column that are read from data; more are no categories but numbers, or names of
rows.
"""


@dataclass(frozen=True)
class Categories:
    """The values of a column, each of which becomes a column of its own."""

    column: str
    values: tuple[str, ...]

    @staticmethod
    def of(what: str, column: str, declared: Sequence[Value], train: pa.ChunkedArray) -> Categories:
        """Those that are declared, or else those in the training data, in order."""
        if declared:
            return Categories(column, tuple(category_name(value) for value in declared))
        every = names_in_order(train.unique().to_pylist())
        if not 0 < len(every) <= MOST:
            raise DataError(
                f"{what}: column {column!r} has {len(every):,} categories, not 1 to {MOST:,}; "
                "leave it out"
            )
        return Categories(column, every)

    def encoded(self, what: str, column: pa.ChunkedArray) -> NDArray[np.float32]:
        """(n, categories) of 0 and 1, NaN in rows without a value; DataError for one that is none
        of them.
        """
        place = {value: k for k, value in enumerate(self.values)}
        out = np.zeros((len(column), len(place)), dtype=np.float32)
        for row, value in enumerate(column.to_pylist()):
            if lacks(value):
                out[row] = np.nan
            elif (said := category_name(value)) in place:
                out[row, place[said]] = 1
            else:
                raise DataError(
                    f"{what}: example {row} has {said[:60]!r} in column {self.column!r}, which is "
                    "none of "
                    f"{', '.join(self.values)[:200]}; correct it, or add it to data.categorical"
                )
        return out


def lacks(value: Any) -> bool:
    """Whether a value is missing: null, or NaN, which pandas writes for it."""
    return value is None or value != value


def names_in_order(values: Iterable[Any]) -> tuple[str, ...]:
    """The names of values, each once: numbers by size, then texts by letter; without those that are
    missing.
    """
    there = sorted(
        (value for value in values if not lacks(value)), key=lambda v: (isinstance(v, str), v)
    )
    return tuple(dict.fromkeys(map(category_name, there)))


def category_name(value: Any) -> str:
    """A value as a name: 3, 3.0 and True of a column of truth values alike in every file."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)
