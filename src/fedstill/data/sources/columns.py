"""Encoding of columns as the arrays of a data set: tables, vectors, series and texts."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.core.files import shortened_list
from fedstill.data.dataset import (
    DEFAULT_TEXT_LENGTH,
    FILE,
    DatasetInfo,
    Decoded,
    Digests,
    ReadingOptions,
    ReadRequest,
)
from fedstill.data.encoding import (
    ListColumn,
    TableInputs,
    category_name,
    category_names,
    check_holds_names,
    column_of_feature,
    distinct_values,
    first_position_of_column,
    float_values,
    names_in_order,
    null_mask,
    numbers,
    table_rows,
    with_marks,
)
from fedstill.data.sources.files import SPLITS, BySplit, split_of_name
from fedstill.data.sources.schema import (
    NUMBER,
    TableSchema,
    check_same_types,
    class_names,
    holds_numbers,
    table_schema,
)
from fedstill.data.sources.tables import (
    MISSING_TEXTS,
    CsvFrame,
    Frame,
    ParquetFrame,
    ParquetSource,
    name_of_files,
    with_missing,
    with_same_texts,
)
from fedstill.data.sources.verification import RawSplit, checked_label, decoded_with_class_ids
from fedstill.data.tokens import token_ids

Tables = Mapping[str, pa.Table]
"""The columns to read, by split."""


def encode_frames(source: str, frames: Mapping[str, Frame], schema: TableSchema) -> Decoded:
    """Encode all rows of ``frames``, which has a frame for each split.

    Numbers are float32. A number is NaN if ``missing = "mean"`` fills it in later. Labels that are
    texts become ids in alphabetical order. Raises DataError for a missing value (unless the options
    permit it), an infinite value, and lists of different lengths.
    """
    options = schema.options
    frames = with_same_texts(frames, [*schema.identifiers, *dict(options.categorical)])
    splits = _read_splits(source, frames, schema)
    tables = splits.parts
    if options.split_column:
        # Row numbers of a split and of the frame differ, so messages cannot look up texts.
        frames = {}
    owners = Owners()
    if options.owner:
        owners = owners_of(source, tables, options.owner, frames)
    encoded = ENCODERS[options.kind](source, tables, options)
    info = replace(encoded.info, owners=owners.names)

    raw_splits = {}
    for split, table in tables.items():
        rows = _Rows(
            source=f"{source}, {split}",
            split=split,
            schema=schema,
            info=info,
            values=encoded.values[split],
            table=table,
            owners=owners.codes.get(split),
            frame=frames.get(split),
        )
        raw_splits[split] = rows.complete()
    _check_label_types(source, raw_splits)

    first_table = next(iter(tables.values()))
    warnings = _column_warnings(schema, first_table, raw_splits)
    data = decoded_with_class_ids(raw_splits, schema.classes, info)
    data = data.with_warnings(*splits.warnings, *warnings)
    return replace(data, source_digests=_source_digests(tables, schema))


def _column_warnings(
    schema: TableSchema, train: pa.Table, raw_splits: Mapping[str, RawSplit]
) -> list[str]:
    """Warnings about columns that are left out, and about values that may be misread."""
    options = schema.options
    categorical = dict(options.categorical)
    numeric = [name for name in options.columns if name not in categorical]
    warnings = [
        schema.left_out,
        _stray_label_warning(raw_splits),
        _marked_label_warning(raw_splits, options.missing_values),
    ]
    warnings += lost_precision(train, numeric)
    if not schema.chosen:
        warnings += row_numbers(train, options.columns)
    return warnings


def schema_of_frames(
    source: str, frames: Mapping[str, Frame], request: ReadRequest
) -> TableSchema | None:
    """The schema of the columns of the first split; None for images.

    Raises DataError if files or splits declare different class names.
    """
    frame = next(iter(frames.values()))

    def categories(name: str) -> list[Any]:
        table = with_missing(frame.read([name]), request.options.missing_values)
        return list(names_in_order(distinct_values(table[name]).values))

    schema = table_schema(source, frame.schema, request, categories)
    if schema is None:
        return None
    labels = dict.fromkeys(frames, schema.label)
    return replace(schema, classes=declared_classes(source, frames, labels))


# The class names that files declare for ids.


@dataclass(frozen=True)
class _ClassDeclaration:
    """The class names that a file or split declares for the ids in its column of labels."""

    part: str
    names: tuple[str, ...]


def declared_classes(
    source: str, frames: Mapping[str, Frame], labels: Mapping[str, str]
) -> tuple[str, ...] | None:
    """The class names that the files of all splits declare for ids; None if no file declares any.

    labels: the column of labels of each split. Raises DataError if two files or splits declare
    different names, because an id would then mean two classes.
    """
    declarations = []
    for split, frame in frames.items():
        declarations += _class_declarations(f"{source}, {split}", frame, labels[split])
    if not declarations:
        return None
    first = declarations[0]
    for declaration in declarations:
        if declaration.names != first.names:
            raise DataError(_class_conflict(first, declaration))
    return first.names


def _class_declarations(part: str, frame: Frame, label: str) -> list[_ClassDeclaration]:
    """The declarations of a split, or of each of its parquet files."""
    schemas = {part: frame.schema}
    if isinstance(frame, ParquetFrame):
        schemas = {str(path): ParquetSource.of(path).schema for path in frame.files}
    declarations = []
    for name, schema in schemas.items():
        names = class_names(schema, label)
        if names is not None:
            declarations.append(_ClassDeclaration(name, names))
    return declarations


def _class_conflict(first: _ClassDeclaration, second: _ClassDeclaration) -> str:
    """The message about two declarations that differ, with the first id that differs."""
    count = min(len(first.names), len(second.names))
    index = next((i for i in range(count) if first.names[i] != second.names[i]), count)
    first_name = _name_of_id(first, index)
    second_name = _name_of_id(second, index)
    return (
        f"class id {index} means {second_name} in {second.part}, but {first_name} in "
        f"{first.part}; write the files again with the same class names"
    )


def _name_of_id(declaration: _ClassDeclaration, index: int) -> str:
    """The name of a class id in a message."""
    if index < len(declaration.names):
        return repr(declaration.names[index])
    return "nothing"


# The tables of all splits.


def _read_splits(
    source: str, frames: Mapping[str, Frame], schema: TableSchema
) -> BySplit[pa.Table]:
    """Read the columns of every split. Their types must be those of the first split."""
    options = schema.options
    # Only tables can fill in or drop the values of a missing column.
    may_lack_columns = options.kind == "table" and options.missing != "refuse"
    tables: dict[str, pa.Table] = {}
    first_part = ""
    for split, frame in frames.items():
        part = name_of_files(frame.files, f"{source}, {split}")
        first_part = first_part or part
        _check_columns(part, frame, first_part, schema)
        if isinstance(frame, CsvFrame) and not may_lack_columns:
            frame.check_complete(schema.names)
        table = frame.read(schema.names)
        table = with_missing(table, options.missing_values, schema.identifiers)
        if not len(table):
            remedy = "leave this split out"
            if frame.files:
                remedy = "leave the file out or download it again"
            raise DataError(f"{part} holds no examples; {remedy}")
        first_table = next(iter(tables.values()), table)
        check_same_types(part, table, first_part, first_table, schema)
        tables[split] = table
    if options.split_column:
        return _by_split_column(source, tables, options.split_column)
    return BySplit(tables)


def _check_columns(part: str, frame: Frame, first_part: str, schema: TableSchema) -> None:
    """Raise DataError if a split lacks a column to read, which the first split has.

    part, first_part: the names of the files or splits, for messages.
    """
    present = frame.schema.names
    absent = [name for name in schema.names if name not in (FILE, *present)]
    if absent:
        names = ", ".join(map(repr, present))[:300] or "none"
        raise DataError(
            f"{part} has no column {absent[0]!r} (its columns are {names}), but {first_part} has "
            "it; add the column, or list the columns to read in data.columns"
        )


def _by_split_column(source: str, tables: Tables, column: str) -> BySplit[pa.Table]:
    """Divide a table by a column of split names. Rows without a known name are left out."""
    if len(tables) > 1:
        raise DataError(
            f"{source}: data.split_column divides a single table, but there are files for the "
            f"splits {', '.join(tables)}; remove the key"
        )
    (table,) = tables.values()
    distinct = distinct_values(table[column])
    split_of_row = distinct.mapped(lambda value: split_of_name(str(value)), missing="")
    by_split = {}
    for split in SPLITS:
        rows = table.filter(pa.array(split_of_row == split))
        if len(rows):
            by_split[split] = rows
    if "train" not in by_split:
        examples = ", ".join(map(repr, distinct.values[:5]))
        raise DataError(
            f"{source}: column {column!r} assigns no row to the split train; its values are "
            f"{examples}, but must be train, validation and test"
        )

    unsplit_count = int(np.count_nonzero(split_of_row == ""))
    if not unsplit_count:
        return BySplit(by_split)
    unknown = [value for value in distinct.values if not split_of_name(str(value))]
    values = ", ".join(map(repr, unknown[:3])) or "no value"
    warning = (
        f"left out {unsplit_count:,} of {len(table):,} rows because their {column!r} is {values}"
    )
    return BySplit(by_split, (warning,))


# The values of each kind of examples.


@dataclass(frozen=True, eq=False)
class _Encoded:
    """The values of all rows by split, and their description."""

    values: Mapping[str, NDArray[Any]]
    info: DatasetInfo


def _table_values(source: str, tables: Tables, options: ReadingOptions) -> _Encoded:
    """Rows (n, features). The last features mark missing numbers."""
    categorical = dict(options.categorical)
    train = tables.get("train", next(iter(tables.values())))
    categories = {
        name: category_names(source, name, categorical[name], train[name])
        for name in options.columns
        if name in categorical
    }
    inputs = TableInputs(options.columns, categories)
    info = inputs.info
    values = {
        split: table_rows(f"{source}, {split}", table, info) for split, table in tables.items()
    }
    if not options.marks:
        return _Encoded(values, info)

    marked = options.marks
    if not isinstance(marked, tuple):
        marked = _columns_with_gaps(values, info)
    marked_values = {split: with_marks(rows, info, marked) for split, rows in values.items()}
    return _Encoded(marked_values, replace(inputs, marked=marked).info)


def _columns_with_gaps(values: Mapping[str, NDArray[Any]], info: DatasetInfo) -> tuple[str, ...]:
    """The columns with a missing value in any split."""
    has_gap = np.logical_or.reduce([np.isnan(rows).any(0) for rows in values.values()])
    positions = first_position_of_column(info)
    return tuple(name for name, position in positions.items() if has_gap[position])


def _list_values(source: str, tables: Tables, options: ReadingOptions) -> _Encoded:
    """Vectors (n, D), or series (n, channels, L)."""
    values = {
        split: _lists(f"{source}, {split}", table, options).values()
        for split, table in tables.items()
    }
    return _Encoded(values, DatasetInfo(options.kind))  # type: ignore[arg-type]


def _lists(source: str, table: pa.Table, options: ReadingOptions) -> ListColumn:
    depth = {"vector": 1, "series": 2}[options.kind]
    return ListColumn(source, table[options.input].combine_chunks(), depth, options.length)


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
                f"{source}, {split}: example {row} has no text; remove the row or add a text"
            )
        tokens = token_ids(column.to_pylist(), options.tokenizer, options.vocabulary, length)
        values[split] = tokens.ids
        info = replace(info, vocabulary=tokens.vocabulary, tokenizer_sha=tokens.sha)
        if tokens.cut_share:
            info = info.with_notes(
                f"{split}: {100 * tokens.cut_share:.1f} % of the texts were cut to {length} tokens"
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
class _Rows:
    """All rows of a split: their values, and their table and frame."""

    source: str
    split: str
    schema: TableSchema
    info: DatasetInfo
    """The description of the data."""
    values: NDArray[Any]
    table: pa.Table
    owners: NDArray[np.int64] | None
    frame: Frame | None
    """The frame in which a message looks up the text of a missing value, if there is one."""

    def complete(self) -> RawSplit:
        """The rows that have all values and a label, and notes on other rows.

        Raises DataError for an infinite value, and for an incomplete row that the options refuse.
        """
        options = self.schema.options
        gaps = self._gaps()
        notes = self._notes_on_means()
        if gaps.any():
            if options.missing != "drop":
                raise DataError(self._missing_value(gaps))
            notes.append(f"{self.split}: {_left_out(gaps, self.owners, self.info.owners)}")

        labels = self.table[self.schema.label]
        unlabelled = ~gaps & (distinct_values(labels).codes < 0)
        if unlabelled.any():
            if options.unlabelled == "refuse":
                raise DataError(self._missing_label(unlabelled))
            notes.append(
                f"{self.split}: {unlabelled.sum():,} of {len(unlabelled):,} rows without a label "
                "were left out"
            )
        complete = ~gaps & ~unlabelled
        if not complete.any():
            raise DataError(
                f"{self.source}: every row lacks a value or its label; set data.columns to "
                "columns with values"
            )
        owners = self.owners
        if owners is not None:
            owners = owners[complete]
        checked_labels = labels_of(self.source, labels, complete)
        return RawSplit(self.values[complete], checked_labels, owners, tuple(notes))

    def _gaps(self) -> NDArray[np.bool_]:
        """A mask (n,) of the rows with a missing value that is not filled in later."""
        options = self.schema.options
        no_gaps = np.zeros(len(self.values), dtype=bool)
        if self.values.dtype.kind != "f":
            return no_gaps
        self._check_finite()
        if options.missing == "mean" and options.kind == "table":
            return no_gaps
        if options.kind == "series":  # short series end with NaN, which are not gaps
            return _lists(self.source, self.table, options).has_gap()
        has_gap: NDArray[np.bool_] = np.isnan(self.values).reshape(len(self.values), -1).any(1)
        return has_gap

    def _notes_on_means(self) -> list[str]:
        """A note on the values of a table that ``missing = "mean"`` fills in later, by column."""
        options = self.schema.options
        if options.missing != "mean" or options.kind != "table":
            return []
        counts = []
        for column, feature in first_position_of_column(self.info).items():
            count = int(np.isnan(self.values[:, feature]).sum())
            if count:
                counts.append(f"{column} {count:,}")
        if not counts:
            return []
        return [
            f"{self.split}: missing values become the mean, or zeros for a category: "
            f"{shortened_list(counts)}"
        ]

    def _check_finite(self) -> None:
        """Raise DataError for an infinite value."""
        is_infinite = np.isinf(self.values).reshape(len(self.values), -1)
        rows = np.flatnonzero(is_infinite.any(1))
        if not len(rows):
            return
        row = rows[0]
        place = ""
        if self.info.features:
            feature = int(np.flatnonzero(is_infinite[row])[0])
            place = f" in column {self.info.features[feature]!r}"
        raise DataError(f"{self.source}: example {row} has an infinite value{place}; correct it")

    def _missing_value(self, gaps: NDArray[np.bool_]) -> str:
        row = int(np.flatnonzero(gaps)[0])
        place = ""
        hint = ""
        if self.info.features:
            feature = int(np.flatnonzero(np.isnan(self.values[row]))[0])
            column = column_of_feature(self.info, feature)
            place = f" in column {column!r}"
            hint = missing_text_hint(self.frame, column, row)
        remedy = "'drop' to skip such rows"
        if self.schema.options.kind == "table":
            remedy += ", or 'mean'"
        return (
            f"{self.source}: example {row} has no value{place} ({gaps.sum():,} of {len(gaps):,} "
            f"rows lack one); {hint}set data.missing = {remedy}"
        )

    def _missing_label(self, unlabelled: NDArray[np.bool_]) -> str:
        row = int(np.flatnonzero(unlabelled)[0])
        hint = missing_text_hint(self.frame, self.schema.label, row)
        return (
            f"{self.source}: example {row} has no label ({unlabelled.sum():,} of "
            f"{len(unlabelled):,} rows have none); {hint}set data.unlabelled = 'drop' to skip "
            "such rows"
        )


def missing_text_hint(frame: Frame | None, column: str, row: int) -> str:
    """A hint that a text such as NA was read as missing; empty for other gaps."""
    if not isinstance(frame, CsvFrame) or frame.options.missing_values:
        return ""
    text = frame.missing_text_at(column, row)
    if not text:
        return ""
    examples = [candidate for candidate in MISSING_TEXTS if candidate != text][:1]
    return (
        f"{text} was read as a missing value; if it is a real value, quote it or set "
        f"data.missing_values = {examples}; otherwise, "
    )


def _left_out(
    gaps: NDArray[np.bool_], owners: NDArray[np.int64] | None, names: Sequence[str]
) -> str:
    """A note on the number of rows left out, in total and by owner."""
    note = f"{gaps.sum():,} of {len(gaps):,} rows with a missing value were left out"
    if owners is None:
        return note
    by_owner = np.bincount(owners[gaps], minlength=len(names))
    counts = []
    for name, count in zip(names, by_owner.tolist(), strict=True):
        if count:
            counts.append(f"{name} {count:,}")
    return f"{note} ({shortened_list(counts)})"


# Labels and owners.


def labels_of(source: str, column: pa.ChunkedArray, complete: NDArray[np.bool_]) -> list[int | str]:
    """The labels of complete rows, as whole numbers or names."""
    distinct = distinct_values(column)
    rows = np.flatnonzero(complete)
    codes = distinct.codes[rows]
    distinct_codes, first_positions = np.unique(codes, return_index=True)
    first_rows = rows[first_positions].tolist()
    labels = {}
    for code, row in zip(distinct_codes.tolist(), first_rows, strict=True):
        labels[code] = checked_label(source, row, distinct.values[code])
    return [labels[code] for code in codes.tolist()]


def _check_label_types(source: str, splits: Mapping[str, RawSplit]) -> None:
    """Raise DataError if train has numbers as labels and another split names, or vice versa."""
    if "train" not in splits:
        return
    train_labels = set(splits["train"].labels)
    train_texts = set(map(str, train_labels))
    for name, split in splits.items():
        labels = set(split.labels)
        is_same_type = _kind_of_labels(labels) == _kind_of_labels(train_labels)
        if not is_same_type and train_texts.isdisjoint(map(str, labels)):
            raise DataError(
                f"{source}: {name} has the labels {_first_labels(labels)}, but train has "
                f"{_first_labels(train_labels)}; use the same labels in both"
            )


def _kind_of_labels(labels: set[int | str]) -> Literal["numbers", "codes", "names"]:
    """The kind of labels; codes are texts that look like numbers, such as 01."""
    texts = [label for label in labels if isinstance(label, str)]
    if not texts:
        return "numbers"
    if all(re.match(NUMBER, text) for text in texts):
        return "codes"
    return "names"


def _first_labels(labels: set[int | str]) -> str:
    names = sorted(map(str, labels))
    return shortened_list([repr(name) for name in names], 3)


def _stray_label_warning(splits: Mapping[str, RawSplit]) -> str:
    """A warning about a few texts among labels that are numbers: each becomes a class."""
    counts = Counter[str]()
    for split in splits.values():
        counts.update(map(str, split.labels))
    strays = Counter[str]()
    for label, count in counts.items():
        if not re.match(NUMBER, label):
            strays[label] = count
    # If at least half of the labels are texts, the labels are names.
    if not 0 < 2 * strays.total() < counts.total():
        return ""
    most_common = [(label[:60], count) for label, count in strays.most_common(3)]
    listed = ", ".join(f"{label!r} ({count:,})" for label, count in most_common)
    first_label = most_common[0][0]
    return (
        f"labels are numbers except {listed}; each of these is a class. If it means a missing "
        f"label, set data.missing_values = [{first_label!r}]"
    )


def _marked_label_warning(
    splits: Mapping[str, RawSplit], marks: Sequence[str | int | float]
) -> str:
    """A warning about labels that are among the numbers that mark missing inputs."""
    labels = set(chain.from_iterable(split.labels for split in splits.values()))
    marked = [mark for mark in marks if not isinstance(mark, str) and {mark, str(mark)} & labels]
    if not marked:
        return ""
    return (
        f"the label {marked[0]} is a class, because numbers in data.missing_values do not apply to "
        f"labels; if it means a missing label, add the text '{marked[0]}' for a CSV file, or "
        "remove the rows"
    )


@dataclass(frozen=True)
class Owners:
    """The ordered names of owners, and the index of each row's owner, by split."""

    names: tuple[str, ...] = ()
    codes: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)


