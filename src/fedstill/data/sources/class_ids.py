"""Labels as class ids. Nothing is rounded, cut off or wrapped around."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.data.dataset import Decoded, Split
from fedstill.data.form import nfc

# Labels one by one: whole numbers, or names.


LARGEST_ID = 1 << 62
"""Class ids are smaller than this."""

NAME_LENGTH = 1000
"""The most characters of a label that is a name."""


def checked_label(what: str, row: int, value: Any) -> int | str:
    """A label: whole numbers (3, 3.0, True) as int, names in one Unicode form.

    Raises DataError with the row for anything else.
    """
    is_integer = isinstance(value, (int, np.integer))
    is_whole_float = isinstance(value, float) and value.is_integer()
    if (is_integer or is_whole_float) and -LARGEST_ID < value < LARGEST_ID:
        return int(value)
    if isinstance(value, str) and len(value) <= NAME_LENGTH:
        return nfc(value)
    is_nan = isinstance(value, (float, np.floating)) and np.isnan(value)
    if value is None or is_nan:
        raise DataError(
            f"{what}: example {row} has no label; give it one, or leave the example out"
        )
    text = repr(value)
    if len(text) > 60:
        text = text[:60] + "…"
    remedy = "labels are class ids, whole numbers from 0, or names"
    if isinstance(value, float):
        remedy += "; fedstill classifies and has no regression"
    raise DataError(f"{what}: example {row} has the label {text}; {remedy}")


def class_ids(what: str, values: Iterable[Any]) -> NDArray[np.int64]:
    """Labels (N,) that are numbers; raises DataError for the first that is not a whole number."""
    labels = [checked_label(what, row, value) for row, value in enumerate(values)]
    for row, label in enumerate(labels):
        if isinstance(label, str):
            raise DataError(
                f"{what}: example {row} has the label {label!r}; here labels are class ids, whole "
                "numbers from 0"
            )
    return np.array(labels, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class RawSplit:
    """The examples of a split with labels as they were read."""

    values: NDArray[Any]
    labels: Sequence[int | str]
    owners: NDArray[np.int64] | None = None


def decoded_with_class_ids(
    splits: Mapping[str, RawSplit], names: tuple[str, ...] | None
) -> Decoded:
    """Splits with class ids for labels; labels that are names get ids in alphabetical order.

    names: the class names that a file declares for ids.
    """
    classes = {label for split in splits.values() for label in split.labels}
    if any(isinstance(label, str) for label in classes):
        names = tuple(sorted(set(map(str, classes))))
        id_of_name = {name: index for index, name in enumerate(names)}
        ids = {label: id_of_name[str(label)] for label in classes}
    else:
        ids = {label: int(label) for label in classes}

    decoded = {}
    for name, split in splits.items():
        labels = np.array([ids[label] for label in split.labels], dtype=np.int64)
        decoded[name] = Split(split.values, labels, split.owners)
    return Decoded(decoded, names)


# Labels in arrays of NumPy.


def check_labels(part: str, labels: NDArray[Any], count: int) -> None:
    """Raise DataError for labels that are not ``count`` whole numbers, with how to make them so."""
    if labels.shape == (count,) and labels.dtype.kind in "iub":
        return
    problem = (
        f"{part}: labels are {labels.dtype} of shape {labels.shape}, not whole numbers of shape "
        f"({count},)"
    )
    if labels.shape != (count,):
        raise DataError(problem + _shape_remedy(labels, count))
    if labels.dtype.kind in "OSU":
        raise DataError(
            f"{problem}: names, ids = np.unique(labels, return_inverse=True), then give ids, and "
            "classes=names"
        )
    if labels.dtype.kind == "f":
        check_whole(part, labels)
        raise DataError(f"{problem}: labels.astype('int64') of an array, labels.long() of a tensor")
    raise DataError(f"{problem}; give class ids, whole numbers from 0")


def _shape_remedy(labels: NDArray[Any], count: int) -> str:
    if labels.shape == (count, 1):
        return ": labels.reshape(-1)"
    if labels.ndim == 2 and len(labels) == count:
        return ": labels.argmax(1), if they mark one class in each row"
    return "; give one label an example"


def check_whole(part: str, labels: NDArray[Any]) -> None:
    """Raise DataError for labels with fractions, and for labels that are missing or infinite."""
    is_finite = np.isfinite(labels)
    fractions = np.flatnonzero(is_finite & (labels != np.round(labels)))
    if len(fractions):
        raise DataError(
            f"{part}: labels are numbers with fractions (example {fractions[0]} has "
            f"{labels[fractions[0]]:.6g}): fedstill classifies and has no regression; for classes "
            "of ranges, np.digitize(labels, limits)"
        )
    unknown = np.flatnonzero(~is_finite)
    if len(unknown):
        raise DataError(
            f"{part}: example {unknown[0]} has the label {labels[unknown[0]]} ({len(unknown):,} of "
            f"{len(labels):,} are not finite); give it a class id, or leave such examples out"
        )
