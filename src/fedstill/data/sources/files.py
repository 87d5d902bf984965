"""Files of a data set: limits on their size, which are checked before they are read, the files
below a folder, and the splits that their names denote.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Generic, TypeVar

from fedstill.core.errors import DataError, on_one_line
from fedstill.core.fields import nfc
from fedstill.core.files import shortened_list

# Limits on the size of data.


MAX_PIXELS = 1 << 26
"""The largest number of pixels of an image, 8,192 × 8,192. Decoding it takes about 800 MB."""

IMAGE_BYTES = 4 * MAX_PIXELS
"""The largest size of an image file in bytes: that of an uncompressed image of ``MAX_PIXELS``."""

MEMORY_DIVISOR = 3
"""A data set may take 1/3 of the memory. Reading makes a copy, and the run needs the rest."""

UNKNOWN_MEMORY = 12 << 30
"""The assumed memory if the system does not report it."""

MAX_COMPRESSION_RATIO = 200
"""The largest compression ratio of a file.

The ratio is 2 to 20 for photographs, and 100 for masks. Data with a larger ratio consist almost
entirely of a repeated value.
"""

UNLIMITED_BYTES = 1 << 28
"""The largest unpacked size of files whose compression ratio is not limited, 268 MB."""

EXAMPLE_BYTES = 100
"""The memory for an example during reading, in addition to its pixels."""

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_GROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int:
    """The memory that this process may use: the minimum of the machine's memory and the limits of
    the container and the process.
    """
    limits = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # a system without sysconf
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in _GROUPS:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(Path(path).read_text(encoding="utf-8")))
    with contextlib.suppress(ImportError):
        import resource

        limits.append(resource.getrlimit(resource.RLIMIT_AS)[0])
    return min((limit for limit in limits if limit > 0), default=UNKNOWN_MEMORY)


def max_data_bytes() -> int:
    """The largest size of a data set in bytes."""
    return memory_bytes() // MEMORY_DIVISOR


def check_size(source: str | Path, claimed: int) -> None:
    """Raise DataError for data whose claimed size exceeds the limit."""
    most = max_data_bytes()
    if claimed > most:
        raise DataError(
            f"{source} needs {size_text(claimed)} of memory, but data may use at most "
            f"{size_text(most)} here (1/{MEMORY_DIVISOR} of the machine's memory); use a subset"
        )


def check_ratio(source: str | Path, claimed: int, stored: int) -> None:
    """Raise DataError for a file of ``stored`` bytes with an implausible compression ratio."""
    if claimed > max(UNLIMITED_BYTES, MAX_COMPRESSION_RATIO * stored):
        raise DataError(
            f"{source} is {size_text(stored)}, but would unpack to {size_text(claimed)}, more than "
            f"{MAX_COMPRESSION_RATIO} times its size; if that is intended, store it uncompressed"
        )


def size_text(count: int) -> str:
    """A number of bytes in readable form.

    >>> size_text(420_000), size_text(582 << 40), size_text(7)
    ('420 kB', '640 TB', '7 bytes')
    """
    value = float(count)
    unit = 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value /= 1000
        unit += 1
    if unit and value < 9.95:
        return f"{value:.1f} {_UNITS[unit]}"
    return f"{value:,.0f} {_UNITS[unit]}"


@contextlib.contextmanager
def file_errors(source: str | Path) -> Iterator[None]:
    """A context that turns system errors and a lack of memory into DataError with the file name."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise file_error(source, error) from error


def file_error(source: str | Path, error: OSError | MemoryError) -> DataError:
    """The error for a file that cannot be read, or does not fit into memory."""
    if isinstance(error, MemoryError):
        return DataError(
            f"{source}{_size(source)} does not fit into memory ({on_one_line(error)}); use a part "
            "of the data, or a machine with more memory"
        )
    path = source
    if error.filename is not None:
        path = error.filename
    return DataError(
        f"{path} cannot be read ({error.strerror or on_one_line(error)}); make it readable, or "
        "choose other data"
    )


