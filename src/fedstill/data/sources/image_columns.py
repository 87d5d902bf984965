"""Columns of encoded images in parquet files and on the hub, read row by row.

The claims of a file are checked before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from fedstill.core.errors import DataError, on_one_line
from fedstill.data.dataset import FILE, Decoded, ReadingOptions, ReadRequest, nfc
from fedstill.data.sources.encode import frames_of, read_frames, schema_of
from fedstill.data.sources.image_sets import (
    check_not_encoded,
    labelled_images,
    labels_in_table,
    read_rows,
    with_owners,
)
from fedstill.data.sources.images import IMAGE_SUFFIXES, Pictures
from fedstill.data.sources.limits import file_errors, refuse_ratio
from fedstill.data.sources.schema import (
    class_names,
    holds_numbers,
    holds_text,
    image_columns,
    label_column,
    no_column,
    no_owner,
)
from fedstill.data.sources.tables import (
    PAGE_BUFFER,
    Frame,
    ParquetFrame,
    check_claims,
    file_claims,
    normalised,
    single_file,
)

ROWS_AT_ONCE = 1
"""The rows of a batch. A file may store an image once and refer to it in all rows, so that k rows
may take k times the bytes of the file.
"""


class ImageRowsSource(Protocol):
    """Where the rows of a split come from, with their images and labels."""

    @property
    def rows(self) -> int:
        """The number of rows, 0 if it is unknown."""

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types."""

    def cells(self, image: str, label: str) -> Iterator[tuple[Any, Any]]:
        """Each row's encoded image and its label."""


def decoded_splits(
    what: str,
    sources: Mapping[str, ImageRowsSource],
    request: ReadRequest,
    within: Path | str,
    owners: Mapping[str, pa.Table] | None = None,
) -> Decoded:
    """All rows of {split: source} as arrays; labels that are names get ids in alphabetical order.

    within: the folder, or the data set on the hub, outside of which no file is opened because a row
    names it. owners: the column of owners of each split, if the options name one. Raises DataError
    for absent columns, for an image that cannot be decoded or differs from the first in size or
    kind, and for a label that is missing or no whole number.
    """
    rows = {}
    names: tuple[str, ...] | None = None
    for split, source in sources.items():
        image = _image_column(what, source.schema, request)
        label = label_column(what, source.schema, request)
        names = names or class_names(source.schema, label)
        pictures = Pictures(f"{what}, {split}", request, source.rows, within)
        rows[split] = read_rows(pictures, source.cells(image, label))
    data = labelled_images(what, rows, request, names)
    return with_owners(what, data, rows, owners) if owners else data


def _image_column(what: str, schema: pa.Schema, request: ReadRequest) -> str:
    """The column of images; DataError if it is not there, or not clear which it is."""
    candidates = image_columns(schema)
    name = nfc(request.image) or (candidates[0] if len(candidates) == 1 else None)
    if name is None or name not in schema.names:
        raise DataError(no_column(what, "image", name, schema.names))
    return name


def read_parquet(
    folder: Path, files: Mapping[str, Sequence[Path]], request: ReadRequest
) -> Decoded:
    """The parquet files of a folder, by split: images, or other columns.

    Raises DataError for a damaged file, for unclear columns, and for more than may be read.
    """
    what = str(single_file(chain.from_iterable(files.values())) or folder)
    try:
        with file_errors(what):
            frames = frames_of(ParquetFrame, folder, files, request.options)
            schema = schema_of(what, frames, request)
            if schema is not None:
                check_not_encoded(what, request)
                return read_frames(what, frames, schema)
            tables = {split: ParquetImages(tuple(paths)) for split, paths in files.items()}
            owners = owner_tables(what, frames, request.options)
            return decoded_splits(what, tables, request, folder, owners)
    except DataError:
        raise
    except Exception as error:  # many kinds, by version of the library
        raise DataError(
            f"{_damaged(files) or folder} cannot be read ({on_one_line(error)}); it is damaged or "
            "not a data set; download or write it again"
        ) from error


def _damaged(files: Mapping[str, Sequence[Path]]) -> Path | None:
    """The first file that cannot be opened."""
    for path in chain.from_iterable(files.values()):
        try:
            pq.ParquetFile(path).close()
        except Exception:
            return path
    return None


def owner_tables(
    what: str, frames: Mapping[str, Frame], options: ReadingOptions
) -> dict[str, pa.Table] | None:
    """The column of owners of each split; None if the options name none.

    Raises DataError if a split lacks it.
    """
    if not options.owner:
        return None
    for frame in frames.values():
        columns = frame.schema.names
        if options.owner not in (FILE, *columns):
            raise DataError(no_owner(what, options, columns))
    return {split: frame.read([options.owner]) for split, frame in frames.items()}