def owners_of(
    source: str,
    tables: Tables,
    column: str,
    frames: Mapping[str, Frame] = MappingProxyType({}),
    positions: Mapping[str, NDArray[np.int64]] = MappingProxyType({}),
) -> Owners:
    """The owners in a column: numbers in ascending order, texts in alphabetical order.

    frames: the frames of the tables, for messages. positions: the row of each owner in its split,
    for tables that lack some rows. Raises DataError for a row without an owner.
    """
    by_split = {split: distinct_values(table[column]) for split, table in tables.items()}
    names: list[Any] = []
    for split, distinct in by_split.items():
        check_holds_names(f"{source}, {split}", column, tables[split][column].type)
        unowned = np.flatnonzero(distinct.codes < 0)
        if len(unowned):
            row = int(unowned[0])
            if split in positions:
                row = int(positions[split][row])
            hint = missing_text_hint(frames.get(split), column, row)
            raise DataError(
                f"{source}, {split}: example {row} has no owner in column {column!r}; {hint}add it"
            )
        names += distinct.values
    ordered = names_in_order(names)
    index_of = {name: index for index, name in enumerate(ordered)}
    codes = {
        split: distinct.mapped(lambda value: index_of[category_name(value)], missing=-1)
        for split, distinct in by_split.items()
    }
    return Owners(ordered, codes)


