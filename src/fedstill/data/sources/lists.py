"""A column of lists as an array: vectors, or the channels of series."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.data.table_encoding import float_values, null_mask

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ListColumn:
    """Lists of numbers (``depth`` 1) or lists of such lists (``depth`` 2), one for each example.

    length: the values that are kept of each innermost list; 0 keeps all, and then all lists must
    have the same length. what: the place of the column, for messages.
    """

    what: str
    array: pa.Array
    depth: int
    length: int = 0

    @staticmethod
    def of(what: str, column: pa.ChunkedArray, depth: int, length: int) -> ListColumn:
        """The column of a table."""
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # of extension types, and in older versions
            array = array.chunk(0)
        return ListColumn(what, array, depth, length)

    def values(self) -> Floats:
        """(n, D) or (n, channels, L) float32; longer lists are cut, shorter ones end with NaN.

        An example is NaN if it is null or has a list that is. Raises DataError if all are, or if
        lengths differ.
        """
        rows = np.flatnonzero(~self._has_null_list())
        if not len(rows):
            raise DataError(
                f"{self.what}: no example has all its values; write them, or leave the column out"
            )
        if len(rows) == len(self.array):
            # Arrow's memory must not be written to.
            return np.require(self._stacked(self.array, rows), requirements=["W"])
        complete = self._stacked(self.array.take(pa.array(rows)), rows)
        values = np.full((len(self.array), *complete.shape[1:]), np.nan, dtype=np.float32)
        values[rows] = complete
        return values

    def has_gap(self) -> NDArray[np.bool_]:
        """Which examples (n,) are null, or lack a list or one of the numbers that are kept."""
        has_gap = self._has_null_list()
        rows = np.arange(len(self.array))
        numbers = self.array
        sizes = rows[:0]
        for _ in range(self.depth):
            sizes = _sizes(numbers)
            rows = np.repeat(rows, sizes)
            numbers = numbers.flatten()
        is_missing = np.isnan(_floats(numbers))
        if self.length:
            is_missing &= _places(sizes) < self.length
        has_gap[rows[is_missing]] = True
        return has_gap

    def _has_null_list(self) -> NDArray[np.bool_]:
        """Which examples (n,) are null, or have a list that is."""
        has_null = np.zeros(len(self.array), dtype=bool)
        rows = np.arange(len(self.array))
        array = self.array
        for level in range(self.depth):
            has_null[rows[null_mask(array)]] = True
            if level < self.depth - 1:
                rows = np.repeat(rows, _sizes(array))
                array = array.flatten()
        return has_null

    def _stacked(self, array: pa.Array, rows: NDArray[np.int64]) -> Floats:
        """The values of examples without a null list; ``rows``: their numbers, for messages."""
        shape = [len(array)]
        for level in range(self.depth):
            sizes = _sizes(array)
            array = array.flatten()
            is_innermost = level == self.depth - 1
            if is_innermost and self.length:
                return _cut_or_filled(_floats(array), sizes, self.length).reshape(*shape, -1)
            self._check_sizes(sizes, rows, shape, is_innermost=is_innermost)
            shape.append(int(sizes[0]))
        return _floats(array).reshape(shape)

    def _check_sizes(
        self,
        sizes: NDArray[np.int64],
        rows: NDArray[np.int64],
        shape: list[int],
        *,
        is_innermost: bool,
    ) -> None:
        """Raise DataError for a list of another length than the first, or of none."""
        wrong = np.flatnonzero((sizes != sizes[0]) | (sizes < 1))
        if not len(wrong):
            return
        lists_an_example = max(1, int(np.prod(shape[1:])))
        example = rows[wrong[0] // lists_an_example]
        parts = "values" if is_innermost else "channels"
        remedy = "leave it out"
        if is_innermost:
            remedy = "correct it, or leave it out"
        if is_innermost and self.depth > 1:
            remedy = "set data.length to cut and fill up all to one length"
        raise DataError(
            f"{self.what}: example {example} has {sizes[wrong[0]]} {parts}, the first {sizes[0]}; "
            f"{remedy}"
        )


def _floats(numbers: pa.Array) -> Floats:
    if pa.types.is_float32(numbers.type):
        return float_values(numbers, np.float32)
    return float_values(numbers.cast(pa.float64())).astype(np.float32)


def _sizes(array: Any) -> NDArray[np.int64]:
    """The length of each list; 0 for one that is null."""
    if pa.types.is_fixed_size_list(array.type):
        sizes = np.full(len(array), array.type.list_size, dtype=np.int64)
    else:
        sizes = np.diff(np.from_dlpack(array.offsets)).astype(np.int64)
    sizes[null_mask(array)] = 0
    return sizes


def _places(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each number in its list."""
    starts = np.cumsum(sizes) - sizes
    places: NDArray[np.int64] = np.arange(sizes.sum()) - np.repeat(starts, sizes)
    return places


def _cut_or_filled(numbers: Floats, sizes: NDArray[np.int64], length: int) -> Floats:
    """Lists as rows of one length: cut, or filled up with NaN."""
    rows = np.full((len(sizes), length), np.nan, dtype=np.float32)
    places = _places(sizes)
    fits = places < length
    row_of_number = np.repeat(np.arange(len(sizes)), sizes)
    rows[row_of_number[fits], places[fits]] = numbers[fits]
    return rows
