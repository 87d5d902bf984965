"""The splits of a data set: assignment of files to splits, and a held-out test split if needed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.core.fields import nfc
from fedstill.core.stream import tasks_of_times
from fedstill.data.dataset import DEFAULT_OPTIONS, Decoded, ReadingOptions, shortened_list

SPLITS = ("train", "validation", "test")
"""The splits, in the order in which they are read."""

SPLIT_WORDS = {
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
"""Words in names of files and folders, and the splits that they denote.

Source: the keywords of the Hugging Face ``datasets`` library.
"""

SHARD = re.compile(r"(?P<name>.+)-\d{5}-of-\d{5}")
"""The name of a shard, such as ``train-00000-of-00003``."""

NAMED_FILES = 8
"""The largest number of files that a message lists."""


@dataclass(frozen=True)
class FileSplits:
    """The files of each split, and warnings about files and folders whose names are unclear."""

    files: Mapping[str, tuple[Path, ...]]
    warnings: tuple[str, ...] = ()


def split_named(name: str) -> str:
    """The split that a column's value or the whole name of a folder denotes, or "".

    >>> split_named("Training"), split_named("training hospital")
    ('train', '')
    """
    return SPLIT_WORDS.get(name.strip().casefold(), "")


def names_by_split(source: str, names: Iterable[str], remedy: str) -> dict[str, str]:
    """The name of each split, among names of which some denote a split.

    source, remedy: the data and the advice, for messages. Raises DataError if two names denote the
    same split, or if none denotes the training data.
    """
    all_names = list(names)
    by_split: dict[str, str] = {}
    for name in all_names:
        split = split_named(name)
        if split in by_split:
            raise DataError(
                f"{source} has two splits for {split}, {by_split[split]!r} and {name!r}; {remedy}"
            )
        if split:
            by_split[split] = name
    if "train" not in by_split:
        listed = ", ".join(map(repr, all_names)) or "none"
        raise DataError(f"{source} has no split 'train' (it has {listed}); {remedy}")
    return {split: by_split[split] for split in SPLITS if split in by_split}


def splits_in(name: str) -> list[str]:
    """The splits that the words of a name denote. Words consist of letters.

    >>> splits_in("heart_Test2"), splits_in("attest"), splits_in("train-test")
    (['test'], [], ['train', 'test'])
    """
    words = re.split(r"[\W\d_]+", name.casefold())
    return list(dict.fromkeys(SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS))


def file_list(files: Sequence[Path]) -> str:
    """A list of file names, which is shortened if there are many files."""
    return shortened_list([path.name for path in files], NAMED_FILES)


def split_tables(place: Path, files: Sequence[Path]) -> FileSplits:
    """Assign table files to splits, by words in the file name, or else by a folder in ``place``.

    All files are training data if no name contains the word of a split. Raises DataError if only
    some names do, or if a name contains the words of two splits.
    """
    splits = {path: _table_split(place, path) for path in files}
    unknown = [path for path in files if not splits[path]]
    warnings = _unused_words(place, unknown, class_folders=False)
    shards = _shards_left_out(files, unknown)
    if shards:
        warnings.append(
            f"ignored because their names do not contain a split: {file_list(shards)}; to read "
            "them, add train, validation or test to their names"
        )
    read = [path for path in files if path not in shards]
    without_split = [path for path in read if not splits[path]]
    if 0 < len(without_split) < len(read):
        with_split = next(path for path in read if splits[path])
        raise DataError(
            f"{place}: the name of {file_list(without_split)} contains no split, unlike "
            f"{with_split.name}; add train, validation or test to its name, or move it "
            "elsewhere"
        )
    return FileSplits(_by_split(read, splits), tuple(warnings))


def _shards_left_out(files: Sequence[Path], unknown: Sequence[Path]) -> list[Path]:
    """The shards among files whose names contain no split. If all files are shards of one name,
    they are the training data, and the result is empty.

    unknown: the files whose names contain no split.
    """
    shards = [path for path in unknown if SHARD.fullmatch(path.stem)]
    names = {SHARD.sub(r"\g<name>", path.stem) for path in shards}
    if len(shards) == len(files) and len(names) == 1:
        return []
    return shards


def split_images(place: Path, images: Sequence[Path]) -> FileSplits:
    """Assign images in folders by class to splits, by the folders between ``place`` and a class.

    All images are training data if no folder has the name of a split. Otherwise, images outside of
    such folders are left out, with a warning.
    """
    splits = {path: _folder_split(path.relative_to(place).parts[:-2]) for path in images}
    unknown = [path for path in images if not splits[path]]
    warnings = _unused_words(place, unknown, class_folders=True)
    if 0 < len(unknown) < len(images):
        folders = Counter(path.relative_to(place).parts[0] for path in unknown)
        warnings.append(
            f"ignored because they are not in the folder of a split: {len(unknown):,} images in "
            f"{shortened_list(list(folders), NAMED_FILES)}; move them into train, validation or "
            "test"
        )
        images = [path for path in images if splits[path]]
    return FileSplits(_by_split(images, splits), tuple(warnings))


def client_name(place: Path, path: Path, *, class_folders: bool) -> str:
    """The name of the client that owns a table file or an image file.

    It is the path in ``place`` without words of splits, shard numbers and, for images in folders by
    class, the class: ``north`` for ``north_train.csv``, ``train/north.csv`` and
    ``train/north/cat/1.png``. Raises DataError if nothing remains.
    """
    relative = path.relative_to(place)
    parts = [part for part in relative.parts[:-1] if not split_named(part)]
    if class_folders:
        parts = parts[:-1]
    else:
        parts.append(_without_split_words(SHARD.sub(r"\g<name>", relative.stem)))
    name = nfc("/".join(part for part in parts if part))
    if not name:
        remedy = "its client's name"
        if class_folders:
            remedy = "a folder of its client above its class"
        raise DataError(f"{path}: add {remedy}, because files must belong to clients")
    return name


def _without_split_words(name: str) -> str:
    """A file's name without words of splits and the separators around them.

    >>> _without_split_words("north_train"), _without_split_words("St-Test-Anna")
    ('north', 'St-Anna')
    """
    pieces = re.split(r"([\W\d_]+)", name)
    words, gaps = pieces[::2], ["", *pieces[1::2]]
    parts = [
        gap + word
        for gap, word in zip(gaps, words, strict=True)
        if word.casefold() not in SPLIT_WORDS
    ]
    return re.sub(r"^[\W_]+", "", "".join(parts))


def _table_split(place: Path, path: Path) -> str:
    splits = splits_in(SHARD.sub(r"\g<name>", path.stem))
    if len(splits) > 1:
        raise DataError(
            f"{path}: its name contains the words of two splits, {splits[0]} and {splits[1]}; "
            "rename the file"
        )
    if splits:
        return splits[0]
    return _folder_split(path.relative_to(place).parts[:-1])


def _folder_split(folders: Iterable[str]) -> str:
    """The split that the name of the innermost such folder denotes, or ""."""
    splits = [split_named(folder) for folder in folders]
    return next(filter(None, reversed(splits)), "")


def _unused_words(place: Path, files: Sequence[Path], *, class_folders: bool) -> list[str]:
    """A warning for each folder whose name contains the word of a split among other words."""
    parents = [path.relative_to(place).parent for path in files]
    if class_folders:
        parents = [parent.parent for parent in parents]
    folders = dict.fromkeys(chain.from_iterable(parent.parts for parent in parents))
    return [
        f"the folder {folder!r} does not count as the split {splits_in(folder)[0]}, because its "
        f"name has other words; if it is this split, rename it to {splits_in(folder)[0]}"
        for folder in folders
        if splits_in(folder) and not split_named(folder)
    ]


def _by_split(files: Sequence[Path], splits: Mapping[Path, str]) -> dict[str, tuple[Path, ...]]:
    """Files by split, in the order of the splits; files without a split are training data."""
    by_split = {
        split: tuple(path for path in files if (splits[path] or "train") == split)
        for split in SPLITS
    }
    return {split: paths for split, paths in by_split.items() if paths}


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
    return replace(data, splits=splits, about=data.about.with_warnings(*warnings))


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
