"""One CSV file as an Arrow table: what stands between its values, what is missing, which values are
no numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from fedstill.data.sources.limits import in_one_line, refuse_large
from fedstill.data.sources.stray import with_strays
from fedstill.errors import DataError, on_one_line

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
