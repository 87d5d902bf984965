"""Which columns hold image and label, how images are read, and labels as class ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.data.cache import Decoded
from fedstill.data.form import FOUND, Broken, Form, Mode, nfc

# Labels as they were read, made class ids: nothing is rounded, cut off or wrapped around.


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
        return nfc(value)
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


@dataclass(frozen=True)
class Columns:
    """What to read: the columns by name (None: find them), and the side to resize images to (None:
    as they are).

    ``form``: what examples are made of, if they are no images. ``known``: of a data set whose
    checksums are known. ``mode``: what images are converted to (None: they are grey or RGB as
    stored). ``broken``: what is done about images that cannot be decoded.
    """

    image: str | None = None
    label: str | None = None
    size: int | None = None
    form: Form = FOUND
    known: bool = False
    mode: Mode | None = None
    broken: Broken = "refuse"


def with_ids(
    what: str,
    raw: Mapping[str, tuple[NDArray[Any], list[int | str]]],
    names: tuple[str, ...] | None,
) -> Decoded:
    """Splits with their labels as class ids; labels that are text are numbered in alphabetical
    order.
    """
    every = [value for _, labels in raw.values() for value in labels]
    if not any(isinstance(value, str) for value in every):
        return Decoded(
            {split: (x, np.array(ids, dtype=np.int64)) for split, (x, ids) in raw.items()}, names
        )
    names = tuple(sorted(set(map(str, every))))
    ids = {name: k for k, name in enumerate(names)}
    return Decoded(
        {s: (x, np.array([ids[str(v)] for v in y], dtype=np.int64)) for s, (x, y) in raw.items()},
        names,
    )
