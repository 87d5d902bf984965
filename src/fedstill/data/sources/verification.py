"""From arrays that were read to a verified data set on disk: labels as class ids, a held-out test
split if needed, checks of splits, shapes and known checksums, and the cache.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from fedstill.core.errors import DataError, DiskFull
from fedstill.core.fields import nfc
from fedstill.core.files import cache_folder, replaced_folder, shortened_list, write_whole
from fedstill.core.stream import tasks_of_times
from fedstill.data.dataset import (
    DEFAULT_OPTIONS,
    IMAGE_INFO,
    PLURALS,
    DatasetInfo,
    Decoded,
    Digests,
    ReadingOptions,
    ReadRequest,
    Split,
)
from fedstill.data.sources.catalog import KnownData
from fedstill.data.sources.files import SPLITS
from fedstill.data.tokens import tokenizer_digest

# Labels as class ids: whole numbers, or names.


LARGEST_ID = 1 << 62
"""Class ids must be smaller than this."""

NAME_LENGTH = 1000
"""The largest number of characters in the name of a class."""


def checked_label(source: str, row: int, value: Any) -> int | str:
    """A checked label: whole numbers (3, 3.0, True) as int, names in Unicode normal form.

    Raises DataError with the row for anything else.
    """
    if isinstance(value, Decimal):
        value = _number_of_decimal(value)
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


def _number_of_decimal(value: Decimal) -> int | float:
    """A decimal, as SQL databases export it: an int if it is whole, otherwise a float."""
    if value.is_finite() and value == value.to_integral_value():
        return int(value)
    return float(value)


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


def _with_empty_test(data: Decoded) -> Decoded:
    """The data with an empty test split, if they have only other splits."""
    if "test" in data.splits or "train" not in data.splits:
        return data
    train = data.splits["train"]
    nothing = np.zeros(len(train), dtype=bool)
    test = train.selected(nothing, train.values[:0])
    return replace(data, splits={**data.splits, "test": test})


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
            label = labels[wrong[0]]
            remedy = "correct or remove the example"
            if label < 0:
                remedy = (
                    "class ids count from 0: write the labels again as 0, 1, …, or as names; if "
                    f"{label} means that the class is unknown, remove such examples"
                )
            raise DataError(
                f"{name}, {split}: example {wrong[0]} has label {label}, outside 0 to "
                f"{len(classes) - 1}; {remedy}"
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


# Decoded data on disk. They are written once, completely or not at all, and then memory-mapped.


LAYOUT = 10
"""The version of the layout. Entries of other versions are not read."""


def decoded_once(
    name: str,
    source: Mapping[str, Any],
    read: Callable[[], Decoded],
    request: ReadRequest,
    entry: KnownData | None = None,
) -> Decoded:
    """The verified data that ``read`` returns; without a test split, a fifth is held out, unless
    the request makes the test split optional.

    Later calls return them from the cache. source: the place of the data, and what shows that they
    have changed. entry: the facts about a known data set.
    """
    known = None
    if entry is not None:
        known = asdict(entry)
    key_fields = {
        **source,
        "request": asdict(request),
        "tokenizer": tokenizer_digest(request.options.tokenizer),
        "known": known,
    }

    def decode() -> Decoded:
        data = read()
        if request.test_is_optional:
            data = _with_empty_test(data)
        return verified_with_test_split(name, data, request.options, entry, in_place=True)

    return _cached(Path(name).stem, key_fields, decode)


def _cached(name: str, key_fields: Mapping[str, Any], decode: Callable[[], Decoded]) -> Decoded:
    """The decoded data of a key, from the cache or from ``decode``.

    key_fields: everything that the result depends on, as JSON. If several processes call this
    function, one decodes and the others wait. A damaged entry is decoded again. If the cache is not
    writable, the arrays stay in memory.
    """
    key = hashlib.sha256(
        json.dumps([LAYOUT, key_fields], sort_keys=True, default=str).encode()
    ).hexdigest()[:16]
    folder = cache_folder() / "decoded" / f"{re.sub(r'[^A-Za-z0-9_-]+', '-', name)}-{key}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(folder.name + ".lock"))
        lock.acquire()
    except OSError:
        return decode()
    try:
        return _read(folder) or _write_and_map(folder, decode())
    finally:
        lock.release()


def _write_and_map(folder: Path, fresh: Decoded) -> Decoded:
    """Write decoded data to the cache, and return them with memory-mapped arrays."""
    try:
        _write(folder, fresh)
    except (OSError, DiskFull):
        return fresh
    return _read(folder) or fresh


def _read(folder: Path) -> Decoded | None:
    """The data in an entry of the cache; None if it is absent or damaged.

    Source digests are not stored: data are verified before they are written.
    """
    try:
        entry = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        splits = {
            split: _read_split(folder, split, shape, has_owners=split in entry["owned"])
            for split, shape in entry["splits"].items()
        }
        classes = entry["classes"]
        if classes is not None:
            classes = tuple(classes)
        about = DatasetInfo.from_json(entry["about"])
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
    return Decoded(splits, classes, about=about)


def _read_split(folder: Path, split: str, shape: list[int], *, has_owners: bool) -> Split:
    values = np.load(folder / f"{split}-values.npy", mmap_mode="c", allow_pickle=False)
    if list(values.shape) != shape:
        raise ValueError(f"{folder}: {split} does not match about.json")
    labels = _read_numbers(folder, split, "labels", shape[0])
    owners = None
    if has_owners:
        owners = _read_numbers(folder, split, "owners", shape[0])
    return Split(values, labels, owners)


def _read_numbers(folder: Path, split: str, name: str, count: int) -> NDArray[np.int64]:
    array: NDArray[np.int64] = np.load(folder / f"{split}-{name}.npy", allow_pickle=False)
    if array.shape != (count,):
        raise ValueError(f"{folder}: {split} does not match about.json")
    return array


def _write(folder: Path, data: Decoded) -> None:
    entry = {
        "classes": data.classes,
        "splits": {name: list(split.values.shape) for name, split in data.splits.items()},
        "owned": [name for name, split in data.splits.items() if split.owners is not None],
        "about": data.about.to_json(),
    }
    # Only the user may read the copy, as the original may be private.
    with replaced_folder(folder, mode=0o700) as temporary:
        for name, split in data.splits.items():
            np.save(temporary / f"{name}-values.npy", split.values, allow_pickle=False)
            np.save(temporary / f"{name}-labels.npy", split.labels, allow_pickle=False)
            if split.owners is not None:
                np.save(temporary / f"{name}-owners.npy", split.owners, allow_pickle=False)
        write_whole(temporary / "about.json", json.dumps(entry, indent=1).encode())
