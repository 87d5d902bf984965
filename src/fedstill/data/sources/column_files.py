"""Columns of parquet and CSV files as Arrow tables; their size is checked first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from fedstill.core.errors import DataError, on_one_line
from fedstill.data.sources.limits import EXAMPLE_BYTES, in_one_line, refuse_large, refuse_ratio
from fedstill.data.sources.schema import unlike, with_strays

# One CSV file as an Arrow table: what stands between its values, what is missing, which values are
# no numbers.


UNKNOWN = ["", "?", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"]
"""What stands in a CSV file where a value is missing; in quotes, in a column of texts, it is a
text.
"""

SEPARATORS = ",;\t"
"""What may stand between values: of these, what is most often in the first line."""

HEADER_BYTES = 1 << 20
"""The first bytes of a file, in which its first line is looked for."""


def read_one_csv(path: Path) -> pa.Table:
    """A file's columns; names without blanks around them. Raises DataError for what is no such
    file.
    """
    with in_one_line(path):
        refuse_large(path, 8 * path.stat().st_size)
        separator = _separator(path)
        try:
            table = _read(path, separator)
            # Arrow decodes names when they are asked for
            names = [name.strip() for name in table.column_names]
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise DataError(
                f"{path} cannot be read as CSV ({on_one_line(error)}); it needs a first line of "
                "column names, commas "
                "(or semicolons, or tabs) between values, and UTF-8"
            ) from error
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            raise DataError(f"{path} has the column {twice[0]!r} twice; rename one of them")
        for field in table.schema:
            if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
                raise DataError(
                    f"{path}, column {field.name!r}, is not in UTF-8; save the file as CSV in UTF-8"
                )
        table = _with_quoted(path, separator, table)
    return with_strays(path, table.rename_columns(names))


def _read(path: Path, separator: str, **how: Any) -> pa.Table:
    return pa.csv.read_csv(
        path,
        parse_options=pa.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(null_values=UNKNOWN, strings_can_be_null=True, **how),
    )


def _separator(path: Path) -> str:
    with path.open("rb") as file:
        first = file.readline(HEADER_BYTES).decode(errors="replace")
    plain = re.sub(r'"[^"]*("|$)', "", first)
    return max(SEPARATORS, key=plain.count)


def _with_quoted(path: Path, separator: str, table: pa.Table) -> pa.Table:
    """The table; in columns of texts a quoted "None" or "NA" is a name, while nothing in quotes
    stays missing.
    """
    names = [
        f.name for f in table.schema if pa.types.is_string(f.type) and table[f.name].null_count
    ]
    if not names:
        return table
    types = dict.fromkeys(names, pa.string())
    again = _read(
        path, separator, quoted_strings_can_be_null=False, include_columns=names, column_types=types
    )
    for name in names:
        own = pc.if_else(pc.equal(again[name], ""), pa.scalar(None, pa.string()), again[name])
        table = table.set_column(table.column_names.index(name), name, own)
    return table


# Columns of parquet and CSV files as Arrow tables, after their claims about their size have been
# looked at.


ROWS_AT_ONCE = 4096
"""Rows of numbers that are read at once."""

PAGE_BUFFER = 1 << 20
"""Bytes of a column that are read ahead, so that no whole row group is held."""


class Frame(Protocol):
    """The rows of a split, by column."""

    @property
    def schema(self) -> pa.Schema:
        """The columns and what they hold."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Where they are; none on the hub."""

    def read(self, names: Sequence[str], gaps: bool = False) -> pa.Table:
        """Some columns, all rows, in their order.

        gaps: whether a CSV file may lack one of them, whose values are missing then.
        """


@dataclass(frozen=True)
class ParquetFrame:
    """Parquet files of one schema, one below another."""

    files: tuple[Path, ...]

    @cached_property
    def schema(self) -> pa.Schema:
        """The first file's columns."""
        with in_one_line(self.files[0]):
            return pq.read_schema(self.files[0])

    def read(self, names: Sequence[str], gaps: bool = False) -> pa.Table:
        """Some columns of all files; raises DataError for a file that lacks one, or is larger than
        may be read.
        """
        return _joined([self._one(path, list(names)) for path in self.files], self.files)

    def _one(self, path: Path, names: list[str]) -> pa.Table:
        with in_one_line(path):
            about, schema = claims(path), pq.read_schema(path)
            for name in names:
                if (count := len(schema.get_all_field_indices(name))) != 1:
                    raise DataError(
                        f"{path} must have exactly one column {name!r}, as {self.files[0].name} "
                        f"has; it has {count}; "
                        "write it again"
                    )
            refuse_claims(path, about, [f"{name}." for name in names] + names)
            rows = ROWS_AT_ONCE if all(_fixed(schema.field(name).type) for name in names) else 1
            batches, unpacked, stored = [], 0, path.stat().st_size
            with pq.ParquetFile(path, buffer_size=PAGE_BUFFER, pre_buffer=False) as file:
                for batch in file.iter_batches(batch_size=rows, columns=names, use_threads=False):
                    batches.append(batch)
                    unpacked += batch.nbytes
                    refuse_large(path, unpacked)
                    refuse_ratio(path, unpacked, stored)
            whole = pa.Table.from_batches(
                batches, pa.schema([schema.field(name) for name in names])
            )
        if len(whole) != about.num_rows:
            raise DataError(
                f"{path} says that it holds {about.num_rows:,} rows, and holds {len(whole):,}"
            )
        return whole.combine_chunks()


