"""Verification of decoded data: labels as class ids, a held-out test split if needed, splits,
shapes and checksums of known data sets, and the layout of images in arrays.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.core.fields import nfc
from fedstill.core.stream import tasks_of_times
from fedstill.data.dataset import (
    DEFAULT_OPTIONS,
    IMAGE_INFO,
    PLURALS,
    DatasetInfo,
    Decoded,
    Digests,
    ReadingOptions,
    Split,
    shortened_list,
)
from fedstill.data.sources.catalog import KnownData
from fedstill.data.sources.files import SPLITS

# Labels as class ids: whole numbers, or names.


LARGEST_ID = 1 << 62
"""Class ids must be smaller than this."""

NAME_LENGTH = 1000
"""The largest number of characters in the name of a class."""


def checked_label(source: str, row: int, value: Any) -> int | str:
    """A checked label: whole numbers (3, 3.0, True) as int, names in Unicode normal form.

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
        raise DataError(f"{source}: example {row} has no label; add a label, or remove the example")
    text = repr(value)
    if len(text) > 60:
        text = text[:60] + "…"
    remedy = "labels must be class ids (whole numbers from 0) or names"
    if isinstance(value, float):
        remedy += "; fedstill does not support regression"
    raise DataError(f"{source}: example {row} has the label {text}; {remedy}")


@dataclass(frozen=True, eq=False)
class RawSplit:
    """The examples of a split, with labels in the form in which they were read."""

    values: NDArray[Any]
    labels: Sequence[int | str]
    owners: NDArray[np.int64] | None = None
    notes: tuple[str, ...] = ()
    """Notes on rows that were left out."""


