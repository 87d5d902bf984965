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
from fedstill.data.dataset import (
    DEFAULT_TEXT_LENGTH,
    FILE,
    DatasetInfo,
    Decoded,
    Digests,
    ReadingOptions,
    ReadRequest,
    shortened_list,
)
from fedstill.data.encoding import (
    Categories,
    category_name,
    column_of_feature,
    distinct_values,
    encoded,
    first_features,
    float_values,
    lost_precision,
    names_in_order,
    null_mask,
    numbers,
    row_numbers,
    table_rows,
    with_features,
    with_marks,
)
from fedstill.data.sources.schema import (
    NUMBER,
    TableSchema,
    check_same_types,
    table_schema,
)
from fedstill.data.sources.splits import SPLITS, client_name, split_named
from fedstill.data.sources.tables import (
    MISSING_TEXTS,
    CsvFrame,
    Frame,
    ParquetFrame,
    single_file,
)
from fedstill.data.sources.verify import RawSplit, checked_label, decoded_with_class_ids

Tables = Mapping[str, pa.Table]
"""The columns that are read of each split."""

FileFrame = TypeVar("FileFrame", CsvFrame, ParquetFrame)


def read_frames(source: str, frames: Mapping[str, Frame], schema: TableSchema) -> Decoded:
    """All rows of {split: frame} as arrays.

    Numbers are float32, and NaN where ``missing = "mean"`` fills them in later. Labels that are
    text become ids in alphabetical order. Raises DataError for a row that lacks a value, unless the
    options say what to do about it, for one that holds an infinite value, and for lists of
    different lengths.
    """
    options = schema.options
    split_tables = _split_tables(source, frames, schema)
    tables = split_tables.tables
    # Messages on a missing value look up its text in the frame. Where a column divides the rows
    # into splits, the number of a row of a split is not its number in the frame.
    frames_of_messages: Mapping[str, Frame] = frames
    if options.split_column:
        frames_of_messages = {}
    owners = NO_OWNERS
    if options.owner:
        owners = owners_of(source, tables, options.owner, frames_of_messages)
    examples = ENCODERS[options.kind](source, tables, options)
    info = replace(examples.info, owners=owners.names)

    raw_splits = {}
    for split, table in tables.items():
        rows = _Rows(
            source=f"{source}, {split}",
            split=split,
            values=examples.values[split],
            table=table,
            owners=owners.codes.get(split),
            frame=frames_of_messages.get(split),
        )
        complete = rows.complete(schema, info)
        info = info.with_notes(*complete.notes)
        raw_splits[split] = rows.examples(schema.label, complete.mask)
    _check_label_types(source, raw_splits)

    digests = {}
    if schema.has_checksums and not options.length:
        digests = {split: _digests(table, schema) for split, table in tables.items()}
    first_table = next(iter(tables.values()))
    warnings = _column_warnings(schema, first_table, raw_splits)
    return replace(
        decoded_with_class_ids(raw_splits, schema.classes),
        source_digests=digests,
        about=info.with_warnings(split_tables.warning, *warnings),
    )


def _column_warnings(
    schema: TableSchema, train: pa.Table, raw_splits: Mapping[str, RawSplit]
) -> list[str]:
    """Warnings about columns that are left out, and about values that may be meant otherwise."""
    options = schema.options
    categorical = dict(options.categorical)
    numeric = [name for name in options.columns if name not in categorical]
    warnings = [schema.left_out, _stray_label_warning(raw_splits)]
    warnings += lost_precision(train, numeric)
    if not schema.chosen:
        warnings += row_numbers(train, options.columns)
    return warnings


def frames_of(
    frame_type: type[FileFrame],
    folder: Path,
    files: Mapping[str, Sequence[Path]],
    options: ReadingOptions,
) -> dict[str, FileFrame]:
    """The frames of the files in a folder, by split."""
    frames = {}
    for split, paths in files.items():
        clients: tuple[str, ...] = ()
        if options.owner == FILE:
            clients = tuple(client_name(folder, path, class_folders=False) for path in paths)
        frames[split] = frame_type(tuple(paths), options, clients)
    return frames


def schema_of(source: str, frames: Mapping[str, Frame], request: ReadRequest) -> TableSchema | None:
    """The schema of a data set, by the columns of its first split; None for images."""
    first_split = min(frames, key=SPLITS.index)
    frame = frames[first_split]

    def categories(name: str) -> list[Any]:
        column = frame.read([name])[name]
        return list(names_in_order(distinct_values(column).values))

    return table_schema(source, frame.schema, request, categories)


