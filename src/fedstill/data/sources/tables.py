"""Reads parquet and CSV files as Arrow tables. Sizes are checked before data are decoded."""

from __future__ import annotations

import codecs
import contextlib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, starmap
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from fedstill.core.errors import DataError, on_one_line
from fedstill.core.fields import nfc
from fedstill.data.dataset import DEFAULT_OPTIONS, FILE, ReadingOptions, Value
from fedstill.data.encoding import category_name, repeated_names
from fedstill.data.sources.files import EXAMPLE_BYTES, check_ratio, check_size, file_errors
from fedstill.data.sources.schema import (
    NUMBER,
    holds_bytes,
    holds_numbers,
    holds_text,
    plain_column,
    plain_schema,
    type_conflict,
    with_strays,
)


class Frame(Protocol):
    """The rows of a split, by column."""

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types; names are in Unicode normal form."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, in the order of their rows; empty for data on the hub."""

    @property
    def rows(self) -> int:
        """The number of rows, 0 if it is unknown."""

    def read(self, names: Sequence[str]) -> pa.Table:
        """All rows of some columns, in order; the column ``FILE`` contains the clients of the
        files. The values that the options declare missing are still present.
        """


class LabelledImage(NamedTuple):
    """The image and the label of an example, as they were read."""

    image: Any
    """A PIL image, the path of a file, or the bytes or path in a table: {"bytes": …, "path": …}."""
    label: Any


class ImageFrame(Frame, Protocol):
    """The rows of a split, which may have a column of encoded images."""

    def labelled_images(self, image: str, label: str) -> Iterator[LabelledImage]:
        """Each row's encoded image and label, from the columns of these names."""


@contextlib.contextmanager
def table_errors(source: Path | str) -> Iterator[None]:
    """A context that turns errors of a library about a damaged file into DataError with its name,
    as well as system errors and a lack of memory.
    """
    try:
        with file_errors(source):
            yield
    except DataError:
        raise
    except Exception as error:  # many kinds, by version of the library
        raise DataError(
            f"{source} cannot be read ({on_one_line(error)}); it is damaged or not a data set; "
            "download or write it again"
        ) from error


@dataclass(frozen=True)
class FileFrame(ABC):
    """The concatenated rows of files."""

    files: tuple[Path, ...]
    options: ReadingOptions = DEFAULT_OPTIONS
    clients: tuple[str, ...] = ()
    """The client of each file, if the options say that files belong to clients; otherwise empty."""

    def read(self, names: Sequence[str]) -> pa.Table:
        """Some columns of all files.

        Raises DataError if the type of a column differs between files.
        """
        tables = self._tables_of_files([name for name in names if name != FILE])
        if FILE in names:
            files = zip(tables, self.clients, self._file_rows, strict=True)
            tables = list(starmap(_with_client, files))
        try:
            table = pa.concat_tables(tables, promote_options="permissive")
        except (pa.ArrowTypeError, pa.ArrowInvalid):
            conflict = _conflict_between_files(tables, self.files)
            if conflict:
                raise DataError(conflict) from None
            raise
        return table.select(list(names))

    @property
    def rows(self) -> int:
        """The number of rows in all files."""
        return sum(self._file_rows)

    @property
    @abstractmethod
    def _file_rows(self) -> list[int]:
        """The number of rows in each file."""

    @abstractmethod
    def _tables_of_files(self, names: Sequence[str]) -> list[pa.Table]:
        """Some columns of each file."""


def _with_client(table: pa.Table, client: str, rows: int) -> pa.Table:
    """The table of a file with the column ``FILE``, which contains the file's client."""
    clients = pa.repeat(pa.scalar(client, pa.string()), rows)
    if not table.num_columns:  # Arrow counts no rows in such a table.
        return pa.table({FILE: clients})
    return table.append_column(FILE, clients)


