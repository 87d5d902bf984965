"""Labels as they were read, made class ids: nothing is rounded, cut off or wrapped around."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.errors import DataError

LARGEST_ID = 1 << 62
NAME_LENGTH = 1000
"""Characters of a label that is a name."""


def checked_label(what: str, k: int, value: Any) -> int | str:
    """One label: a whole number (3, 3.0, True) as an int, or a name. DataError for anything else,
    with its place.
    """
    whole = isinstance(value, (int, np.integer)) or (
        isinstance(value, float) and value.is_integer()
    )
    if whole and -LARGEST_ID < value < LARGEST_ID:
        return int(value)
    if isinstance(value, str) and len(value) <= NAME_LENGTH:
        return value
    if value is None or (isinstance(value, (float, np.floating)) and np.isnan(value)):
        raise DataError(f"{what}: example {k} has no label; give it one, or leave the example out")
    said = repr(value) if len(repr(value)) <= 60 else repr(value)[:60] + "…"
    raise DataError(
        f"{what}: example {k} has the label {said}; labels are class ids, whole numbers from 0, or "
        "names"
    )


def class_ids(what: str, values: Iterable[Any]) -> NDArray[np.int64]:
    """Labels that are numbers, as (N,) class ids; raises DataError for the first that is not a
    whole number.
    """
    return np.fromiter((_number(what, k, value) for k, value in enumerate(values)), dtype=np.int64)


def _number(what: str, k: int, value: Any) -> int:
    label = checked_label(what, k, value)
    if isinstance(label, str):
        raise DataError(
            f"{what}: example {k} has the label {label!r}; here labels are class ids, whole "
            "numbers from 0"
        )
    return label
