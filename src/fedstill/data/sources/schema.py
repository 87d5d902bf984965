"""The schema of columns: what each column holds, which of them examples are made of, and why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedstill.core.errors import DataError
from fedstill.data.form import FILE, Form, nfc
from fedstill.data.sources.records import Columns
from fedstill.data.table_encoding import float_values

# What a column holds, by its Arrow type.


OTHER_TYPES = {
    "timestamp": pa.types.is_timestamp,
    "date": pa.types.is_date,
    "time": pa.types.is_time,
    "duration": pa.types.is_duration,
    "no values": pa.types.is_null,
    "bytes": lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind),
    "lists": lambda kind: pa.types.is_nested(kind) and not pa.types.is_struct(kind),
}
"""Types that are neither numbers nor text, by the word that messages use."""


def holds_numbers(kind: pa.DataType) -> bool:
    """Whether a column holds numbers, truth values and decimals included."""
    is_integer_or_bool = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    return bool(is_integer_or_bool or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def holds_text(kind: pa.DataType) -> bool:
    """Whether a column holds texts, dictionary-encoded or not."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def list_depth(kind: pa.DataType) -> int:
    """1 for lists of numbers, 2 for lists of such lists, else 0."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list and not pa.types.is_fixed_size_list(kind):
        return 0
    if holds_numbers(kind.value_type):
        return 1
    return 2 if list_depth(kind.value_type) == 1 else 0


def type_name(kind: pa.DataType) -> str:
    """The word that messages use for a type.

    >>> type_name(pa.int64()), type_name(pa.time32("s")), type_name(pa.string())
    ('numbers', 'time', 'text')
    """
    if holds_numbers(kind):
        return "numbers"
    if holds_text(kind):
        return "text"
    return next((word for word, is_it in OTHER_TYPES.items() if is_it(kind)), str(kind)[:60])


def type_conflict(
    where: str, name: str, kind: pa.DataType, first: str, first_kind: pa.DataType
) -> str:
    """The message on a column that holds different types in two files or splits."""
    words = [type_name(kind), type_name(first_kind)]
    if words[0] == words[1]:
        words = [str(kind)[:60], str(first_kind)[:60]]
    return f"{where}: column {name!r} holds {words[0]}, and in {first} {words[1]}; make them alike"


# What a file declares about its columns: the metadata of Hugging Face's datasets, and of pandas.


def declared_features(schema: pa.Schema) -> Mapping[str, Any]:
    """The features that Hugging Face's ``datasets`` wrote into a file, by column; empty if none."""
    features = _metadata(schema, b"huggingface", "info", "features")
    if not isinstance(features, Mapping):
        return {}
    return {nfc(name): feature for name, feature in features.items()}


def class_names(schema: pa.Schema, column: str) -> tuple[str, ...] | None:
    """The class names that a file declares for the ids in a column, or None."""
    feature = declared_features(schema).get(column)
    if not isinstance(feature, Mapping) or feature.get("_type") != "ClassLabel":
        return None
    names = feature.get("names")
    if not isinstance(names, list):
        return None
    return tuple(nfc(str(name)) for name in names)


def image_columns(schema: pa.Schema) -> list[str]:
    """The columns of encoded images: declared as such, or records of ``bytes`` and ``path``."""
    features = declared_features(schema)
    columns = []
    for field in schema:
        feature = features.get(field.name)
        is_declared = isinstance(feature, Mapping) and feature.get("_type") == "Image"
        parts: set[str] = set()
        if pa.types.is_struct(field.type):
            parts = {field.type.field(index).name for index in range(field.type.num_fields)}
        if is_declared or {"bytes", "path"} <= parts:
            columns.append(field.name)
    return columns


def index_columns(schema: pa.Schema) -> set[str]:
    """The columns that are the index of a pandas table; in a CSV file, the one without a name.

    The index of rows that were sorted or selected by their labels reveals the labels.
    """
    index = _metadata(schema, b"pandas", "index_columns")
    names = index if isinstance(index, list) else []
    return {name for name in names if isinstance(name, str)} | {""}


def _metadata(schema: pa.Schema, key: bytes, *path: str) -> Any:
    """A value in the JSON that a file has as its metadata; None if it is not there."""
    try:
        value = json.loads((schema.metadata or {}).get(key, b"{}"))
        for name in path:
            value = value[name]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return value


