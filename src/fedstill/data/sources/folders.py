"""Data in a folder, in any of the layouts: parquet, CSV, IDX, NPZ, images by class; and what kind
of examples a data set most likely holds, by its name or the columns of its first file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from fedstill.core.errors import DataError
from fedstill.core.registry import names
from fedstill.data.cache import Decoded, kept
from fedstill.data.form import Form, Kind
from fedstill.data.sources.array_files import is_idx, read_idx, read_npz
from fedstill.data.sources.catalog import FOLDERS, Known
from fedstill.data.sources.columns import Columns
from fedstill.data.sources.encode import frames_of, read_frames, schema_of
from fedstill.data.sources.image_sets import check_not_encoded, read_image_folder
from fedstill.data.sources.images import IMAGE_SUFFIXES
from fedstill.data.sources.limits import in_one_line
from fedstill.data.sources.parquet import images_beside_caution, read_parquet
from fedstill.data.sources.schema import check_images_only, table_schema
from fedstill.data.sources.splits import (
    FileSplits,
    file_list,
    hold_out,
    split_tables,
    splits_in,
)
from fedstill.data.sources.tables import CsvFrame, ParquetFrame, single_file
from fedstill.data.sources.verify import verified

# The files below a folder that is said to hold data; a folder that holds something else is noticed
# early.


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


# CSV files of a data set: a table, or texts, with a line of column names.


def read_csv_files(folder: Path, files: Mapping[str, Sequence[Path]], columns: Columns) -> Decoded:
    """The CSV files of a folder, by split; raises DataError for one that cannot be read, or has no
    clear columns.
    """
    frames = frames_of(CsvFrame, folder, files, columns.form)
    what = str(single_file(files) or folder)
    for frame in frames.values():
        if not frame.rows:
            where = single_file({"": frame.files}) or what
            raise DataError(f"{where} has a line of column names and no rows below it; add rows")
    schema = schema_of(what, frames, columns)
    if schema is None:
        raise DataError(
            f"{what}: a CSV file holds no images; leave data.image_column and data.kind out"
        )
    check_not_encoded(what, columns)
    return read_frames(what, frames, schema)


# Data in a folder, whichever of the layouts it is in: parquet, CSV, IDX, NPZ, images by class.


CSV = (".csv", ".tsv")
DATA_FILES = (".parquet", *CSV, ".npz")
"""How the names of files end that may hold a data set by themselves."""


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
        return data if known else _with_file_note(data, place, files)

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
            check_images_only(str(path), columns.form)
            check_not_encoded(str(path), columns)
            data = read_npz(path)
        else:
            read = read_csv_files if path.suffix.lower() in CSV else read_parquet
            data = read(path.parent, {"train": [path]}, columns)
        return verified(name, hold_out(data, columns.form) if "train" in data.splits else data)

    return kept(path.stem, origin, decode)


def _decode(place: Path, files: Sequence[Path], columns: Columns) -> Decoded:
    tables, is_parquet = table_splits(place, files)
    if tables.files:
        read = read_parquet if is_parquet else read_csv_files
        caution = images_beside_caution(tables.files, files, columns) if is_parquet else ""
        data = read(place, tables.files, columns)
        return replace(data, about=data.about.warned(*tables.cautions, caution))
    check_images_only(str(place), columns.form)
    archives = [path for path in files if path.parent == place and path.suffix.lower() == ".npz"]
    if not is_idx(place) and not archives:
        return read_image_folder(place, files, columns)
    check_not_encoded(str(place), columns)
    return read_idx(place) if is_idx(place) else read_npz(archives[0])


def table_splits(place: Path, files: Sequence[Path]) -> tuple[FileSplits, bool]:
    """The table files of a folder by split, and whether they are parquet files.

    There are none where CSV files lie beside images. Raises DataError if some splits are parquet
    files and others CSV files.
    """
    parquet = [path for path in files if path.suffix.lower() == ".parquet"]
    csv = [path for path in files if path.suffix.lower() in CSV]
    if not parquet:
        has_images = any(path.suffix.lower() in IMAGE_SUFFIXES for path in files)
        return split_tables(place, [] if has_images else csv), False

    splits = split_tables(place, parquet)
    others = [
        path for path in csv if splits_in(path.stem) and splits_in(path.stem)[0] not in splits.files
    ]
    if others:
        raise DataError(
            f"{place} has parquet files ({file_list(parquet)}) and {others[0].name}; the splits "
            "are read from files of one kind: write all of them as parquet or all as CSV"
        )
    if csv:
        caution = f"left out, because parquet files are read: {file_list(csv)}; move them elsewhere"
        splits = replace(splits, cautions=(*splits.cautions, caution))
    return splits, True


def _with_file_note(data: Decoded, place: Path, files: Sequence[Path]) -> Decoded:
    """The data with a note on the table files of each split, if a split has several."""
    by_split = table_splits(place, files)[0].files
    if all(len(paths) == 1 for paths in by_split.values()):
        return data
    sources = [f"{split} from {file_list(paths)}" for split, paths in by_split.items()]
    note = f"read {'; '.join(sources)}"
    return replace(data, about=replace(data.about, notes=(*data.about.notes, note)))


COLUMNS = (".parquet", *CSV)
"""How the names of files of columns end."""

LOOKED_AT = 1000
"""Files of a folder that are looked at for the first of columns."""


def likely_kind(name: str, folder: str, label_column: str, form: Mapping[str, Any]) -> Kind:
    """The kind of a data set's examples; "image" where that cannot be told without reading it.

    name: a registered name, a path, or a folder in ``folder``; form: fields of ``Form`` that are
    set.
    """
    if "kind" in form:
        return form["kind"]  # type: ignore[no-any-return]
    if name in names("dataset") or ":" in name:
        return "image"
    own = FOLDERS[name].form.kind if name in FOLDERS else "auto"
    if own != "auto":
        return own
    place = local_folder(name, folder or None) or Path(name)
    try:
        file = _first_file(place)
        stamp = file.stat().st_mtime_ns if file else 0
        return _kind_in(file, stamp, label_column, Form(**form)) if file else "image"
    except OSError:
        return "image"  # whoever reads it will say what is wrong


def _first_file(place: Path) -> Path | None:
    """The file itself, or the first of columns in a folder."""
    if place.is_file():
        return place if place.suffix.lower() in COLUMNS else None
    if not place.is_dir():
        return None
    some = sorted(islice(place.iterdir(), LOOKED_AT))
    return next((path for path in some if path.suffix.lower() in COLUMNS and path.is_file()), None)


@lru_cache(maxsize=64)
def _kind_in(file: Path, stamp: int, label_column: str, form: Form) -> Kind:
    frame_type = ParquetFrame if file.suffix.lower() == ".parquet" else CsvFrame
    frame = frame_type((file,), form)
    try:
        schema = table_schema(
            str(file), frame.schema, Columns(None, label_column or None, None, form)
        )
    except (DataError, ValueError, OSError):
        return "image"  # reading the data reports the error
    return "image" if schema is None else schema.form.kind  # type: ignore[return-value]