def decoded_with_class_ids(
    splits: Mapping[str, RawSplit], names: tuple[str, ...] | None, info: DatasetInfo = IMAGE_INFO
) -> Decoded:
    """Convert the labels of splits to class ids; names get ids in alphabetical order.

    names: the class names that a file declares for ids. info: the description of the data, without
    the notes of the splits.
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
        info = info.with_notes(*split.notes)
    return Decoded(decoded, names, about=info)


# Labels in arrays of NumPy.


def check_labels(part: str, labels: NDArray[Any], count: int) -> None:
    """Raise DataError, with advice, unless labels are ``count`` whole numbers."""
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
            f"{problem}; convert them with names, ids = np.unique(labels, return_inverse=True), "
            "then pass ids and classes=names"
        )
    if labels.dtype.kind == "f":
        check_whole_labels(part, labels)
        raise DataError(
            f"{problem}; use labels.astype('int64') for an array, or labels.long() for a tensor"
        )
    raise DataError(f"{problem}; use class ids (whole numbers from 0)")


def _shape_remedy(labels: NDArray[Any], count: int) -> str:
    if labels.shape == (count, 1):
        return ": labels.reshape(-1)"
    if labels.ndim == 2 and len(labels) == count:
        return "; for one-hot labels, use labels.argmax(1)"
    return "; use one label per example"


def check_whole_labels(part: str, labels: NDArray[Any]) -> None:
    """Raise DataError for labels with fractions, and for labels that are missing or infinite."""
    is_finite = np.isfinite(labels)
    fractions = np.flatnonzero(is_finite & (labels != np.round(labels)))
    if len(fractions):
        raise DataError(
            f"{part}: labels are not whole numbers (example {fractions[0]} has "
            f"{labels[fractions[0]]:.6g}): fedstill does not support regression; to make classes "
            "of ranges, use np.digitize(labels, limits)"
        )
    unknown = np.flatnonzero(~is_finite)
    if len(unknown):
        raise DataError(
            f"{part}: example {unknown[0]} has the label {labels[unknown[0]]} ({len(unknown):,} of "
            f"{len(labels):,} are not finite); use a class id, or remove such examples"
        )


# A test split for data without one: a fifth of every class, equal on all machines.


TEST_SHARE = 0.2
"""The share of a class that is held out."""

HOLD_OUT_SEED = 0
"""The seed of the draw, which never changes."""

NAMED_CLASSES = 5
"""The largest number of classes that a warning lists."""

MOVED_BYTES = 1 << 24
"""The number of bytes that are moved at once if an array is changed in place."""


def hold_out(
    name: str, data: Decoded, options: ReadingOptions = DEFAULT_OPTIONS, *, in_place: bool = False
) -> Decoded:
    """Return ``data`` with a test split. If there is none, a stratified fifth of the training split
    is held out.

    Each class contributes round(n / 5) examples, drawn from NumPy's legacy generator with seed 0,
    which never changes. Classes with one or two examples contribute none, with a warning. The
    order of examples does not change.

    name: the name of the data, for messages. options: if they have cuts, a fifth of each task is
    held out, independently of other tasks. in_place: whether the training array may be changed,
    which saves the memory of a copy. Raises DataError if no class contributes an example.
    """
    if "test" in data.splits:
        return data
    train = data.splits["train"]
    held_out = np.zeros(len(train), dtype=bool)
    for part in _parts_of_train(data, options):
        stream = np.random.RandomState(HOLD_OUT_SEED)
        for label in np.unique(train.labels[part]):
            members = stream.permutation(part[train.labels[part] == label])
            held_out[members[: round(TEST_SHARE * len(members))]] = True
    if not held_out.any():
        raise DataError(
            f"{name} has no test split, and a fifth cannot be held out because no class has three "
            "examples; add a test split"
        )

    test = train.selected(held_out, train.values[held_out])
    if in_place and train.values.flags.writeable:
        train_values = _moved_together(train.values, np.flatnonzero(~held_out))
    else:
        train_values = train.values[~held_out]
    splits = {**data.splits, "train": train.selected(~held_out, train_values), "test": test}

    warnings = [_untested_classes_warning(train.labels, test.labels, data.classes)]
    if "validation" in data.splits:
        warnings.append(
            "no test split: a fifth of the training split is held out; the split 'validation' is "
            "not used"
        )
    return replace(data, splits=splits).with_warnings(*warnings)


def _untested_classes_warning(
    labels: NDArray[Any], test_labels: NDArray[Any], classes: Sequence[str] | None
) -> str:
    """A warning about classes that are too small to hold out a fifth of them, or ""."""
    untested = np.setdiff1d(labels, test_labels).tolist()
    if not untested:
        return ""
    names = [str(label) for label in untested]
    if classes is not None:
        names = [classes[label] for label in untested if 0 <= label < len(classes)]
    return (
        f"the held-out test set has no example of {shortened_list(names, NAMED_CLASSES)}, because "
        "these classes are too small; to test them, add a test split"
    )


def _parts_of_train(data: Decoded, options: ReadingOptions) -> list[NDArray[np.int64]]:
    """The positions of each task's training examples, or of all if there are no tasks by date."""
    train = data.splits["train"]
    if not options.cuts or train.owners is None:
        return [np.arange(len(train))]
    tasks = tasks_of_times("the data", options.owner, data.about.owners, options.cuts)
    task_of_example = np.array(tasks, dtype=np.int64)[train.owners]
    return [np.flatnonzero(task_of_example == task) for task in range(len(options.cuts) + 1)]


