"""Limits on the size of data, checked against a file's own claims before it is decoded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedstill.core.errors import DataError, on_one_line

PIXELS = 1 << 26
"""The most pixels of an image, 8,192 × 8,192. Decoded, it and its copies take about 800 MB."""

IMAGE_BYTES = 4 * PIXELS
"""The most bytes of an image's file. An uncompressed image of ``PIXELS`` takes no more."""

SHARE = 3
"""A data set may take a third of the memory. Reading makes a copy, and the run needs the rest."""

UNKNOWN_MEMORY = 12 << 30
"""The memory that is assumed if the system does not tell it."""

RATIO = 200
"""The most times its size that a compressed file may unpack to.

Photographs shrink to a half or a twentieth, masks to a hundredth. What shrinks further is one value
over and over.
"""

FREE = 1 << 28
"""A file that unpacks to at most so many bytes, 256 MB, may have any ratio."""

EXAMPLE_BYTES = 100
"""The memory for an example beside its pixels while it is read."""

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_GROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int:
    """The memory that this process may use: the least of the machine's, its container's and its
    own limit.
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
    """The most bytes of a data set."""
    return memory_bytes() // SHARE


def check_size(source: str | Path, claimed: int, stored: int | None = None) -> None:
    """Raise DataError for data that claim more bytes than may be read.

    stored: the bytes of their file, if it is compressed.
    """
    most = most_bytes()
    if claimed > most:
        raise DataError(
            f"{source} says that it holds {size_text(claimed)}, and this machine reads at most "
            f"{size_text(most)}, 1/{SHARE} of its memory; take a part of it, or a machine with more"
        )
    if stored is not None:
        check_ratio(source, claimed, stored)


def check_ratio(source: str | Path, claimed: int, stored: int) -> None:
    """Raise DataError for a file that claims to unpack to far more than data do."""
    if claimed > max(FREE, RATIO * stored):
        raise DataError(
            f"{source} has {size_text(stored)} and says that it holds {size_text(claimed)}, over "
            f"{RATIO} times as much; if that is right, write it uncompressed"
        )


def size_text(count: int) -> str:
    """A number of bytes, for people.

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
    """Turn an error of the system, or a lack of memory, into a DataError that names the file."""
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
            "or name other data"
        ) from error


def memory_error(source: str | Path, error: MemoryError) -> DataError:
    """The error for data that do not fit into memory."""
    return DataError(
        f"{source}{_size(source)} does not fit into memory ({on_one_line(error)}); take a part of "
        "it, or a machine with more"
    )


def _size(source: str | Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        if Path(source).is_file():
            return f", {size_text(Path(source).stat().st_size)},"
    return ""


# The files below a folder. A folder that is not that of a data set is noticed early.


DEPTH = 8
"""The most folders in folders. Data have one for a split, one for a class, and a few above them."""

FOLDERS_WALKED = 100_000
"""The most folders of a data set."""

OTHERS = 10_000
"""The most files that are no data, unless a fifth of all files are."""


def files_below(place: Path, data_suffixes: Collection[str]) -> list[Path]:
    """All regular files below a folder, through links too, in the order of their paths.

    Hidden files are left out. Raises DataError for what cannot be read, for a link that leads back
    up, and for a folder that is clearly not that of a data set: the root of a file system, or
    thousands of files whose names do not end as those of data do.
    """
    real = Path(os.path.realpath(place))
    if real == Path(real.anchor):
        raise DataError(
            f"{place} is the root of a file system, not the folder of a data set; name that folder"
        )
    with file_errors(place):
        return sorted(_Walk(place, data_suffixes).files(place, ()))


@dataclass
class _Walk:
    """A walk through a folder, which counts folders, files of data, and other files."""

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
            self._refuse(f"has folders {len(parents)} deep")
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
                f"has over {self.others - 1:,} files that are no images, parquet, CSV, IDX or NPZ"
            )

    def _refuse(self, reason: str) -> None:
        raise DataError(
            f"{self.place} {reason}: it is not the folder of a data set; name that folder"
        )
