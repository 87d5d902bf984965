"""Columns of a CSV file that are texts only because a few of their values are no numbers: which one
is the first.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from fedstill.data.sources.column_types import holds_text

LOOKED_AT = 1000
"""Values of a column by which it is told what the others are meant to be."""

NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
LIKE = (
    rf"{NUMBER}|^\s*[<>≤≥~]?\s*[-+]?\d+([.,]\d+)?\s*%?\s*$|^\s*[-+]?\d{{1,3}}([.,' "
    rf"]\d{{3}})+([.,]\d+)?\s*$"
)
"""What is meant as a number: one, or such as 12 %, < 0.5, 0,5 and 1,234."""

KEY = b"stray"
"""Where a column's field says which of its values is no number."""


def with_strays(path: Path, table: pa.Table) -> pa.Table:
    """The table; a column of texts most of which are numbers says in its field which is the first
    that is not.
    """
    fields = []
    for field, column in zip(table.schema, table.columns, strict=True):
        said = _first_stray(column) if holds_text(field.type) else ""
        fields.append(field.with_metadata({KEY: f"{path}: {said}"}) if said else field)
    return pa.Table.from_arrays(table.columns, schema=pa.schema(fields))


def stray_of(field: pa.Field) -> str:
    """``FILE: example 3 has 'k.A.'``: the first value that is no number in a column of such; empty
    if there is none.
    """
    said: bytes = (field.metadata or {}).get(KEY, b"")
    return said.decode()


def _first_stray(column: pa.ChunkedArray) -> str:
    some = column.slice(0, LOOKED_AT).drop_null()
    meant = pc.sum(pc.match_substring_regex(some, LIKE)).as_py() or 0
    if 2 * meant <= len(some):
        return ""
    at = pc.index(pc.match_substring_regex(column, NUMBER), False).as_py()
    return f"example {at} has {column[at].as_py()[:60]!r}" if at >= 0 else ""
