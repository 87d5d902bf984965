"""The schema of a table: the type and the role of each column, and the reason for its role."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from fedstill.core.errors import DataError
from fedstill.core.fields import nfc
from fedstill.core.files import shortened_list
from fedstill.data.dataset import FILE, PLURALS, Kind, ReadingOptions, ReadRequest
from fedstill.data.encoding import repeated_names

# Types of columns.


def holds_bytes(arrow_type: pa.DataType) -> bool:
    """Whether a column holds sequences of bytes."""
    return bool(pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type))


OTHER_TYPES = {
    "timestamp": pa.types.is_timestamp,
    "date": pa.types.is_date,
    "time": pa.types.is_time,
    "duration": pa.types.is_duration,
    "no values": pa.types.is_null,
    "bytes": holds_bytes,
    "lists": lambda type_: pa.types.is_nested(type_) and not pa.types.is_struct(type_),
}
"""Types that are neither numbers nor text, by their names in messages."""


def plain_type(arrow_type: pa.DataType) -> pa.DataType:
    """The type of the stored values of an extension type, a dictionary or a view of texts; others
    are unchanged.

    The extension types of a file depend on the libraries that a program has imported.
    """
    if isinstance(arrow_type, pa.BaseExtensionType):
        return plain_type(arrow_type.storage_type)
    if pa.types.is_dictionary(arrow_type):
        return plain_type(arrow_type.value_type)
    if pa.types.is_string_view(arrow_type):
        return pa.large_string()
    return arrow_type


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """A schema of plain types, with the same metadata."""
    fields = [field.with_type(plain_type(field.type)) for field in schema]
    return pa.schema(fields, schema.metadata)


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The stored values of a column, whose type is plain."""
    if isinstance(column.type, pa.BaseExtensionType):
        storage = [chunk.storage for chunk in column.chunks]
        return plain_column(pa.chunked_array(storage, column.type.storage_type))
    if pa.types.is_dictionary(column.type):
        decoded = [chunk.dictionary_decode() for chunk in column.chunks]
        return plain_column(pa.chunked_array(decoded, column.type.value_type))
    if pa.types.is_string_view(column.type):
        return column.cast(pa.large_string())
    return column


def holds_numbers(arrow_type: pa.DataType) -> bool:
    """Whether a column holds numbers, including truth values and decimals."""
    types = pa.types
    is_integer_or_bool = types.is_integer(arrow_type) or types.is_boolean(arrow_type)
    return bool(is_integer_or_bool or types.is_floating(arrow_type) or types.is_decimal(arrow_type))


def holds_text(arrow_type: pa.DataType) -> bool:
    """Whether a column holds texts, dictionary-encoded or not."""
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    return bool(pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type))


def list_depth(arrow_type: pa.DataType) -> int:
    """1 for lists of numbers, 2 for lists of such lists, else 0."""
    is_list = pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)
    if not is_list and not pa.types.is_fixed_size_list(arrow_type):
        return 0
    if holds_numbers(arrow_type.value_type):
        return 1
    if list_depth(arrow_type.value_type) == 1:
        return 2
    return 0


def type_name(arrow_type: pa.DataType) -> str:
    """The name of a type in messages.

    >>> type_name(pa.int64()), type_name(pa.time32("s")), type_name(pa.string())
    ('numbers', 'time', 'text')
    """
    if holds_numbers(arrow_type):
        return "numbers"
    if holds_text(arrow_type):
        return "text"
    for name, is_of_type in OTHER_TYPES.items():
        if is_of_type(arrow_type):
            return name
    return str(arrow_type)[:60]


def type_conflict(
    part: str, name: str, arrow_type: pa.DataType, first_part: str, first_type: pa.DataType
) -> str:
    """The message about a column that has different types in two files or splits."""
    text = type_name(arrow_type)
    first_text = type_name(first_type)
    if text == first_text:
        text = str(arrow_type)[:60]
        first_text = str(first_type)[:60]
    return (
        f"{part}: column {name!r} holds {text}, but {first_text} in {first_part}; use the same "
        "type in both"
    )


