"""The rows of columns as the arrays of a data set: tables, vectors, series and texts."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.data.cache import Decoded
from fedstill.data.form import FILE, LENGTH, About, Form
from fedstill.data.sources.lists import ListColumn
from fedstill.data.sources.records import Columns, checked_label, with_ids
from fedstill.data.sources.schema import (
    NUMBER,
    TableSchema,
    check_same_types,
    lost_precision,
    row_numbers,
    table_schema,
)
from fedstill.data.sources.splits import SPLITS, client_name, split_named
from fedstill.data.sources.tables import MISSING_MARKS, CsvFrame, Frame, ParquetFrame
from fedstill.data.table_encoding import (
    Categories,
    category_name,
    distinct_values,
    first_features,
    names_in_order,
    null_mask,
    numbers,
    table_rows,
    with_features,
    with_marks,
)
from fedstill.data.text import encoded

Floats = NDArray[np.float32]
Tables = Mapping[str, pa.Table]
OneFrame = TypeVar("OneFrame", CsvFrame, ParquetFrame)


def read_frames(what: str, frames: Mapping[str, Frame], schema: TableSchema) -> Decoded:
    """All rows of {split: frame} as arrays.

    Numbers are float32, and NaN where ``missing = "mean"`` fills them in later. Labels that are
    text become ids in alphabetical order. Raises DataError for a row that lacks a value, unless the
    form says what to do about it, for one that holds an infinite value, and for lists of different
    lengths.
    """
    form = schema.form
    tables, cautions = _tables(what, frames, schema)
    owners = owners_of(what, tables, form.owner, frames) if form.owner else NO_OWNERS
    about = About(form.kind, owners=owners.names)  # type: ignore[arg-type]
    values, about = ENCODERS[form.kind](what, tables, schema, about)

    notes: list[str] = []
    complete = {}
    arrays = {}
    for split, table in tables.items():
        rows = _Rows(f"{what}, {split}", split, values[split], table, frames.get(split))
        complete[split] = rows.complete(schema, about, owners.codes.get(split), notes)
        labels = labels_of(rows.what, table[schema.label], complete[split])
        arrays[split] = (values[split][complete[split]], labels)
    _check_label_types(what, {split: labels for split, (_, labels) in arrays.items()})
    data = with_ids(what, arrays, schema.classes)

    train = next(iter(tables.values()))
    categorical = dict(form.categorical)
    cautions += [schema.left_out, _stray_label_caution(arrays)]
    cautions += lost_precision(train, [name for name in form.columns if name not in categorical])
    if not schema.chosen:
        cautions += row_numbers(train, form.columns)
    digests = {}
    if schema.known and not form.length:
        digests = {split: _digests(table, schema) for split, table in tables.items()}
    return replace(
        data,
        read=digests,
        owners={split: codes[complete[split]] for split, codes in owners.codes.items()},
        about=replace(about, notes=(*about.notes, *notes)).warned(*cautions),
    )


def frames_of(
    kind: type[OneFrame], place: Path, files: Mapping[str, Sequence[Path]], form: Form
) -> dict[str, OneFrame]:
    """The frames of files by split, in a folder ``place``."""
    frames = {}
    for split, paths in files.items():
        clients: tuple[str, ...] = ()
        if form.owner == FILE:
            clients = tuple(client_name(place, path, class_folders=False) for path in paths)
        frames[split] = kind(tuple(paths), form, clients)
    return frames


def schema_of(what: str, frames: Mapping[str, Frame], columns: Columns) -> TableSchema | None:
    """The schema of a data set, by the columns of its first split; None for images."""
    frame = frames[min(frames, key=SPLITS.index)]

    def categories(name: str) -> list[Any]:
        return list(names_in_order(distinct_values(frame.read([name])[name]).values))

    return table_schema(what, frame.schema, columns, categories)


# The tables of all splits.


def _tables(
    what: str, frames: Mapping[str, Frame], schema: TableSchema
) -> tuple[dict[str, pa.Table], list[str]]:
    """The columns to read of every split, of the types of the first split, and warnings."""
    # Only a table has a way to treat rows that lack a whole column.
    optional = schema.form.kind == "table" and schema.form.missing != "refuse"
    tables: dict[str, pa.Table] = {}
    first = ""
    for split in sorted(frames, key=SPLITS.index):
        frame = frames[split]
        where = str(frame.files[0]) if len(frame.files) == 1 else f"{what}, {split}"
        first = first or where
        _check_columns(where, frame, first, schema)
        table = frame.read(schema.names, optional)
        if not len(table):
            raise DataError(f"{where} holds no examples; leave the file out or download it again")
        check_same_types(where, table, first, next(iter(tables.values()), table), schema)
        tables[split] = table
    if schema.form.split_column:
        return _by_column(what, tables, schema.form.split_column)
    return tables, []


def _check_columns(where: str, frame: Frame, first: str, schema: TableSchema) -> None:
    present = frame.schema.names
    absent = [name for name in schema.names if name not in (FILE, *present)]
    if absent:
        raise DataError(
            f"{where} has no column {absent[0]!r} among "
            f"{', '.join(map(repr, present))[:300] or 'none'}, and {first} has it; write it there, "
            "or name the columns to read in data.columns"
        )


def _by_column(what: str, tables: Tables, column: str) -> tuple[dict[str, pa.Table], list[str]]:
    """The rows of one table by the split that a column names; other rows are left out."""
    if len(tables) > 1:
        raise DataError(
            f"{what}: data.split_column is for one table, and there are files of the splits "
            f"{', '.join(tables)}; leave it out"
        )
    (table,) = tables.values()
    names = distinct_values(table[column])
    splits = np.array([split_named(str(value)) for value in names.values] + [""])
    row_splits = splits[names.codes]
    by_split = {split: table.filter(pa.array(row_splits == split)) for split in SPLITS}
    by_split = {split: rows for split, rows in by_split.items() if len(rows)}
    others = [value for value, split in zip(names.values, splits, strict=False) if not split]
    unsplit = int(np.count_nonzero(row_splits == ""))
    if "train" not in by_split:
        raise DataError(
            f"{what}: no row is of the split train by column {column!r}, which has "
            f"{', '.join(map(repr, names.values[:5]))}; its values must be train, validation and "
            "test"
        )
    if not unsplit:
        return by_split, []
    kinds = ", ".join(repr(value) for value in others[:3]) or "no value"
    caution = f"left out: {unsplit:,} of {len(table):,} rows, whose {column!r} is {kinds}"
    return by_split, [caution]


# The values of each kind of examples.


def _table_values(
    what: str, tables: Tables, schema: TableSchema, about: About
) -> tuple[dict[str, Floats], About]:
    """Rows (n, features), with the marks of missing numbers behind them."""
    form = schema.form
    categorical = dict(form.categorical)
    train = tables.get("train", next(iter(tables.values())))
    categories = tuple(
        (name, Categories.of(what, name, categorical[name], train[name]).values)
        for name in form.columns
        if name in categorical
    )
    about = with_features(replace(about, columns=form.columns, categories=categories))
    values = {
        split: table_rows(f"{what}, {split}", table, about) for split, table in tables.items()
    }
    if not form.marks:
        return values, about

    unmarked = about
    marked = form.marks if isinstance(form.marks, tuple) else _columns_with_gaps(values, about)
    about = with_features(about, marked)
    return {split: with_marks(rows, unmarked, marked) for split, rows in values.items()}, about


def _columns_with_gaps(values: Mapping[str, Floats], about: About) -> tuple[str, ...]:
    has_gap = np.logical_or.reduce([np.isnan(rows).any(0) for rows in values.values()])
    return tuple(name for name, at in first_features(about).items() if has_gap[at])


def _list_values(
    what: str, tables: Tables, schema: TableSchema, about: About
) -> tuple[dict[str, Floats], About]:
    """Vectors (n, D), or series (n, channels, L)."""
    values = {
        split: _lists(f"{what}, {split}", table, schema.form).values()
        for split, table in tables.items()
    }
    return values, about


def _lists(what: str, table: pa.Table, form: Form) -> ListColumn:
    depth = 1 if form.kind == "vector" else 2
    return ListColumn.of(what, table[form.input], depth, form.length)


def _text_values(
    what: str, tables: Tables, schema: TableSchema, about: About
) -> tuple[dict[str, NDArray[np.int64]], About]:
    """Token ids (n, length)."""
    form = schema.form
    length = form.length or LENGTH
    values = {}
    for split, table in tables.items():
        column = table[form.input]
        if column.null_count:
            row = int(np.flatnonzero(null_mask(column.combine_chunks()))[0])
            raise DataError(
                f"{what}, {split}: example {row} has no text; leave it out, or write a word"
            )
        tokens = encoded(column.to_pylist(), form.tokenizer, form.vocabulary, length)
        values[split] = tokens.ids
        note = (
            f"{split}: {100 * tokens.cut:.1f} % of the texts are longer than {length} tokens: cut"
        )
        about = replace(
            about,
            vocabulary=tokens.vocabulary,
            tokenizer=form.tokenizer,
            tokenizer_sha=tokens.sha,
            notes=(*about.notes, note),
        )
    return values, about


ENCODERS: Mapping[str, Callable[..., tuple[dict[str, Any], About]]] = {
    "table": _table_values,
    "vector": _list_values,
    "series": _list_values,
    "text": _text_values,
}


# Rows that lack a value or a label.


@dataclass(frozen=True)
class _Rows:
    """The rows of a split: their values, and the table that they come from."""

    what: str
    split: str
    values: NDArray[Any]
    table: pa.Table
    frame: Frame | None

    def complete(
        self,
        schema: TableSchema,
        about: About,
        owner_codes: NDArray[np.int64] | None,
        notes: list[str],
    ) -> NDArray[np.bool_]:
        """Which rows (n,) are examples; adds a note on those that are left out.

        Raises DataError for a row without a value or a label if the form refuses such rows, and
        for an infinite value.
        """
        form = schema.form
        complete = ~self._incomplete(form, about)
        if not complete.all():
            if form.missing != "drop":
                raise DataError(self._missing_value(form, about, ~complete))
            notes.append(f"{self.split}: {_left_out(~complete, owner_codes, about.owners)}")

        labels = distinct_values(self.table[schema.label])
        unlabelled = complete & (labels.codes < 0)
        if unlabelled.any():
            if form.unlabelled == "refuse":
                raise DataError(self._missing_label(schema.label, unlabelled))
            complete &= ~unlabelled
            notes.append(
                f"{self.split}: {unlabelled.sum():,} of {len(unlabelled):,} rows were left out, as "
                "they have no label"
            )
        if not complete.any():
            raise DataError(
                f"{self.what}: every row misses a value or its label; set data.columns to "
                "columns that have values"
            )
        return complete

    def _incomplete(self, form: Form, about: About) -> NDArray[np.bool_]:
        """Which rows (n,) lack a value that nothing fills in."""
        if self.values.dtype.kind != "f":
            return np.zeros(len(self.values), dtype=bool)
        self._check_finite(about)
        if form.missing == "mean" and form.kind == "table":
            return np.zeros(len(self.values), dtype=bool)
        if form.kind == "series":  # the end of a series that is too short is NaN as well
            return _lists(self.what, self.table, form).has_gap()
        has_gap: NDArray[np.bool_] = np.isnan(self.values).reshape(len(self.values), -1).any(1)
        return has_gap

    def _check_finite(self, about: About) -> None:
        infinite = np.isinf(self.values).reshape(len(self.values), -1)
        rows = np.flatnonzero(infinite.any(1))
        if len(rows):
            feature = int(np.flatnonzero(infinite[rows[0]])[0])
            column = f" in column {about.features[feature]!r}" if about.features else ""
            raise DataError(
                f"{self.what}: example {rows[0]} has a value that is not finite{column}; correct it"
            )

    def _missing_value(self, form: Form, about: About, gaps: NDArray[np.bool_]) -> str:
        row = int(np.flatnonzero(gaps)[0])
        place = hint = ""
        if about.features:
            feature = int(np.flatnonzero(np.isnan(self.values[row].reshape(-1)))[0])
            column = about.features[feature].partition("=")[0]
            place = f" in column {column!r}"
            hint = mark_hint(self.frame, column, row)
        remedy = "'drop' to leave such rows out"
        if form.kind == "table":
            remedy += ", or 'mean'"
        return (
            f"{self.what}: example {row} has no value{place} ({gaps.sum():,} of {len(gaps):,} "
            f"rows miss one); {hint}set data.missing = {remedy}"
        )

    def _missing_label(self, column: str, unlabelled: NDArray[np.bool_]) -> str:
        row = int(np.flatnonzero(unlabelled)[0])
        hint = mark_hint(self.frame, column, row)
        return (
            f"{self.what}: example {row} has no label ({unlabelled.sum():,} of {len(unlabelled):,} "
            f"rows have none); {hint}set data.unlabelled = 'drop' to leave such rows out"
        )


def mark_hint(frame: Frame | None, column: str, row: int) -> str:
    """How a mark of missing values, such as NA, is read as a name instead; "" for other gaps."""
    if not isinstance(frame, CsvFrame) or frame.form.split_column or frame.form.missing_values:
        return ""
    mark = frame.mark(column, row)
    if not mark:
        return ""
    others = [other for other in MISSING_MARKS if other != mark][:1]
    return (
        f"{mark} means missing in a CSV file: where it is a name, write it in quotes, or list the "
        f"marks of this file, as in data.missing_values = {others}; where it means missing, "
    )


def _left_out(
    gaps: NDArray[np.bool_], codes: NDArray[np.int64] | None, owners: Sequence[str]
) -> str:
    """The number of rows that are left out, in all and by owner."""
    note = f"{gaps.sum():,} of {len(gaps):,} rows were left out, as they miss a value"
    if codes is None:
        return note
    lost = np.bincount(codes[gaps], minlength=len(owners))
    counts = [f"{name} {n:,}" for name, n in zip(owners, lost.tolist(), strict=True) if n]
    others = ", …" if len(counts) > 12 else ""
    return f"{note} ({', '.join(counts[:12])}{others})"


# Labels and owners.


def labels_of(what: str, column: pa.ChunkedArray, complete: NDArray[np.bool_]) -> list[int | str]:
    """The labels of complete rows, as whole numbers or names."""
    distinct = distinct_values(column)
    rows = np.flatnonzero(complete)
    codes = distinct.codes[rows]
    used, first = np.unique(codes, return_index=True)
    labels = {
        code: checked_label(what, row, distinct.values[code])
        for code, row in zip(used.tolist(), rows[first].tolist(), strict=True)
    }
    return [labels[code] for code in codes.tolist()]


def _check_label_types(what: str, labels: Mapping[str, Sequence[int | str]]) -> None:
    """Raise DataError if one split has names for labels, and train numbers, and none is in both."""
    train = set(labels.get("train", ()))
    train_has_names = any(isinstance(label, str) for label in train)
    for split, split_labels in labels.items():
        classes = set(split_labels)
        has_names = any(isinstance(label, str) for label in classes)
        in_both = {*map(str, classes)} & {*map(str, train)}
        if train and has_names != train_has_names and not in_both:
            raise DataError(
                f"{what}: the labels of {split} are {_examples(classes)}, those of train "
                f"{_examples(train)}; make them alike"
            )


def _examples(labels: set[int | str]) -> str:
    names = sorted(map(str, labels))
    others = ", …" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + others


def _stray_label_caution(arrays: Mapping[str, tuple[Any, Sequence[int | str]]]) -> str:
    """A warning about labels that are numbers but for a few texts, which are classes then."""
    counts = Counter(str(label) for _, labels in arrays.values() for label in labels)
    strays = Counter({name: count for name, count in counts.items() if not re.match(NUMBER, name)})
    if not 0 < 2 * strays.total() < counts.total():
        return ""
    names = ", ".join(f"{name[:60]!r} ({count:,})" for name, count in strays.most_common(3))
    first = strays.most_common(1)[0][0]
    return (
        f"labels are numbers but for {names}, each a class of its own; if one means missing, set "
        f"data.missing_values = [{first[:60]!r}]"
    )


@dataclass(frozen=True)
class Owners:
    """Whose examples are: the names of owners in order, and by split the number of each row's."""

    names: tuple[str, ...] = ()
    codes: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)