class ParquetFrame(FileFrame):
    """The concatenated rows of parquet files with the same schema."""

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the first file."""
        with table_errors(self.files[0]):
            schema = with_normal_names(self.files[0], pq.read_schema(self.files[0]))
            return plain_schema(schema)

    @cached_property
    def _file_rows(self) -> list[int]:
        """The number of rows in each file, according to its metadata."""
        return [ParquetSource.of(path).metadata.num_rows for path in self.files]

    def labelled_images(self, image: str, label: str) -> Iterator[LabelledImage]:
        """Each row's encoded image and label.

        Raises DataError for columns of other types, and for images that exceed the limits.
        """
        for path in self.files:
            with table_errors(path):
                yield from _labelled_images(ParquetSource.of(path), image, label)

    def _tables_of_files(self, names: Sequence[str]) -> list[pa.Table]:
        """Some columns of each file; DataError for a file that lacks one or exceeds the limits."""
        tables = []
        for path in self.files:
            with table_errors(path):
                tables.append(self._table_of_file(ParquetSource.of(path), names))
        return tables

    def _table_of_file(self, source: ParquetSource, names: Sequence[str]) -> pa.Table:
        _check_unique(source.path, list(map(nfc, source.schema.names)))
        in_file = stored_names(source.schema)
        for name in names:
            if name not in in_file:
                raise DataError(
                    f"{source.path} has no column {name!r}, unlike {self.files[0].name}; add the "
                    "column, or list the columns to read in data.columns"
                )
        columns = _read_columns(source, [in_file[name] for name in names])
        return pa.table({name: plain_column(columns[in_file[name]]) for name in names})


def with_normal_names(source: Path | str, schema: pa.Schema) -> pa.Schema:
    """A schema whose column names are in Unicode normal form.

    Raises DataError if two columns then have the same name.
    """
    names = [nfc(name) for name in schema.names]
    _check_unique(source, names)
    fields = [field.with_name(name) for field, name in zip(schema, names, strict=True)]
    return pa.schema(fields, schema.metadata)


def stored_names(schema: pa.Schema) -> dict[str, str]:
    """The names of columns in a file or on the hub, by their Unicode normal form."""
    return {nfc(name): name for name in schema.names}


def _check_unique(source: Path | str, names: Sequence[str]) -> None:
    repeated = repeated_names(names)
    if repeated:
        raise DataError(f"{source} has two columns named {repeated[0]!r}; rename one of them")


# Parquet files.


@dataclass(frozen=True)
class ParquetSource:
    """A parquet file, its metadata, and the schema in them."""

    path: Path
    metadata: pq.FileMetaData
    schema: pa.Schema

    @staticmethod
    def of(path: Path) -> ParquetSource:
        """The file; DataError if it has too many rows, regardless of their content."""
        with table_errors(path):
            metadata = pq.read_metadata(path)
        groups = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        if metadata.num_rows != sum(groups) or min(groups, default=0) < 0:
            raise DataError(
                f"{path} claims to hold {metadata.num_rows:,} rows, but its parts hold {groups}; "
                "write it again"
            )
        check_size(path, metadata.num_rows * EXAMPLE_BYTES)
        return ParquetSource(path, metadata, plain_schema(metadata.schema.to_arrow_schema()))

    def opened(self, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
        """The open file. dictionaries: the columns to read as references to distinct values."""
        return pq.ParquetFile(
            self.path,
            metadata=self.metadata,
            buffer_size=PAGE_BUFFER,
            pre_buffer=False,
            read_dictionary=list(dictionaries),
        )

    def chunks(self, names: Collection[str]) -> Iterator[pq.ColumnChunkMetaData]:
        """The metadata of columns in all row groups.

        names: paths of columns, including all columns below a path.
        """
        columns = set(names)
        for number in range(self.metadata.num_row_groups):
            group = self.metadata.row_group(number)
            for index in range(self.metadata.num_columns):
                chunk = group.column(index)
                if _column_of(chunk.path_in_schema, columns):
                    yield chunk

    def may_name_images(self, column: str) -> bool:
        """Whether rows of an image column may name image files, according to the metadata."""
        name = stored_names(self.schema).get(column)
        if name is None or holds_bytes(self.schema.field(name).type):
            return False
        chunks = list(self.chunks([f"{name}.bytes"]))
        for chunk in chunks:
            # Without statistics, it is unknown whether a row lacks bytes.
            if chunk.statistics is None or chunk.statistics.null_count != 0:
                return True
        return not chunks  # only paths

    def check_sizes(self, names: Collection[str]) -> None:
        """Raise DataError for columns whose claimed size is implausible for the size of the file.

        names: as in ``chunks``.
        """
        sizes = [chunk.total_uncompressed_size for chunk in self.chunks(names)]
        if min(sizes, default=0) < 0:
            raise DataError(
                f"{self.path} claims that a column holds {min(sizes)} bytes; write it again"
            )
        check_ratio(self.path, sum(sizes), self.path.stat().st_size)

    def check_row_count(self, count: int) -> None:
        """Raise DataError if the file holds another number of rows than its metadata say."""
        if count != self.metadata.num_rows:
            raise DataError(
                f"{self.path} claims to hold {self.metadata.num_rows:,} rows, but holds {count:,}; "
                "write it again"
            )

    def column_type(self, name: str) -> pa.DataType:
        """The type of a column; DataError if there is no such column, or several."""
        count = len(self.schema.get_all_field_indices(name))
        if count != 1:
            raise DataError(
                f"{self.path} must have exactly one column {name!r}, like the first file of its "
                f"split, but has {count}; write it again"
            )
        return self.schema.field(name).type


# Columns of parquet files, in batches of a bounded size.


PAGE_BUFFER = 1 << 20
"""The bytes of a column that are read ahead, so that row groups are not held as a whole."""

FIXED_ROWS = 1 << 16
"""The number of rows in a batch, for columns of fixed-width values."""

BATCH_BYTES = 1 << 23
"""The approximate bytes in a batch of other columns, according to the file's metadata."""


