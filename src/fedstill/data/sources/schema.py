"""The schema of a table: column types, left-out columns, and doubtful columns."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedstill.core.errors import DataError
from fedstill.data.form import Form
from fedstill.data.sources.columns import Columns, is_image, label_column

# What a column holds, told by its Arrow type: numbers, texts, lists of numbers, or what no example
# is made of.


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


# Columns of a CSV file that are texts only because a few of their values are no numbers: which one
# is the first.


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


# Columns that no example is made of though nobody said so: the index of a pandas table, times, what
# is no number.


INDEX = "the index of a pandas table"
MOST_NAMED = 12
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
    more = f" and {len(each) - MOST_NAMED} more" if len(each) > MOST_NAMED else ""
    return f"left out: {', '.join(each[:MOST_NAMED])}{more}" if each else ""


def _why(name: str, kind: pa.DataType, index: Iterable[str]) -> str:
    return INDEX if name in index and holds_numbers(kind) else said_kind(kind)


# What the examples in some columns are, told by what the columns hold: images, a table, vectors,
# series or texts.


@dataclass(frozen=True)
class InputColumns:
    """Which columns to read, and as what: the form with its kind told, the label, the class names
    of the file.

    ``known``: whether there are checksums to compare with. ``unasked``: whether nobody said which
    columns to read; what was left out then is a sentence in ``left``.
    """

    form: Form
    label: str
    classes: tuple[str, ...] | None
    known: bool = False
    unasked: bool = False
    left: str = ""

    @property
    def values(self) -> list[str]:
        """The columns that examples are made of."""
        form = self.form
        return [form.input] if form.input else [*form.columns]

    @property
    def names(self) -> list[str]:
        """All columns to read."""
        return list(
            dict.fromkeys(
                [*self.values, self.label, *([self.form.owner] if self.form.owner else [])]
            )
        )


def input_columns(what: str, schema: pa.Schema, columns: Columns) -> InputColumns | None:
    """What the examples are; None for images. Raises DataError where that is not clear, naming the
    key to set.
    """
    import datasets

    form = columns.form
    features: Mapping[str, Any] = dict(datasets.Features.from_arrow_schema(schema))
    named = {name for name, _ in form.categorical}
    for_table = bool(form.columns or named)
    if form.kind == "image" or columns.image:
        refuse_of_tables(what, form)
        return None
    if (
        form.kind == "auto"
        and not for_table
        and not form.input
        and any(map(is_image, features.values()))
    ):
        return None
    if form.owner and form.owner not in features:
        raise DataError(no_owner(what, form, features))
    label, classes = label_column(what, features, columns)
    every = {f.name: f.type for f in schema if f.name not in (label, form.owner)}
    asked = {
        "columns": form.columns,
        "categorical": named,
        "input_column": [form.input] if form.input else [],
    }
    for key, name in ((key, name) for key, each in asked.items() for name in each):
        if name not in every:
            raise DataError(
                f"{what} has no column {name!r} among {', '.join(every) or 'none'}; correct "
                f"data.{key}"
            )
    index = index_columns(schema)
    rest = {
        n: k
        for n, k in every.items()
        if n not in index or any(n in each for each in asked.values())
    }
    _refuse_strays(schema, form, [n for n in form.columns or rest if n not in named])
    unasked = not form.columns and not form.input
    form = _with_kind(what, form, rest, named)
    if form.kind == "table" and not form.columns:
        form = replace(
            form, columns=tuple(n for n, k in rest.items() if n in named or holds_numbers(k))
        )
    if form.kind == "table" and (
        strange := [n for n in form.columns if n not in named and not holds_numbers(rest[n])]
    ):
        raise DataError(
            f"{what}: column {strange[0]!r} holds {str(rest[strange[0]])[:60]}, not numbers; name "
            "it in "
            "data.categorical if its values are names, or leave it out of data.columns"
        )
    used = {form.input, *form.columns}
    left = left_out({n: k for n, k in every.items() if n not in used}, index) if unasked else ""
    return InputColumns(form, label, classes, columns.known, unasked, left)


def refuse_of_tables(what: str, form: Form) -> None:
    """Raise DataError where images are to be read as what they are not: a table, texts, a column of
    them.
    """
    asked = {
        "data.columns": form.columns,
        "data.categorical": form.categorical,
        "data.input_column": form.input,
    }
    kind = {f"data.kind = {form.kind!r}": form.kind not in ("auto", "image")}
    if key := next((key for key, value in {**asked, **kind}.items() if value), ""):
        raise DataError(
            f"{what} holds images, and {key} is for other data; leave it out, or name a file of "
            "columns"
        )


def _refuse_strays(schema: pa.Schema, form: Form, names: Collection[str]) -> None:
    """Raise DataError for a column of numbers that is one of texts, because of a value that is
    none.
    """
    if form.input or form.kind not in ("auto", "table"):
        return
    for name, said in ((name, stray_of(schema.field(name))) for name in names):
        if said:
            raise DataError(
                f"{said} in column {name!r}, which otherwise holds numbers; write 1234.5, say, or "
                "nothing where it is "
                "unknown; or leave the column out with data.columns; or name it in "
                "data.categorical, if it holds names"
            )


def no_owner(what: str, form: Form, columns: Collection[str]) -> str:
    """What is said where the column of owners, or of times, is not there."""
    todo = "correct time_column in site.toml" if form.cuts else "set partition.column"
    return f"{what} has no column {form.owner!r} among {', '.join(columns)}; {todo}"


def _with_kind(what: str, form: Form, rest: Mapping[str, pa.DataType], named: set[str]) -> Form:
    """The form with its kind, and with the one column of values of what is no table."""
    if form.columns or named or form.kind == "table":
        if form.kind not in ("auto", "table") or form.input:
            raise DataError(
                f"{what}: data.columns and data.categorical are for tables; leave them or "
                "data.kind out"
            )
        return replace(form, kind="table")
    depths = {name: list_depth(kind) for name, kind in rest.items()}
    of_kind = {
        "vector": [n for n, d in depths.items() if d == 1],
        "series": [n for n, d in depths.items() if d == 2],
        "text": [n for n, k in rest.items() if holds_text(k)],
    }
    if form.input:
        fitting = [kind for kind, names in of_kind.items() if form.input in names]
        if not fitting or form.kind not in ("auto", *fitting):
            raise DataError(
                f"{what}: column {form.input!r} holds {str(rest[form.input])[:60]}, not texts or "
                "lists of numbers"
            )
        return replace(form, kind=fitting[0])  # type: ignore[arg-type]
    numbers = [n for n, k in rest.items() if holds_numbers(k)]
    if form.kind != "auto":
        return replace(form, input=_only(what, form.kind, of_kind[form.kind], rest))
    lists = of_kind["vector"] + of_kind["series"]
    if len(lists) == 1:
        return replace(form, kind="vector" if of_kind["vector"] else "series", input=lists[0])
    if len(of_kind["text"]) == 1 and not numbers and not lists:
        return replace(form, kind="text", input=of_kind["text"][0])
    if numbers and not of_kind["text"] and not lists:
        return replace(form, kind="table")
    raise DataError(_unclear(what, rest, of_kind["text"], numbers))


def _only(what: str, kind: str, names: list[str], rest: Mapping[str, pa.DataType]) -> str:
    if len(names) != 1:
        has = (
            f"{len(names)} such columns ({', '.join(names)})"
            if names
            else f"none among {', '.join(rest) or 'none'}"
        )
        raise DataError(
            f"{what}: data.kind = {kind!r} needs one column of it, and there are {has}; set "
            "data.input_column"
        )
    return names[0]


def _unclear(
    what: str, rest: Mapping[str, pa.DataType], texts: list[str], numbers: list[str]
) -> str:
    if texts and numbers:
        return (
            f"{what}: it is not clear what an example is: columns of numbers "
            f"({', '.join(numbers)[:200]}) and of text "
            f"({', '.join(texts)[:200]}); set data.input_column to the text column, or "
            "data.columns to those of a "
            "table (names in them: data.categorical; whose they are: partition.column)"
        )
    return (
        f"{what}: it is not clear what an example is, among columns "
        f"{', '.join(rest)[:300] or 'none'}; set "
        "data.input_column to one column of texts or lists, or data.columns to those of a table"
    )


# Columns of a table that are read, but perhaps not as they are meant: what a run says of them when
# it begins.


NAME_OF_ROWS = re.compile(r"unnamed: ?\d+|(.*[^a-z])?(id|ids|uuid|idx|index|nr|no)", re.IGNORECASE)
CAPITAL_ID = re.compile(r".*[a-z](ID|Id|Nr|No)")
"""How columns are called that number rows: id, patient_id, patientID, Unnamed: 0."""

STEPS = 1024
"""Numbers that span fewer steps of 32 bits than this are looked at: some may have become alike."""


def names_of_rows(table: pa.Table, columns: Sequence[str]) -> list[str]:
    """A sentence for each column of whole numbers that is called as a number of rows is, and
    differs in every row.
    """
    return [
        f"{name}: all {len(table):,} values differ; if it only numbers the rows, leave it out with "
        "data.columns"
        for name in columns
        if (NAME_OF_ROWS.fullmatch(name) or CAPITAL_ID.fullmatch(name))
        and pa.types.is_integer(table[name].type)
        and pc.count_distinct(table[name], mode="all").as_py() == len(table) > 1
    ]


def too_close(table: pa.Table, columns: Sequence[str]) -> list[str]:
    """A sentence for each column whose numbers are alike once they have 32 bits, such as seconds
    since 1970.
    """
    out = []
    for name in (
        name
        for name in columns
        if pa.types.is_integer(table[name].type) or _exact(table[name].type)
    ):
        exact = table[name].drop_null().cast(pa.float64()).to_numpy()
        exact = exact[np.isfinite(exact)]
        if (
            not len(exact)
            or np.ptp(exact) >= STEPS * np.finfo(np.float32).eps * np.abs(exact).max()
        ):
            continue
        before, after = (len(np.unique(values)) for values in (exact, exact.astype(np.float32)))
        if after < before:
            out.append(
                f"{name}: its {before:,} different numbers, from {exact.min():.12g} to "
                f"{exact.max():.12g}, are "
                f"{after:,} in 32 bits; subtract the smallest from all"
            )
    return out


def _exact(kind: pa.DataType) -> bool:
    return bool(pa.types.is_float64(kind) or pa.types.is_decimal(kind))


# Whether the splits of a data set hold the same in the same columns, and call their classes alike.


def refuse_other_types(
    where: str, table: pa.Table, first: str, other: pa.Table, inputs: InputColumns
) -> None:
    """Raise DataError for a column of values that holds something else than in the first split.

    Columns whose values are names may be written as numbers in one and as texts in the other.
    """
    named = {name for name, _ in inputs.form.categorical}
    for name in (name for name in inputs.values if name not in named):
        kind, theirs = table.schema.field(name).type, other.schema.field(name).type
        if not any(map(pa.types.is_null, (kind, theirs))) and said_kind(kind) != said_kind(theirs):
            stray = stray_of(table.schema.field(name)) or stray_of(other.schema.field(name))
            raise DataError(
                unlike(where, name, kind, first, theirs) + (f" ({stray})" if stray else "")
            )


def refuse_other_labels(what: str, labels: Mapping[str, Sequence[int | str]]) -> None:
    """Raise DataError where a split has names for labels and train numbers, or the other way, and
    none is in both.
    """
    train = labels.get("train", ())
    for split, own in labels.items():
        texts = [any(isinstance(label, str) for label in each) for each in (own, train)]
        if train and texts[0] != texts[1] and not {*map(str, own)} & {*map(str, train)}:
            raise DataError(
                f"{what}: the labels of {split} are {_some(own)}, those of train {_some(train)}; "
                "make them alike"
            )


def _some(labels: Sequence[int | str]) -> str:
    each = sorted(set(map(str, labels)))
    return ", ".join(map(repr, each[:3])) + (", …" if len(each) > 3 else "")
