"""What the examples in some columns are, told by what the columns hold: images, a table, vectors, series or texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from fedstill.data.form import Form
from fedstill.data.sources.columns import Columns, is_image, label_column
from fedstill.errors import DataError


@dataclass(frozen=True)
class InputColumns:
    """Which columns to read, and as what: the form with its kind told, the label, the class names of the file.

    ``known``: whether there are checksums to compare with.
    """

    form: Form
    label: str
    classes: tuple[str, ...] | None
    known: bool = False

    @property
    def values(self) -> list[str]:
        """The columns that examples are made of."""
        form = self.form
        return [form.input] if form.input else [*form.columns]

    @property
    def names(self) -> list[str]:
        """All columns to read."""
        return list(dict.fromkeys([*self.values, self.label, *([self.form.owner] if self.form.owner else [])]))


def input_columns(what: str, schema: pa.Schema, columns: Columns) -> InputColumns | None:
    """What the examples are; None for images. Raises DataError where that is not clear, naming the key to set."""
    import datasets

    form = columns.form
    features: Mapping[str, Any] = dict(datasets.Features.from_arrow_schema(schema))
    if form.kind == "image" or columns.image or (form.kind == "auto" and any(map(is_image, features.values()))):
        return None
    if form.owner and form.owner not in features:
        raise DataError(no_owner(what, form, features))
    label, classes = label_column(what, features, columns)
    named = {name for name, _ in form.categorical}
    rest = {f.name: f.type for f in schema if f.name not in (label, form.owner)}
    asked = {"columns": form.columns, "categorical": named, "input_column": filter(None, [form.input])}
    for key, name in ((key, name) for key, each in asked.items() for name in each):
        if name not in rest:
            raise DataError(f"{what} has no column {name!r} among {', '.join(rest) or 'none'}; correct data.{key}")
    form = _with_kind(what, form, rest, named)
    if form.kind == "table" and not form.columns:
        form = replace(form, columns=tuple(n for n, k in rest.items() if n in named or _is_number(k)))
    if form.kind == "table" and (strange := [n for n in form.columns if n not in named and not _is_number(rest[n])]):
        raise DataError(
            f"{what}: column {strange[0]!r} holds {str(rest[strange[0]])[:60]}, not numbers; name it in "
            "data.categorical if its values are names, or leave it out of data.columns"
        )
    return InputColumns(form, label, classes, columns.known)


def no_owner(what: str, form: Form, columns: Collection[str]) -> str:
    """What is said where the column of owners, or of times, is not there."""
    todo = "correct time_column in site.toml" if form.cuts else "set partition.column"
    return f"{what} has no column {form.owner!r} among {', '.join(columns)}; {todo}"


def _with_kind(what: str, form: Form, rest: Mapping[str, pa.DataType], named: set[str]) -> Form:
    """The form with its kind, and with the one column of values of what is no table."""
    if form.columns or named or form.kind == "table":
        if form.kind not in ("auto", "table") or form.input:
            raise DataError(f"{what}: data.columns and data.categorical are for tables; leave them or data.kind out")
        return replace(form, kind="table")
    depths = {name: _depth(kind) for name, kind in rest.items()}
    of_kind = {
        "vector": [n for n, d in depths.items() if d == 1],
        "series": [n for n, d in depths.items() if d == 2],
        "text": [n for n, k in rest.items() if _is_text(k)],
    }
    if form.input:
        fitting = [kind for kind, names in of_kind.items() if form.input in names]
        if not fitting or form.kind not in ("auto", *fitting):
            raise DataError(
                f"{what}: column {form.input!r} holds {str(rest[form.input])[:60]}, not texts or lists of numbers"
            )
        return replace(form, kind=fitting[0])  # type: ignore[arg-type]
    numbers = [n for n, k in rest.items() if _is_number(k)]
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
        has = f"{len(names)} such columns ({', '.join(names)})" if names else f"none among {', '.join(rest) or 'none'}"
        raise DataError(
            f"{what}: data.kind = {kind!r} needs one column of it, and there are {has}; set data.input_column"
        )
    return names[0]


def _unclear(what: str, rest: Mapping[str, pa.DataType], texts: list[str], numbers: list[str]) -> str:
    if texts and numbers:
        return (
            f"{what}: it is not clear what an example is: columns of numbers ({', '.join(numbers)[:200]}) and of text "
            f"({', '.join(texts)[:200]}); set data.input_column to the text column, or data.columns to those of a "
            "table (names in them: data.categorical; whose they are: partition.column)"
        )
    return (
        f"{what}: it is not clear what an example is, among columns {', '.join(rest)[:300] or 'none'}; set "
        "data.input_column to one column of texts or lists, or data.columns to those of a table"
    )


def _depth(kind: pa.DataType) -> int:
    """1 for lists of numbers, 2 for lists of such lists, else 0."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = kind.value_type
        return 1 if _is_number(inner) else 1 + _depth(inner) if _depth(inner) == 1 else 0
    return 0


def _is_number(kind: pa.DataType) -> bool:
    return any(is_it(kind) for is_it in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
