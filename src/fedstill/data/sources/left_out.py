"""Columns that no example is made of though nobody said so: the index of a pandas table, times,
what is no number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import pyarrow as pa

from fedstill.data.sources.column_types import holds_numbers, said_kind

INDEX = "the index of a pandas table"
SAID = 12
"""Columns that are named; the others are counted."""


def index_columns(schema: pa.Schema) -> set[str]:
    """The columns that are a pandas table's index, as the file says it; of a CSV file, the one
    without a name.

    Rows that were sorted or chosen by their labels have an index that tells these.
    """
    try:
        named = json.loads((schema.metadata or {}).get(b"pandas", b"{}")).get("index_columns", [])
    except (ValueError, AttributeError):
        named = []
    return {name for name in named if isinstance(name, str)} | {""}


def left_out(kinds: Mapping[str, pa.DataType], index: Iterable[str]) -> str:
    """``left out: when (timestamp)``: of columns that were found and not asked for; empty if there
    are none.
    """
    each = [
        f"{name or 'a column without a name'} ({_why(name, kind, index)})"
        for name, kind in kinds.items()
    ]
    more = f" and {len(each) - SAID} more" if len(each) > SAID else ""
    return f"left out: {', '.join(each[:SAID])}{more}" if each else ""


def _why(name: str, kind: pa.DataType, index: Iterable[str]) -> str:
    return INDEX if name in index and holds_numbers(kind) else said_kind(kind)
