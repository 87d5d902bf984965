"""A column of lists as an array: vectors, or the channels of a series; and which examples lack a
value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedstill.errors import DataError

Floats = NDArray[np.float32]


def nested(what: str, column: pa.ChunkedArray, depth: int, length: int) -> Floats:
    """Lists of numbers as (n, D), lists of lists as (n, channels, L); cut to ``length``, or filled
    up with NaN.

    An example that is null, or has a list that is, is NaN. Raises DataError where all are, or
    lengths differ.
    """
    array = _whole(column)
    rows = np.flatnonzero(~_lacks_lists(array, depth))
    if not len(rows):
        raise DataError(
            f"{what}: no example has all its values; write them, or leave the column out"
        )
    known = _stacked(what, array.take(pa.array(rows)), depth, length, rows)
    if len(rows) == len(array):
        return known
    values = np.full((len(array), *known.shape[1:]), np.nan, dtype=np.float32)
    values[rows] = known
    return values


def with_gaps(column: pa.ChunkedArray, depth: int, length: int) -> NDArray[np.bool_]:
    """Which examples (n,) are null, or lack a list, or one of the numbers that ``length`` keeps."""
    array = _whole(column)
    lacks = _lacks_lists(array, depth)
    rows, flat = np.arange(len(array)), array
    for _ in range(depth):
        sizes = _sizes(flat)
        rows, flat = np.repeat(rows, sizes), flat.flatten()
    gaps = np.isnan(_numbers(flat)) & (_places(sizes) < (length or np.inf))
    lacks[rows[gaps]] = True
    return lacks


def _whole(column: pa.ChunkedArray) -> Any:
    whole = column.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole


def _lacks_lists(array: Any, depth: int) -> NDArray[np.bool_]:
    """Which examples (n,) are null, or have a list that is."""
    lacks = np.zeros(len(array), dtype=bool)
    rows = np.arange(len(array))
    for level in range(depth):
        lacks[rows[array.is_null().to_numpy(zero_copy_only=False)]] = True
        if level < depth - 1:
            rows, array = np.repeat(rows, _sizes(array)), array.flatten()
    return lacks


def _stacked(what: str, array: Any, depth: int, length: int, rows: NDArray[np.int64]) -> Floats:
    """Examples without a null list; ``rows``: their numbers, for people."""
    shape, flat = [len(array)], array
    for level in range(depth):
        sizes, last = _sizes(flat), level == depth - 1
        flat = flat.flatten()
        if last and length:
            return _padded(_numbers(flat), sizes, length).reshape(*shape, length)
        wrong = np.flatnonzero((sizes != sizes[0]) | (sizes < 1))
        if len(wrong):
            parts, todo = (
                ("values", "correct it, or leave it out") if last else ("channels", "leave it out")
            )
            if last and depth > 1:
                todo = "set data.length to cut and fill up all to one length"
            raise DataError(
                f"{what}: example {rows[wrong[0] // max(1, int(np.prod(shape[1:])))]} has "
                f"{sizes[wrong[0]]} {parts}, "
                f"the first {sizes[0]}; {todo}"
            )
        shape.append(int(sizes[0]))
    return _numbers(flat).reshape(shape)


def _numbers(flat: Any) -> Floats:
    return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.float32)


def _sizes(array: Any) -> NDArray[np.int64]:
    """How long each list is; 0 for one that is null."""
    if pa.types.is_fixed_size_list(array.type):
        sizes = np.full(len(array), array.type.list_size, dtype=np.int64)
    else:
        sizes = np.diff(array.offsets.to_numpy()).astype(np.int64)
    sizes[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return sizes


def _places(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each number in its list."""
    places: NDArray[np.int64] = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return places


def _padded(numbers: Floats, sizes: NDArray[np.int64], length: int) -> Floats:
    out = np.full((len(sizes), length), np.nan, dtype=np.float32)
    places = _places(sizes)
    kept = places < length
    out[np.repeat(np.arange(len(sizes)), sizes)[kept], places[kept]] = numbers[kept]
    return out