# The tables of all splits.


@dataclass(frozen=True)
class _SplitTables:
    """The table of each split, and a warning about rows that are in none."""

    tables: Tables
    warning: str = ""


def _split_tables(source: str, frames: Mapping[str, Frame], schema: TableSchema) -> _SplitTables:
    """The columns to read of every split, of the types of the first split."""
    options = schema.options
    # Only a table has a way to treat rows that lack a whole column.
    optional = options.kind == "table" and options.missing != "refuse"
    tables: dict[str, pa.Table] = {}
    first_part = ""
    for split in sorted(frames, key=SPLITS.index):
        frame = frames[split]
        part = str(single_file(frame.files) or f"{source}, {split}")
        first_part = first_part or part
        _check_columns(part, frame, first_part, schema)
        table = frame.read(schema.names, optional)
        if not len(table):
            raise DataError(f"{part} holds no examples; leave the file out or download it again")
        first_table = next(iter(tables.values()), table)
        check_same_types(part, table, first_part, first_table, schema)
        tables[split] = table
    if options.split_column:
        return _divided(source, tables, options.split_column)
    return _SplitTables(tables)


def _check_columns(part: str, frame: Frame, first_part: str, schema: TableSchema) -> None:
    """Raise DataError for a split without one of the columns to read, which the first split has.

    part, first_part: what is read, for messages.
    """
    present = frame.schema.names
    absent = [name for name in schema.names if name not in (FILE, *present)]
    if absent:
        names = ", ".join(map(repr, present))[:300] or "none"
        raise DataError(
            f"{part} has no column {absent[0]!r} among {names}, and {first_part} has it; write it "
            "there, or name the columns to read in data.columns"
        )


def _divided(source: str, tables: Tables, column: str) -> _SplitTables:
    """The rows of one table, divided by the split that a column names; others are left out."""
    if len(tables) > 1:
        raise DataError(
            f"{source}: data.split_column is for one table, and there are files of the splits "
            f"{', '.join(tables)}; leave it out"
        )
    (table,) = tables.values()
    distinct = distinct_values(table[column])
    split_of_row = distinct.mapped(lambda value: split_named(str(value)), missing="")
    by_split = {}
    for split in SPLITS:
        rows = table.filter(pa.array(split_of_row == split))
        if len(rows):
            by_split[split] = rows
    if "train" not in by_split:
        raise DataError(
            f"{source}: no row is of the split train by column {column!r}, which has "
            f"{', '.join(map(repr, distinct.values[:5]))}; its values must be train, validation "
            "and test"
        )

    unsplit_count = int(np.count_nonzero(split_of_row == ""))
    if not unsplit_count:
        return _SplitTables(by_split)
    unknown = [value for value in distinct.values if not split_named(str(value))]
    values = ", ".join(map(repr, unknown[:3])) or "no value"
    warning = f"left out: {unsplit_count:,} of {len(table):,} rows, whose {column!r} is {values}"
    return _SplitTables(by_split, warning)


# The values of each kind of examples.


@dataclass(frozen=True, eq=False)
class _Encoded:
    """The values of each split, for all rows, and what they are."""

    values: Mapping[str, NDArray[Any]]
    info: DatasetInfo


def _table_values(source: str, tables: Tables, options: ReadingOptions) -> _Encoded:
    """Rows (n, features), with the marks of missing numbers behind them."""
    categorical = dict(options.categorical)
    train = tables.get("train", next(iter(tables.values())))
    categories = []
    for name in options.columns:
        if name in categorical:
            of_column = Categories.of(source, name, categorical[name], train[name])
            categories.append((name, of_column.values))
    columns_info = DatasetInfo("table", columns=options.columns, categories=tuple(categories))
    info = with_features(columns_info)
    values = {
        split: table_rows(f"{source}, {split}", table, info) for split, table in tables.items()
    }
    if not options.marks:
        return _Encoded(values, info)

    marked = options.marks
    if not isinstance(marked, tuple):
        marked = _columns_with_gaps(values, info)
    marked_values = {split: with_marks(rows, info, marked) for split, rows in values.items()}
    return _Encoded(marked_values, with_features(info, marked))


def _columns_with_gaps(values: Mapping[str, NDArray[Any]], info: DatasetInfo) -> tuple[str, ...]:
    """The columns in which a row of any split has no value."""
    has_gap = np.logical_or.reduce([np.isnan(rows).any(0) for rows in values.values()])
    return tuple(name for name, feature in first_features(info).items() if has_gap[feature])


