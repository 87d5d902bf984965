"""Limits on the size of data, which are checked against a file's metadata before it is decoded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedstill.core.errors import DataError, on_one_line

PIXELS = 1 << 26
"""The largest number of pixels of an image, 8,192 × 8,192. Decoding it takes about 800 MB."""

IMAGE_BYTES = 4 * PIXELS
"""The largest size of an image file in bytes: the size of an uncompressed image of ``PIXELS``."""

SHARE = 3
"""A data set may take 1/3 of the memory. Reading makes a copy, and the run needs the rest."""

UNKNOWN_MEMORY = 12 << 30
"""The assumed memory if the system does not report it."""

RATIO = 200
"""The largest compression ratio of a file.

The ratio is 2 to 20 for photographs, and 100 for masks. Data with a larger ratio consist almost
entirely of a repeated value.
"""

FREE = 1 << 28
"""The ratio is not limited for files that unpack to at most 256 MB."""

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


def most_bytes() -> int:
    """The largest size of a data set in bytes."""
    return memory_bytes() // SHARE


def check_size(source: str | Path, claimed: int, stored: int | None = None) -> None:
    """Raise DataError for data whose claimed size exceeds the limit.

    stored: the bytes of their file, if it is compressed.
    """
    most = most_bytes()
    if claimed > most:
        raise DataError(
            f"{source} claims to hold {size_text(claimed)}, but this machine reads at most "
            f"{size_text(most)}, 1/{SHARE} of its memory; use a part of the data, or a machine "
            "with more memory"
        )
    if stored is not None:
        check_ratio(source, claimed, stored)


def check_ratio(source: str | Path, claimed: int, stored: int) -> None:
    """Raise DataError for a file with an implausible compression ratio."""
    if claimed > max(FREE, RATIO * stored):
        raise DataError(
            f"{source} has {size_text(stored)} and claims to hold {size_text(claimed)}, over "
            f"{RATIO} times as much; if this is correct, write it uncompressed"
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
    except MemoryError as error:
        raise memory_error(source, error) from error
    except OSError as error:
        path = source
        if error.filename is not None:
            path = error.filename
        raise DataError(
            f"{path} cannot be read ({error.strerror or on_one_line(error)}); make it readable, "
            "or choose other data"
        ) from error


def memory_error(source: str | Path, error: MemoryError) -> DataError:
    """The error for data that do not fit into memory."""
    return DataError(
        f"{source}{_size(source)} does not fit into memory ({on_one_line(error)}); use a part of "
        "the data, or a machine with more memory"
    )


def _size(source: str | Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        if Path(source).is_file():
            return f", {size_text(Path(source).stat().st_size)},"
    return ""


# The files below a folder. Folders that are not data sets are detected early.


DEPTH = 8
"""The largest depth of folders. Data have folders for splits and classes, and a few above them."""

FOLDERS_WALKED = 100_000
"""The largest number of folders in a data set."""

OTHERS = 10_000
"""The largest number of files that are not data, unless at least a fifth of all files are data."""


def files_below(place: Path, data_suffixes: Collection[str]) -> list[Path]:
    """All regular files below a folder, sorted by path; links are followed.

    Hidden files are left out. Raises DataError for unreadable folders, for links to a parent
    folder, and for folders that are clearly not data sets: the root of a file system, or folders
    with thousands of files without a suffix of data files.
    """
    real = Path(os.path.realpath(place))
    if real == Path(real.anchor):
        raise DataError(
            f"{place} is the root of a file system, not the folder of a data set; choose that "
            "folder"
        )
    with file_errors(place):
        return sorted(_Walk(place, data_suffixes).files(place, ()))


@dataclass
class _Walk:
    """A walk through a folder, which counts folders, data files and other files."""

    place: Path
    data_suffixes: Collection[str]
    folders: int = 0
    data: int = 0
    others: int = 0

    def files(self, folder: Path, parents: tuple[tuple[int, int], ...]) -> Iterator[Path]:
        """The files below a folder; ``parents``: the devices and inodes of the folders above it."""
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in parents:
            raise DataError(f"{folder} is a link to a folder above it; remove the link")
        self.folders += 1
        if len(parents) > DEPTH:
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
        self.others += 1
        if self.others > OTHERS and self.others > 4 * self.data:
            self._refuse(
                f"has over {self.others - 1:,} files that are not images, parquet, CSV, IDX or NPZ"
            )

    def _refuse(self, reason: str) -> None:
        raise DataError(
            f"{self.place} {reason}: it is not the folder of a data set; choose that folder"
        )