def label_column(what: str, schema: pa.Schema, columns: Columns) -> str:
    """The column of labels: the one that is asked for, or one with a usual name.

    Raises DataError if it is not there, or if it is not clear which it is.
    """
    declared = [name for name in schema.names if class_names(schema, name) is not None]
    usual = [name for name in ("label", "fine_label") if name in schema.names]
    last_resort = [name for name in ("labels",) if name in schema.names]
    label = nfc(columns.label) or next(iter([*usual, *declared, *last_resort]), None)
    if label is None or label not in schema.names:
        raise DataError(no_column(what, "label", label, schema.names))
    return label


def no_column(what: str, role: str, name: str | None, columns: Iterable[str]) -> str:
    """The message on a column of images or labels that is absent or unclear."""
    problem = f"no column {name!r}" if name else f"not one clear {role} column"
    names = ", ".join(map(repr, columns)) or "none"
    return f"{what} has {problem} among {names}; set data.{role}_column"


def no_owner(what: str, form: Form, columns: Collection[str]) -> str:
    """The message on a column of owners, or of times, that is not there."""
    remedy = "correct time_column in site.toml" if form.cuts else "set partition.column"
    return f"{what} has no column {form.owner!r} among {', '.join(columns)}; {remedy}"


# Columns of a CSV file that are text only because of a few values that are no numbers.


LOOKED_AT = 1000
"""The first values of a column, by which it is decided whether it is meant to hold numbers."""

NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
NUMBER_LIKE = (
    rf"{NUMBER}|^\s*[<>≤≥~]?\s*[-+]?\d+([.,]\d+)?\s*%?\s*$|"
    r"^\s*[-+]?\d{1,3}([.,' ]\d{3})+([.,]\d+)?\s*$"
)
"""A number, or a text that means one, such as 12 %, < 0.5, 0,5 and 1,234."""

STRAY = b"stray"
"""The key in a field's metadata under which its first value is that is no number."""


def with_strays(path: str, table: pa.Table) -> pa.Table:
    """A table whose text columns name, in their metadata, the first value that is no number.

    Only columns have it of which most values are meant as numbers.
    """
    fields = []
    for field, column in zip(table.schema, table.columns, strict=True):
        stray = _first_stray(column) if holds_text(field.type) else ""
        fields.append(field.with_metadata({STRAY: f"{path}: {stray}"}) if stray else field)
    return pa.Table.from_arrays(table.columns, schema=pa.schema(fields))


def stray_of(field: pa.Field) -> str:
    """The place and text of the first value that is no number in a column of numbers, or ""."""
    stray: bytes = (field.metadata or {}).get(STRAY, b"")
    return stray.decode()


def _first_stray(column: pa.ChunkedArray) -> str:
    sample = column.slice(0, LOOKED_AT).drop_null()
    numbers = pc.sum(pc.match_substring_regex(sample, NUMBER_LIKE)).as_py() or 0
    if 2 * numbers <= len(sample):
        return ""
    strays = pc.indices_nonzero(pc.invert(pc.match_substring_regex(column, NUMBER)))
    if not len(strays):
        return ""
    row = strays[0].as_py()
    return f"example {row} has {column[row].as_py()[:60]!r}"


# The schema: the role of each column.


MOST_NAMED = 12
"""The number of columns that a warning names. It counts the others."""

SUGGESTED_CATEGORIES = 20
"""A column of text with at most so many different values is suggested as categorical."""


@dataclass(frozen=True)
class ColumnRole:
    """What a column holds, what it is used for, and why."""

    name: str
    type: str
    role: Literal["input", "label", "owner", "split", "left out"]
    reason: str

    def __str__(self) -> str:
        return f"{self.name or 'a column without a name'}: {self.type}, {self.role} ({self.reason})"


@dataclass(frozen=True)
class TableSchema:
    """Which columns are read, and as what. ``str(schema)`` explains every column.

    ``form``: how examples are made, its kind resolved. ``label``: the column of labels, whose
    ``classes`` the file may declare. ``known``: whether there are checksums to compare with.
    ``chosen``: whether the user named the columns. ``roles``: of all columns.
    """

    form: Form
    label: str
    classes: tuple[str, ...] | None
    roles: tuple[ColumnRole, ...]
    known: bool = False
    chosen: bool = False

    @property
    def inputs(self) -> list[str]:
        """The columns that examples are made of."""
        return [self.form.input] if self.form.input else [*self.form.columns]

    @property
    def names(self) -> list[str]:
        """All columns that are read."""
        others = [self.label, self.form.owner, self.form.split_column]
        return list(dict.fromkeys([*self.inputs, *filter(None, others)]))

    @property
    def left_out(self) -> str:
        """A warning that names the columns that were found and are not read, or ""."""
        columns = [role for role in self.roles if role.role == "left out"]
        if not columns or self.chosen:
            return ""
        names = [f"{role.name or 'a column without a name'} ({role.reason})" for role in columns]
        others = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return f"left out: {', '.join(names[:MOST_NAMED])}{others}"

    def __str__(self) -> str:
        return "\n".join(map(str, self.roles))