def _size(source: str | Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        if Path(source).is_file():
            return f", {size_text(Path(source).stat().st_size)},"
    return ""


# The files below a folder. Folders that are not data sets are detected early.


MAX_FOLDER_DEPTH = 8
"""The largest depth of folders. Data have folders for splits and classes, and a few above them."""

FOLDERS_WALKED = 100_000
"""The largest number of folders in a data set."""

MAX_OTHER_FILES = 10_000
"""The largest number of files that are not data, unless at least a fifth of all files are data."""


def has_suffix(path: Path, suffixes: Collection[str]) -> bool:
    """Whether a file's name ends with one of the suffixes, in lower or upper case."""
    return path.suffix.lower() in suffixes


def files_below(place: Path, data_suffixes: Collection[str], most: int | None = None) -> list[Path]:
    """All regular files below a folder, sorted by path; links are followed.

    Hidden files are left out. most: the number of files after which the walk ends. Raises DataError
    for unreadable folders, for links to a parent folder, and for folders that are clearly not data
    sets: the root of a file system, or folders with thousands of files without a suffix of data
    files.
    """
    real = Path(os.path.realpath(place))
    if real == Path(real.anchor):
        raise DataError(
            f"{place} is the root of a file system, not a data set; name the folder that contains "
            "the data"
        )
    with file_errors(place):
        return sorted(islice(_Walk(place, data_suffixes).files(place, ()), most))


@dataclass
class _Walk:
    """A walk through a folder, which counts folders, data files and other files."""

    place: Path
    data_suffixes: Collection[str]
    folders: int = 0
    data: int = 0
    other_files: int = 0

    def files(self, folder: Path, parents: tuple[tuple[int, int], ...]) -> Iterator[Path]:
        """The files below a folder; ``parents``: the devices and inodes of the folders above it."""
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in parents:
            raise DataError(f"{folder} is a link to a folder above it; remove the link")
        self.folders += 1
        if len(parents) > MAX_FOLDER_DEPTH:
            self._refuse(f"has {len(parents)} levels of folders")
        if self.folders > FOLDERS_WALKED:
            self._refuse(f"has {self.folders:,} folders")

        subfolders = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    subfolders.append(folder / entry.name)
                elif entry.is_file():
                    self._count(entry.name)
                    yield folder / entry.name
        for subfolder in sorted(subfolders):
            yield from self.files(subfolder, (*parents, identity))

    def _count(self, name: str) -> None:
        suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 - there may be a million names
        if suffix in self.data_suffixes:
            self.data += 1
            return
        self.other_files += 1
        if self.other_files > MAX_OTHER_FILES and self.other_files > 4 * self.data:
            self._refuse(
                f"has over {self.other_files - 1:,} files that are not images, parquet, CSV, IDX "
                "or NPZ"
            )

    def _refuse(self, reason: str) -> None:
        raise DataError(
            f"{self.place} {reason}: this does not look like a data set; name the folder that "
            "contains the data"
        )


# The splits that names of files, folders and columns denote.


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


Part = TypeVar("Part")


@dataclass(frozen=True, eq=False)
class BySplit(Generic[Part]):
    """The part of data that each split has, and warnings about data that no split has."""

    parts: Mapping[str, Part]
    """In the order of ``SPLITS``."""
    warnings: tuple[str, ...] = ()


FileSplits = BySplit[tuple[Path, ...]]
"""The files of each split."""


def split_of_name(name: str) -> str:
    """The split that a column's value or the whole name of a folder denotes, or "".

    >>> split_of_name("Training"), split_of_name("training hospital")
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
        split = split_of_name(name)
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


def splits_of_words(name: str) -> list[str]:
    """The splits that the words of a name denote. Words consist of letters.

    >>> splits_of_words("heart_Test2"), splits_of_words("attest"), splits_of_words("train-test")
    (['test'], [], ['train', 'test'])
    """
    words = re.split(r"[\W\d_]+", name.casefold())
    return list(dict.fromkeys(SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS))


def file_list(files: Sequence[Path]) -> str:
    """A list of file names, which is shortened if there are many files."""
    return shortened_list([path.name for path in files], NAMED_FILES)


def table_files_by_split(place: Path, files: Sequence[Path]) -> FileSplits:
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
    return BySplit(_by_split(read, splits), tuple(warnings))


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


def image_files_by_split(place: Path, images: Sequence[Path]) -> FileSplits:
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
    return BySplit(_by_split(images, splits), tuple(warnings))


def client_name(place: Path, path: Path, *, class_folders: bool) -> str:
    """The name of the client that owns a table file or an image file.

    It is the path in ``place`` without words of splits, shard numbers and, for images in folders by
    class, the class: ``north`` for ``north_train.csv``, ``train/north.csv`` and
    ``train/north/cat/1.png``. Raises DataError if nothing remains.
    """
    relative = path.relative_to(place)
    parts = [part for part in relative.parts[:-1] if not split_of_name(part)]
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

    Numbers remain, since they may tell clients apart.

    >>> _without_split_words("north_train"), _without_split_words("St-Test-Anna")
    ('north', 'St-Anna')
    >>> _without_split_words("site1_train"), _without_split_words("1_train")
    ('site1', '1')
    """
    pieces = re.finditer(r"[\W_]*(?P<word>[^\W\d_]+|\d*)", name)
    parts = [piece[0] for piece in pieces if piece["word"].casefold() not in SPLIT_WORDS]
    return re.sub(r"^[\W_]+", "", "".join(parts))


def _table_split(place: Path, path: Path) -> str:
    splits = splits_of_words(SHARD.sub(r"\g<name>", path.stem))
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
    splits = [split_of_name(folder) for folder in folders]
    return next(filter(None, reversed(splits)), "")


def _unused_words(place: Path, files: Sequence[Path], *, class_folders: bool) -> list[str]:
    """A warning for each folder whose name contains the word of a split among other words."""
    parents = [path.relative_to(place).parent for path in files]
    if class_folders:
        parents = [parent.parent for parent in parents]
    warnings = []
    for folder in dict.fromkeys(chain.from_iterable(parent.parts for parent in parents)):
        splits = splits_of_words(folder)
        if splits and not split_of_name(folder):
            warnings.append(
                f"the folder {folder!r} does not count as the split {splits[0]}, because its name "
                f"has other words; if it is this split, rename it to {splits[0]}"
            )
    return warnings


def _by_split(files: Sequence[Path], splits: Mapping[Path, str]) -> dict[str, tuple[Path, ...]]:
    """Files by split, in the order of the splits; files without a split are training data."""
    by_split = {
        split: tuple(path for path in files if (splits[path] or "train") == split)
        for split in SPLITS
    }
    return {split: paths for split, paths in by_split.items() if paths}