def images_beside_caution(
    tables: Mapping[str, Sequence[Path]], files: Sequence[Path], request: ReadRequest
) -> str:
    """A warning about image files beside parquet files that hold no images, or "".

    Raises DataError if there is an image for each row: the table must be what holds their labels.
    """
    images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
    if not images or request.image:
        return ""
    paths = list(chain.from_iterable(tables.values()))
    if image_columns(ParquetFrame((paths[0],)).schema):
        return ""
    rows = sum(file_claims(path).num_rows for path in paths)
    if len(images) >= rows:
        raise DataError(labels_in_table(paths[0]))
    return f"not read, because parquet files are read: {len(images):,} image files"


@dataclass(frozen=True)
class ParquetImages:
    """The rows of parquet files with a column of images."""

    files: tuple[Path, ...]

    @cached_property
    def rows(self) -> int:
        """The number of rows that the files claim."""
        return sum(file_claims(path).num_rows for path in self.files)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the first file."""
        with file_errors(self.files[0]):
            return normalised(self.files[0], pq.read_schema(self.files[0]))

    def cells(self, image: str, label: str) -> Iterator[tuple[Any, Any]]:
        """Each row's image, as {"bytes": …, "path": …}, and its label."""
        for path in self.files:
            with file_errors(path):
                yield from _rows(path, image, label)


def _rows(path: Path, image: str, label: str) -> Iterator[tuple[Any, Any]]:
    """The rows of one file, one after another."""
    claims = file_claims(path)
    schema = pq.read_schema(path)
    stored_names = {nfc(name): name for name in schema.names}
    image = stored_names.get(image, image)
    label = stored_names.get(label, label)
    _check_label_column(path, schema, label)
    names = [*_image_parts(path, schema, image), label]
    check_claims(path, claims, names)

    image_type = schema.field(image).type
    stored_bytes = path.stat().st_size
    count = 0
    unpacked = 0
    with pq.ParquetFile(path, buffer_size=PAGE_BUFFER, pre_buffer=False) as file:
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=names, use_threads=False):
            images = batch.column(image).to_pylist()
            labels = batch.column(label).to_pylist()
            for value, label_value in zip(images, labels, strict=True):
                cell = _as_cell(value, image_type)
                count += 1
                unpacked += len((cell or {}).get("bytes") or b"")
                refuse_ratio(path, unpacked, stored_bytes)
                yield cell, label_value
    if count != claims.num_rows:
        raise DataError(
            f"{path} says that it holds {claims.num_rows:,} rows, and holds {count:,}; write it "
            "again"
        )


def _as_cell(value: Any, arrow_type: pa.DataType) -> dict[str, Any] | None:
    """An image as {"bytes": …} or {"path": …}, from a column of records, bytes or paths."""
    if value is None or pa.types.is_struct(arrow_type):
        return value  # type: ignore[no-any-return]
    return {"bytes" if _is_binary(arrow_type) else "path": value}


def _image_parts(path: Path, schema: pa.Schema, name: str) -> list[str]:
    """The columns, or parts of one, that images are in: their bytes, or paths of files.

    Raises DataError for other types.
    """
    arrow_type = _column_type(path, schema, name)
    if pa.types.is_struct(arrow_type):
        fields = [arrow_type.field(index) for index in range(arrow_type.num_fields)]
        parts = [
            field.name
            for field in fields
            if field.name in ("bytes", "path")
            and (_is_binary(field.type) or holds_text(field.type))
        ]
        if parts:
            return [f"{name}.{part}" for part in parts]
    elif _is_binary(arrow_type) or holds_text(arrow_type):
        return [name]
    raise DataError(
        f"{path}: column {name!r} holds {str(arrow_type)[:100]}, not encoded images; write it "
        "again with them"
    )


def _check_label_column(path: Path, schema: pa.Schema, name: str) -> None:
    """Raise DataError for a column that holds neither numbers nor names."""
    arrow_type = _column_type(path, schema, name)
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if not (holds_numbers(arrow_type) or holds_text(arrow_type) or pa.types.is_null(arrow_type)):
        raise DataError(
            f"{path}: column {name!r} holds {str(arrow_type)[:100]}, not class ids or names; set "
            "data.label_column"
        )


def _column_type(path: Path, schema: pa.Schema, name: str) -> pa.DataType:
    count = len(schema.get_all_field_indices(name))
    if count != 1:
        raise DataError(
            f"{path} must have exactly one column {name!r}, as the first file of its split has; it "
            f"has {count}; write it again"
        )
    return schema.field(name).type


def _is_binary(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type))