def table_schema(
    what: str,
    schema: pa.Schema,
    columns: Columns,
    categories: Callable[[str], Sequence[Any]] | None = None,
) -> TableSchema | None:
    """The schema of a table, vectors, series or texts; None for images.

    categories: the different values of a column, which a message suggests as categories. Raises
    DataError naming the key to set if it is not clear what an example is.
    """
    form = columns.form
    for_table = bool(form.columns or form.categorical)
    if form.kind == "image" or columns.image:
        check_images_only(what, form)
        return None
    if form.kind == "auto" and not for_table and not form.input and image_columns(schema):
        return None

    _check_extra_columns(what, schema, form)
    label = label_column(what, schema, columns)
    types = {
        field.name: field.type
        for field in schema
        if field.name not in (label, form.owner, form.split_column)
    }
    _check_asked_columns(what, form, types)

    asked = {*form.columns, *dict(form.categorical), form.input}
    index = index_columns(schema)
    candidates = {name: kind for name, kind in types.items() if name in asked or name not in index}
    _check_strays(schema, form, form.columns or list(candidates))
    chosen = bool(form.columns or form.input)
    form = _with_kind(what, form, candidates, categories)
    if form.kind == "table":
        form = _with_columns(what, form, candidates)
    return TableSchema(
        form=form,
        label=label,
        classes=class_names(schema, label),
        roles=tuple(_role(field, form, label, index, chosen=chosen) for field in schema),
        known=columns.known,
        chosen=chosen,
    )


def check_images_only(what: str, form: Form) -> None:
    """Raise DataError for keys of tables, texts or lists where the data are images."""
    keys = {
        "data.columns": form.columns,
        "data.categorical": form.categorical,
        "data.input_column": form.input,
        f"data.kind = {form.kind!r}": form.kind not in ("auto", "image"),
        "data.split_column": form.split_column,
    }
    key = next((key for key, value in keys.items() if value), "")
    if key:
        raise DataError(
            f"{what} holds images, and {key} is for other data; leave it out, or name a file of "
            "columns"
        )


def _check_extra_columns(what: str, schema: pa.Schema, form: Form) -> None:
    """Raise DataError if the columns of owners or splits are not there."""
    if form.owner not in ("", FILE) and form.owner not in schema.names:
        raise DataError(no_owner(what, form, schema.names))
    if form.split_column and form.split_column not in schema.names:
        raise DataError(
            f"{what} has no column {form.split_column!r} among {', '.join(schema.names)}; correct "
            "data.split_column"
        )


def _check_asked_columns(what: str, form: Form, types: Mapping[str, pa.DataType]) -> None:
    asked = {
        "columns": form.columns,
        "categorical": tuple(dict(form.categorical)),
        "input_column": (form.input,) if form.input else (),
    }
    for key, names in asked.items():
        absent = [name for name in names if name not in types]
        if absent:
            raise DataError(
                f"{what} has no column {absent[0]!r} among {', '.join(types) or 'none'}; correct "
                f"data.{key}"
            )


def _check_strays(schema: pa.Schema, form: Form, names: Iterable[str]) -> None:
    """Raise DataError for a column of numbers that is text because of a value that is none."""
    if form.input or form.kind not in ("auto", "table"):
        return
    for name in names:
        stray = "" if name in dict(form.categorical) else stray_of(schema.field(name))
        if not stray:
            continue
        if re.search(r"'[-+]?\d+,\d+'$", stray) and form.decimal == ".":
            remedy = 'set data.decimal = "," if commas are decimal marks'
        else:
            value = stray.rpartition(" has ")[2]
            remedy = f"if it means missing, set data.missing_values = [{value}]"
        raise DataError(
            f"{stray} in column {name!r}, which otherwise holds numbers; {remedy}; or correct it, "
            "leave the column out with data.columns, or name it in data.categorical if it holds "
            "names"
        )