# Metadata in a file about its columns, written by Hugging Face's datasets and by pandas.


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
    """The columns of encoded images: declared ones, and records of ``bytes`` and ``path``."""
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
    """The index columns of a pandas table. In a CSV file, the index has no name.

    If the rows were sorted or selected by label, the index reveals the labels.
    """
    index = _metadata(schema, b"pandas", "index_columns")
    if not isinstance(index, list):
        return {""}
    return {name for name in index if isinstance(name, str)} | {""}


def _metadata(schema: pa.Schema, key: bytes, *path: str) -> Any:
    """A value in the JSON metadata of a file; None if there is none."""
    try:
        value = json.loads((schema.metadata or {}).get(key, b"{}"))
        for name in path:
            value = value[name]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return value


def label_column(source: str, schema: pa.Schema, request: ReadRequest) -> str:
    """The column of labels: the requested one, or one with a common name.

    Raises DataError if there is no such column.
    """
    declared = [name for name in schema.names if class_names(schema, name) is not None]
    likely = ["label", "fine_label", *declared, "labels"]
    label = nfc(request.label) or next((name for name in likely if name in schema.names), None)
    if label is None or label not in schema.names:
        raise DataError(no_column(source, "label", label, schema.names))
    return label


def no_column(source: str, role: str, name: str | None, columns: Iterable[str]) -> str:
    """The message about a missing or ambiguous column of images or labels."""
    names = _quoted(columns)
    problem = f": cannot tell which column holds the {role}s ({names})"
    if name:
        problem = f" has no column {name!r} among {names}"
    return f"{source}{problem}; set data.{role}_column"


def _quoted(columns: Iterable[str]) -> str:
    """The names of columns in quotes, because a name may be empty or contain blanks."""
    return ", ".join(map(repr, columns)) or "none"


def check_owner(source: str, columns: Collection[str], options: ReadingOptions) -> None:
    """Raise DataError if the column of owners or times is missing."""
    if options.owner in ("", FILE) or options.owner in columns:
        return
    remedy = "set partition.column"
    if options.cuts:
        remedy = "correct time_column in site.toml"
    raise DataError(f"{source} has no column {options.owner!r} among {_quoted(columns)}; {remedy}")


# Strays: values that are not numbers, because of which a column of a CSV file is read as text.


SAMPLE_SIZE = 1000
"""The number of first values that decide whether a column is meant to hold numbers."""

NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
THOUSANDS_MARKS = ".,'’ \u00a0\u202f"
"""The possible separators of thousands; the last two are spaces that do not break a line."""

GROUPED_NUMBER = rf"^\s*[-+]?\d{{1,3}}([{THOUSANDS_MARKS}]\d{{3}})+([.,]\d+)?\s*$"
NUMBER_LIKE = rf"{NUMBER}|^\s*[<>≤≥~]?\s*[-+]?\d+([.,]\d+)?\s*%?\s*$|{GROUPED_NUMBER}"
"""A number, or a text for a number, such as 12 %, < 0.5, 0,5 and 1,234."""

QUANTITY = (
    r"\s*(?P<bound>[<>≤≥~]?)=?\s*(?P<currency>[€$£¥]?)\s*(?P<number>[-+]?\d+([.,]\d+)?)"
    r"\s*(?P<unit>(([^\W\d_]|[€$£¥%°])\D{0,9})?)"
)
"""A number with a bound, a currency or a unit, such as <5, $ 20 and 0,5 mg."""

STRAY_PLACE = b"stray place"
STRAY_TEXT = b"stray text"
"""Keys of a field's metadata: the place and the text of its stray."""


