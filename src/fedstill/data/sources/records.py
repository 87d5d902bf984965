"""What is read of a data set: its columns, how its images are read, and its labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import ConfigError, DataError
from fedstill.data.cache import Decoded
from fedstill.data.form import FOUND, Broken, Form, Mode, nfc


@dataclass(frozen=True)
class Columns:
    """Which columns are read, and how.

    image, label: names of columns; None looks for them. size: the side to which images are
    resized; None keeps them. form: what examples are made of, unless they are images. known:
    whether there are checksums to compare with. mode: what all images are converted to; None keeps
    grey and RGB. broken: what is done about images that cannot be decoded. Raises ConfigError for
    an unknown mode or broken.
    """

    image: str | None = None
    label: str | None = None
    size: int | None = None
    form: Form = FOUND
    known: bool = False
    mode: Mode | None = None
    broken: Broken = "refuse"

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, (None, *get_args(Mode)))
        _check_choice("broken", self.broken, get_args(Broken))


def _check_choice(field: str, value: object, choices: Sequence[str | None]) -> None:
    if value not in choices:
        names = " or ".join(repr(choice) for choice in choices if choice is not None)
        raise ConfigError(f"data.{field} = {value!r} is unknown; set {names}, or leave it out")


# Labels as class ids. Nothing is rounded, cut off or wrapped around.


LARGEST_ID = 1 << 62
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


def with_ids(
    what: str,
    splits: Mapping[str, tuple[NDArray[Any], Sequence[int | str]]],
    names: tuple[str, ...] | None,
) -> Decoded:
    """Splits with their labels as class ids; labels that are names get ids in alphabetical order.

    names: the class names that a file declares for ids.
    """
    classes = {label for _, labels in splits.values() for label in labels}
    if any(isinstance(label, str) for label in classes):
        names = tuple(sorted(set(map(str, classes))))
        id_of_name = {name: index for index, name in enumerate(names)}
        ids = {label: id_of_name[str(label)] for label in classes}
    else:
        ids = {label: int(label) for label in classes}
    arrays = {
        split: (values, np.array([ids[label] for label in labels], dtype=np.int64))
        for split, (values, labels) in splits.items()
    }
    return Decoded(arrays, names)
