"""What a column holds, told by its Arrow type: numbers, texts, lists of numbers, or what no example
is made of.
"""

from __future__ import annotations

import pyarrow as pa

SAID = {
    "timestamp": pa.types.is_timestamp,
    "date": pa.types.is_date,
    "time": pa.types.is_time,
    "duration": pa.types.is_duration,
    "no values": pa.types.is_null,
    "bytes": lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind),
    "lists": lambda kind: pa.types.is_nested(kind) and not pa.types.is_struct(kind),
}
"""Kinds of values that are neither numbers nor texts, by the word that people use."""


def holds_numbers(kind: pa.DataType) -> bool:
    """Whether a column holds numbers, truth values and decimals included."""
    some = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(is_it(kind) for is_it in some)


def holds_text(kind: pa.DataType) -> bool:
    """Whether a column holds texts, each written out or once for many rows."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def list_depth(kind: pa.DataType) -> int:
    """1 for lists of numbers, 2 for lists of such lists, else 0."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = kind.value_type
        return 1 if holds_numbers(inner) else 1 + list_depth(inner) if list_depth(inner) == 1 else 0
    return 0


def said_kind(kind: pa.DataType) -> str:
    """What a column holds, for people.

    >>> said_kind(pa.int64()), said_kind(pa.time32("s")), said_kind(pa.string())
    ('numbers', 'time', 'text')
    """
    if holds_numbers(kind) or holds_text(kind):
        return "numbers" if holds_numbers(kind) else "text"
    return next((word for word, is_it in SAID.items() if is_it(kind)), str(kind)[:60])


def unlike(where: str, name: str, kind: pa.DataType, first: str, other: pa.DataType) -> str:
    """What is said where two files, or splits, hold something else in one column."""
    said, theirs = said_kind(kind), said_kind(other)
    if said == theirs:
        said, theirs = str(kind)[:60], str(other)[:60]
    return f"{where}: column {name!r} holds {said}, and in {first} {theirs}; make them alike"