@dataclass(frozen=True)
class Stray:
    """The first value of a column that is not a number."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place} has {self.text!r}"


def with_strays(path: str, table: pa.Table, decimal: Literal[".", ","] = ".") -> pa.Table:
    """Add strays to the metadata of the text columns in which most values are numbers.

    decimal: the decimal mark of the numbers.
    """
    fields = []
    for field, column in zip(table.schema, table.columns, strict=True):
        stray = None
        if holds_text(field.type):
            stray = _first_stray(path, column, decimal)
        if stray is not None:
            field = field.with_metadata({STRAY_PLACE: stray.place, STRAY_TEXT: stray.text})
        fields.append(field)
    return pa.Table.from_arrays(table.columns, schema=pa.schema(fields))


def stray_of(field: pa.Field) -> Stray | None:
    """The stray in the metadata of a column; None if there is none."""
    metadata = field.metadata or {}
    if STRAY_PLACE not in metadata:
        return None
    return Stray(metadata[STRAY_PLACE].decode(), metadata[STRAY_TEXT].decode())


def _first_stray(path: str, column: pa.ChunkedArray, decimal: Literal[".", ","]) -> Stray | None:
    sample = column.slice(0, SAMPLE_SIZE).drop_null()
    is_number_like = pc.match_substring_regex(sample, NUMBER_LIKE)
    number_count = pc.sum(is_number_like).as_py() or 0
    if 2 * number_count <= len(sample):
        return None
    # NUMBER has a point as the decimal mark.
    number = NUMBER.replace(r"\.", re.escape(decimal))
    is_number = pc.match_substring_regex(column, number)
    stray_rows = pc.indices_nonzero(pc.invert(is_number))
    if not len(stray_rows):
        return None
    row = stray_rows[0].as_py()
    return Stray(f"{path}: example {row}", column[row].as_py()[:60])


# The schema: the role of each column.


SUGGESTED_CATEGORIES = 20
"""The maximum number of values of a text column that is suggested as categorical."""


@dataclass(frozen=True)
class ColumnRole:
    """The type of a column, its role, and the reason for the role."""

    name: str
    type: str
    role: Literal["input", "label", "owner", "split", "left out"]
    reason: str

    def __str__(self) -> str:
        return f"{self.label}: {self.type}, {self.role} ({self.reason})"

    @property
    def label(self) -> str:
        """The column's name for messages."""
        return self.name or "a column without a name"


@dataclass(frozen=True)
class TableSchema:
    """The roles of the columns of a table. ``str(schema)`` explains every column."""

    options: ReadingOptions
    """The options with the resolved kind and the resolved input columns."""
    label: str
    """The column of labels."""
    classes: tuple[str, ...] | None
    """The class names that the file declares."""
    roles: tuple[ColumnRole, ...]
    """The roles of all columns."""
    has_checksums: bool = False
    """Whether the data are compared with known checksums."""
    chosen: bool = False
    """Whether the user chose the columns."""

    @property
    def inputs(self) -> list[str]:
        """The input columns."""
        if self.options.input:
            return [self.options.input]
        return [*self.options.columns]

    @property
    def identifiers(self) -> list[str]:
        """The columns of labels, owners and splits."""
        columns = [self.label, self.options.owner, self.options.split_column]
        return list(filter(None, columns))

    @property
    def names(self) -> list[str]:
        """All columns to read."""
        return list(dict.fromkeys([*self.inputs, *self.identifiers]))

    @property
    def left_out(self) -> str:
        """A warning about the columns that are not read; empty if the user chose the columns."""
        columns = [role for role in self.roles if role.role == "left out"]
        if not columns or self.chosen:
            return ""
        names = [f"{column.label} ({column.reason})" for column in columns]
        return f"left out: {shortened_list(names)}"

    def __str__(self) -> str:
        return "\n".join(map(str, self.roles))


