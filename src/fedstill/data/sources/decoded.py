"""Decoded data sets on disk: written once, whole or not at all, and memory-mapped afterwards."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from fedstill.data.cache_folder import cache_folder

LAYOUT = 1
"""Raised when what is written changes, so that older entries are not read."""

Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class Decoded:
    """A data set as arrays: {split: (images (N, C, H, W) uint8, labels (N,) int64)}, and class names if it has them."""

    splits: Mapping[str, Arrays]
    classes: tuple[str, ...] | None


def kept(name: str, origin: Mapping[str, Any], decode: Callable[[], Decoded]) -> Decoded:
    """The decoded form of what ``origin`` describes, from the cache folder or else from ``decode``, which fills it.

    origin: JSON-able; all that the outcome depends on. Safe for several processes at once: one decodes, the others
    wait. A damaged entry is decoded again; where the cache cannot be written, the arrays stay in memory.
    """
    key = hashlib.sha256(json.dumps([LAYOUT, origin], sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = cache_folder() / "decoded" / f"{re.sub(r'[^A-Za-z0-9_-]+', '-', name)}-{key}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(folder.name + ".lock"))
        lock.acquire()
    except OSError:
        return decode()
    try:
        return _read(folder) or _fill(folder, decode())
    finally:
        lock.release()


def _fill(folder: Path, fresh: Decoded) -> Decoded:
    try:
        _write(folder, fresh)
    except OSError:
        return fresh
    return _read(folder) or fresh


def _read(folder: Path) -> Decoded | None:
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        splits = {split: _read_split(folder, split, shape) for split, shape in about["splits"].items()}
        classes = about["classes"]
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
    return Decoded(splits, None if classes is None else tuple(classes))


def _read_split(folder: Path, split: str, shape: list[int]) -> Arrays:
    images = np.load(folder / f"{split}-images.npy", mmap_mode="c", allow_pickle=False)
    labels = np.load(folder / f"{split}-labels.npy", allow_pickle=False)
    if list(images.shape) != shape or labels.shape != (shape[0],):
        raise ValueError(f"{folder}: {split} is not what about.json says")
    return images, labels


def _write(folder: Path, data: Decoded) -> None:
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        for split, (images, labels) in data.splits.items():
            np.save(aside / f"{split}-images.npy", images, allow_pickle=False)
            np.save(aside / f"{split}-labels.npy", labels, allow_pickle=False)
        about = {"classes": data.classes, "splits": {s: list(a[0].shape) for s, a in data.splits.items()}}
        (aside / "about.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