def _read_columns(source: ParquetSource, names: Sequence[str]) -> dict[str, pa.ChunkedArray]:
    """Columns by name. Columns of fixed width are read together, other columns one by one.

    Raises DataError if the columns exceed the limits.
    """
    source.check_sizes(names)
    types = {name: source.schema.field(name).type for name in names}
    texts = [name for name in names if holds_text(types[name])]
    fixed = [name for name in names if _has_fixed_width(types[name])]
    others = [name for name in names if name not in {*texts, *fixed}]
    batch_rows = _rows_a_batch(source, others)
    # The file is opened once, because opening it takes long if it has thousands of columns.
    with source.opened(dictionaries=texts) as file:
        reader = _ColumnReader(source, file)
        columns = reader.columns(fixed, FIXED_ROWS)
        for name in texts:
            columns[name] = reader.texts(name)
        for name in others:
            columns |= reader.columns([name], batch_rows[name])
    return columns


@dataclass
class _ColumnReader:
    """Reads columns of an open parquet file, and counts their bytes.

    ``file`` reads texts as dictionary references. Raises DataError if the bytes exceed the limit.
    """

    source: ParquetSource
    file: pq.ParquetFile
    bytes_read: int = 0

    def columns(self, names: Sequence[str], batch_rows: int) -> dict[str, pa.ChunkedArray]:
        """Some columns, read together in batches of rows."""
        if not names:
            return {}
        batches = []
        for batch in self.file.iter_batches(batch_rows, columns=list(names), use_threads=False):
            batches.append(batch)
            self._count(batch.nbytes)
        return self._joined(batches, names)

    def texts(self, name: str) -> pa.ChunkedArray:
        """A column of texts.

        A file may store a text once and use it in all rows. Rows are therefore read as references
        to texts, and the bytes of the texts are counted before the references are replaced.
        """
        batches = list(self.file.iter_batches(FIXED_ROWS, columns=[name], use_threads=False))
        column = self._joined(batches, [name])[name]
        if not pa.types.is_dictionary(column.type):
            self._count(column.nbytes)
            return column
        for chunk in column.chunks:
            lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
            self._count((pc.sum(lengths).as_py() or 0) + chunk.indices.nbytes)
        return column.cast(column.type.value_type)

    def _count(self, count: int) -> None:
        self.bytes_read += count
        check_size(self.source.path, self.bytes_read)
        check_ratio(self.source.path, self.bytes_read, self.source.path.stat().st_size)

    def _joined(
        self, batches: Sequence[pa.RecordBatch], names: Sequence[str]
    ) -> dict[str, pa.ChunkedArray]:
        """The columns of all batches; DataError if the number of rows contradicts the metadata."""
        self.source.check_row_count(sum(map(len, batches)))
        columns = {}
        for name in names:
            chunks = [batch.column(name) for batch in batches]
            arrow_type = self.source.schema.field(name).type
            if chunks:
                arrow_type = chunks[0].type  # it may be dictionary-encoded
            columns[name] = pa.chunked_array(chunks, arrow_type)
        return columns


