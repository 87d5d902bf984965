"""Arrow columns as arrays of numbers: rows of tables become numbers, categories and marks of
missing values; lists become vectors and series.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedstill.core.errors import DataError, on_one_line
from fedstill.core.fields import nfc
from fedstill.data.dataset import DatasetInfo, Value

# The names of the inputs. A numeric column is one input, and a categorical column is one input for
# each category. At the end, there is a mark for each marked column, which is 1 if the value is
# missing.


MARK_SUFFIX = " is missing"
"""The suffix of a mark's name, after the name of its column."""


@dataclass(frozen=True)
class TableInputs:
    """The columns of a table, the categories of its categorical columns, and its marked columns."""

    columns: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]
    marked: tuple[str, ...] = ()

    @property
    def info(self) -> DatasetInfo:
        """A data set's description with the names of the inputs, and the binary ones among them.

        >>> TableInputs(("age", "sex"), {"sex": ("f", "m")}, ("age",)).info.features
        ('age', 'sex=f', 'sex=m', 'age is missing')
        """
        features: list[str] = []
        binary: list[int] = []
        for column in self.columns:
            if column in self.categories:
                names = [f"{column}={name}" for name in self.categories[column]]
                binary += range(len(features), len(features) + len(names))
                features += names
            else:
                features.append(column)
        binary += range(len(features), len(features) + len(self.marked))
        features += [f"{column}{MARK_SUFFIX}" for column in self.marked]

        categories = tuple(
            (column, self.categories[column])
            for column in self.columns
            if column in self.categories
        )
        return DatasetInfo(
            "table",
            columns=self.columns,
            categories=categories,
            features=tuple(features),
            binary_features=tuple(binary),
        )

    @staticmethod
    def named_by(
        columns: Sequence[str], features: Sequence[str], binary: Collection[int]
    ) -> TableInputs:
        """Derive the columns and categories from the names of inputs.

        features: the names of all inputs; binary: the positions of the binary ones.

        >>> TableInputs.named_by(
        ...     ["age", "sex"], ["age", "sex=f", "sex=m", "age is missing"], [1, 2, 3]
        ... ).categories
        {'sex': ('f', 'm')}
        """
        position = 0
        categories: dict[str, tuple[str, ...]] = {}
        for column in columns:
            prefix = f"{column}="
            names: list[str] = []
            while position < len(features) and position in binary:
                if not features[position].startswith(prefix):
                    break
                names.append(features[position].removeprefix(prefix))
                position += 1
            if names:
                categories[column] = tuple(names)
            else:
                position += 1
        marked = tuple(name.removesuffix(MARK_SUFFIX) for name in features[position:])
        return TableInputs(tuple(columns), categories, marked)


# One-hot encoding of categorical columns.


MOST_CATEGORIES = 1000
"""The largest number of categories that are read from a column.

A column with more categories probably holds numbers, or identifiers of rows.
"""


def category_names(
    source: str, column: str, declared: Sequence[Value], train: pa.ChunkedArray
) -> tuple[str, ...]:
    """The declared categories of a column, or else those in the training data, in order.

    Raises DataError if there are none, or more than ``MOST_CATEGORIES``, and if a category is
    declared twice.
    """
    check_holds_names(source, column, train.type)
    if declared:
        names = tuple(map(category_name, declared))
        repeated = repeated_names(names)
        if repeated:
            raise DataError(
                f"{source}: data.categorical has {repeated[0]!r} more than once in column "
                f"{column!r}; remove the repetition"
            )
        return names
    names = names_in_order(distinct_values(train).values)
    if not 0 < len(names) <= MOST_CATEGORIES:
        raise DataError(
            f"{source}: column {column!r} has {len(names):,} categories, not 1 to "
            f"{MOST_CATEGORIES:,}; remove it"
        )
    return names


def repeated_names(names: Iterable[str]) -> list[str]:
    """The names that occur more than once, in order."""
    return [name for name, count in Counter(names).items() if count > 1]


def check_holds_names(source: str, column: str, arrow_type: pa.DataType) -> None:
    """Raise DataError for a column of lists or records, which are neither categories nor owners."""
    if pa.types.is_nested(arrow_type):
        raise DataError(
            f"{source}: column {column!r} holds {str(arrow_type)[:60]}, not names or numbers; "
            "choose another column, or write one with a text or a number in each row"
        )


