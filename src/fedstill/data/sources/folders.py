"""Data in a folder, whichever of the layouts it is in: parquet, CSV, IDX, NPZ, images by class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedstill.data.sources.catalog import Known
from fedstill.data.sources.columns import Columns
from fedstill.data.sources.csv_files import read_csv_files
from fedstill.data.sources.decoded import Decoded, kept
from fedstill.data.sources.held_out import hold_out
from fedstill.data.sources.idx import is_idx, read_idx
from fedstill.data.sources.image_folder import read_image_folder
from fedstill.data.sources.npz import read_npz
from fedstill.data.sources.parquet import by_split, read_parquet
from fedstill.data.sources.pictures import IMAGE_SUFFIXES
from fedstill.data.sources.verify import verified
from fedstill.data.sources.walk import files_below
from fedstill.errors import DataError

DATA_FILES = (".parquet", ".csv", ".npz")
"""How the names of files end that may hold a data set by themselves."""


def data_root(folder: str | Path | None) -> Path | None:
    """The folder of local data: ``folder``, or the environment's ``FEDSTILL_DATA``, or None."""
    given = folder if folder is not None else os.environ.get("FEDSTILL_DATA")
    return at_home(given) if given else None


def at_home(given: str | Path) -> Path:
    """A path with ``~`` as the home folder, if there is one."""
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise DataError(f"{given} names a home folder that is not there; give the whole path") from error


def local_folder(name: str, folder: str | Path | None) -> Path | None:
    """The folder of that name in ``data_root(folder)``, if there is one."""
    root = data_root(folder)
    plain = name not in ("", ".", "..") and "/" not in name
    return root / name if root is not None and plain and (root / name).is_dir() else None


def read_folder(name: str, place: Path, columns: Columns, known: Known | None = None) -> Decoded:
    """What a folder holds, verified, and decoded once: the cache's key covers its files' names, sizes and times."""
    files = files_below(place)
    stamps = [(str(p.relative_to(place)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    origin = {"folder": str(place.resolve()), "files": stamps, "columns": vars(columns), "known": repr(known)}

    def decode() -> Decoded:
        if not files:
            raise DataError(
                f"{place} is empty; it needs parquet or CSV files, or images in folders named by their class"
            )
        data = _decode(place, files, columns)
        return verified(name, hold_out(data, columns.form) if "train" in data.splits else data, known)

    return kept(name, origin, decode)


def is_data_file(path: Path) -> bool:
    """Whether a path is a file that may hold a data set by itself."""
    return path.suffix in DATA_FILES and path.is_file()


def read_file(name: str, path: Path, columns: Columns) -> Decoded:
    """What one parquet, CSV or NPZ file holds, verified, and decoded once; a fifth is held out where it has no test."""
    about = path.stat()
    stamp = [about.st_size, about.st_mtime_ns]
    origin = {"file": str(path.resolve()), "stamp": stamp, "columns": vars(columns)}

    def decode() -> Decoded:
        if path.suffix == ".npz":
            data = read_npz(path)
        else:
            data = (read_csv_files if path.suffix == ".csv" else read_parquet)(path.parent, {"train": [path]}, columns)
        return verified(name, hold_out(data, columns.form) if "train" in data.splits else data)

    return kept(path.stem, origin, decode)


def _decode(place: Path, files: Sequence[Path], columns: Columns) -> Decoded:
    if tables := by_split(files, ".parquet"):
        return read_parquet(place, tables, columns)
    if (tables := by_split(files, ".csv")) and not any(path.suffix.lower() in IMAGE_SUFFIXES for path in files):
        return read_csv_files(place, tables, columns)
    if is_idx(place):
        return read_idx(place)
    archives = [path for path in files if path.parent == place and path.suffix == ".npz"]
    return read_npz(archives[0]) if archives else read_image_folder(place, files, columns)