def _list_values(source: str, tables: Tables, options: ReadingOptions) -> _Encoded:
    """Vectors (n, D), or series (n, channels, L)."""
    values = {
        split: _lists(f"{source}, {split}", table, options).values()
        for split, table in tables.items()
    }
    return _Encoded(values, DatasetInfo(options.kind))  # type: ignore[arg-type]


def _lists(source: str, table: pa.Table, options: ReadingOptions) -> ListColumn:
    depth = {"vector": 1, "series": 2}[options.kind]
    return ListColumn.of(source, table[options.input], depth, options.length)


def _text_values(source: str, tables: Tables, options: ReadingOptions) -> _Encoded:
    """Token ids (n, length)."""
    length = options.length or DEFAULT_TEXT_LENGTH
    info = DatasetInfo("text", tokenizer=options.tokenizer)
    values = {}
    for split, table in tables.items():
        column = table[options.input]
        if column.null_count:
            row = int(np.flatnonzero(null_mask(column.combine_chunks()))[0])
            raise DataError(
                f"{source}, {split}: example {row} has no text; leave it out, or write a word"
            )
        tokens = encoded(column.to_pylist(), options.tokenizer, options.vocabulary, length)
        values[split] = tokens.ids
        info = replace(info, vocabulary=tokens.vocabulary, tokenizer_sha=tokens.sha).with_notes(
            f"{split}: {100 * tokens.cut_share:.1f} % of the texts are longer than {length} "
            "tokens: cut"
        )
    return _Encoded(values, info)


ENCODERS: Mapping[str, Callable[[str, Tables, ReadingOptions], _Encoded]] = {
    "table": _table_values,
    "vector": _list_values,
    "series": _list_values,
    "text": _text_values,
}


# Rows that lack a value or a label.


@dataclass(frozen=True)
class _CompleteRows:
    """Which rows (n,) of a split are examples, and notes on those that are left out."""

    mask: NDArray[np.bool_]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Rows:
    """All rows of a split: their values, and the table and the frame that they come from."""

    source: str
    split: str
    values: NDArray[Any]
    table: pa.Table
    owners: NDArray[np.int64] | None
    frame: Frame | None

    def complete(self, schema: TableSchema, info: DatasetInfo) -> _CompleteRows:
        """The rows that have all values and a label.

        Raises DataError for a row without a value or a label if the options refuse such rows, and
        for an infinite value.
        """
        options = schema.options
        notes = []
        gaps = self._gaps(options, info)
        if gaps.any():
            if options.missing != "drop":
                raise DataError(self._missing_value(options, info, gaps))
            notes.append(f"{self.split}: {_left_out(gaps, self.owners, info.owners)}")

        unlabelled = ~gaps & (distinct_values(self.table[schema.label]).codes < 0)
        if unlabelled.any():
            if options.unlabelled == "refuse":
                raise DataError(self._missing_label(schema.label, unlabelled))
            notes.append(
                f"{self.split}: {unlabelled.sum():,} of {len(unlabelled):,} rows were left out, as "
                "they have no label"
            )
        complete = ~gaps & ~unlabelled
        if not complete.any():
            raise DataError(
                f"{self.source}: every row misses a value or its label; set data.columns to "
                "columns that have values"
            )
        return _CompleteRows(complete, tuple(notes))

    def examples(self, label: str, complete: NDArray[np.bool_]) -> RawSplit:
        """The values, labels and owners of complete rows."""
        labels = labels_of(self.source, self.table[label], complete)
        owners = self.owners
        if owners is not None:
            owners = owners[complete]
        return RawSplit(self.values[complete], labels, owners)

    def _gaps(self, options: ReadingOptions, info: DatasetInfo) -> NDArray[np.bool_]:
        """Which rows (n,) lack a value that nothing fills in."""
        nothing = np.zeros(len(self.values), dtype=bool)
        if self.values.dtype.kind != "f":
            return nothing
        self._check_finite(info)
        if options.missing == "mean" and options.kind == "table":
            return nothing
        if options.kind == "series":  # the end of a series that is too short is NaN as well
            return _lists(self.source, self.table, options).has_gap()
        has_gap: NDArray[np.bool_] = np.isnan(self.values).reshape(len(self.values), -1).any(1)
        return has_gap

    def _check_finite(self, info: DatasetInfo) -> None:
        """Raise DataError for a value that is infinite."""
        is_infinite = np.isinf(self.values).reshape(len(self.values), -1)
        rows = np.flatnonzero(is_infinite.any(1))
        if not len(rows):
            return
        row = rows[0]
        place = ""
        if info.features:
            feature = int(np.flatnonzero(is_infinite[row])[0])
            place = f" in column {info.features[feature]!r}"
        raise DataError(
            f"{self.source}: example {row} has a value that is not finite{place}; correct it"
        )

    def _missing_value(
        self, options: ReadingOptions, info: DatasetInfo, gaps: NDArray[np.bool_]
    ) -> str:
        row = int(np.flatnonzero(gaps)[0])
        place = ""
        hint = ""
        if info.features:
            feature = int(np.flatnonzero(np.isnan(self.values[row]))[0])
            column = column_of_feature(info, feature)
            place = f" in column {column!r}"
            hint = missing_text_hint(self.frame, column, row)
        remedy = "'drop' to leave such rows out"
        if options.kind == "table":
            remedy += ", or 'mean'"
        return (
            f"{self.source}: example {row} has no value{place} ({gaps.sum():,} of {len(gaps):,} "
            f"rows miss one); {hint}set data.missing = {remedy}"
        )

    def _missing_label(self, column: str, unlabelled: NDArray[np.bool_]) -> str:
        row = int(np.flatnonzero(unlabelled)[0])
        hint = missing_text_hint(self.frame, column, row)
        return (
            f"{self.source}: example {row} has no label ({unlabelled.sum():,} of "
            f"{len(unlabelled):,} rows have none); {hint}set data.unlabelled = 'drop' to leave "
            "such rows out"
        )