def one_hot(
    source: str, name: str, column: pa.ChunkedArray, categories: Sequence[str]
) -> NDArray[np.float32]:
    """The one-hot encoding (n, categories) of a column, NaN in rows without a value.

    Raises DataError for a value that is not a category.
    """
    place = {category: index for index, category in enumerate(categories)}
    distinct = distinct_values(column)
    places = np.array(
        [place.get(category_name(value), -1) for value in distinct.values], dtype=np.int64
    )
    unknown = np.isin(distinct.codes, np.flatnonzero(places < 0))
    if unknown.any():
        row = int(np.argmax(unknown))
        value = category_name(distinct.values[distinct.codes[row]])
        raise DataError(
            f"{source}: example {row} has {value[:60]!r} in column {name!r}, which is none of "
            f"{', '.join(categories)[:200]}; correct it, or add it to data.categorical"
        )

    # One row for each distinct value; the last row is for missing values.
    rows = np.zeros((len(places) + 1, len(categories)), dtype=np.float32)
    rows[np.arange(len(places)), places] = 1
    rows[-1] = np.nan
    return rows[distinct.codes]


@dataclass(frozen=True)
class DistinctValues:
    """The distinct values of a column, and the position of each row's value among them, (n,).

    The position of a missing value is -1.
    """

    values: list[Any]
    codes: NDArray[np.int64]

    def mapped(self, function: Callable[[Any], Any], missing: Any) -> NDArray[Any]:
        """Apply a function to each row's value, (n,); missing values become ``missing``."""
        # The code -1 of a missing value is the position of the last entry.
        results = np.array([*map(function, self.values), missing])
        return results[self.codes]


def distinct_values(column: pa.ChunkedArray) -> DistinctValues:
    """The distinct values of a column, in the order of their first occurrence."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type):
        return DistinctValues([], np.full(len(column), -1, dtype=np.int64))
    if pa.types.is_nested(column.type):  # types that Arrow cannot compare
        return DistinctValues(column.to_pylist(), np.arange(len(column)))
    encoded = column.combine_chunks().dictionary_encode()
    codes = _filled(encoded.indices, -1).astype(np.int64)
    values = encoded.dictionary.to_pylist()
    nan = [index for index, value in enumerate(values) if is_missing(value)]
    codes[np.isin(codes, nan)] = -1
    return DistinctValues(values, codes)


def float_values(column: pa.ChunkedArray | pa.Array) -> NDArray[Any]:
    """The numbers (n,) of a column of floats, with NaN for nulls. They may be read-only."""
    array = column
    if isinstance(column, pa.ChunkedArray):
        array = column.combine_chunks()
    return _filled(array, np.nan)


def _filled(array: pa.Array, value: float) -> NDArray[Any]:
    """The numbers (n,) of an array, with a value for nulls. They may be read-only.

    Arrow's own conversion of an array, and of a Python number to a scalar, imports pandas, which
    takes as long as reading a small file.
    """
    kind = "i"
    if pa.types.is_floating(array.type):
        kind = "f"
    numbers = np.array([value], dtype=f"{kind}{array.type.bit_width // 8}")
    scalar = pa.Array.from_buffers(array.type, 1, [None, pa.py_buffer(numbers)])[0]
    return np.from_dlpack(array.fill_null(scalar))


def null_mask(array: pa.Array) -> NDArray[np.bool_]:
    """Whether each value is null, (n,)."""
    if not array.null_count:
        return np.zeros(len(array), dtype=bool)
    return np.from_dlpack(array.is_null().cast(pa.uint8())).astype(bool)


def is_missing(value: Any) -> bool:
    """Whether a value is missing: null, or NaN, which pandas writes for missing values."""
    return value is None or value != value


def names_in_order(values: Iterable[Any]) -> tuple[str, ...]:
    """The distinct names of values, without missing ones.

    Numbers come first, in ascending order, followed by texts in alphabetical order.
    """
    present = [nfc(value) for value in values if not is_missing(value)]
    present.sort(key=lambda value: (isinstance(value, str), value))
    return tuple(dict.fromkeys(map(category_name, present)))


def category_name(value: Any) -> str:
    """The name of a value. It is equal for 3, 3.0 and "3", and for all Unicode forms of a text.

    >>> category_name(3.0), category_name(Decimal("3.00")), category_name(Decimal("0.50"))
    ('3', '3', '0.5')
    """
    if isinstance(value, Decimal):
        return _decimal_name(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return nfc(str(value))


def _decimal_name(value: Decimal) -> str:
    """A decimal with all its digits, but without zeros at the end of a fraction."""
    digits = f"{value:f}"
    if "." not in digits:
        return digits
    return digits.rstrip("0").removesuffix(".")


# Rows of all columns.


Floats = NDArray[np.float32]


def table_rows(
    source: str, table: pa.Table | Mapping[str, pa.ChunkedArray], about: DatasetInfo
) -> Floats:
    """Encode columns as the inputs (n, features) of ``about``, without marks; missing values
    become NaN.

    Raises DataError for a value that is neither a number nor a category of its column.
    """
    categories = dict(about.categories)
    positions = first_position_of_column(about)
    width = sum(_width(name, categories) for name in about.columns)
    count = len(table[about.columns[0]])
    rows = np.empty((count, width), dtype=np.float32)
    for name, position in positions.items():
        if name in categories:
            end = position + len(categories[name])
            rows[:, position:end] = one_hot(source, name, table[name], categories[name])
        else:
            rows[:, position] = numbers(table[name], f"{source}: column {name!r}")
    return rows


def first_position_of_column(about: DatasetInfo) -> dict[str, int]:
    """The position of each column's first input."""
    categories = dict(about.categories)
    positions = {}
    position = 0
    for name in about.columns:
        positions[name] = position
        position += _width(name, categories)
    return positions


