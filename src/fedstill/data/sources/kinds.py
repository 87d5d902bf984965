"""What the examples in some columns are, told by what the columns hold: images, a table, vectors,
series or texts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from fedstill.data.form import Form
from fedstill.data.sources.column_types import holds_numbers, holds_text, list_depth
from fedstill.data.sources.columns import Columns, is_image, label_column
from fedstill.data.sources.left_out import index_columns, left_out
from fedstill.data.sources.stray import stray_of
from fedstill.errors import DataError


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