def missing_text_hint(frame: Frame | None, column: str, row: int) -> str:
    """How a text that means missing, such as NA, is read as a name instead; "" for other gaps."""
    if not isinstance(frame, CsvFrame) or frame.options.missing_values:
        return ""
    text = frame.missing_text_at(column, row)
    if not text:
        return ""
    examples = [candidate for candidate in MISSING_TEXTS if candidate != text][:1]
    return (
        f"{text} means missing in a CSV file: where it is a name, write it in quotes, or list the "
        f"marks of this file, as in data.missing_values = {examples}; where it means missing, "
    )


NAMED_OWNERS = 12
"""The number of owners that a note names."""


def _left_out(
    gaps: NDArray[np.bool_], owners: NDArray[np.int64] | None, names: Sequence[str]
) -> str:
    """The number of rows that are left out, in all and by owner."""
    note = f"{gaps.sum():,} of {len(gaps):,} rows were left out, as they miss a value"
    if owners is None:
        return note
    by_owner = np.bincount(owners[gaps], minlength=len(names))
    counts = [f"{name} {n:,}" for name, n in zip(names, by_owner.tolist(), strict=True) if n]
    return f"{note} ({shortened_list(counts, NAMED_OWNERS)})"


# Labels and owners.


def labels_of(source: str, column: pa.ChunkedArray, complete: NDArray[np.bool_]) -> list[int | str]:
    """The labels of complete rows, as whole numbers or names."""
    distinct = distinct_values(column)
    rows = np.flatnonzero(complete)
    codes = distinct.codes[rows]
    used, first = np.unique(codes, return_index=True)
    labels = {
        code: checked_label(source, row, distinct.values[code])
        for code, row in zip(used.tolist(), rows[first].tolist(), strict=True)
    }
    return [labels[code] for code in codes.tolist()]


def _check_label_types(source: str, splits: Mapping[str, RawSplit]) -> None:
    """Raise DataError if one split has names for labels, and train numbers, and none is in both."""
    if "train" not in splits:
        return
    train_labels = set(splits["train"].labels)
    train_texts = set(map(str, train_labels))
    for name, split in splits.items():
        labels = set(split.labels)
        is_same_type = _has_names(labels) == _has_names(train_labels)
        if not is_same_type and train_texts.isdisjoint(map(str, labels)):
            raise DataError(
                f"{source}: the labels of {name} are {_first_labels(labels)}, those of train "
                f"{_first_labels(train_labels)}; make them alike"
            )


def _has_names(labels: set[int | str]) -> bool:
    return any(isinstance(label, str) for label in labels)


def _first_labels(labels: set[int | str]) -> str:
    names = sorted(map(str, labels))
    return shortened_list([repr(name) for name in names], 3)