def column_of_feature(about: DatasetInfo, feature: int) -> str:
    """The column of an input, given the input's position; not for marks.

    >>> info = TableInputs(("age", "sex"), {"sex": ("f", "m")}).info
    >>> column_of_feature(info, 0), column_of_feature(info, 2)
    ('age', 'sex')
    """
    column = ""
    for name, first in first_position_of_column(about).items():
        if first <= feature:
            column = name
    return column


def _width(column: str, categories: Mapping[str, Sequence[str]]) -> int:
    """The number of inputs of a column."""
    if column in categories:
        return len(categories[column])
    return 1


def with_marks(rows: Floats, about: DatasetInfo, marked: Collection[str]) -> Floats:
    """Append a mark to rows for each marked column: 1 if the value is missing, else 0."""
    positions = first_position_of_column(about)
    marks = np.isnan(rows[:, [positions[name] for name in marked]])
    return np.concatenate([rows, marks.astype(np.float32)], axis=1)


def numbers(column: pa.ChunkedArray, source: str = "") -> Floats:
    """A numeric column (n,) as float32, with NaN for missing values.

    Raises DataError for values that are not numbers, or are too large for float32.
    """
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    exact = float_values(_as_float64(column, source, "leave it out with data.columns"))
    large = np.flatnonzero(np.isfinite(exact) & (np.abs(exact) > np.finfo(np.float32).max))
    if len(large):
        raise DataError(
            f"{source} holds {exact[large[0]]:g}, which is too large for a 32-bit float; correct "
            "or rescale it"
        )
    as_floats: Floats = exact.astype(np.float32)
    return as_floats


def _as_float64(
    column: pa.ChunkedArray | pa.Array, source: str, remedy: str
) -> pa.ChunkedArray | pa.Array:
    """Numbers as float64. remedy: what to do with numbers that are ids."""
    try:
        return column.cast(pa.float64())
    except pa.ArrowException as error:
        if pa.types.is_integer(column.type):
            raise DataError(
                f"{source} holds whole numbers beyond 2^53, which a float cannot represent; if it "
                f"is an id, {remedy}"
            ) from error
        raise DataError(
            f"{source} holds a value that is not a number: {on_one_line(error)}; correct it"
        ) from error


# A column of lists as an array: vectors, or the channels of series.


