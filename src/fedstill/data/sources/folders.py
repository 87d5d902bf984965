"""Data in a folder, whichever of the layouts it is in: parquet, CSV, IDX, NPZ, images by class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedstill.data.sources.catalog import Known
from fedstill.data.sources.columns import Columns
from fedstill.data.sources.csv_files import read_csv_files
from fedstill.data.sources.decoded import Decoded, kept
from fedstill.data.sources.held_out import hold_out
from fedstill.data.sources.idx import is_idx, read_idx
from fedstill.data.sources.image_folder import read_image_folder
from fedstill.data.sources.kinds import refuse_of_tables
from fedstill.data.sources.npz import read_npz
from fedstill.data.sources.parquet import by_split, read_parquet, said_split
from fedstill.data.sources.pictures import IMAGE_SUFFIXES
from fedstill.data.sources.verify import verified
from fedstill.data.sources.walk import files_below
from fedstill.errors import DataError

CSV = (".csv", ".tsv")
DATA_FILES = (".parquet", *CSV, ".npz")
"""How the names of files end that may hold a data set by themselves."""

NAMED_FILES = 8
"""Files that are named in a sentence; the others are counted."""


def data_root(folder: str | Path | None) -> Path | None:
    """The folder of local data: ``folder``, or the environment's ``FEDSTILL_DATA``, or None."""
    given = folder if folder is not None else os.environ.get("FEDSTILL_DATA")
    return at_home(given) if given else None


def at_home(given: str | Path) -> Path:
    """A path with ``~`` as the home folder, if there is one. Raises DataError if there is no such
    home folder.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{given} names a home folder that is not there; give the whole path"
        ) from error


def local_folder(name: str, folder: str | Path | None) -> Path | None:
    """The folder of that name in ``data_root(folder)``, if there is one."""
    root = data_root(folder)
    plain = name not in ("", ".", "..") and "/" not in name
    return root / name if root is not None and plain and (root / name).is_dir() else None


def read_folder(name: str, place: Path, columns: Columns, known: Known | None = None) -> Decoded:
    """What a folder holds, verified, and decoded once: the cache's key covers its files' names,
    sizes and times.

    Raises DataError for an empty folder, and for files that are no data set.
    """
    files = files_below(place)
    stamps = [(str(p.relative_to(place)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    origin = {
        "folder": str(place.resolve()),
        "files": stamps,
        "columns": vars(columns),
        "known": repr(known),
    }

    def decode() -> Decoded:
        if not files:
            raise DataError(
                f"{place} is empty; it needs parquet or CSV files, or images in folders named by "
                "their class"
            )
        data = _decode(place, files, columns)
        data = verified(
            name, hold_out(data, columns.form) if "train" in data.splits else data, known
        )
        return data if known else _told_of_files(data, place, files)

    return kept(name, origin, decode)


def is_data_file(path: Path) -> bool:
    """Whether a path is a file that may hold a data set by itself."""
    return path.suffix.lower() in DATA_FILES and path.is_file()


def read_file(name: str, path: Path, columns: Columns) -> Decoded:
    """What one parquet, CSV or NPZ file holds, verified, and decoded once; a fifth is held out
    where it has no test.
    """
    about = path.stat()
    stamp = [about.st_size, about.st_mtime_ns]
    origin = {"file": str(path.resolve()), "stamp": stamp, "columns": vars(columns)}

    def decode() -> Decoded:
        if path.suffix.lower() == ".npz":
            refuse_of_tables(str(path), columns.form)
            data = read_npz(path)
        else:
            read = read_csv_files if path.suffix.lower() in CSV else read_parquet
            data = read(path.parent, {"train": [path]}, columns)
        return verified(name, hold_out(data, columns.form) if "train" in data.splits else data)

    return kept(path.stem, origin, decode)


def _decode(place: Path, files: Sequence[Path], columns: Columns) -> Decoded:
    kind, tables = _tables(place, files)
    if tables:
        return (read_csv_files if kind == CSV else read_parquet)(place, tables, columns)
    refuse_of_tables(str(place), columns.form)
    if is_idx(place):
        return read_idx(place)
    archives = [path for path in files if path.parent == place and path.suffix.lower() == ".npz"]
    return read_npz(archives[0]) if archives else read_image_folder(place, files, columns)


def _tables(place: Path, files: Sequence[Path]) -> tuple[tuple[str, ...], dict[str, list[Path]]]:
    """The files of columns in a folder, by split, and how their names end; none where there are CSV
    files and images.

    Raises DataError where some splits are parquet files and others CSV files.
    """
    parquet, csv = by_split(files, ".parquet"), by_split(files, *CSV)
    if not parquet:
        images = any(path.suffix.lower() in IMAGE_SUFFIXES for path in files)
        return CSV, {} if images else csv
    if more := [
        path for paths in csv.values() for path in paths if said_split(path) not in ("", *parquet)
    ]:
        names = ", ".join(path.name for paths in parquet.values() for path in paths[:2])
        raise DataError(
            f"{place} has parquet files ({names}) and {more[0].name}; the splits are read from "
            "files of one kind: "
            "write all of them as parquet or all as CSV"
        )
    return (".parquet",), parquet


def _told_of_files(data: Decoded, place: Path, files: Sequence[Path]) -> Decoded:
    """The data with a sentence on the files of columns that they came from, if a split has
    several.
    """
    _, tables = _tables(place, files)
    every = sorted(path for paths in tables.values() for path in paths)
    if len(every) == len(tables):
        return data
    each = [f"{split} from {_named(paths)}" for split, paths in tables.items()]
    about = replace(data.about, notes=(*data.about.notes, f"read {'; '.join(each)}"))
    silent = [path for path in every if not said_split(path)]
    if 0 < len(silent) < len(every):
        about = about.warned(
            "read as training data, because their names do not begin with train, test or "
            f"validation: {_named(silent)}"
        )
    return replace(data, about=about)


def _named(files: Sequence[Path]) -> str:
    more = f" and {len(files) - NAMED_FILES} more" if len(files) > NAMED_FILES else ""
    return ", ".join(path.name for path in files[:NAMED_FILES]) + more