# Columns that may be read incorrectly. A run warns about them.


ROW_NUMBER_NAME = re.compile(
    r"unnamed: ?\d+|(.*[^a-z])?(id|ids|uuid|idx|index|nr|no)", re.IGNORECASE
)
ROW_NUMBER_SUFFIX = re.compile(r".*[a-z](ID|Id|Nr|No)")
"""Names of columns that probably number rows: id, patient_id, patientID, Unnamed: 0."""

MIN_FLOAT_STEPS = 1024
"""Columns whose range has fewer steps of float32 than this are checked for values that become
equal.
"""


def row_numbers(table: pa.Table, columns: Sequence[str]) -> list[str]:
    """A warning for each integer column that probably numbers rows: by its name, and because all
    values differ.
    """
    warnings = []
    for name in columns:
        has_such_name = ROW_NUMBER_NAME.fullmatch(name) or ROW_NUMBER_SUFFIX.fullmatch(name)
        if not has_such_name or not pa.types.is_integer(table[name].type) or len(table) < 2:
            continue
        if pc.count_distinct(table[name], mode="all").as_py() == len(table):
            warnings.append(
                f"{name}: all {len(table):,} values differ; if it only numbers the rows, leave it "
                "out with data.columns"
            )
    return warnings


def lost_precision(table: pa.Table, columns: Sequence[str]) -> list[str]:
    """A warning for each column with numbers that become equal as float32, such as times in
    seconds.
    """
    warnings = []
    for name in columns:
        arrow_type = table[name].type
        is_exact = pa.types.is_integer(arrow_type) or pa.types.is_decimal(arrow_type)
        if not is_exact and not pa.types.is_float64(arrow_type):
            continue
        exact = float_values(table[name].cast(pa.float64(), safe=False))
        exact = exact[np.isfinite(exact)]
        if not len(exact):
            continue
        step = np.finfo(np.float32).eps * np.abs(exact).max()
        if np.ptp(exact) >= MIN_FLOAT_STEPS * step:
            continue
        distinct = len(np.unique(exact))
        distinct_in_32_bits = len(np.unique(exact.astype(np.float32)))
        if distinct_in_32_bits < distinct:
            warnings.append(
                f"{name}: its {distinct:,} distinct numbers, from {exact.min():.12g} to "
                f"{exact.max():.12g}, become {distinct_in_32_bits:,} in 32 bits; subtract the "
                "minimum from all"
            )
    return warnings


