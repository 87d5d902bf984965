"""Rows and texts as people have them, as the tensor that a run's model takes: as the run made its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from fedstill.data.form import About
from fedstill.data.sources.categories import category_name
from fedstill.data.sources.table_rows import table_rows, with_marks
from fedstill.data.sources.text import encoded
from fedstill.data.table_inputs import MISSING
from fedstill.errors import ConfigError, DataError, on_one_line
from fedstill.origin import of_kind

GIVEN = "the rows"


def as_taken(about: About, given: Any, length: int) -> Tensor:
    """Rows of a table (n, features) float32, NaN where a value is missing; texts as ids (n, length)
    int64.

    given: of a table a data frame, {column: values}, or a list of dicts; of texts a list. Raises
    ConfigError for other kinds, and where the run does not know how its examples were made;
    DataError for values that it cannot take.
    """
    if about.kind == "table" and about.columns:
        return _rows(about, given)
    if about.kind == "text" and about.tokenizer:
        return _texts(about, given, length)
    if about.kind in ("table", "text"):
        made = "names of columns" if about.kind == "table" else "a tokenizer"
        raise ConfigError(
            f"encode: the run's data were tensors without {made}; give the model such tensors"
        )
    raise ConfigError(
        f"encode is for tables and texts; the run's examples are {about.many}: give them as a "
        "tensor"
    )


def _texts(about: About, given: Any, length: int) -> Tensor:
    if isinstance(given, str) or not isinstance(given, Sequence):
        given = [given] if isinstance(given, str) else list(given)
    ids = encoded(given, about.tokenizer, about.vocabulary, length)
    if ids.sha != about.tokenizer_sha:
        raise ConfigError(
            f"encode: {about.tokenizer} is not the file that the run was trained with; put that "
            "one back"
        )
    return torch.from_numpy(ids.ids)


def _rows(about: About, given: Any) -> Tensor:
    columns = {name: _column(name, values) for name, values in _by_column(about, given).items()}
    for name, known in about.categories:
        _refuse_unknown(name, columns[name], known)
    rows = table_rows(GIVEN, columns, about)
    gaps = [name for name in about.columns if f"{name}{MISSING}" in about.features]
    return torch.from_numpy(with_marks(rows, about, gaps) if gaps else rows)


def _refuse_unknown(name: str, column: pa.ChunkedArray, known: Sequence[str]) -> None:
    """Raise DataError for a name that the run had no input for."""
    for row, value in enumerate(column.to_pylist()):
        if value is not None and category_name(value) not in known:
            raise DataError(
                f"{GIVEN}: row {row} has {category_name(value)[:60]!r} in column {name!r}, and the "
                "run knew "
                f"{', '.join(known)[:200]}; give one of these, or None, which counts as missing; "
                "to have it known, "
                "train a run whose data have it, or whose data.categorical names it"
            )


def _by_column(about: About, given: Any) -> dict[str, Any]:
    """The values of each column of a run's table, by name; others are left out. A dict of single
    values is one row.
    """
    if isinstance(given, Mapping) and not any(_several(values) for values in given.values()):
        given = [given]
    if isinstance(given, Mapping) or hasattr(given, "columns"):
        has = list(given) if isinstance(given, Mapping) else [str(name) for name in given.columns]
        if lacking := [name for name in about.columns if name not in has]:
            raise DataError(
                f"{GIVEN} lack column {lacking[0]!r}; the run's columns: {', '.join(about.columns)}"
            )
        return {name: given[name] for name in about.columns}
    rows = list(given)
    for at, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {at} is {of_kind(row)}, not a dict; give a data frame, or a list of dicts"
            )
        if lacking := [name for name in about.columns if name not in row]:
            raise DataError(f"row {at} lacks {lacking[0]!r}; write None where a value is not known")
    return {name: [row[name] for row in rows] for name in about.columns}


def _several(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, (str, bytes))


def _column(name: str, values: Any) -> pa.ChunkedArray:
    if not _several(values):
        raise DataError(
            f"{GIVEN}: column {name!r} is {of_kind(values)}, not a list of values, as others are"
        )
    try:
        return pa.chunked_array([pa.array(list(values), from_pandas=True)])
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"{GIVEN}: column {name!r} is not of one type: {on_one_line(error)}; correct it"
        ) from error