@dataclass(frozen=True)
class ListColumn:
    """A column of lists of numbers (``depth`` 1) or of lists of such lists (``depth`` 2).

    length: the number of values to keep of each innermost list. With 0, all values are kept, and
    all lists must have the same length. source: the name of the column's file, for messages.
    """

    source: str
    array: pa.Array
    depth: int
    length: int = 0

    def values(self) -> Floats:
        """(n, D) or (n, channels, L), float32. Long lists are cut; short lists are padded with NaN.

        An example that is null or has a null list is NaN. Raises DataError if this is true of all
        examples, or if lengths differ.
        """
        rows = np.flatnonzero(~self._has_null_list())
        if not len(rows):
            raise DataError(
                f"{self.source}: no example has all its values; add them, or remove the column"
            )
        if len(rows) == len(self.array):
            # Arrow's memory is read-only, so a writable copy is needed.
            return np.require(self._stacked(self.array, rows), requirements=["W"])
        complete = self._stacked(self.array.take(pa.array(rows)), rows)
        values = np.full((len(self.array), *complete.shape[1:]), np.nan, dtype=np.float32)
        values[rows] = complete
        return values

    def has_gap(self) -> NDArray[np.bool_]:
        """A mask (n,) of the examples that lack a list or a number to keep."""
        *_, innermost = self._levels()
        has_gap = self._has_null_list()
        has_gap[innermost.rows[np.isnan(self._floats(innermost.array))]] = True
        return has_gap

    def _has_null_list(self) -> NDArray[np.bool_]:
        """A mask (n,) of the examples that are null or have a null list."""
        has_null = np.zeros(len(self.array), dtype=bool)
        for level in islice(self._levels(), self.depth):
            has_null[level.rows[null_mask(level.array)]] = True
        return has_null

    def _levels(self) -> Iterator[_Level]:
        """The examples, the lists inside them for ``depth`` 2, and the numbers to keep."""
        level = _Level(self.array, np.arange(len(self.array)))
        for depth in range(1, self.depth + 1):
            yield level
            lists = level.array
            if depth == self.depth and self.length:
                lists = pc.list_slice(lists, 0, self.length, return_fixed_size_list=False)
            level = _Level(lists.flatten(), np.repeat(level.rows, _sizes(lists)))
        yield level

    def _stacked(self, array: pa.Array, rows: NDArray[np.int64]) -> Floats:
        """The values of examples without null lists. ``rows``: their row numbers, for messages."""
        shape = [len(array)]
        for level in range(self.depth):
            is_innermost = level == self.depth - 1
            if is_innermost and self.length:
                # Short lists are filled with nulls.
                array = pc.list_slice(array, 0, self.length, return_fixed_size_list=True)
            sizes = _sizes(array)
            self._check_sizes(sizes, rows, shape, is_innermost=is_innermost)
            shape.append(int(sizes[0]))
            array = array.flatten()
        return self._floats(array).reshape(shape)

    def _floats(self, array: pa.Array) -> Floats:
        """The innermost numbers."""
        if not pa.types.is_float32(array.type):
            array = _as_float64(array, f"{self.source}: the column of lists", "set another column")
        return float_values(array).astype(np.float32, copy=False)

    def _check_sizes(
        self,
        sizes: NDArray[np.int64],
        rows: NDArray[np.int64],
        shape: list[int],
        *,
        is_innermost: bool,
    ) -> None:
        """Raise DataError for an empty list, or one that is not as long as the first."""
        empty = np.flatnonzero(sizes < 1)
        wrong = np.flatnonzero(sizes != sizes[0])
        if not len(empty) and not len(wrong):
            return
        first_wrong = next(iter([*empty[:1], *wrong[:1]]))
        lists_per_example = max(1, int(np.prod(shape[1:])))
        example = rows[first_wrong // lists_per_example]
        parts = "channels"
        remedy = "remove it"
        if is_innermost:
            parts = "values"
            remedy = "correct or remove it"
        if is_innermost and self.depth > 1:
            remedy = "set data.length to cut or pad all series to one length"
        if len(empty):
            raise DataError(f"{self.source}: example {example} has no {parts}; {remedy}")
        raise DataError(
            f"{self.source}: example {example} has {sizes[first_wrong]} {parts}, but the first has "
            f"{sizes[0]}; {remedy}"
        )


class _Level(NamedTuple):
    """Lists or numbers, and the row of the example to which each belongs."""

    array: pa.Array
    rows: NDArray[np.int64]


def _sizes(array: pa.Array) -> NDArray[np.int64]:
    """The length of each list; 0 for null."""
    return _filled(pc.list_value_length(array), 0).astype(np.int64)