# Checksums of known data sets.


def _source_digests(tables: Tables, schema: TableSchema) -> dict[str, Digests]:
    """The digests of each split; empty for data without known checksums, or with cut examples."""
    if not schema.has_checksums or schema.options.length:
        return {}
    return {split: _digests(table, schema) for split, table in tables.items()}


def _digests(table: pa.Table, schema: TableSchema) -> Digests:
    """The digests of the raw inputs and labels.

    Numbers are hashed as float32, row by row, and texts as UTF-8 with a zero byte after each. A
    label is one byte, as for images; labels that are names are hashed as texts.
    """
    inputs = _inputs_as_bytes(table, schema.options)
    labels = _labels_as_bytes(table[schema.label].to_pylist())
    return Digests(hashlib.sha256(inputs).hexdigest(), hashlib.sha256(labels).hexdigest())


def _inputs_as_bytes(table: pa.Table, options: ReadingOptions) -> bytes:
    if options.kind == "text":
        return _texts_as_bytes(table[options.input].to_pylist())
    if options.kind == "table":
        return _rows_as_bytes(table, options.columns)
    return _lists("", table, options).values().astype("<f4").tobytes()


def _rows_as_bytes(table: pa.Table, names: Sequence[str]) -> bytes:
    """The numeric columns among ``names``, row by row."""
    columns = [numbers(table[name]) for name in names if holds_numbers(table[name].type)]
    if not columns:
        return b""
    return np.stack(columns, 1).astype("<f4").tobytes()


def _labels_as_bytes(labels: Sequence[Any]) -> bytes:
    if all(isinstance(label, int) and 0 <= label < 256 for label in labels):
        return bytes(labels)
    return _texts_as_bytes(labels)


def _texts_as_bytes(texts: Sequence[Any]) -> bytes:
    return b"".join(str(text).encode() + b"\0" for text in texts)
