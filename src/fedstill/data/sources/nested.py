"""A column of lists as an array: vectors, or the channels of a series."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedstill.errors import DataError

Floats = NDArray[np.float32]


def nested(what: str, column: pa.ChunkedArray, depth: int, length: int) -> Floats:
    """Lists of numbers as (n, D), lists of lists as (n, channels, L); cut to ``length``, or filled up with NaN."""
    whole = column.combine_chunks()
    array = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
    if array.null_count:
        at = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"{what}: example {at} has no values; leave it out")
    shape, flat = [len(array)], array
    for level in range(depth):
        sizes = _sizes(flat)
        flat, last = flat.flatten(), level == depth - 1
        if last and length:
            numbers = np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.float32)
            return _padded(numbers, sizes, length).reshape(*shape, length)
        wrong = np.flatnonzero(sizes != sizes[0])
        if len(wrong) or sizes[0] < 1:
            raise DataError(
                f"{what}: example {wrong[0] // max(1, int(np.prod(shape[1:]))) if len(wrong) else 0} has "
                f"{sizes[wrong[0]] if len(wrong) else 0} values, the first {sizes[0]}; set data.length to cut and fill "
                "up all to one length"
            )
        shape.append(int(sizes[0]))
    return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.float32).reshape(shape)


def _sizes(array: Any) -> NDArray[np.int64]:
    """How long each list is."""
    if pa.types.is_fixed_size_list(array.type):
        return np.full(len(array), array.type.list_size, dtype=np.int64)
    sizes: NDArray[np.int64] = np.diff(array.offsets.to_numpy()).astype(np.int64)
    return sizes


def _padded(numbers: Floats, sizes: NDArray[np.int64], length: int) -> Floats:
    out = np.full((len(sizes), length), np.nan, dtype=np.float32)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    take = np.minimum(sizes, length)
    rows = np.repeat(np.arange(len(sizes)), take)
    places = np.arange(take.sum()) - np.repeat(np.cumsum(take) - take, take)
    out[rows, places] = numbers[np.repeat(starts, take) + places]
    return out
