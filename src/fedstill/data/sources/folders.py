"""Reads local files and folders as arrays: tables, images by class, IDX and NPZ files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from fedstill.core import registry
from fedstill.core.errors import DataError
from fedstill.core.fields import nfc
from fedstill.core.files import named_path
from fedstill.core.user_modules import split_name
from fedstill.data.dataset import FILE, Decoded, Kind, ReadingOptions, ReadRequest
from fedstill.data.sources.catalog import KNOWN_FOLDERS, KnownData
from fedstill.data.sources.files import (
    BySplit,
    FileSplits,
    client_name,
    file_list,
    files_below,
    has_suffix,
    splits_of_words,
    table_files_by_split,
)
from fedstill.data.sources.image_sets import (
    check_no_columns,
    check_not_encoded,
    is_idx,
    labels_in_table,
    read_frames,
    read_idx,
    read_image_folder,
    read_npz,
)
from fedstill.data.sources.images import IMAGE_SUFFIXES
from fedstill.data.sources.schema import check_images_only, image_columns, table_schema
from fedstill.data.sources.tables import (
    CSV_SUFFIXES,
    CsvFrame,
    ParquetFrame,
    ParquetSource,
    name_of_files,
    table_errors,
)
from fedstill.data.sources.verification import decoded_once

PARQUET_SUFFIXES = (".parquet",)

TABLE_SUFFIXES = (*PARQUET_SUFFIXES, *CSV_SUFFIXES)

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
    return has_suffix(path, DATA_SUFFIXES) and path.is_file()


def _stamp(place: Path, path: Path) -> tuple[str, int, int]:
    """The name in ``place``, size and modification time of a file, which reveal changes."""
    status = path.stat()
    return str(path.relative_to(place)), status.st_size, status.st_mtime_ns


def read_data_file(name: str, path: Path, request: ReadRequest) -> Decoded:
    """The verified data in a parquet, CSV or NPZ file, which is decoded once."""

    def read() -> Decoded:
        if has_suffix(path, TABLE_SUFFIXES):
            return read_table_files(path.parent, {"train": [path]}, request)
        _check_arrays_only(path, request)
        return read_npz(path)

    folder = path.parent
    source = {
        "folder": str(folder.resolve()),
        "file": _stamp(folder, path),
        "images": [_stamp(folder, image) for image in _images_of_rows(path, request)],
    }
    return decoded_once(name, source, read, request)


def _images_of_rows(path: Path, request: ReadRequest) -> list[Path]:
    """The image files below the folder of a parquet file, if its rows may name image files."""
    if not has_suffix(path, PARQUET_SUFFIXES):
        return []
    source = ParquetSource.of(path)
    columns = image_columns(source.schema)
    if request.image:
        columns = [nfc(request.image)]
    if not any(source.may_name_images(column) for column in columns):
        return []
    files = files_below(path.parent, {*DATA_SUFFIXES, *IMAGE_SUFFIXES})
    return [file for file in files if has_suffix(file, IMAGE_SUFFIXES)]


def data_files(place: Path, most: int | None = None) -> list[Path]:
    """All files of a folder of data, or ``most`` of them, sorted by path. Raises DataError as
    ``files_below`` does.
    """
    return files_below(place, {*DATA_SUFFIXES, ".gz", *IMAGE_SUFFIXES}, most)


def read_folder(
    name: str, place: Path, request: ReadRequest, entry: KnownData | None = None
) -> Decoded:
    """The verified data in a folder, which is decoded once.

    Raises DataError for an empty folder, and for files that are not a data set.
    """
    files = data_files(place)

    def read() -> Decoded:
        if not files:
            raise DataError(
                f"{place} is empty; it needs parquet or CSV files, or images in folders named by "
                "their class"
            )
        tables = find_table_files(place, files)
        if not tables.parts:
            return _decoded_images(place, files, request)
        warning = _images_warning(tables.parts, files, request)
        data = read_table_files(place, tables.parts, request)
        data = data.with_warnings(*tables.warnings, warning)
        if entry is not None:
            return data
        return replace(data, about=data.about.with_notes(_file_note(tables.parts)))

    stamps = [_stamp(place, path) for path in files]
    source = {"folder": str(place.resolve()), "files": stamps}
    return decoded_once(name, source, read, request, entry)


def _decoded_images(place: Path, files: Sequence[Path], request: ReadRequest) -> Decoded:
    """The images in a folder, by its layout: IDX, NPZ, or images by class.

    Raises DataError if there are several NPZ archives.
    """
    archives = [path for path in files if path.parent == place and has_suffix(path, {".npz"})]
    if not is_idx(place) and not archives:
        check_images_only(str(place), request)
        return read_image_folder(place, files, request)
    _check_arrays_only(place, request)
    if is_idx(place):
        return read_idx(place)
    if len(archives) > 1:
        raise DataError(
            f"{place} has several .npz files ({file_list(archives)}); name one of them: data.name ="
            f" '{place.name}/{archives[0].name}'"
        )
    images = [path for path in files if has_suffix(path, IMAGE_SUFFIXES)]
    warning = ""
    if images:
        warning = f"ignored because there is {archives[0].name}: {file_list(images)}"
    return read_npz(archives[0]).with_warnings(warning)


def _check_arrays_only(place: Path, request: ReadRequest) -> None:
    """Raise DataError for keys that do not apply to the arrays of IDX and NPZ files."""
    source = str(place)
    check_images_only(source, request)
    check_not_encoded(source, request)
    check_no_columns(source, request)
    if request.options.owner == FILE:
        raise DataError(
            f"partition.column = {FILE!r} makes each file a client, but {source} holds all "
            "examples in arrays; remove it"
        )


def find_table_files(place: Path, files: Sequence[Path]) -> FileSplits:
    """The table files of a folder by split: parquet files, or else CSV files.

    CSV files next to images do not count. Raises DataError if some splits are parquet files and
    others are CSV files.
    """
    parquet = [path for path in files if has_suffix(path, PARQUET_SUFFIXES)]
    csv = [path for path in files if has_suffix(path, CSV_SUFFIXES)]
    has_images = any(has_suffix(path, IMAGE_SUFFIXES) for path in files)
    if not parquet and has_images:
        return BySplit({})
    if not parquet:
        return table_files_by_split(place, csv)

    splits = table_files_by_split(place, parquet)
    for path in csv:
        if not set(splits_of_words(path.stem)) <= set(splits.parts):
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
    images = [path for path in files if has_suffix(path, IMAGE_SUFFIXES)]
    if not images or request.image:
        return ""
    frame = ParquetFrame(tuple(chain.from_iterable(tables.values())))
    if image_columns(frame.schema):
        return ""
    if len(images) >= frame.rows:
        raise DataError(labels_in_table(frame.files[0]))
    return f"ignored because there are parquet files: {len(images):,} image files"


def read_table_files(
    folder: Path, files: Mapping[str, Sequence[Path]], request: ReadRequest
) -> Decoded:
    """The rows of table files by split, which are either parquet files or CSV files.

    Raises DataError for a file that cannot be read, for ambiguous columns, and for data that exceed
    the limits.
    """
    options = request.options
    frames = {}
    for split, paths in files.items():
        clients: tuple[str, ...] = ()
        if options.owner == FILE:
            clients = tuple(client_name(folder, path, class_folders=False) for path in paths)
        frames[split] = _frame_type(paths[0])(tuple(paths), options, clients)
    source = name_of_files([path for paths in files.values() for path in paths], folder)
    for frame in frames.values():
        if isinstance(frame, CsvFrame) and not frame.rows:
            raise DataError(
                f"{name_of_files(frame.files, source)} has a header but no rows; add rows"
            )
    with table_errors(source):
        return read_frames(source, frames, request, folder)


def _frame_type(path: Path) -> type[ParquetFrame | CsvFrame]:
    if has_suffix(path, PARQUET_SUFFIXES):
        return ParquetFrame
    return CsvFrame


def _file_note(files: Mapping[str, Sequence[Path]]) -> str:
    """A note about the table files of each split, if a split has several, or ""."""
    if all(len(paths) == 1 for paths in files.values()):
        return ""
    sources = [f"{split} from {file_list(paths)}" for split, paths in files.items()]
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
    if name in registry.names("dataset") or split_name(name).is_code:
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
    except (OSError, DataError):
        return "image"  # reading the data reports the error


def _first_table(place: Path) -> Path | None:
    """The file itself, or the first table that would be read from a folder."""
    if place.is_file() and has_suffix(place, TABLE_SUFFIXES):
        return place
    if not place.is_dir():
        return None
    tables = find_table_files(place, data_files(place, FILES_LOOKED_AT))
    return next(chain.from_iterable(tables.parts.values()), None)


@lru_cache(maxsize=64)
def _kind_of_table(file: Path, modified: int, label_column: str, options: ReadingOptions) -> Kind:
    """The kind of a table's examples; ``modified``: its modification time, for the cache key."""
    frame = _frame_type(file)((file,), options)
    request = ReadRequest(label=label_column or None, options=options.normalised)
    try:
        schema = table_schema(str(file), frame.schema, request)
    except (DataError, ValueError, OSError):
        return "image"  # reading the data reports the error
    if schema is None:
        return "image"
    return schema.options.kind  # type: ignore[return-value]