def _stray_label_warning(splits: Mapping[str, RawSplit]) -> str:
    """A warning about labels that are numbers but for a few texts, which are classes then."""
    counts = Counter[str]()
    for split in splits.values():
        counts.update(map(str, split.labels))
    strays = Counter[str]()
    for label, count in counts.items():
        if not re.match(NUMBER, label):
            strays[label] = count
    # If half of the labels or more are texts, the labels are meant to be names.
    if not 0 < 2 * strays.total() < counts.total():
        return ""
    most_common = [(label[:60], count) for label, count in strays.most_common(3)]
    listed = ", ".join(f"{label!r} ({count:,})" for label, count in most_common)
    first_label = most_common[0][0]
    return (
        f"labels are numbers but for {listed}, each a class of its own; if one means missing, set "
        f"data.missing_values = [{first_label!r}]"
    )


@dataclass(frozen=True)
class Owners:
    """The names of owners in order, and by split the number of each row's owner."""

    names: tuple[str, ...] = ()
    codes: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)


NO_OWNERS = Owners()


def owners_of(
    source: str, tables: Tables, column: str, frames: Mapping[str, Frame] = MappingProxyType({})
) -> Owners:
    """The owners that a column names: numbers in order of size, texts in alphabetical order.

    frames: where the tables come from, for messages. Raises DataError for a row without an owner.
    """
    by_split = {split: distinct_values(table[column]) for split, table in tables.items()}
    names: list[Any] = []
    for split, distinct in by_split.items():
        unowned = np.flatnonzero(distinct.codes < 0)
        if len(unowned):
            row = int(unowned[0])
            raise DataError(
                f"{source}, {split}: example {row} has no {column!r}, its owner; "
                f"{missing_text_hint(frames.get(split), column, row)}write the owner"
            )
        names += distinct.values
    ordered = names_in_order(names)
    number = {name: index for index, name in enumerate(ordered)}
    codes = {
        split: distinct.mapped(lambda value: number[category_name(value)], missing=-1)
        for split, distinct in by_split.items()
    }
    return Owners(ordered, codes)


# Checksums of known data sets.


def _digests(table: pa.Table, schema: TableSchema) -> Digests:
    """The digests of inputs and labels, as they were read.

    Numbers count as float32, row by row; texts as UTF-8 with a zero byte after each. Labels are a
    byte each, as for images; labels that are names count as texts.
    """
    options = schema.options
    labels = table[schema.label].to_pylist()
    if options.kind == "text":
        inputs = _texts_as_bytes(table[options.input].to_pylist())
    elif options.kind == "table":
        columns = [name for name in options.columns if _is_numeric(table[name].type)]
        stacked = np.empty(0)
        if columns:
            stacked = np.stack([numbers(table[name]) for name in columns], 1)
        inputs = stacked.astype("<f4").tobytes()
    else:
        inputs = _lists("", table, options).values().astype("<f4").tobytes()

    if all(isinstance(label, int) and 0 <= label < 256 for label in labels):
        label_bytes = bytes(labels)
    else:
        label_bytes = _texts_as_bytes(labels)
    return Digests(hashlib.sha256(inputs).hexdigest(), hashlib.sha256(label_bytes).hexdigest())


def _texts_as_bytes(texts: Sequence[Any]) -> bytes:
    return b"".join(str(text).encode() + b"\0" for text in texts)


def _is_numeric(arrow_type: pa.DataType) -> bool:
    is_integer_or_bool = pa.types.is_integer(arrow_type) or pa.types.is_boolean(arrow_type)
    return bool(is_integer_or_bool or pa.types.is_floating(arrow_type))