def _with_kind(
    what: str,
    form: Form,
    types: Mapping[str, pa.DataType],
    categories: Callable[[str], Sequence[Any]] | None,
) -> Form:
    """The form with its kind, and with the one column of values of what is no table."""
    if form.columns or form.categorical or form.kind == "table":
        if form.kind not in ("auto", "table") or form.input:
            raise DataError(
                f"{what}: data.columns and data.categorical are for tables; leave them or "
                "data.kind out"
            )
        return replace(form, kind="table")

    candidates = {
        "vector": [name for name, kind in types.items() if list_depth(kind) == 1],
        "series": [name for name, kind in types.items() if list_depth(kind) == 2],
        "text": [name for name, kind in types.items() if holds_text(kind)],
    }
    if form.input:
        return replace(form, kind=_kind_of_input(what, form, types, candidates))  # type: ignore[arg-type]
    if form.kind != "auto":
        return replace(form, input=_only_column(what, form.kind, candidates[form.kind], types))

    numbers = [name for name, kind in types.items() if holds_numbers(kind)]
    lists = candidates["vector"] + candidates["series"]
    texts = candidates["text"]
    if len(lists) == 1:
        kind: Literal["vector", "series"] = "vector" if candidates["vector"] else "series"
        return replace(form, kind=kind, input=lists[0])
    if len(texts) == 1 and not numbers and not lists:
        return replace(form, kind="text", input=texts[0])
    if numbers and not texts and not lists:
        return replace(form, kind="table")
    raise DataError(_unclear(what, types, texts, numbers, categories))


def _kind_of_input(
    what: str,
    form: Form,
    types: Mapping[str, pa.DataType],
    candidates: Mapping[str, Sequence[str]],
) -> str:
    kinds = [kind for kind, names in candidates.items() if form.input in names]
    if not kinds or form.kind not in ("auto", *kinds):
        raise DataError(
            f"{what}: column {form.input!r} holds {str(types[form.input])[:60]}, not texts or "
            "lists of numbers; correct data.input_column"
        )
    return kinds[0]


def _only_column(
    what: str, kind: str, names: Sequence[str], types: Mapping[str, pa.DataType]
) -> str:
    if len(names) == 1:
        return names[0]
    found = f"none among {', '.join(types) or 'none'}"
    if names:
        found = f"{len(names)} such columns ({', '.join(names)})"
    raise DataError(
        f"{what}: data.kind = {kind!r} needs one column of it, and there are {found}; set "
        "data.input_column"
    )


def _with_columns(what: str, form: Form, types: Mapping[str, pa.DataType]) -> Form:
    """The form of a table with its columns; raises DataError for one that holds no numbers.

    A column without any value is one of missing numbers where the config names it: a CSV file of
    a site may have it.
    """
    categorical = dict(form.categorical)
    columns = form.columns or tuple(
        name for name, kind in types.items() if name in categorical or holds_numbers(kind)
    )
    for name in columns:
        is_number = holds_numbers(types[name]) or pa.types.is_null(types[name])
        if name not in categorical and not is_number:
            raise DataError(
                f"{what}: column {name!r} holds {str(types[name])[:60]}, not numbers; name it in "
                "data.categorical if its values are names, or leave it out of data.columns"
            )
    return replace(form, columns=columns)


def _unclear(
    what: str,
    types: Mapping[str, pa.DataType],
    texts: Sequence[str],
    numbers: Sequence[str],
    categories: Callable[[str], Sequence[Any]] | None,
) -> str:
    """The message on columns that could be several kinds of examples, with the keys to set."""
    if not texts or not numbers:
        return (
            f"{what}: it is not clear what an example is, among columns "
            f"{', '.join(types)[:300] or 'none'}; set data.input_column to one column of texts or "
            "lists, or data.columns to those of a table"
        )
    values = {name: categories(name) if categories else () for name in texts}
    named = {name: v for name, v in values.items() if 0 < len(v) <= SUGGESTED_CATEGORIES}
    columns = [name for name in types if name in numbers or name in named]
    lines = f"columns = {_toml(columns)}"
    if named:
        entries = ", ".join(f"{_toml_key(name)} = {_toml(v)}" for name, v in named.items())
        lines += f" and categorical = {{{entries}}}"
    return (
        f"{what}: it is not clear what an example is: columns of numbers "
        f"({', '.join(numbers)[:200]}) and of text ({', '.join(texts)[:200]}); for a table, write "
        f"into [data] {lines} (whose they are: partition.column); for texts, input_column = "
        f"{_toml(max(values, key=lambda name: len(values[name])))}"
    )