def table_schema(
    source: str,
    schema: pa.Schema,
    request: ReadRequest,
    categories: Callable[[str], Sequence[Any]] | None = None,
) -> TableSchema | None:
    """The schema of a table, vectors, series or texts; None for images.

    categories: returns the distinct values of a column, which a message suggests as categories.
    Raises DataError, with the key to set, if the columns are ambiguous.
    """
    options = request.options
    if _are_images(schema, request):
        check_images_only(source, request)
        return None
    _check_extra_columns(source, schema, options)
    label = label_column(source, schema, request)
    candidates = _candidates(source, schema, options, label)
    _check_strays(schema, options, options.columns or list(candidates.types))
    resolved = candidates.resolved(options, categories)
    _check_text_options(source, resolved)
    chosen = bool(options.columns or options.input)
    index = index_columns(schema)
    return TableSchema(
        options=resolved,
        label=label,
        classes=class_names(schema, label),
        roles=tuple(_role(field, resolved, label, index, chosen=chosen) for field in schema),
        has_checksums=request.has_checksums,
        chosen=chosen,
    )


def _are_images(schema: pa.Schema, request: ReadRequest) -> bool:
    options = request.options
    if options.kind == "image" or request.image:
        return True
    has_input = bool(options.columns or options.categorical or options.input)
    return options.kind == "auto" and not has_input and bool(image_columns(schema))


def check_images_only(source: str, request: ReadRequest) -> None:
    """Raise DataError for options of tables, texts or lists if the data are images."""
    options = request.options
    keys = {
        "data.columns": options.columns,
        "data.categorical": options.categorical,
        "data.input_column": options.input,
        f"data.kind = {options.kind!r}": options.kind not in ("auto", "image"),
        "data.split_column": options.split_column,
        f"data.missing = {options.missing!r}": options.missing != ReadingOptions.missing,
        "data.missing_marks": options.marks,
        "data.decimal": options.decimal != ReadingOptions.decimal,
        **_text_keys(options),
        "data.length": options.length,
    }
    key = next((key for key, value in keys.items() if value), "")
    if not key:
        return
    cause = image_keys(request)
    if cause:
        raise DataError(
            f"{source}: {cause} says that it holds images, but {key} is for other data; remove one "
            "of them"
        )
    raise DataError(
        f"{source} holds images, but {key} is for other data; remove it, or name a file with "
        "columns"
    )


def image_keys(request: ReadRequest) -> str:
    """The keys that say that data are images; empty if none is set."""
    keys = {
        "data.image_column": bool(request.image),
        "data.kind = 'image'": request.options.kind == "image",
    }
    return " and ".join(key for key, is_set in keys.items() if is_set)


def _text_keys(options: ReadingOptions) -> dict[str, bool]:
    """Whether the keys of texts have other values than the defaults."""
    return {
        f"data.tokenizer = {options.tokenizer!r}": options.tokenizer != ReadingOptions.tokenizer,
        f"data.vocabulary = {options.vocabulary}": options.vocabulary != ReadingOptions.vocabulary,
    }


def _check_text_options(source: str, options: ReadingOptions) -> None:
    """Raise DataError for options of texts and series that do not apply to the kind of the data."""
    keys = {"data.length": options.length and options.kind not in ("text", "series")}
    if options.kind != "text":
        keys |= _text_keys(options)
    key = next((key for key, is_set in keys.items() if is_set), "")
    if key:
        raise DataError(
            f"{source} holds {PLURALS[options.kind]}, to which {key} does not apply; remove it"
        )
    has_vocabulary = options.vocabulary != ReadingOptions.vocabulary
    if has_vocabulary and options.tokenizer != ReadingOptions.tokenizer:
        raise DataError(
            f"data.vocabulary = {options.vocabulary} is the number of token ids of the tokenizer "
            f"'words', and data.tokenizer = {options.tokenizer!r} has its own; remove one of them"
        )


def _check_extra_columns(source: str, schema: pa.Schema, options: ReadingOptions) -> None:
    """Raise DataError if the column of owners or splits is missing."""
    check_owner(source, schema.names, options)
    if options.split_column and options.split_column not in schema.names:
        raise DataError(
            f"{source} has no column {options.split_column!r} among {_quoted(schema.names)}; "
            "correct data.split_column"
        )