def _moved_together(values: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
    """Move rows (in ascending order) to the beginning of an array, and return this part."""
    block = max(1, MOVED_BYTES // max(1, values[:1].nbytes))
    for start in range(0, len(rows), block):
        # Rows only move towards the beginning, over rows that were already moved or left out.
        moved = rows[start : start + block]
        values[start : start + len(moved)] = values[moved]
    return values[: len(rows)]


# The verification of all splits.


HASHED_IMAGES = 4096
"""The number of images that are hashed at once, so that a large data set is not copied."""


def verified_with_test_split(
    name: str,
    data: Decoded,
    options: ReadingOptions = DEFAULT_OPTIONS,
    entry: KnownData | None = None,
    *,
    in_place: bool = False,
) -> Decoded:
    """Check the data, and return them with class names and with splits in order.

    Without a test split, a fifth of the training split is held out. All data need a training split,
    equal shapes, and labels that are class ids. A known data set must also have its known sizes,
    shape, class names and, if recorded, checksums. Raises DataError for the first check that fails.

    options, in_place: as for ``hold_out``. entry: the facts about a known data set.
    """
    if "train" not in data.splits:
        raise DataError(
            f"{name} has no train split (it has {', '.join(data.splits) or 'none'}); add train "
            "files"
        )
    data = hold_out(name, data, options, in_place=in_place)
    _check_label_counts(name, data)
    classes = _classes(name, data, entry)
    _check_shapes(name, data)
    for split, arrays in data.splits.items():
        labels = arrays.labels
        wrong = np.flatnonzero((labels < 0) | (labels >= len(classes)))
        if len(wrong):
            raise DataError(
                f"{name}, {split}: example {wrong[0]} has label {labels[wrong[0]]}, outside 0 to "
                f"{len(classes) - 1}; correct or remove the example"
            )
    if entry is not None and data.about.kind == "image":
        _check_images(entry, data)
    elif entry is not None:
        _check_columns(entry, data)
    splits = {split: data.splits[split] for split in SPLITS if split in data.splits}
    return replace(data, splits=splits, classes=classes)


def image_digests(split: Split) -> Digests:
    """The digests of a split's pixels, as bytes in the order (N, H, W, C), and of its labels, as
    one byte each.
    """
    pixels = hashlib.sha256()
    for start in range(0, len(split), HASHED_IMAGES):
        block = split.values[start : start + HASHED_IMAGES].transpose(0, 2, 3, 1)
        pixels.update(np.ascontiguousarray(block).data)
    labels = hashlib.sha256(split.labels.astype(np.uint8).tobytes())
    return Digests(pixels.hexdigest(), labels.hexdigest())


def _check_label_counts(name: str, data: Decoded) -> None:
    for split, arrays in data.splits.items():
        if len(arrays.values) != len(arrays.labels):
            raise DataError(
                f"{name}, {split} has {len(arrays.values)} {PLURALS[data.about.kind]} and "
                f"{len(arrays.labels)} labels; download it again"
            )


def _check_shapes(name: str, data: Decoded) -> None:
    shapes = {split: arrays.values.shape[1:] for split, arrays in data.splits.items()}
    if len(set(shapes.values())) == 1:
        return
    if data.about.kind == "image":
        raise DataError(
            f"{name}: images differ between splits, (C, H, W) = {shapes}; set data.size to resize "
            "all, and data.mode if some are grey and others RGB"
        )
    raise DataError(
        f"{name}: the shapes of examples differ between splits: {shapes}; use one shape"
    )


def _classes(name: str, data: Decoded, entry: KnownData | None) -> tuple[str, ...]:
    """The names of the classes: known names, declared names, or the numbers up to the highest
    label.
    """
    if entry is not None:
        if data.classes is not None and _letters(data.classes) != _letters(entry.classes):
            raise DataError(
                f"{name}: the classes are {', '.join(data.classes)}, not "
                f"{', '.join(entry.classes)}; this is a different data set; rename the folder"
            )
        return entry.classes
    if data.classes is not None:
        return data.classes
    highest = max(int(split.labels.max(initial=0)) for split in data.splits.values())
    examples = sum(map(len, data.splits.values()))
    if highest >= examples:
        raise DataError(
            f"{name}: label {highest} among {examples} examples; class ids count up from 0"
        )
    return tuple(str(label) for label in range(highest + 1))


def _letters(names: Iterable[str]) -> list[str]:
    return [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names]


def _check_columns(entry: KnownData, data: Decoded) -> None:
    """Compare checksums of the columns that were read, if they are those of the data set."""
    if data.about.columns != entry.options.columns:
        return
    for split, expected in entry.digests.items():
        if data.source_digests.get(split, expected) != expected:
            raise DataError(
                f"{entry.name}, {split}: the examples differ from the data set; rename the folder"
            )


def _check_images(entry: KnownData, data: Decoded) -> None:
    """Compare the sizes, the shape and the checksums of images."""
    sizes = {split: len(data.splits[split]) for split in SPLITS if split in data.splits}
    remedy = (
        "the files are incomplete or a different data set; download them again, or rename the "
        "folder"
    )
    if any(sizes.get(split) != size for split, size in entry.sizes.items()):
        raise DataError(f"{entry.name} has {sizes} examples, not {dict(entry.sizes)}; {remedy}")
    total = sum(sizes.values())
    if entry.total is not None and total != entry.total:
        raise DataError(f"{entry.name} has {total} examples, not {entry.total}; {remedy}")
    shape = data.splits["train"].values.shape[1:]
    if shape != entry.shape:
        raise DataError(
            f"{entry.name} has images of (C, H, W) = {shape}, not {entry.shape}; {remedy}"
        )
    for split, expected in entry.digests.items():
        digests = image_digests(data.splits[split])
        if digests.values != expected.values:
            part = "pixels"
            comparison = f"{digests.values}, not {expected.values}"
        elif digests.labels != expected.labels:
            part = "labels"
            comparison = f"{digests.labels}, not {expected.labels}"
        else:
            continue
        raise DataError(f"{entry.name}, {split}: the {part} have SHA-256 {comparison}; {remedy}")


# Images in arrays: the position of their channels, and the scale of their pixels.


PICTURE_CHANNELS = (1, 3, 4)
"""The numbers of channels of grey, RGB and RGBA images; most image libraries put channels last."""

MOST_PICTURE_CHANNELS = max(PICTURE_CHANNELS)

TRANSPOSITION = (
    "values.transpose(0, 3, 1, 2) for an array, or values.permute(0, 3, 1, 2) for a tensor"
)


def check_channels(part: str, values: NDArray[Any]) -> None:
    """Raise DataError for images (N, H, W, C), which would be read as images of H channels."""
    if _channel_axis(values.shape) == "last":
        raise DataError(
            f"{part}: values of shape {values.shape} have their channels last; pass (N, C, H, W): "
            f"{TRANSPOSITION}"
        )


def ambiguous_channels(values: NDArray[Any]) -> str:
    """A warning about images with an ambiguous position of channels, or ""."""
    if _channel_axis(values.shape) != "unclear":
        return ""
    _, channels, height, width = values.shape
    return (
        f"values of shape {values.shape} are read as images of {channels} channels and {height} × "
        f"{width} pixels; if their channels are last, pass {TRANSPOSITION}"
    )


def _channel_axis(shape: tuple[int, ...]) -> Literal["first", "last", "unclear"]:
    """Whether images of a shape (N, …, …, …) have their channels first or last.

    Small squares with many channels, such as (N, 512, 4, 4), are feature maps. For other images,
    the two axes with the most similar lengths are taken as height and width.

    >>> [_channel_axis((90, *sides)) for sides in ((64, 48, 3), (512, 4, 4), (4, 64, 4))]
    ['last', 'first', 'unclear']
    """
    _, first, second, last = shape
    if last not in PICTURE_CHANNELS or second == last:
        return "first"
    is_elongated = _elongation(first, second) >= _elongation(second, last)
    if first <= MOST_PICTURE_CHANNELS or is_elongated:
        return "unclear"
    return "last"


def _elongation(side: int, other: int) -> float:
    """The longer of two sides, divided by the shorter one."""
    return max(side, other) / max(1, min(side, other))


MAX_SCALED_PIXEL = 3.0
"""The largest absolute value of pixels in [0, 1] or of standardised pixels."""


def unusual_scale(values: NDArray[Any]) -> str:
    """A warning about images whose floats (x - 0.5) / 0.5 does not map to about [-1, 1], or ""."""
    if values.dtype.kind != "f" or not len(values):
        return ""
    low = float(values.min())
    high = float(values.max())
    if max(-low, high) <= MAX_SCALED_PIXEL:
        return ""
    return (
        f"images hold numbers from {low:.4g} to {high:.4g}, which (x - 0.5) / 0.5 maps to "
        f"{2 * low - 1:.4g} to {2 * high - 1:.4g}; divide pixels by 255, or set mean= and std="
    )
