"""Reads local files and folders as arrays: tables, images by class, IDX and NPZ files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from fedstill.core import registry
from fedstill.core.errors import DataError, on_one_line
from fedstill.core.files import named_path
from fedstill.data.cache import cached
from fedstill.data.dataset import Decoded, Kind, ReadingOptions, ReadRequest
from fedstill.data.sources.catalog import KNOWN_FOLDERS, KnownData
from fedstill.data.sources.columns import frames_of
from fedstill.data.sources.files import (
    FileSplits,
    file_errors,
    file_list,
    files_below,
    split_tables,
    splits_in,
)
from fedstill.data.sources.image_sets import (
    check_not_encoded,
    is_idx,
    labels_in_table,
    read_columns,
    read_idx,
    read_image_folder,
    read_npz,
    read_without_images,
)
from fedstill.data.sources.images import IMAGE_SUFFIXES
from fedstill.data.sources.schema import check_images_only, image_columns, table_schema
from fedstill.data.sources.tables import CSV_SUFFIXES, CsvFrame, ParquetFrame, single_file
from fedstill.data.sources.verification import completed

TABLE_SUFFIXES = (".parquet", *CSV_SUFFIXES)

DATA_SUFFIXES = (*TABLE_SUFFIXES, ".npz")
"""The suffixes of files that can be a data set on their own."""


def data_root(folder: str | Path | None) -> Path | None:
    """The folder of local data: ``folder``, the environment variable ``FEDSTILL_DATA``, or None."""
    root = folder
    if root is None:
        root = os.environ.get("FEDSTILL_DATA")
    if not root:
        return None
    return named_path(root)


def local_folder(name: str, folder: str | Path | None) -> Path | None:
    """The folder with this name in ``data_root(folder)``, or None."""
    root = data_root(folder)
    if root is None or name in ("", ".", "..") or "/" in name:
        return None
    place = root / name
    if not place.is_dir():
        return None
    return place


def is_data_file(path: Path) -> bool:
    """Whether a path is a file that can be a data set on its own."""
    return path.suffix.lower() in DATA_SUFFIXES and path.is_file()


def is_table(path: Path) -> bool:
    """Whether a path has the suffix of a parquet or CSV file."""
    return path.suffix.lower() in TABLE_SUFFIXES


def is_parquet(path: Path) -> bool:
    """Whether a path has the suffix of a parquet file."""
    return path.suffix.lower() == ".parquet"


def read_data_file(name: str, path: Path, request: ReadRequest) -> Decoded:
    """The verified data in a parquet, CSV or NPZ file; without a test split, a fifth is held out.

    The file is decoded once. The cache key contains its size and modification time.
    """
    status = path.stat()
    key_fields = {
        "file": str(path.resolve()),
        "stamp": [status.st_size, status.st_mtime_ns],
        "request": asdict(request),
    }

    def decode() -> Decoded:
        data = _decoded_file(path, request)
        return completed(name, data, request.options, in_place=True)

    return cached(path.stem, key_fields, decode)


def _decoded_file(path: Path, request: ReadRequest) -> Decoded:
    if is_table(path):
        return read_tables(path.parent, {"train": [path]}, request)
    check_images_only(str(path), request.options)
    check_not_encoded(str(path), request)
    return read_npz(path)


def read_folder(
    name: str, place: Path, request: ReadRequest, entry: KnownData | None = None
) -> Decoded:
    """The verified data in a folder; without a test split, a fifth is held out.

    The folder is decoded once. The cache key contains the names, sizes and modification times of
    its files. Raises DataError for an empty folder, and for files that are not a data set.
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
        tables = table_splits(place, files)
        data = _decoded_folder(place, files, tables, request)
        data = completed(name, data, request.options, entry, in_place=True)
        if entry is not None:
            return data
        return replace(data, about=data.about.with_notes(_file_note(tables)))

    return cached(name, key_fields, decode)


def _stamp(place: Path, path: Path) -> tuple[str, int, int]:
    """The name, size and modification time of a file, which reveal changes."""
    status = path.stat()
    return str(path.relative_to(place)), status.st_size, status.st_mtime_ns


def _decoded_folder(
    place: Path, files: Sequence[Path], tables: FileSplits, request: ReadRequest
) -> Decoded:
    """The data in a folder, by its layout: tables, IDX, NPZ, or images by class."""
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
    warning = _images_warning(tables.files, files, request)
    data = read_tables(place, tables.files, request)
    return replace(data, about=data.about.with_warnings(*tables.warnings, warning))