def _check_strays(schema: pa.Schema, options: ReadingOptions, names: Iterable[str]) -> None:
    """Raise DataError if a stray turns a column of numbers into text."""
    if options.input or options.kind not in ("auto", "table"):
        return
    for name in names:
        stray = stray_of(schema.field(name))
        if stray is None or name in dict(options.categorical):
            continue
        raise DataError(
            f"{stray} in column {name!r}, whose values are otherwise numbers; "
            f"{_stray_remedy(stray.text, options.decimal)}; or correct it, exclude the column with "
            "data.columns, or list it in data.categorical if it holds names"
        )


def _stray_remedy(text: str, decimal: Literal[".", ","]) -> str:
    """What to do about a stray. A number in another notation does not mean missing."""
    remedies = []
    if re.match(GROUPED_NUMBER, text):
        remedies.append("if the column has separators of thousands, remove them")
    quantity = re.fullmatch(QUANTITY, text)
    if quantity is not None:
        remedies += _quantity_remedies(text, quantity, decimal)
    if not remedies:
        return f"if it means missing, set data.missing_values = [{text!r}]"
    return "; ".join(remedies)


def _quantity_remedies(text: str, quantity: re.Match[str], decimal: Literal[".", ","]) -> list[str]:
    """What to do about a stray that is a number with another decimal mark, a unit or a bound."""
    remedies = []
    if decimal == "." and "," in quantity["number"]:
        remedies.append('set data.decimal = "," if commas are decimal marks')
    if decimal == "," and "." in quantity["number"]:
        remedies.append('remove data.decimal = "," if points are decimal marks')
    unit = (quantity["currency"] or quantity["unit"]).strip()
    if unit == "%":
        remedies.append("remove the percent signs from the column")
    elif unit:
        remedies.append(f"remove units such as {unit!r} from the column")
    if quantity["bound"]:
        remedies.append(
            "replace such bounds by numbers of your choice, or set data.missing_values = "
            f"[{text!r}] if they may count as missing"
        )
    return remedies


def _candidates(
    source: str, schema: pa.Schema, options: ReadingOptions, label: str
) -> _CandidateColumns:
    """The possible input columns: all columns except the index, unless the options name it.

    Raises DataError if the options name a missing column.
    """
    roles = {label: "label", options.owner: "owner", options.split_column: "split"}
    types = {field.name: field.type for field in schema if field.name not in roles}
    chosen = {
        "columns": options.columns,
        "categorical": tuple(dict(options.categorical)),
        "input_column": tuple(filter(None, [options.input])),
    }
    for key, names in chosen.items():
        absent = [name for name in names if name not in types]
        if absent and absent[0] in schema.names:
            raise DataError(
                f"{source}: column {absent[0]!r} holds the {roles[absent[0]]}s, so it cannot be an "
                f"input; remove it from data.{key}"
            )
        if absent:
            raise DataError(
                f"{source} has no column {absent[0]!r} among {', '.join(types) or 'none'}; correct "
                f"data.{key}"
            )
    index = index_columns(schema).difference(*chosen.values())
    types_without_index = {name: type_ for name, type_ in types.items() if name not in index}
    return _CandidateColumns(source, types_without_index)