# A column of lists as an array: vectors, or the channels of series.


Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ListColumn:
    """Lists of numbers (``depth`` 1) or lists of such lists (``depth`` 2), one for each example.

    length: the values that are kept of each innermost list; 0 keeps all, and then all lists must
    have the same length. source: the place of the column, for messages.
    """

    source: str
    array: pa.Array
    depth: int
    length: int = 0

    @staticmethod
    def of(source: str, column: pa.ChunkedArray, depth: int, length: int) -> ListColumn:
        """The column of a table."""
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # of extension types, and in older versions
            array = array.chunk(0)
        return ListColumn(source, array, depth, length)

    def values(self) -> Floats:
        """(n, D) or (n, channels, L) float32; longer lists are cut, shorter ones end with NaN.

        An example is NaN if it is null or has a list that is. Raises DataError if all are, or if
        lengths differ.
        """
        rows = np.flatnonzero(~self._has_null_list())
        if not len(rows):
            raise DataError(
                f"{self.source}: no example has all its values; write them, or leave the column out"
            )
        if len(rows) == len(self.array):
            # Arrow's memory must not be written to.
            return np.require(self._stacked(self.array, rows), requirements=["W"])
        complete = self._stacked(self.array.take(pa.array(rows)), rows)
        values = np.full((len(self.array), *complete.shape[1:]), np.nan, dtype=np.float32)
        values[rows] = complete
        return values

    def has_gap(self) -> NDArray[np.bool_]:
        """Which examples (n,) are null, or lack a list or one of the numbers that are kept."""
        has_gap = self._has_null_list()
        rows = np.arange(len(self.array))
        numbers = self.array
        sizes = rows[:0]
        for _ in range(self.depth):
            sizes = _sizes(numbers)
            rows = np.repeat(rows, sizes)
            numbers = numbers.flatten()
        is_missing = np.isnan(_floats(numbers))
        if self.length:
            is_missing &= _places(sizes) < self.length
        has_gap[rows[is_missing]] = True
        return has_gap

    def _has_null_list(self) -> NDArray[np.bool_]:
        """Which examples (n,) are null, or have a list that is."""
        has_null = np.zeros(len(self.array), dtype=bool)
        rows = np.arange(len(self.array))
        array = self.array
        for level in range(self.depth):
            has_null[rows[null_mask(array)]] = True
            if level < self.depth - 1:
                rows = np.repeat(rows, _sizes(array))
                array = array.flatten()
        return has_null

    def _stacked(self, array: pa.Array, rows: NDArray[np.int64]) -> Floats:
        """The values of examples without a null list; ``rows``: their numbers, for messages."""
        shape = [len(array)]
        for level in range(self.depth):
            sizes = _sizes(array)
            array = array.flatten()
            is_innermost = level == self.depth - 1
            if is_innermost and self.length:
                return _cut_or_filled(_floats(array), sizes, self.length).reshape(*shape, -1)
            self._check_sizes(sizes, rows, shape, is_innermost=is_innermost)
            shape.append(int(sizes[0]))
        return _floats(array).reshape(shape)

    def _check_sizes(
        self,
        sizes: NDArray[np.int64],
        rows: NDArray[np.int64],
        shape: list[int],
        *,
        is_innermost: bool,
    ) -> None:
        """Raise DataError for a list of another length than the first, or of none."""
        wrong = np.flatnonzero((sizes != sizes[0]) | (sizes < 1))
        if not len(wrong):
            return
        lists_an_example = max(1, int(np.prod(shape[1:])))
        example = rows[wrong[0] // lists_an_example]
        parts = "channels"
        remedy = "leave it out"
        if is_innermost:
            parts = "values"
            remedy = "correct it, or leave it out"
        if is_innermost and self.depth > 1:
            remedy = "set data.length to cut and fill up all to one length"
        raise DataError(
            f"{self.source}: example {example} has {sizes[wrong[0]]} {parts}, the first "
            f"{sizes[0]}; {remedy}"
        )


def _floats(numbers: pa.Array) -> Floats:
    if pa.types.is_float32(numbers.type):
        return float_values(numbers, np.float32)
    return float_values(numbers.cast(pa.float64())).astype(np.float32)


def _sizes(array: Any) -> NDArray[np.int64]:
    """The length of each list; 0 for one that is null."""
    if pa.types.is_fixed_size_list(array.type):
        sizes = np.full(len(array), array.type.list_size, dtype=np.int64)
    else:
        sizes = np.diff(np.from_dlpack(array.offsets)).astype(np.int64)
    sizes[null_mask(array)] = 0
    return sizes


def _places(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each number in its list."""
    starts = np.cumsum(sizes) - sizes
    places: NDArray[np.int64] = np.arange(sizes.sum()) - np.repeat(starts, sizes)
    return places


def _cut_or_filled(numbers: Floats, sizes: NDArray[np.int64], length: int) -> Floats:
    """Lists as rows of one length: cut, or filled up with NaN."""
    rows = np.full((len(sizes), length), np.nan, dtype=np.float32)
    places = _places(sizes)
    fits = places < length
    row_of_number = np.repeat(np.arange(len(sizes)), sizes)
    rows[row_of_number[fits], places[fits]] = numbers[fits]
    return rows
