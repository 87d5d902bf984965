"""Which columns hold image and label, and their rows as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.data.cache import Decoded
from fedstill.data.form import FOUND, Form
from fedstill.data.sources.images import Pictures

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


USUAL_LABELS = ("label", "fine_label")

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
"""Words in names of files and folders that say which split it is."""


@dataclass(frozen=True)
class Columns:
    """What to read: the columns by name (None: find them), and the side to resize images to (None:
    as they are).

    ``form``: what examples are made of, if they are no images. ``known``: of a data set whose
    checksums are known.
    """

    image: str | None = None
    label: str | None = None
    size: int | None = None
    form: Form = FOUND
    known: bool = False


class Table(Protocol):
    """The rows of a split."""

    @property
    def rows(self) -> int:
        """How many there are, 0 if that is not known."""

    @property
    def features(self) -> Mapping[str, Any]:
        """What each column holds, as ``datasets`` says it."""

    def cells(self, image: str, label: str) -> Iterator[tuple[Any, Any]]:
        """Each row's encoded image and its label."""


def decoded_splits(
    what: str, tables: Mapping[str, Table], columns: Columns, within: Path | str
) -> Decoded:
    """All rows of {split: table} as arrays; labels that are text become ids in alphabetical order.

    within: the folder, or the data set on the hub, outside of which no file is opened because a row
    names it. Raises DataError for columns that are not there, an image that differs from the first
    in size or kind, or a label that is missing or no whole number.
    """
    raw, names = {}, None
    for split, table in tables.items():
        image, label, own_names = _find(what, table.features, columns)
        names = names or own_names
        pictures = Pictures(f"{what}, {split}", columns.size, table.rows, within)
        raw[split] = read_rows(pictures, table.cells(image, label))
    return with_ids(what, raw, names)


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
        return Decoded({s: (x, class_ids(f"{what}, {s}", y)) for s, (x, y) in raw.items()}, names)
    names = tuple(sorted(set(map(str, every))))
    ids = {name: k for k, name in enumerate(names)}
    return Decoded(
        {s: (x, np.array([ids[str(v)] for v in y], dtype=np.int64)) for s, (x, y) in raw.items()},
        names,
    )


def read_rows(
    pictures: Pictures, cells: Iterator[tuple[Any, Any]]
) -> tuple[NDArray[np.uint8], list[int | str]]:
    """(N, C, H, W) of encoded images, and their labels. Raises DataError without an example, an
    image or a label.
    """
    images: list[NDArray[np.uint8]] = []
    labels: list[int | str] = []
    for k, (image, label) in enumerate(cells):
        labels.append(checked_label(pictures.what, k, label))
        images.append(pictures.decoded(image, k))
    if not images:
        raise DataError(
            f"{pictures.what} holds no examples; leave the file out or download it again"
        )
    return np.stack(images), labels


def _find(
    what: str, features: Mapping[str, Any], columns: Columns
) -> tuple[str, str, tuple[str, ...] | None]:
    """The image column, the label column, and the class names written in the file."""
    images = [k for k, f in features.items() if is_image(f)]
    image = columns.image or (images[0] if len(images) == 1 else None)
    if image is None or image not in features:
        raise DataError(_absent(what, "image", image, features))
    label, names = label_column(what, features, columns)
    return image, label, names


def label_column(
    what: str, features: Mapping[str, Any], columns: Columns
) -> tuple[str, tuple[str, ...] | None]:
    """The label column, and the class names written in the file; DataError where it is not clear
    which it is.
    """
    import datasets

    labels = [k for k, f in features.items() if isinstance(f, datasets.ClassLabel)]
    usual = [name for name in USUAL_LABELS if name in features]
    label = columns.label or next(
        iter([*usual, *labels, *(["labels"] if "labels" in features else [])]), None
    )
    if label is None or label not in features:
        raise DataError(_absent(what, "label", label, features))
    feature = features[label]
    return label, tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None


def is_image(feature: Any) -> bool:
    """Whether a column holds encoded images, as ``datasets`` says it."""
    import datasets

    return isinstance(feature, datasets.Image) or (
        isinstance(feature, Mapping) and {"bytes", "path"} <= set(feature)
    )


def _absent(what: str, role: str, name: str | None, features: Mapping[str, Any]) -> str:
    asked = f"no column {name!r}" if name else f"not one clear {role} column"
    return (
        f"{what} has {asked} among {', '.join(map(repr, features)) or 'none'}; set "
        f"data.{role}_column"
    )
