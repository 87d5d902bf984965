"""The cache folder, and decoded data sets in it, which are memory-mapped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from platformdirs import user_cache_dir

from fedstill.core.errors import ConfigError
from fedstill.data.form import IMAGES, About

# Where decoded data, slow splits and replies are kept: ``FEDSTILL_CACHE``, or the user's cache
# folder.


CACHE = "FEDSTILL_CACHE"
"""The environment variable that names the cache folder."""


def cache_folder() -> Path:
    """The cache folder; it may not exist yet, and deleting it loses nothing but time.

    Raises ConfigError if ``FEDSTILL_CACHE`` names a file. A folder in which nothing can be written
    is done without.
    """
    folder = Path(os.environ.get(CACHE) or user_cache_dir("fedstill"))
    with contextlib.suppress(PermissionError):
        if folder.is_file():
            raise ConfigError(
                f"{CACHE} = {str(folder)!r} is a file; name a folder, which may be one to be made"
            )
    return folder


REUSE_GB = "FEDSTILL_REUSE_GB"
"""The environment variable that says how many gigabytes of replies are kept for other runs."""


def reuse_bytes() -> int:
    """How many bytes of replies may be kept: 10 GB, or what ``FEDSTILL_REUSE_GB`` says; 0 keeps
    none.

    Raises ConfigError if that is no number of at least 0.
    """
    said = os.environ.get(REUSE_GB) or "10"
    try:
        gigabytes = float(said)
    except ValueError:
        gigabytes = math.nan
    if not 0 <= gigabytes < math.inf:
        raise ConfigError(f"{REUSE_GB} = {said!r} must be a number of gigabytes, at least 0")
    return int(gigabytes * 1e9)


# Decoded data sets on disk: written once, whole or not at all, and memory-mapped afterwards.


LAYOUT = 6
"""Raised when what is written changes, so that older entries are not read."""

Arrays = tuple[NDArray[Any], NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class Decoded:
    """A data set as arrays: {split: (values, labels (N,) int64)}, and class names if it has them.

    Values are images (N, C, H, W) uint8, numbers (N, …) float32, or token ids (N, L)
    int64. ``owners``: by split, the number (N,) of each example's owner, where the data say whose
    it is. ``read``: by split, the SHA-256 of inputs and labels as they were read, before anything
    was left out or encoded; of known tables, series and texts only.
    """

    splits: Mapping[str, Arrays]
    classes: tuple[str, ...] | None
    owners: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    read: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    about: About = IMAGES


def kept(name: str, origin: Mapping[str, Any], decode: Callable[[], Decoded]) -> Decoded:
    """The decoded form of what ``origin`` describes, from the cache folder or else from ``decode``,
    which fills it.

    origin: JSON-able; all that the outcome depends on. Safe for several processes at once: one
    decodes, the others wait. A damaged entry is decoded again; where the cache cannot be written,
    the arrays stay in memory.
    """
    key = hashlib.sha256(
        json.dumps([LAYOUT, origin], sort_keys=True, default=str).encode()
    ).hexdigest()[:16]
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


def about_of(said: Mapping[str, Any]) -> About:
    """What was read, as JSON has it; raises TypeError for another's fields."""
    return About(**{name: _frozen(value) for name, value in said.items()})


def _frozen(value: Any) -> Any:
    """Lists as tuples, however deep."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _fill(folder: Path, fresh: Decoded) -> Decoded:
    try:
        _write(folder, fresh)
    except OSError:
        return fresh
    return _read(folder) or fresh


def _read(folder: Path) -> Decoded | None:
    try:
        told = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        splits = {
            split: _read_split(folder, split, shape) for split, shape in told["splits"].items()
        }
        owners = {
            split: _labels(folder, split, "owners", len(splits[split][1]))
            for split in told["owned"]
        }
        classes = told["classes"]
        about = about_of(told["about"])
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
    return Decoded(splits, None if classes is None else tuple(classes), owners, about=about)


def _read_split(folder: Path, split: str, shape: list[int]) -> Arrays:
    values = np.load(folder / f"{split}-values.npy", mmap_mode="c", allow_pickle=False)
    if list(values.shape) != shape:
        raise ValueError(f"{folder}: {split} is not what about.json says")
    return values, _labels(folder, split, "labels", shape[0])


def _labels(folder: Path, split: str, what: str, count: int) -> NDArray[np.int64]:
    array: NDArray[np.int64] = np.load(folder / f"{split}-{what}.npy", allow_pickle=False)
    if array.shape != (count,):
        raise ValueError(f"{folder}: {split} is not what about.json says")
    return array


def _write(folder: Path, data: Decoded) -> None:
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        for split, (values, labels) in data.splits.items():
            np.save(aside / f"{split}-values.npy", values, allow_pickle=False)
            np.save(aside / f"{split}-labels.npy", labels, allow_pickle=False)
        for split, codes in data.owners.items():
            np.save(aside / f"{split}-owners.npy", codes, allow_pickle=False)
        shapes = {s: list(a[0].shape) for s, a in data.splits.items()}
        told = {
            "classes": data.classes,
            "splits": shapes,
            "owned": list(data.owners),
            "about": asdict(data.about),
        }
        (aside / "about.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