def _toml(value: Any) -> str:
    """A text, or a list of texts or numbers, as TOML writes it: the same as JSON."""
    return json.dumps(value, ensure_ascii=False)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _role(
    field: pa.Field, form: Form, label: str, index: Collection[str], *, chosen: bool
) -> ColumnRole:
    """What a column is used for. A column may be an input and the owner at once."""
    name = field.name
    kind = type_name(field.type)
    is_index = name in index and holds_numbers(field.type)
    by_whom = "asked for" if chosen else f"all columns of {kind} are"
    if name == label:
        return ColumnRole(name, kind, "label", "the column of labels")
    if name == form.input or name in form.columns:
        reason = "a category" if name in dict(form.categorical) else by_whom
        return ColumnRole(name, kind, "input", reason)
    if name == form.owner:
        return ColumnRole(name, kind, "owner", "says whose an example is")
    if name == form.split_column:
        return ColumnRole(name, kind, "split", "says which split an example is in")
    reason = "the index of a pandas table" if is_index else kind
    return ColumnRole(name, kind, "left out", reason)


# Columns that are read, but perhaps not as they are meant. A run warns about them.


ROW_NUMBER_NAME = re.compile(
    r"unnamed: ?\d+|(.*[^a-z])?(id|ids|uuid|idx|index|nr|no)", re.IGNORECASE
)
ROW_NUMBER_SUFFIX = re.compile(r".*[a-z](ID|Id|Nr|No)")
"""Names of columns that number rows: id, patient_id, patientID, Unnamed: 0."""

STEPS = 1024
"""A range of fewer steps of float32 than this is looked at: numbers in it may become equal."""


def row_numbers(table: pa.Table, columns: Sequence[str]) -> list[str]:
    """A warning for each column of integers with a row number's name and a value for each row."""
    warnings = []
    for name in columns:
        has_such_name = ROW_NUMBER_NAME.fullmatch(name) or ROW_NUMBER_SUFFIX.fullmatch(name)
        if not has_such_name or not pa.types.is_integer(table[name].type):
            continue
        if pc.count_distinct(table[name], mode="all").as_py() == len(table) > 1:
            warnings.append(
                f"{name}: all {len(table):,} values differ; if it only numbers the rows, leave it "
                "out with data.columns"
            )
    return warnings


def lost_precision(table: pa.Table, columns: Sequence[str]) -> list[str]:
    """A warning for each column with numbers that become equal as float32, such as times in s."""
    warnings = []
    for name in columns:
        kind = table[name].type
        if not (
            pa.types.is_integer(kind) or pa.types.is_float64(kind) or pa.types.is_decimal(kind)
        ):
            continue
        exact = float_values(table[name].cast(pa.float64(), safe=False))
        exact = exact[np.isfinite(exact)]
        if not len(exact):
            continue
        step = np.finfo(np.float32).eps * np.abs(exact).max()
        if np.ptp(exact) >= STEPS * step:
            continue
        distinct = len(np.unique(exact))
        distinct_in_32_bits = len(np.unique(exact.astype(np.float32)))
        if distinct_in_32_bits < distinct:
            warnings.append(
                f"{name}: its {distinct:,} different numbers, from {exact.min():.12g} to "
                f"{exact.max():.12g}, are {distinct_in_32_bits:,} in 32 bits; subtract the "
                "smallest from all"
            )
    return warnings


def check_same_types(
    where: str, table: pa.Table, first: str, first_table: pa.Table, schema: TableSchema
) -> None:
    """Raise DataError for an input column that holds another type than in the first split.

    Categories may be numbers in one split and texts in another.
    """
    categorical = dict(schema.form.categorical)
    for name in schema.inputs:
        field = table.schema.field(name)
        first_field = first_table.schema.field(name)
        has_null = pa.types.is_null(field.type) or pa.types.is_null(first_field.type)
        if name in categorical or has_null or type_name(field.type) == type_name(first_field.type):
            continue
        stray = stray_of(field) or stray_of(first_field)
        conflict = type_conflict(where, name, field.type, first, first_field.type)
        raise DataError(f"{conflict} ({stray})" if stray else conflict)