@dataclass(frozen=True)
class CsvFrame:
    """CSV files with a line of column names, one below another; commas, quotes, UTF-8."""

    files: tuple[Path, ...]

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns, and what their values look like; of files that disagree in a column, the
        first one's.
        """
        fields: dict[str, list[pa.Field]] = {}
        for table in self._each:
            for field in table.schema:
                fields.setdefault(field.name, []).append(field)
        return pa.schema([_agreed(own) for own in fields.values()])

    def read(self, names: Sequence[str], gaps: bool = False) -> pa.Table:
        """Some columns of all files. Raises DataError where files differ in them."""
        for path, table in zip(self.files, self._each, strict=True):
            if not gaps and (lacking := [name for name in names if name not in table.column_names]):
                raise DataError(
                    f"{path} has no column {lacking[0]!r}, which others of its split have; write "
                    "it there, or name the "
                    "columns to read in data.columns"
                )
        some = [
            table.select([name for name in names if name in table.column_names])
            for table in self._each
        ]
        return _joined(some, self.files).select(list(names)).combine_chunks()

    @property
    def rows(self) -> int:
        """How many there are in all files."""
        return sum(map(len, self._each))

    @cached_property
    def _each(self) -> list[pa.Table]:
        return [read_one_csv(path) for path in self.files]


def _agreed(fields: Sequence[pa.Field]) -> pa.Field:
    """A column of several files: a type that all of them have, or else the first one's; a stray
    value of any.
    """
    try:
        one = pa.unify_schemas(
            [pa.schema([field]) for field in fields], promote_options="permissive"
        ).field(0)
    except pa.ArrowTypeError:
        one = fields[0]
    return one.with_metadata(next((field.metadata for field in fields if field.metadata), None))


def _joined(tables: Sequence[pa.Table], files: Sequence[Path]) -> pa.Table:
    """Tables one below another; raises DataError for a column that holds something else in another
    file.
    """
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        first: dict[str, tuple[str, pa.DataType]] = {}
        for path, table in zip(files, tables, strict=True):
            for field in table.schema:
                where, kind = first.setdefault(field.name, (path.name, field.type))
                if pa.types.is_null(kind):
                    first[field.name] = (path.name, field.type)
                elif not _mergeable(kind, field.type):
                    raise DataError(
                        unlike(str(path), field.name, field.type, where, kind)
                    ) from None
        raise


def _mergeable(kind: pa.DataType, other: pa.DataType) -> bool:
    try:
        pa.unify_schemas(
            [pa.schema([("", kind)]), pa.schema([("", other)])], promote_options="permissive"
        )
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return False
    return True


def only_file(files: Mapping[str, Sequence[Path]]) -> Path | None:
    """The file of {split: files} if there is but one."""
    every = [path for paths in files.values() for path in paths]
    return every[0] if len(every) == 1 else None


def claims(path: Path) -> pq.FileMetaData:
    """What a parquet file says of itself; DataError if its rows, whatever they hold, would be too
    many.
    """
    with in_one_line(path):
        about = pq.read_metadata(path)
    groups = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
    if about.num_rows != sum(groups) or min(groups, default=0) < 0:
        raise DataError(
            f"{path} says that it holds {about.num_rows:,} rows, and its parts {groups}; write it "
            "again"
        )
    refuse_large(path, about.num_rows * EXAMPLE_BYTES)
    return about


def refuse_claims(path: Path, about: pq.FileMetaData, wanted: Sequence[str]) -> None:
    """Raise DataError for columns that say that they unpack to far more than the file holds.

    wanted: paths of columns; one that ends with a point stands for all below it.
    """
    paths = [(i, about.schema.column(i).path) for i in range(len(about.schema))]
    below = tuple(w for w in wanted if w.endswith("."))
    places = [i for i, path_ in paths if path_ in wanted or path_.startswith(below or ("\0",))]
    chunks = [about.row_group(g).column(i) for g in range(about.num_row_groups) for i in places]
    sizes = [chunk.total_uncompressed_size for chunk in chunks]
    if min(sizes, default=0) < 0:
        raise DataError(f"{path} says that a column holds {min(sizes)} bytes; write it again")
    refuse_ratio(path, sum(sizes), path.stat().st_size)


def _fixed(kind: pa.DataType) -> bool:
    """Whether all values of a column take the same room, so that none can be large by itself."""
    if pa.types.is_fixed_size_list(kind):
        return kind.list_size <= ROWS_AT_ONCE and _fixed(kind.value_type)
    return bool(pa.types.is_primitive(kind) or pa.types.is_null(kind))
