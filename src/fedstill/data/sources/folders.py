"""Data in a folder, whichever of the four layouts it is in: parquet, IDX, NPZ, images by class."""

from __future__ import annotations

import os
from pathlib import Path

from fedstill.data.sources.catalog import Known
from fedstill.data.sources.columns import Columns
from fedstill.data.sources.decoded import Decoded, kept
from fedstill.data.sources.held_out import hold_out
from fedstill.data.sources.idx import is_idx, read_idx
from fedstill.data.sources.npz import read_npz
from fedstill.data.sources.streams import parquet_files, read_image_folder, read_parquet
from fedstill.data.sources.verify import verified
from fedstill.errors import DataError


def data_root(folder: str | Path | None) -> Path | None:
    """The folder of local data: ``folder``, or the environment's ``FEDSTILL_DATA``, or None."""
    given = folder if folder is not None else os.environ.get("FEDSTILL_DATA")
    return Path(given).expanduser() if given else None


def local_folder(name: str, folder: str | Path | None) -> Path | None:
    """The folder of that name in ``data_root(folder)``, if there is one."""
    root = data_root(folder)
    plain = name not in ("", ".", "..") and "/" not in name
    return root / name if root is not None and plain and (root / name).is_dir() else None


def read_folder(name: str, place: Path, columns: Columns, known: Known | None = None) -> Decoded:
    """What a folder holds, verified, and decoded once: the cache's key covers its files' names, sizes and times."""
    files = sorted(path for path in place.rglob("*") if path.is_file() and not path.name.startswith("."))
    stamps = [(str(p.relative_to(place)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    origin = {"folder": str(place.resolve()), "files": stamps, "columns": vars(columns), "known": repr(known)}

    def decode() -> Decoded:
        if not files:
            raise DataError(f"{place} is empty; it needs parquet files, or images in folders named by their class")
        data = _decode(place, columns)
        return verified(name, hold_out(data) if "train" in data.splits else data, known)

    return kept(name, origin, decode)


def _decode(place: Path, columns: Columns) -> Decoded:
    if parquet_files(place):
        return read_parquet(place, columns)
    if is_idx(place):
        return read_idx(place)
    archives = sorted(place.glob("*.npz"))
    return read_npz(archives[0]) if archives else read_image_folder(place, columns)
