"""Images in folders named by their class."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedstill.data.sources.columns import SPLIT_NAMES, Columns, read_rows, with_ids
from fedstill.data.sources.decoded import Decoded
from fedstill.data.sources.pictures import IMAGE_SUFFIXES, Pictures
from fedstill.errors import DataError

TABLES = frozenset({"metadata.csv", "metadata.jsonl", "metadata.parquet"})
"""Files with which some folders say which image has which label; they are not read."""


def read_image_folder(place: Path, files: Sequence[Path], columns: Columns) -> Decoded:
    """Images in folders named by their class, with folders named by the split above them or
    without.

    A folder says a split by a word of its name: ``train``, ``test-images``. Where some do, images
    outside of these are left out. Raises DataError if there are no images, or if a file is none.
    """
    images = sorted(
        (f for f in files if f.suffix.lower() in IMAGE_SUFFIXES), key=lambda f: f.as_posix()
    )
    if not images:
        kinds = Counter(f.suffix.lower() for f in files if f.suffix)
        there = (
            f" (it holds {', '.join(f'{n} {kind}' for kind, n in kinds.most_common(3))})"
            if kinds
            else ""
        )
        raise DataError(
            f"{place} holds no images{there}; a folder of images holds one folder a class, e.g. "
            "train/cat/1.png. "
            "Other files, sounds say, are read by a function of yours: data.name = 'mine.py:data'"
        )
    for table in (f for f in files if f.name in TABLES):
        raise DataError(
            f"{table} is not read; put each image into a folder named by its class, or write "
            "parquet files"
        )
    if flat := _without_class([f.relative_to(place) for f in images]):
        raise DataError(
            f"{place / flat} is in no folder of its class; put each image into a folder named by "
            "its class: "
            f"{place.name}/cat/{flat.name}, or {place.name}/train/cat/{flat.name}"
        )
    by_split: dict[str, list[Path]] = {}
    for path in images:
        by_split.setdefault(_split_of(path.relative_to(place)), []).append(path)
    if len(by_split) > 1:
        by_split.pop("", None)
    raw = {
        split or "train": read_rows(
            Pictures(f"{place}, {split or 'train'}", columns.size, len(paths), place),
            ((path, path.parent.name) for path in paths),
        )
        for split, paths in by_split.items()
    }
    return with_ids(str(place), raw, None)


def _without_class(images: Sequence[Path]) -> Path | None:
    """An image that lies in no folder, or in a split's own, where no folder at its level names a
    class.
    """
    folders = {path.parts[0].lower() for path in images if len(path.parts) == 2}
    flat = {1, 2} if folders <= SPLIT_NAMES.keys() else {1}
    return next((path for path in images if len(path.parts) in flat), None)


def _split_of(path: Path) -> str:
    """The split that a folder above an image's class names; "" if none does."""
    for folder in path.parts[:-2]:
        for word in re.split(r"[-._ 0-9]+", folder.lower()):
            if word in SPLIT_NAMES:
                return SPLIT_NAMES[word]
    return ""