def _rows_a_batch(source: ParquetSource, names: Sequence[str]) -> dict[str, int]:
    """The number of rows in a batch of lists, by column, from the numbers of values in the
    metadata.
    """
    values = Counter(dict.fromkeys(names, 0))
    for chunk in source.chunks(names):
        values[_column_of(chunk.path_in_schema, values)] += chunk.num_values
    batch_rows = {}
    for name, count in values.items():
        bytes_a_row = max(1, 8 * count // max(1, source.metadata.num_rows))
        batch_rows[name] = min(FIXED_ROWS, max(1, BATCH_BYTES // bytes_a_row))
    return batch_rows


def _column_of(path: str, names: Collection[str]) -> str:
    """The column to which a stored column belongs; "" if it belongs to none of ``names``.

    >>> _column_of("a.list.element", {"a", "b"}), _column_of("c", {"a", "b"})
    ('a', '')
    """
    end = len(path)
    while end > 0:
        if path[:end] in names:
            return path[:end]
        end = path.rfind(".", 0, end)
    return ""


def _has_fixed_width(arrow_type: pa.DataType) -> bool:
    """Whether all values of a column have the same width, so that no single value can be large."""
    types = pa.types
    if types.is_fixed_size_list(arrow_type):
        return arrow_type.list_size <= 4096 and _has_fixed_width(arrow_type.value_type)
    is_number = types.is_primitive(arrow_type) or types.is_decimal(arrow_type)
    return bool(is_number or types.is_null(arrow_type))


# Columns of encoded images, which are read a few rows at a time.


IMAGES_AT_ONCE = 16
"""The number of rows in a batch. It is 1 if a file has a dictionary of its images. Such a file may
store an image once and refer to it in all rows, so that the images of k rows may take k times its
bytes.
"""


def _labelled_images(source: ParquetSource, image: str, label: str) -> Iterator[LabelledImage]:
    """Each row's encoded image and label, from one file."""
    in_file = stored_names(source.schema)
    image = in_file.get(image, image)
    label = in_file.get(label, label)
    _check_label_column(source, label)
    parts = _image_parts(source, image)
    names = [*parts, label]
    source.check_sizes(names)

    image_type = source.schema.field(image).type
    stored_bytes = source.path.stat().st_size
    batch_size = IMAGES_AT_ONCE
    if any(chunk.has_dictionary_page for chunk in source.chunks(parts)):
        batch_size = 1
    count = 0
    unpacked = 0
    with source.opened() as file:
        for batch in file.iter_batches(batch_size=batch_size, columns=names, use_threads=False):
            images = [encoded_image(value, image_type) for value in batch.column(image).to_pylist()]
            labels = batch.column(label).to_pylist()
            count += len(images)
            unpacked += sum(len((encoded or {}).get("bytes") or b"") for encoded in images)
            check_ratio(source.path, unpacked, stored_bytes)
            yield from starmap(LabelledImage, zip(images, labels, strict=True))
    source.check_row_count(count)


def encoded_image(value: Any, arrow_type: pa.DataType) -> dict[str, Any] | None:
    """An image as {"bytes": …} or {"path": …}, from a column of records, bytes or paths."""
    if value is None or pa.types.is_struct(arrow_type):
        return value  # type: ignore[no-any-return]
    if holds_bytes(arrow_type):
        return {"bytes": value}
    return {"path": value}


def _image_parts(source: ParquetSource, name: str) -> list[str]:
    """The columns that contain images, or the parts of such a column: bytes, or paths of files.

    Raises DataError for other types.
    """
    arrow_type = source.column_type(name)
    check_image_type(str(source.path), name, arrow_type)
    if pa.types.is_struct(arrow_type):
        return [f"{name}.{part}" for part in _parts_of_images(arrow_type)]
    return [name]


def check_image_type(source: str, name: str, arrow_type: pa.DataType) -> None:
    """Raise DataError for a column that holds neither encoded images nor the paths of images."""
    is_readable = holds_bytes(arrow_type) or holds_text(arrow_type)
    if pa.types.is_struct(arrow_type):
        is_readable = bool(_parts_of_images(arrow_type))
    if not is_readable:
        raise DataError(
            f"{source}: column {name!r} holds {str(arrow_type)[:100]}, not encoded images; write "
            "the data again with encoded images, or correct data.image_column"
        )


def _parts_of_images(arrow_type: pa.StructType) -> list[str]:
    """The parts of a column of records that images are read from: bytes, or paths of files."""
    fields = [arrow_type.field(index) for index in range(arrow_type.num_fields)]
    return [
        field.name
        for field in fields
        if field.name in ("bytes", "path") and (holds_bytes(field.type) or holds_text(field.type))
    ]


def _check_label_column(source: ParquetSource, name: str) -> None:
    """Raise DataError for a column that holds neither numbers nor names."""
    arrow_type = source.column_type(name)
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    if not (holds_numbers(arrow_type) or holds_text(arrow_type) or pa.types.is_null(arrow_type)):
        raise DataError(
            f"{source.path}: column {name!r} holds {str(arrow_type)[:100]}, not class ids or "
            "names; set data.label_column"
        )


# CSV files: separators, missing values, and values that are not numbers.


CSV_SUFFIXES = (".csv", ".tsv")

MISSING_TEXTS = ("?", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")
"""The texts that denote missing values in a CSV file, in addition to an empty field.

In a column of texts, quoted ones are ordinary texts.
"""

SEPARATORS = ",;\t"
"""The possible separators; the most frequent one in the first line is used."""

HEADER_BYTES = 1 << 20
"""The number of bytes at the start of a file that must contain its first line."""


@dataclass(frozen=True)
class CsvFrame(FileFrame):
    """The concatenated rows of CSV files in UTF-8 with a header line."""

    texts: tuple[str, ...] = ()
    """The columns that are read as text even if all their values are numbers."""

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of all files; if the types of a column differ, the first file's type."""
        fields: dict[str, list[pa.Field]] = {}
        for table in self._tables:
            for field in table.schema:
                fields.setdefault(field.name, []).append(field)
        return pa.schema([_common_field(candidates) for candidates in fields.values()])

    def check_complete(self, names: Sequence[str]) -> None:
        """Raise DataError if a file lacks one of the columns. Otherwise, its values are missing."""
        for path, table in zip(self.files, self._tables, strict=True):
            absent = [name for name in names if name not in (FILE, *table.column_names)]
            if absent:
                raise DataError(
                    f"{path} has no column {absent[0]!r}, unlike other files of its split; add the "
                    "column, or list the columns to read in data.columns"
                )

    def _tables_of_files(self, names: Sequence[str]) -> list[pa.Table]:
        """Those of the columns that a file has, for each file."""
        tables = []
        for table in self._tables:
            present = [name for name in names if name in table.column_names]
            tables.append(table.select(present))
        return tables

    @property
    def text_columns(self) -> set[str]:
        """The columns that are text in any of the files."""
        fields = chain.from_iterable(table.schema for table in self._tables)
        return {field.name for field in fields if holds_text(field.type)}

    def missing_text_at(self, name: str, row: int) -> str:
        """The text that denotes the missing value in a row, such as "NA"; empty for an empty field.

        The file is read again without treating any text as missing.
        """
        for path, table in zip(self.files, self._tables, strict=True):
            if row < len(table):
                texts = _parsed_csv(
                    path, _separator(path), null_values=[], quoted_strings_can_be_null=False
                )
                return str(texts[table.column_names.index(name)][row].as_py() or "").strip()
            row -= len(table)
        raise IndexError(f"there is no row {row}")

    @property
    def _file_rows(self) -> list[int]:
        """The number of rows in each file."""
        return [len(table) for table in self._tables]

    @cached_property
    def _tables(self) -> list[pa.Table]:
        return [csv_table(path, self.options, self.texts) for path in self.files]


def with_same_texts(frames: Mapping[str, Frame], names: Collection[str]) -> dict[str, Frame]:
    """The frames of all splits, in which those of the columns that are text in one CSV file are
    text in all.

    Otherwise, the code 01 would become 1 in a split that has no code such as A1. Files of one split
    must have the same types.
    """
    csv_frames = {split: frame for split, frame in frames.items() if isinstance(frame, CsvFrame)}
    text_columns: set[str] = set()
    for frame in csv_frames.values():
        text_columns |= frame.text_columns & set(names)

    same = dict(frames)
    for split, frame in csv_frames.items():
        numeric = text_columns - frame.text_columns
        if numeric:
            same[split] = replace(frame, texts=tuple(sorted(numeric)))
    return same


def csv_table(
    path: Path, options: ReadingOptions = DEFAULT_OPTIONS, texts: Collection[str] = ()
) -> pa.Table:
    """The columns of a CSV file, with stripped names in Unicode normal form.

    texts: the columns to read as text even if all their values are numbers. Raises DataError for a
    file that is not CSV.
    """
    with file_errors(path):
        check_size(path, 8 * path.stat().st_size)
        _check_first_line(path)
        separator = _separator(path)
        try:
            table = _parsed_csv(path, separator, **_conversion(options))
            # Arrow decodes names only when they are accessed.
            names = [nfc(name.strip()) for name in table.column_names]
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise DataError(
                f"{path} cannot be read as CSV ({on_one_line(error)}); it needs a header "
                "line, commas (or semicolons, or tabs) between values, and UTF-8"
            ) from error
        _check_unique(path, names)
        for field in table.schema:
            if holds_bytes(field.type):
                raise DataError(
                    f"{path}, column {field.name!r}, is not in UTF-8; save the file as CSV in UTF-8"
                )
        coded = [column for column, codes in options.categorical if any(map(_is_code, codes))]
        numeric_texts = [
            stored
            for stored, name in zip(table.column_names, names, strict=True)
            if name in (*texts, *coded) and not holds_text(table.schema.field(stored).type)
        ]
        table = _with_texts(path, separator, options, table, numeric_texts)
    return with_strays(str(path), table.rename_columns(names), options.decimal)


def _is_code(category: Value) -> bool:
    """Whether a declared category is a text that changes if it is read as a number or a truth
    value, such as 01 and true.
    """
    if not isinstance(category, str):
        return False
    if re.match(NUMBER, category):
        return category_name(float(category)) != category
    return category in ("true", "false", "TRUE", "FALSE")


def _parsed_csv(path: Path, separator: str, **conversion: Any) -> pa.Table:
    return pa.csv.read_csv(
        path,
        parse_options=pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(**conversion),
    )


def _conversion(options: ReadingOptions) -> dict[str, Any]:
    """Arrow's options for the conversion of values to numbers, texts and missing values."""
    missing = options.missing_values or MISSING_TEXTS
    return {
        "null_values": ["", *(text for text in missing if isinstance(text, str))],
        "strings_can_be_null": True,
        "decimal_point": options.decimal,
    }


def _separator(path: Path) -> str:
    line = _first_line(path).decode(errors="replace")
    without_quoted = re.sub(r'"[^"]*("|$)', "", line)
    return max(SEPARATORS, key=without_quoted.count)


def _check_first_line(path: Path) -> None:
    """Raise DataError for a file in UTF-16, and for a line that tells Excel the separator."""
    line = _first_line(path)
    # In UTF-16, each ASCII character contains a null byte.
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line:
        raise DataError(
            f"{path} seems to be in UTF-16, but must be in UTF-8; save it again as CSV in UTF-8"
        )
    text = line.decode("utf-8-sig", errors="replace").strip(" \r\n")
    if re.fullmatch(r'"?sep=.?"?', text, re.IGNORECASE):
        raise DataError(
            f"{path} starts with the line {text!r}, which only Excel understands, instead of the "
            "names of the columns; delete this line"
        )


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline(HEADER_BYTES)


def _with_texts(
    path: Path,
    separator: str,
    options: ReadingOptions,
    table: pa.Table,
    numeric_texts: Sequence[str],
) -> pa.Table:
    """The table in which quoted texts such as "None" or "NA" are not missing in columns of texts.

    An empty text in quotes remains missing. numeric_texts: columns of numbers that become texts.
    """
    names = [
        field.name
        for field in table.schema
        if pa.types.is_string(field.type) and table[field.name].null_count
    ]
    names += numeric_texts
    if not names:
        return table
    texts = _parsed_csv(
        path,
        separator,
        **_conversion(options),
        quoted_strings_can_be_null=False,
        include_columns=names,
        column_types=dict.fromkeys(names, pa.string()),
    )
    for name in names:
        missing = pa.scalar(None, pa.string())
        column = pc.if_else(pc.equal(texts[name], ""), missing, texts[name])
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _common_field(fields: Sequence[pa.Field]) -> pa.Field:
    """The field of a column in several files: a type that fits all files, or else the first file's
    type, with the first stray value.
    """
    arrow_type = _common_type([field.type for field in fields]) or fields[0].type
    metadata = next((field.metadata for field in fields if field.metadata), None)
    return pa.field(fields[0].name, arrow_type, metadata=metadata)


def _common_type(types: Iterable[pa.DataType]) -> pa.DataType | None:
    """A type that fits values of all the types, or None.

    Arrow has a common type for decimals and integers, but cannot convert the integers to it.
    """
    tables = [pa.table({"": pa.nulls(1, arrow_type)}) for arrow_type in types]
    try:
        return pa.concat_tables(tables, promote_options="permissive").schema.field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None


# Tables of several files.


def _conflict_between_files(tables: Sequence[pa.Table], files: Sequence[Path]) -> str:
    """The message about a column whose type differs in a later file, or ""."""
    first: dict[str, tuple[str, pa.DataType]] = {}
    for path, table in zip(files, tables, strict=True):
        for field in table.schema:
            first_part, first_type = first.setdefault(field.name, (path.name, field.type))
            if pa.types.is_null(first_type):
                first[field.name] = (path.name, field.type)
            elif _common_type([first_type, field.type]) is None:
                return type_conflict(str(path), field.name, field.type, first_part, first_type)
    return ""


def with_missing(
    table: pa.Table, values: Sequence[str | int | float], identifiers: Collection[str] = ()
) -> pa.Table:
    """Mark some values of a table as missing: numbers in numeric columns, texts in others.

    identifiers: the columns in which numbers do not mark missing values, such as that of labels.
    """
    if not values:
        return table
    for index, field in enumerate(table.schema):
        marks = values
        if field.name in identifiers:
            marks = [value for value in values if isinstance(value, str)]
        column = table[field.name]
        is_missing = _is_marked(column, marks)
        if is_missing is not None:
            missing = pa.scalar(None, field.type)
            table = table.set_column(index, field, pc.if_else(is_missing, missing, column))
    return table


def _is_marked(
    column: pa.ChunkedArray, marks: Sequence[str | int | float]
) -> pa.ChunkedArray | None:
    """A mask of the values that are among the marks; None if no value can be."""
    numbers = [float(mark) for mark in marks if not isinstance(mark, str)]
    if holds_numbers(column.type) and numbers:
        as_floats = column.cast(pa.float64(), safe=False)
        return pc.is_in(as_floats, pa.array(numbers, pa.float64()))
    if holds_text(column.type) and marks:
        return pc.is_in(column.cast(pa.string()), pa.array(map(str, marks), pa.string()))
    return None


def name_of_files(files: Collection[Path], name: Path | str) -> str:
    """The name of data in messages: the file if there is only one, else ``name``."""
    if len(files) != 1:
        return str(name)
    return str(next(iter(files)))
