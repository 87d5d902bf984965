"""The cache folder, and its memory-mapped decoded data sets."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from platformdirs import user_cache_dir

from fedstill.core.errors import ConfigError, DiskFull
from fedstill.core.files import replaced_folder, write_whole

if TYPE_CHECKING:
    from fedstill.data.dataset import Decoded, Split

# The cache folder contains decoded data, slow partitions and replies of clients.


CACHE = "FEDSTILL_CACHE"
"""The environment variable that names the cache folder."""


def cache_folder() -> Path:
    """The cache folder: ``FEDSTILL_CACHE``, or the user's cache folder.

    It may not exist yet, and it can be deleted at any time. If it is not writable, nothing is
    cached. Raises ConfigError if ``FEDSTILL_CACHE`` names a file.
    """
    folder = Path(os.environ.get(CACHE) or user_cache_dir("fedstill"))
    with contextlib.suppress(PermissionError):
        if folder.is_file():
            raise ConfigError(
                f"{CACHE} = {str(folder)!r} is a file; name a folder, which need not exist"
            )
    return folder


REUSE_GB = "FEDSTILL_REUSE_GB"
"""The environment variable for the size of the cache of replies, in gigabytes."""


def reuse_bytes() -> int:
    """The maximum size of the cache of replies in bytes: ``FEDSTILL_REUSE_GB``, or 10 GB; 0
    disables it.

    Raises ConfigError if the variable is not a number of at least 0.
    """
    text = os.environ.get(REUSE_GB) or "10"
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = math.nan
    if not 0 <= gigabytes < math.inf:
        raise ConfigError(f"{REUSE_GB} = {text!r} must be a number of gigabytes, at least 0")
    return int(gigabytes * 1e9)


# Decoded data sets on disk. They are written once, completely or not at all, and then
# memory-mapped.


LAYOUT = 7
"""The version of the layout. Entries of other versions are not read."""


def cached(name: str, key_fields: Mapping[str, Any], decode: Callable[[], Decoded]) -> Decoded:
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
    # Lazy, because readers of runs need the cache folder, and no data.
    from fedstill.data.dataset import DatasetInfo, Decoded

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
    from fedstill.data.dataset import Split  # lazy, as above

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
    with replaced_folder(folder) as temporary:
        for name, split in data.splits.items():
            np.save(temporary / f"{name}-values.npy", split.values, allow_pickle=False)
            np.save(temporary / f"{name}-labels.npy", split.labels, allow_pickle=False)
            if split.owners is not None:
                np.save(temporary / f"{name}-owners.npy", split.owners, allow_pickle=False)
        write_whole(temporary / "about.json", json.dumps(entry, indent=1).encode())
