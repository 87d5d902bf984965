"""Columns of parquet and CSV files as Arrow tables, after their claims about their size have been looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from fedstill.data.sources.limits import EXAMPLE_BYTES, in_one_line, refuse_large, refuse_ratio
from fedstill.errors import DataError, on_one_line

ROWS_AT_ONCE = 4096
"""Rows of numbers that are read at once."""

PAGE_BUFFER = 1 << 20
"""Bytes of a column that are read ahead, so that no whole row group is held."""

UNKNOWN = ["", "?", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"]
"""What stands in a CSV file where a value is missing."""


class Frame(Protocol):
    """The rows of a split, by column."""

    @property
    def schema(self) -> pa.Schema:
        """The columns and what they hold."""

    def read(self, names: Sequence[str]) -> pa.Table:
        """Some columns, all rows, in their order."""


@dataclass(frozen=True)
class ParquetFrame:
    """Parquet files of one schema, one below another."""

    files: tuple[Path, ...]

    @cached_property
    def schema(self) -> pa.Schema:
        """The first file's columns."""
        with in_one_line(self.files[0]):
            return pq.read_schema(self.files[0])

    def read(self, names: Sequence[str]) -> pa.Table:
        """Some columns of all files; raises DataError for a file that lacks one, or is larger than may be read."""
        return pa.concat_tables([self._one(path, list(names)) for path in self.files], promote_options="permissive")

    def _one(self, path: Path, names: list[str]) -> pa.Table:
        with in_one_line(path):
            about, schema = claims(path), pq.read_schema(path)
            for name in names:
                if len(schema.get_all_field_indices(name)) != 1:
                    raise DataError(f"{path} has not one column {name!r}, as the first file has; write it again")
            refuse_claims(path, about, [f"{name}." for name in names] + names)
            rows = ROWS_AT_ONCE if all(_fixed(schema.field(name).type) for name in names) else 1
            batches, unpacked, stored = [], 0, path.stat().st_size
            with pq.ParquetFile(path, buffer_size=PAGE_BUFFER, pre_buffer=False) as file:
                for batch in file.iter_batches(batch_size=rows, columns=names, use_threads=False):
                    batches.append(batch)
                    unpacked += batch.nbytes
                    refuse_large(path, unpacked)
                    refuse_ratio(path, unpacked, stored)
            whole = pa.Table.from_batches(batches, pa.schema([schema.field(name) for name in names]))
        if len(whole) != about.num_rows:
            raise DataError(f"{path} says that it holds {about.num_rows:,} rows, and holds {len(whole):,}")
        return whole.combine_chunks()


@dataclass(frozen=True)
class CsvFrame:
    """CSV files with a line of column names, one below another; commas, quotes, UTF-8."""

    files: tuple[Path, ...]

    @property
    def schema(self) -> pa.Schema:
        """The columns, and what their values look like."""
        return self._all.schema

    def read(self, names: Sequence[str]) -> pa.Table:
        """Some columns of all files."""
        return self._all.select(list(names)).combine_chunks()

    @cached_property
    def _all(self) -> pa.Table:
        return pa.concat_tables([_csv(path) for path in self.files], promote_options="permissive")


def _csv(path: Path) -> pa.Table:
    with in_one_line(path):
        refuse_large(path, 8 * path.stat().st_size)
        try:
            table = pc.read_csv(
                path,
                parse_options=pc.ParseOptions(newlines_in_values=True),
                convert_options=pc.ConvertOptions(null_values=UNKNOWN, strings_can_be_null=True),
            )
            _ = table.column_names  # Arrow decodes names when they are asked for
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise DataError(
                f"{path} cannot be read as CSV ({on_one_line(error)}); it needs a first line of column names, commas "
                "between values, and UTF-8"
            ) from error
        if twice := [name for name, times in Counter(table.column_names).items() if times > 1]:
            raise DataError(f"{path} has the column {twice[0]!r} twice; rename one of them")
        for field in table.schema:
            if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
                raise DataError(f"{path}, column {field.name!r}, is not in UTF-8; save the file as CSV in UTF-8")
    return table


def claims(path: Path) -> pq.FileMetaData:
    """What a parquet file says of itself; DataError if its rows, whatever they hold, would be too many."""
    with in_one_line(path):
        about = pq.read_metadata(path)
    groups = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
    if about.num_rows != sum(groups) or min(groups, default=0) < 0:
        raise DataError(f"{path} says that it holds {about.num_rows:,} rows, and its parts {groups}; write it again")
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