@dataclass(frozen=True)
class _CandidateColumns:
    """The possible input columns."""

    source: str
    types: Mapping[str, pa.DataType]

    def resolved(
        self, options: ReadingOptions, categories: Callable[[str], Sequence[Any]] | None
    ) -> ReadingOptions:
        """The options with the kind of examples and their input columns.

        The first rule that applies decides:

        1. ``columns``, ``categorical`` or the kind "table" is set: a table.
        2. ``input`` is set: the kind that fits its column.
        3. Another kind is set: the only column that fits this kind.
        4. One column holds lists: vectors or series.
        5. One column holds texts, and none holds numbers or lists: texts.
        6. Columns hold numbers, and none holds texts or lists: a table.

        Raises DataError if no rule applies, and for a column of a table without numbers.
        """
        if options.columns or options.categorical or options.kind == "table":
            self._check_table_keys(options)
            return self._with_columns(options)

        if options.input:
            return replace(options, kind=self._kind_of_input(options))
        if options.kind != "auto":
            return replace(options, input=self._only_column(options.kind))

        numbers = self._by_kind["table"]
        texts = self._by_kind["text"]
        lists = self._by_kind["vector"] + self._by_kind["series"]
        if len(lists) == 1:
            kind: Kind = "series"
            if self._by_kind["vector"]:
                kind = "vector"
            return replace(options, kind=kind, input=lists[0])
        if len(texts) == 1 and not numbers and not lists:
            return replace(options, kind="text", input=texts[0])
        if numbers and not texts and not lists:
            return self._with_columns(options)
        raise DataError(self._unclear(texts, numbers, categories))

    def _check_table_keys(self, options: ReadingOptions) -> None:
        """Raise DataError if a table is requested, and data of another kind, too."""
        other_keys = {
            "data.input_column": options.input,
            f"data.kind = {options.kind!r}": options.kind not in ("auto", "table"),
        }
        other_key = next((key for key, value in other_keys.items() if value), "")
        if not other_key:
            return
        table_keys = {
            "data.columns": options.columns,
            "data.categorical": options.categorical,
            "data.kind = 'table'": options.kind == "table",
        }
        table_key = next(key for key, value in table_keys.items() if value)
        raise DataError(
            f"{self.source}: {table_key} is for tables, and {other_key} for other data; remove one "
            "of them"
        )

    @cached_property
    def _by_kind(self) -> dict[Kind, list[str]]:
        """The possible columns of each kind of examples."""
        by_kind: dict[Kind, list[str]] = {"table": [], "vector": [], "series": [], "text": []}
        for name, arrow_type in self.types.items():
            depth = list_depth(arrow_type)
            if depth == 1:
                by_kind["vector"].append(name)
            elif depth == 2:
                by_kind["series"].append(name)
            elif holds_text(arrow_type):
                by_kind["text"].append(name)
            elif holds_numbers(arrow_type):
                by_kind["table"].append(name)
        return by_kind

    def _kind_of_input(self, options: ReadingOptions) -> Kind:
        for kind, names in self._by_kind.items():
            if kind != "table" and options.input in names and options.kind in ("auto", kind):
                return kind
        raise DataError(
            f"{self.source}: column {options.input!r} contains "
            f"{type_name(self.types[options.input])}, not texts or lists of numbers; correct "
            "data.input_column"
        )

    def _only_column(self, kind: Kind) -> str:
        names = self._by_kind[kind]
        if len(names) == 1:
            return names[0]
        problem = f"none among {', '.join(self.types) or 'none'}"
        if names:
            problem = f"{len(names)} such columns ({', '.join(names)})"
        raise DataError(
            f"{self.source}: data.kind = {kind!r} needs one column of this kind, but there are "
            f"{problem}; set data.input_column"
        )

    def _with_columns(self, options: ReadingOptions) -> ReadingOptions:
        """The options of a table with its columns.

        Raises DataError for a column that is listed twice, for a marked column that is no input,
        and for a column that is neither numbers nor categorical. A column that the config names may
        be empty, as in a CSV file of a site: its numbers are missing.
        """
        categorical = dict(options.categorical)
        numbers = self._by_kind["table"]
        columns = options.columns or tuple(
            name for name in self.types if name in categorical or name in numbers
        )
        if not columns:
            raise DataError(
                f"{self.source}: no column holds numbers, among {', '.join(self.types) or 'none'}; "
                "list the columns of a table in data.columns and data.categorical"
            )
        repeated = repeated_names(columns)
        if repeated:
            raise DataError(
                f"{self.source}: data.columns has {repeated[0]!r} more than once; remove the "
                "repetition"
            )
        if isinstance(options.marks, tuple) and not set(options.marks) <= set(columns):
            raise DataError(
                f"{self.source}: data.missing_marks = {list(options.marks)} has a column that is "
                f"not among the inputs {', '.join(columns)}; correct it"
            )
        for name in columns:
            is_number = name in numbers or pa.types.is_null(self.types[name])
            if name not in categorical and not is_number:
                raise DataError(
                    f"{self.source}: column {name!r} contains {type_name(self.types[name])}, not "
                    "numbers; list it in data.categorical if its values are names, or remove it "
                    "from data.columns"
                )
        return replace(options, kind="table", columns=columns)

    def _unclear(
        self,
        texts: Sequence[str],
        numbers: Sequence[str],
        categories: Callable[[str], Sequence[Any]] | None,
    ) -> str:
        """The message about ambiguous columns, with the keys to set."""
        if not texts or not numbers:
            return (
                f"{self.source}: it is not clear what an example is, among columns "
                f"{', '.join(self.types)[:300] or 'none'}; set data.input_column to one column of "
                "texts or lists, or data.columns to those of a table"
            )
        values: dict[str, Sequence[Any]] = dict.fromkeys(texts, ())
        if categories:
            values = {name: categories(name) for name in texts}
        categorical = {
            name: names for name, names in values.items() if 0 < len(names) <= SUGGESTED_CATEGORIES
        }
        columns = [name for name in self.types if name in numbers or name in categorical]
        keys = f"columns = {_toml(columns)}"
        if categorical:
            entries = [f"{_toml_key(name)} = {_toml(names)}" for name, names in categorical.items()]
            keys += f" and categorical = {{{', '.join(entries)}}}"
        most_varied = max(values, key=lambda name: len(values[name]))
        return (
            f"{self.source}: it is not clear what an example is: columns of numbers "
            f"({', '.join(numbers)[:200]}) and of text ({', '.join(texts)[:200]}); for a table, "
            f"write into [data] {keys} (owners: partition.column); for texts, "
            f"input_column = {_toml(most_varied)}"
        )


