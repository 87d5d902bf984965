"""The files below a folder that is said to hold data; a folder that holds something else is noticed
early.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedstill.data.sources.limits import in_one_line
from fedstill.data.sources.pictures import IMAGE_SUFFIXES
from fedstill.errors import DataError

DEPTH = 8
"""Folders in folders; data have a folder for a split, one for a class, and a few above these."""

FOLDERS_WALKED = 100_000
"""Folders below one data set's."""

OTHERS = 10_000
"""From so many files on that are no data, and are four times as many as those that are, it is
another folder.
"""

DATA_SUFFIXES = IMAGE_SUFFIXES | {".parquet", ".csv", ".tsv", ".npz", ".gz"}


def files_below(place: Path) -> list[Path]:
    """All regular files below a folder, through links too, in the order of their paths; hidden ones
    are left out.

    Raises DataError for what cannot be read, for a link that leads back up, and for a folder that
    is clearly not that of a data set: the root of a file system, or thousands of files of other
    kinds.
    """
    real = Path(os.path.realpath(place))
    if real == Path(real.anchor):
        raise DataError(
            f"{place} is the root of a file system, not the folder of a data set; name that folder"
        )
    with in_one_line(place):
        return sorted(_Walk(place).below(place, ()))


@dataclass
class _Walk:
    place: Path
    folders: int = 0
    data: int = 0
    others: int = 0

    def below(self, folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
        about = folder.stat()
        here = (about.st_dev, about.st_ino)
        if here in above:
            raise DataError(f"{folder} is a link to a folder above it; remove the link")
        self.folders += 1
        if len(above) > DEPTH or self.folders > FOLDERS_WALKED:
            self._refuse(
                f"has folders {len(above)} deep"
                if len(above) > DEPTH
                else f"has {self.folders:,} folders"
            )
        inner = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    inner.append(folder / entry.name)
                elif entry.is_file():
                    self._count(entry.name)
                    yield folder / entry.name
        for each in sorted(inner):
            yield from self.below(each, (*above, here))

    def _count(self, name: str) -> None:
        if os.path.splitext(name)[1].lower() in DATA_SUFFIXES:  # noqa: PTH122 - a million names
            self.data += 1
        else:
            self.others += 1
            if self.others > OTHERS and self.others > 4 * self.data:
                self._refuse(
                    f"has over {self.others - 1:,} files that are no images, parquet, CSV, IDX or "
                    "NPZ"
                )

    def _refuse(self, why: str) -> None:
        raise DataError(f"{self.place} {why}: it is not the folder of a data set; name that folder")