def table_splits(place: Path, files: Sequence[Path]) -> FileSplits:
    """The table files of a folder by split: parquet files, or else CSV files.

    CSV files next to images do not count. Raises DataError if some splits are parquet files and
    others are CSV files.
    """
    parquet = [path for path in files if is_parquet(path)]
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
                f"{place} has parquet files ({file_list(parquet)}) and {path.name}; all splits "
                "must have the same format: write all of them as parquet or all as CSV"
            )
    if csv:
        warning = f"ignored because there are parquet files: {file_list(csv)}; move them elsewhere"
        splits = replace(splits, warnings=(*splits.warnings, warning))
    return splits


def _images_warning(
    tables: Mapping[str, Sequence[Path]], files: Sequence[Path], request: ReadRequest
) -> str:
    """A warning about image files next to parquet files without images, or "".

    Raises DataError if there is one image per row, because the table probably holds their labels.
    """
    images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
    if not images or request.image:
        return ""
    frame = ParquetFrame(tuple(chain.from_iterable(tables.values())))
    if image_columns(frame.schema):
        return ""
    if len(images) >= frame.rows:
        raise DataError(labels_in_table(frame.files[0]))
    return f"ignored because there are parquet files: {len(images):,} image files"


def read_tables(folder: Path, files: Mapping[str, Sequence[Path]], request: ReadRequest) -> Decoded:
    """Read the table files of a folder by split: either parquet files or CSV files.

    Raises DataError like ``read_parquet`` and ``read_csv``.
    """
    first = next(chain.from_iterable(files.values()))
    if is_parquet(first):
        return read_parquet(folder, files, request)
    return read_csv(folder, files, request)


def read_csv(folder: Path, files: Mapping[str, Sequence[Path]], request: ReadRequest) -> Decoded:
    """Read the CSV files of a folder by split.

    Raises DataError for a file that cannot be read, and for ambiguous columns.
    """
    source = _name_of(folder, files)
    frames = frames_of(CsvFrame, folder, files, request.options)
    for frame in frames.values():
        if not frame.rows:
            place = single_file(frame.files) or source
            raise DataError(f"{place} has a header but no rows; add rows")
    data = read_without_images(source, frames, request)
    if data is None:
        raise DataError(
            f"{source}: a CSV file holds no images; remove data.image_column and data.kind"
        )
    return data


def read_parquet(
    folder: Path, files: Mapping[str, Sequence[Path]], request: ReadRequest
) -> Decoded:
    """Read the parquet files of a folder by split: images, or other columns.

    Raises DataError for damaged files, for ambiguous columns, and for data that exceed the limits.
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


def _file_note(tables: FileSplits) -> str:
    """A note about the table files of each split, if a split has several, or ""."""
    if all(len(paths) == 1 for paths in tables.files.values()):
        return ""
    sources = [f"{split} from {file_list(paths)}" for split, paths in tables.files.items()]
    return f"read {'; '.join(sources)}"


# The kind of a data set's examples, before the data set is read.


FILES_LOOKED_AT = 1000
"""The number of files in a folder among which the first table is searched."""


def likely_kind(name: str, folder: str, label_column: str, options: Mapping[str, Any]) -> Kind:
    """The kind of a data set's examples; "image" if it is unknown before the data are read.

    name: a registered name, a path, or a folder in ``folder``; options: values of fields of
    ``ReadingOptions``.
    """
    if "kind" in options:
        return options["kind"]  # type: ignore[no-any-return]
    if name in registry.names("dataset") or ":" in name:
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
    if place.is_file() and is_table(place):
        return place
    if not place.is_dir():
        return None
    paths = sorted(islice(place.iterdir(), FILES_LOOKED_AT))
    tables = (path for path in paths if is_table(path) and path.is_file())
    return next(tables, None)


@lru_cache(maxsize=64)
def _kind_of_table(file: Path, modified: int, label_column: str, options: ReadingOptions) -> Kind:
    """The kind of a table's examples; ``modified``: its modification time, for the cache key."""
    frame: ParquetFrame | CsvFrame = CsvFrame((file,), options)
    if is_parquet(file):
        frame = ParquetFrame((file,), options)
    request = ReadRequest(label=label_column or None, options=options.normalised)
    try:
        schema = table_schema(str(file), frame.schema, request)
    except (DataError, ValueError, OSError):
        return "image"  # reading the data reports the error
    if schema is None:
        return "image"
    return schema.options.kind  # type: ignore[return-value]