NO_OWNERS = Owners()


def owners_of(
    what: str, tables: Tables, column: str, frames: Mapping[str, Frame] = MappingProxyType({})
) -> Owners:
    """The owners that a column names: numbers in order of size, texts in alphabetical order.

    Raises DataError for a row without an owner.
    """
    values = {split: distinct_values(table[column]) for split, table in tables.items()}
    for split, distinct in values.items():
        unowned = np.flatnonzero(distinct.codes < 0)
        if len(unowned):
            raise DataError(
                f"{what}, {split}: example {unowned[0]} has no {column!r}, its owner; "
                f"{mark_hint(frames.get(split), column, int(unowned[0]))}write the owner"
            )
    names = names_in_order(value for distinct in values.values() for value in distinct.values)
    number = {name: index for index, name in enumerate(names)}
    codes = {}
    for split, distinct in values.items():
        owner_of_value = np.array([number[category_name(v)] for v in distinct.values] or [0])
        codes[split] = owner_of_value[distinct.codes].astype(np.int64)
    return Owners(names, codes)


# Checksums of known data sets.


def _digests(table: pa.Table, schema: TableSchema) -> tuple[str, str]:
    """SHA-256 of the inputs and of the labels, as they were read.

    Numbers count as float32, row by row; texts as UTF-8 with a zero byte after each. Labels are a
    byte each, as for images; labels that are names count as texts.
    """
    form = schema.form
    labels = table[schema.label].to_pylist()
    if form.kind == "text":
        inputs = b"".join(str(text).encode() + b"\0" for text in table[form.input].to_pylist())
    elif form.kind == "table":
        columns = [name for name in form.columns if _is_numeric(table[name].type)]
        stacked = (
            np.stack([numbers(table[name]) for name in columns], 1) if columns else np.empty(0)
        )
        inputs = stacked.astype("<f4").tobytes()
    else:
        inputs = _lists("", table, form).values().astype("<f4").tobytes()
    fit_in_a_byte = all(isinstance(label, int) and 0 <= label < 256 for label in labels)
    if fit_in_a_byte:
        label_bytes = bytes(labels)
    else:
        label_bytes = b"".join(str(label).encode() + b"\0" for label in labels)
    return hashlib.sha256(inputs).hexdigest(), hashlib.sha256(label_bytes).hexdigest()


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )
