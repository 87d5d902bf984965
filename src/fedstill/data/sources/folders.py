"""Local files and folders of data as arrays: tables, images by class, IDX and NPZ files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from fedstill.core.errors import DataError, on_one_line
from fedstill.core.registry import names
from fedstill.data.cache import cached
from fedstill.data.dataset import Decoded, Kind, ReadingOptions, ReadRequest
from fedstill.data.sources.array_files import is_idx, read_idx, read_npz
from fedstill.data.sources.catalog import KNOWN_FOLDERS, KnownData
from fedstill.data.sources.encode import frames_of, read_frames, schema_of
from fedstill.data.sources.image_sets import (
    check_not_encoded,
    labels_in_table,
    read_columns,
    read_image_folder,
)
from fedstill.data.sources.images import IMAGE_SUFFIXES
from fedstill.data.sources.limits import file_errors, files_below
from fedstill.data.sources.schema import check_images_only, image_columns, table_schema
from fedstill.data.sources.splits import (
    FileSplits,
    file_list,
    hold_out,
    split_tables,
    splits_in,
)
from fedstill.data.sources.tables import CSV_SUFFIXES, CsvFrame, ParquetFrame, single_file
from fedstill.data.sources.verify import verified

TABLE_SUFFIXES = (".parquet", *CSV_SUFFIXES)

DATA_SUFFIXES = (*TABLE_SUFFIXES, ".npz")
"""The suffixes of files that may hold a data set by themselves."""


def data_root(folder: str | Path | None) -> Path | None:
    """The folder of local data: ``folder``, or the environment's ``FEDSTILL_DATA``, or None."""
    root = folder
    if root is None:
        root = os.environ.get("FEDSTILL_DATA")
    if not root:
        return None
    return at_home(root)


def at_home(path: str | Path) -> Path:
    """A path with ``~`` as the home folder. Raises DataError if there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{path} names a home folder that is not there; give the whole path"
        ) from error


def local_folder(name: str, folder: str | Path | None) -> Path | None:
    """The folder of that name in ``data_root(folder)``, or None."""
    root = data_root(folder)
    if root is None or name in ("", ".", "..") or "/" in name:
        return None
    place = root / name
    if not place.is_dir():
        return None
    return place


def is_data_file(path: Path) -> bool:
    """Whether a path is a file that may hold a data set by itself."""
    return path.suffix.lower() in DATA_SUFFIXES and path.is_file()


def read_file(name: str, path: Path, request: ReadRequest) -> Decoded:
    """The data in a parquet, CSV or NPZ file, verified; without a test split, a fifth is held out.

    The file is decoded once: the key of the cache has its size and time.
    """
    status = path.stat()
    key_fields = {
        "file": str(path.resolve()),
        "stamp": [status.st_size, status.st_mtime_ns],
        "request": asdict(request),
    }

    def decode() -> Decoded:
        return _with_test_split(name, _decoded_file(path, request), request)

    return cached(path.stem, key_fields, decode)


def _decoded_file(path: Path, request: ReadRequest) -> Decoded:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return read_parquet(path.parent, {"train": [path]}, request)
    if suffix in CSV_SUFFIXES:
        return read_csv(path.parent, {"train": [path]}, request)
    check_images_only(str(path), request.options)
    check_not_encoded(str(path), request)
    return read_npz(path)


def read_folder(
    name: str, place: Path, request: ReadRequest, entry: KnownData | None = None
) -> Decoded:
    """The data in a folder, verified; without a test split, a fifth is held out.

    The folder is decoded once: the key of the cache has its files' names, sizes and times. Raises
    DataError for an empty folder, and for files that are no data set.
    """
    files = files_below(place, {*DATA_SUFFIXES, ".gz", *IMAGE_SUFFIXES})
    key_fields = {
        "folder": str(place.resolve()),
        "files": [_stamp(place, path) for path in files],
        "request": asdict(request),
        "known": None if entry is None else asdict(entry),
    }

    def decode() -> Decoded:
        if not files:
            raise DataError(
                f"{place} is empty; it needs parquet or CSV files, or images in folders named by "
                "their class"
            )
        data = _with_test_split(name, _decoded_folder(place, files, request), request, entry)
        if entry is not None:
            return data
        return _with_file_note(data, place, files)

    return cached(name, key_fields, decode)


def _stamp(place: Path, path: Path) -> tuple[str, int, int]:
    """What tells whether a file has changed."""
    status = path.stat()
    return str(path.relative_to(place)), status.st_size, status.st_mtime_ns


def _with_test_split(
    name: str, data: Decoded, request: ReadRequest, entry: KnownData | None = None
) -> Decoded:
    """Verified data with a test split."""
    if "train" in data.splits:
        data = hold_out(name, data, request.options, in_place=True)
    return verified(name, data, entry)


def _decoded_folder(place: Path, files: Sequence[Path], request: ReadRequest) -> Decoded:
    """The data in a folder, by its layout: tables, IDX, NPZ, or images by class."""
    tables = table_splits(place, files)
    if tables.files:
        return _decoded_tables(place, tables, files, request)
    check_images_only(str(place), request.options)
    archives = [path for path in files if path.parent == place and path.suffix.lower() == ".npz"]
    if not is_idx(place) and not archives:
        return read_image_folder(place, files, request)
    check_not_encoded(str(place), request)
    if is_idx(place):
        return read_idx(place)
    return read_npz(archives[0])


def _decoded_tables(
    place: Path, tables: FileSplits, files: Sequence[Path], request: ReadRequest
) -> Decoded:
    first = next(chain.from_iterable(tables.files.values()))
    warning = ""
    if first.suffix.lower() == ".parquet":
        warning = _images_warning(tables.files, files, request)
        data = read_parquet(place, tables.files, request)
    else:
        data = read_csv(place, tables.files, request)
    return replace(data, about=data.about.with_warnings(*tables.warnings, warning))


def table_splits(place: Path, files: Sequence[Path]) -> FileSplits:
    """The table files of a folder by split: parquet files, or else CSV files.

    There are none where CSV files lie beside images. Raises DataError if some splits are parquet
    files and others CSV files.
    """
    parquet = [path for path in files if path.suffix.lower() == ".parquet"]
    csv = [path for path in files if path.suffix.lower() in CSV_SUFFIXES]
    has_images = any(path.suffix.lower() in IMAGE_SUFFIXES for path in files)
    if not parquet and has_images:
        return FileSplits({})
    if not parquet:
        return split_tables(place, csv)

    splits = split_tables(place, parquet)
    for path in csv:
        if not set(splits_in(path.stem)) <= set(splits.files):
            raise DataError(
                f"{place} has parquet files ({file_list(parquet)}) and {path.name}; the splits are "
                "read from files of one kind: write all of them as parquet or all as CSV"
            )
    if csv:
        warning = f"left out, because parquet files are read: {file_list(csv)}; move them elsewhere"
        splits = replace(splits, warnings=(*splits.warnings, warning))
    return splits


def _images_warning(
    tables: Mapping[str, Sequence[Path]], files: Sequence[Path], request: ReadRequest
) -> str:
    """A warning about image files beside parquet files that hold no images, or "".

    Raises DataError if there is an image for each row: the table must be what holds their labels.
    """
    images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
    if not images or request.image:
        return ""
    frame = ParquetFrame(tuple(chain.from_iterable(tables.values())))
    if image_columns(frame.schema):
        return ""
    if len(images) >= frame.rows:
        raise DataError(labels_in_table(frame.files[0]))
    return f"not read, because parquet files are read: {len(images):,} image files"


def read_csv(folder: Path, files: Mapping[str, Sequence[Path]], request: ReadRequest) -> Decoded:
    """The CSV files of a folder, by split.

    Raises DataError for a file that cannot be read, and for unclear columns.
    """
    source = _name_of(folder, files)
    frames = frames_of(CsvFrame, folder, files, request.options)
    for frame in frames.values():
        if not frame.rows:
            place = single_file(frame.files) or source
            raise DataError(f"{place} has a line of column names and no rows below it; add rows")
    schema = schema_of(source, frames, request)
    if schema is None:
        raise DataError(
            f"{source}: a CSV file holds no images; leave data.image_column and data.kind out"
        )
    check_not_encoded(source, request)
    return read_frames(source, frames, schema)


def read_parquet(
    folder: Path, files: Mapping[str, Sequence[Path]], request: ReadRequest
) -> Decoded:
    """The parquet files of a folder, by split: images, or other columns.

    Raises DataError for a damaged file, for unclear columns, and for more than may be read.
    """
    source = _name_of(folder, files)
    try:
        with file_errors(source):
            frames = frames_of(ParquetFrame, folder, files, request.options)
            return read_columns(source, frames, request, folder)
    except DataError:
        raise
    except Exception as error:  # many kinds, by version of the library
        raise DataError(
            f"{_damaged(files) or folder} cannot be read ({on_one_line(error)}); it is damaged or "
            "not a data set; download or write it again"
        ) from error


def _name_of(folder: Path, files: Mapping[str, Sequence[Path]]) -> str:
    """The name of the data in messages: the file, if there is only one."""
    return str(single_file(chain.from_iterable(files.values())) or folder)


def _damaged(files: Mapping[str, Sequence[Path]]) -> Path | None:
    """The first file that cannot be opened."""
    for path in chain.from_iterable(files.values()):
        try:
            pq.ParquetFile(path).close()
        except Exception:
            return path
    return None


def _with_file_note(data: Decoded, place: Path, files: Sequence[Path]) -> Decoded:
    """The data with a note on the table files of each split, if a split has several."""
    by_split = table_splits(place, files).files
    if all(len(paths) == 1 for paths in by_split.values()):
        return data
    sources = [f"{split} from {file_list(paths)}" for split, paths in by_split.items()]
    return replace(data, about=data.about.with_notes(f"read {'; '.join(sources)}"))


# The kind of a data set's examples, before it is read.


FILES_LOOKED_AT = 1000
"""The files of a folder among which the first table is looked for."""


def likely_kind(name: str, folder: str, label_column: str, options: Mapping[str, Any]) -> Kind:
    """The kind of a data set's examples; "image" where it is unknown before the data are read.

    name: a registered name, a path, or a folder in ``folder``; options: fields of
    ``ReadingOptions`` that are set.
    """
    if "kind" in options:
        return options["kind"]  # type: ignore[no-any-return]
    if name in names("dataset") or ":" in name:
        return "image"
    entry = KNOWN_FOLDERS.get(name)
    if entry is not None and entry.options.kind != "auto":
        return entry.options.kind
    place = local_folder(name, folder or None) or Path(name)
    try:
        file = _first_table(place)
        if file is None:
            return "image"
        modified = file.stat().st_mtime_ns
        return _kind_of_table(file, modified, label_column, ReadingOptions(**options))
    except OSError:
        return "image"  # reading the data reports the error


def _first_table(place: Path) -> Path | None:
    """The file itself, or the first table in a folder."""
    if place.is_file() and place.suffix.lower() in TABLE_SUFFIXES:
        return place
    if not place.is_dir():
        return None
    paths = sorted(islice(place.iterdir(), FILES_LOOKED_AT))
    tables = (path for path in paths if path.suffix.lower() in TABLE_SUFFIXES and path.is_file())
    return next(tables, None)


@lru_cache(maxsize=64)
def _kind_of_table(file: Path, modified: int, label_column: str, options: ReadingOptions) -> Kind:
    """The kind of a table's examples; ``modified``, its time, is a part of the cache's key."""
    frame: ParquetFrame | CsvFrame = CsvFrame((file,), options)
    if file.suffix.lower() == ".parquet":
        frame = ParquetFrame((file,), options)
    request = ReadRequest(label=label_column or None, options=options.normalised)
    try:
        schema = table_schema(str(file), frame.schema, request)
    except (DataError, ValueError, OSError):
        return "image"  # reading the data reports the error
    if schema is None:
        return "image"
    return schema.options.kind  # type: ignore[return-value]
