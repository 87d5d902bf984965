"""Rows of a table as inputs of a network: numbers, names as columns of 0 and 1, and marks of what
is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedstill.data.form import About
from fedstill.data.sources.categories import Categories
from fedstill.data.table_inputs import TableInputs
from fedstill.errors import DataError, on_one_line

Floats = NDArray[np.float32]


def table_rows(what: str, table: pa.Table | Mapping[str, pa.ChunkedArray], about: About) -> Floats:
    """Columns as the inputs (n, features) of ``about``, NaN where a value is missing; without
    marks.

    Raises DataError for a value that is no number, or none of the names of its column.
    """
    named = dict(about.categories)
    parts = [
        Categories(name, named[name]).encoded(what, table[name])
        if name in named
        else numbers(table[name], f"{what}: column {name!r}")[:, None]
        for name in about.columns
    ]
    return np.concatenate(parts, axis=1)


def begins(about: About) -> dict[str, int]:
    """Where among the inputs each column begins."""
    named, at, out = dict(about.categories), 0, {}
    for name in about.columns:
        out[name] = at
        at += len(named[name]) if name in named else 1
    return out


def with_features(about: About, missing: Collection[str] = ()) -> About:
    """What was read, with the names of a table's inputs, and which of them are 0 or 1.

    missing: columns that have a column beside them that says where their values are missing.
    """
    said = TableInputs(about.columns, dict(about.categories), tuple(missing)).about
    return replace(about, features=said.features, marks=said.marks)


def with_marks(rows: Floats, about: About, missing: Collection[str]) -> Floats:
    """Rows, and a column of 0 and 1 beside them for each of some columns: 1 where its value is
    missing.
    """
    starts = begins(about)
    marks = np.isnan(rows[:, [starts[name] for name in missing]])
    return np.concatenate([rows, marks.astype(np.float32)], axis=1)


def numbers(column: pa.ChunkedArray, what: str = "") -> Floats:
    """A column of numbers, NaN where one is missing; raises DataError for what is no number."""
    try:
        plain = column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column
        exact = plain.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        if pa.types.is_integer(column.type):
            raise DataError(
                f"{what} holds whole numbers beyond 2^53, which no float holds; if it is an id, "
                "leave it out with "
                "data.columns"
            ) from error
        raise DataError(
            f"{what} holds something that is no number: {on_one_line(error)}; correct it"
        ) from error
    large = np.flatnonzero(np.isfinite(exact) & (np.abs(exact) > np.finfo(np.float32).max))
    if len(large):
        raise DataError(
            f"{what} holds {exact[large[0]]:g}, too large for a number of 32 bits; correct or "
            "rescale it"
        )
    as_floats: Floats = exact.astype(np.float32)
    return as_floats