def _toml(value: Any) -> str:
    """A text, or a list of texts or numbers, as TOML, which has the same form as JSON."""
    return json.dumps(value, ensure_ascii=False)


def _toml_key(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    return _toml(name)


def _role(
    field: pa.Field, options: ReadingOptions, label: str, index: Collection[str], *, chosen: bool
) -> ColumnRole:
    """The role of a column."""
    name = field.name
    type_text = type_name(field.type)
    if not name:  # like an option that is not set
        return ColumnRole(name, type_text, "left out", type_text)
    if name == label:
        return ColumnRole(name, type_text, "label", "the column of labels")
    if name == options.input or name in options.columns:
        reason = f"all columns of {type_text} are"
        if chosen:
            reason = "chosen"
        if name in dict(options.categorical):
            reason = "a category"
        return ColumnRole(name, type_text, "input", reason)
    if name == options.owner:
        return ColumnRole(name, type_text, "owner", "the owner of an example")
    if name == options.split_column:
        return ColumnRole(name, type_text, "split", "the split of an example")
    if name in index and holds_numbers(field.type):
        return ColumnRole(name, type_text, "left out", "the index of a pandas table")
    return ColumnRole(name, type_text, "left out", type_text)


def check_same_types(
    part: str, table: pa.Table, first_part: str, first_table: pa.Table, schema: TableSchema
) -> None:
    """Raise DataError if the type of an input column differs from its type in the first split.

    Categories may be numbers in one split and texts in another.
    """
    categorical = dict(schema.options.categorical)
    for name in schema.inputs:
        field = table.schema.field(name)
        first_field = first_table.schema.field(name)
        has_null = pa.types.is_null(field.type) or pa.types.is_null(first_field.type)
        if name in categorical or has_null or type_name(field.type) == type_name(first_field.type):
            continue
        stray = stray_of(field) or stray_of(first_field)
        conflict = type_conflict(part, name, field.type, first_part, first_field.type)
        if stray:
            conflict = f"{conflict} ({stray})"
        raise DataError(conflict)
