"""Data from Python: data frames, Hugging Face and torch data sets, for all clients together or by
client.

This module does not import pandas, ``datasets`` or torchvision. It recognises their objects by
their interface, or by a class of a module that is already imported.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch.utils.data as torch_data
from torch import Tensor

from fedstill.core.errors import ConfigError, DataError, UnknownName, on_one_line
from fedstill.core.fields import kind_text, nfc, plain_value
from fedstill.core.files import shortened_list
from fedstill.core.process_settings import process_settings
from fedstill.data.dataset import (
    FILE,
    IMAGE_FIELDS,
    Dataset,
    Decoded,
    ReadingOptions,
    ReadRequest,
    as_dataset,
)
from fedstill.data.sources.files import SPLITS, BySplit, names_by_split, split_of_name
from fedstill.data.sources.image_sets import read_frames
from fedstill.data.sources.load import FIELDS, ROWS_AT_ONCE, request_of_fields
from fedstill.data.sources.schema import (
    class_names,
    index_columns,
    plain_column,
    plain_schema,
)
from fedstill.data.sources.tables import LabelledImage, encoded_image, with_normal_names
from fedstill.data.sources.tensors import (
    ItemsRead,
    Pair,
    TensorFields,
    TorchItems,
    check_no_image_fields,
    check_sampler,
    dataset_of_pairs,
    join_clients,
    loader_warning,
)
from fedstill.data.sources.verification import verified_with_test_split

PAIR_FIELDS = ("mode", "size", *(field.name for field in dataclasses.fields(TensorFields)))
"""Options for data without columns; mode and size apply to PIL images."""


@process_settings()
def from_python(
    name: str, data: object, test: object = None, validation: object = None, **fields: Any
) -> Dataset:
    """A data set from Python objects, for all clients together or by client.

    data: one of the following, a pair (train, test) of them, or a mapping from splits (train,
    validation, test) to them:

    - Columns: a pandas DataFrame or another table with the Arrow interface, or a Hugging Face
      ``Dataset``. They are read like the columns of a parquet file: rows of a table, texts, lists
      of numbers, or images.
    - Pairs (value, label): a torch ``Dataset`` with a length, or the data set of a ``DataLoader``.
      Values are tensors, NumPy arrays or PIL images; each is read once, in order. If the data set
      has an attribute ``classes``, as in torchvision, it contains the names of the classes.
    - (values, labels), as for ``from_tensors``.

    ``data`` may also be a mapping from clients to any of these. A run on it has these clients, and
    ``partition`` can be omitted. Without a test set, a stratified fifth of the training data is
    held out.

    test, validation: data for these splits, common to all clients. fields: for columns, the fields
    of ``load_dataset``, such as ``label_column``, ``columns``, ``categorical`` and ``missing``; for
    other data, the fields of ``from_tensors``, and ``size`` and ``mode`` for PIL images. Raises
    ConfigError for other objects and for fields that do not apply to the data, and DataError like
    ``load_dataset`` and ``from_tensors``.
    """
    fields = plain_value(fields)
    python_data = _python_data(name, data, {"test": test, "validation": validation}, fields)
    with_columns = [source for source in python_data.sources if source.table is not None]
    if not with_columns:
        _check_fields(name, fields, PAIR_FIELDS)
        return _dataset_of_pairs(python_data)
    if len(with_columns) < len(python_data.sources):
        without_columns = next(source for source in python_data.sources if source.table is None)
        raise DataError(
            f"{with_columns[0].part} has columns, but {without_columns.part} has none; use "
            "one kind of data"
        )
    _check_fields(name, fields, FIELDS)
    return _dataset_of_columns(python_data)


def is_by_client(data: object) -> bool:
    """Whether data are a mapping from clients, rather than from splits, to data."""
    if not isinstance(data, Mapping) or _is_of(data, "datasets", "DatasetDict"):
        return False
    return not any(split_of_name(str(key)) for key in data)


def _is_of(data: object, module: str, name: str) -> bool:
    """Whether an object is an instance of a library's class, if the library has been imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(data, kind)


def _check_fields(name: str, fields: Mapping[str, Any], legal: Sequence[str]) -> None:
    """Raise ConfigError for a field that does not exist, or does not apply to such data."""
    for key in fields:
        if key in legal:
            continue
        if key not in (*FIELDS, *PAIR_FIELDS):
            raise UnknownName("field", key, legal, place=f"dataset {name!r}")
        kind = "tensors"
        if legal is PAIR_FIELDS:
            kind = "columns"
        raise ConfigError(
            f"dataset {name!r}: {key} is for data with {kind}; remove it (these data have "
            f"{', '.join(legal)})"
        )


# Sources: the data of a split, from one client or from all clients together.


@dataclass(frozen=True, eq=False)
class _Source:
    """Data that the user passed for a split, from one client or from all clients together."""

    part: str
    """A description of the data for messages."""
    split: str
    client: int | None
    """The number of the client that owns the data; None if they are common to all."""
    data: Any
    table: pa.Table | None = None
    """The columns of the data, if they have columns."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _PythonData:
    """All data that the user passed, with the options."""

    name: str
    sources: Sequence[_Source]
    clients: tuple[str, ...]
    fields: Mapping[str, Any]
    warnings: tuple[str, ...]

    def of_split(self, split: str) -> list[_Source]:
        """The sources of a split, in the order of clients."""
        return [source for source in self.sources if source.split == split]


def _python_data(
    name: str, data: object, common: Mapping[str, object], fields: Mapping[str, Any]
) -> _PythonData:
    """Collect all data; a common split replaces the clients' own, with a warning."""
    clients: tuple[str, ...] = ()
    data_of_part: dict[str, Any] = {name: data}
    if is_by_client(data):
        assert isinstance(data, Mapping)
        clients = _client_names(name, data)
        data_of_part = {f"{name}, client {client}": part for client, part in data.items()}

    sources: list[_Source] = []
    warnings: list[str] = []
    for number, (part, part_data) in enumerate(data_of_part.items()):
        client = number if clients else None
        splits = _splits_of(part, part_data)
        warnings += splits.warnings
        for split, split_data in splits.parts.items():
            sources.append(_Source(f"{part}, {split}", split, client, split_data))

    for split, common_data in common.items():
        if common_data is None:
            continue
        warnings.append(_replacement_warning(split, sources, has_clients=bool(clients)))
        sources = [source for source in sources if source.split != split]
        sources.append(_Source(f"{name}, {split}", split, None, common_data))

    sources = [_resolved(source) for source in sources]
    for source in sources:
        warnings += source.warnings
    return _PythonData(
        name=name,
        sources=sources,
        clients=clients,
        fields=fields,
        warnings=tuple(filter(None, warnings)),
    )


def _replacement_warning(split: str, sources: Sequence[_Source], *, has_clients: bool) -> str:
    """A warning about data of a split that a common split replaces, or ""."""
    if all(source.split != split for source in sources):
        return ""
    replaced = f"the {split} set in data"
    if has_clients:
        replaced = f"the clients' own {split} sets"
    return f"{split}= replaces {replaced}"


def _client_names(name: str, data: Any) -> tuple[str, ...]:
    names = tuple(nfc(str(key)) for key in data)
    if not names:
        raise DataError(f"{name}: the mapping is empty; pass the data of at least one client")
    if len(set(names)) < len(names):
        raise DataError(f"{name}: the names of two clients are equal as text; rename one of them")
    return names


def _splits_of(part: str, data: Any) -> BySplit[Any]:
    """The data of each split, from one client or from all clients together."""
    if isinstance(data, Mapping):
        return _named_splits(part, data)
    if isinstance(data, (tuple, list)) and len(data) == 2 and not _is_pair(data):
        splits = {"train": data[0], "test": data[1]}
        return BySplit({split: source for split, source in splits.items() if source is not None})
    return BySplit({"train": data})


def _is_pair(data: Sequence[Any]) -> bool:
    """Whether two objects are values and labels, rather than training and test data."""
    return any(isinstance(value, (Tensor, np.ndarray)) for value in data)


def _named_splits(part: str, data: Mapping[Any, Any]) -> BySplit[Any]:
    data_of = {str(key): source for key, source in data.items()}
    names = names_by_split(
        part, data_of, remedy="pass one split train, and at most one validation and one test"
    )
    unknown = [key for key in data_of if key not in names.values()]
    if unknown and not _is_of(data, "datasets", "DatasetDict"):
        raise DataError(
            f"{part}: {unknown[0]!r} is not a split; keys are either splits (train, validation, "
            "test) or clients"
        )
    warnings: tuple[str, ...] = ()
    if unknown:
        warnings = (f"left out: the splits {', '.join(unknown)}",)
    return BySplit({split: data_of[key] for split, key in names.items()}, warnings)


# Columns: data frames and Hugging Face data sets. They are read like the columns of files.
#
# In a mapping from clients, an additional column of owners contains the name of each row's client.
# In splits that are common to all clients, it contains the first client's name, because every row
# needs an owner. After the rows have been read, ``_with_clients`` removes the owners of common
# splits, and numbers clients in the order of the mapping instead of alphabetically.


CLIENT_COLUMN = "<client>"
"""The column with the client of each row, for mappings from clients."""

UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
"""The name that pyarrow assigns to an unnamed pandas index."""


@dataclass(frozen=True)
class ArrowFrame:
    """The concatenated rows of the tables of a split, in memory."""

    part: str
    """The name of the split for messages."""
    table: pa.Table
    options: ReadingOptions
    columns: Mapping[str, Sequence[str]]
    """The columns that each client has; empty without clients."""
    files: tuple[Path, ...] = ()
    """Empty, because the data are in memory."""

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types."""
        return self.table.schema

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.table)

    def read(self, names: Sequence[str]) -> pa.Table:
        """All rows of some columns.

        Raises DataError if a client lacks one of them, unless missing values are permitted.
        """
        if self.options.missing == "refuse":
            self._check_complete(names)
        return self.table.select(list(names))

    def _check_complete(self, names: Sequence[str]) -> None:
        """Raise DataError if a client lacks one of the columns."""
        gaps = []
        for client, columns in self.columns.items():
            absent = [repr(name) for name in names if name not in columns]
            if absent:
                gaps.append(f"client {client} has no {shortened_list(absent)}")
        if gaps:
            raise DataError(
                f"{self.part}: clients have different columns: {shortened_list(gaps)}; add the "
                "columns, or list those to read in data.columns"
            )

    def labelled_images(self, image: str, label: str) -> Iterator[LabelledImage]:
        """Each row's encoded image and label."""
        image_type = self.schema.field(image).type
        for batch in self.table.select([image, label]).to_batches(ROWS_AT_ONCE):
            stored_images = batch.column(image).to_pylist()
            images = [encoded_image(value, image_type) for value in stored_images]
            labels = batch.column(label).to_pylist()
            yield from starmap(LabelledImage, zip(images, labels, strict=True))


def _resolved(source: _Source) -> _Source:
    """The source with its columns, if it has any; a DataLoader is replaced by its data set."""
    data = source.data
    warnings = []
    if isinstance(data, torch_data.DataLoader):
        if not isinstance(data.dataset, torch_data.IterableDataset):
            check_sampler(source.part, data)
            warnings.append(loader_warning(data))
        data = data.dataset
    _check_kind(source.part, data)
    table: pa.Table | None = None
    if _is_of(data, "datasets", "Dataset"):
        table = _table_of_hugging_face(data)
        warnings.append(_transform_warning(data))
    elif hasattr(data, "__arrow_c_stream__"):
        table = _table_of_arrow(source.part, data)
    if table is not None:
        table = _with_plain_columns(source.part, table)
    return replace(source, data=data, table=table, warnings=tuple(filter(None, warnings)))


def _check_kind(part: str, data: object) -> None:
    """Raise ConfigError for a stream of examples, and for groups of rows."""
    is_stream = isinstance(data, torch_data.IterableDataset)
    if is_stream or _is_of(data, "datasets", "IterableDataset"):
        raise _no_data_set(part, data, ", which is read in one order only")
    if _is_of(data, "pandas.api.typing", "DataFrameGroupBy"):
        raise ConfigError(
            f"{part} is a DataFrameGroupBy; pass a mapping from clients to DataFrames: "
            "dict(tuple(GROUPS))"
        )


def _table_of_hugging_face(data: Any) -> pa.Table:
    """The columns of a Hugging Face data set, with the metadata of their types."""
    table = data.with_format("arrow", columns=data.format["columns"])[:]
    return table.replace_schema_metadata(data.features.arrow_schema.metadata)


def _transform_warning(data: Any) -> str:
    """A warning about a Hugging Face data set with a transform, or ""."""
    if data.format["type"] != "custom":
        return ""
    return "the transform of the Hugging Face data set is not applied; apply it with map()"


def _table_of_arrow(part: str, data: Any) -> pa.Table:
    """The columns of a DataFrame or another table; DataError if pyarrow cannot convert it."""
    if _is_of(data, "pandas", "Series"):
        raise DataError(
            f"{part}: a Series has no columns; a pair is training and test data, so pass a "
            "DataFrame that contains the label column, and name that column with label_column"
        )
    try:
        return _without_unnamed_index(pa.table(data))
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"{part}: pyarrow cannot convert the {type(data).__name__} to columns "
            f"({on_one_line(error)}); every column needs a single type and a unique name"
        ) from error


def _without_unnamed_index(table: pa.Table) -> pa.Table:
    """The table of a DataFrame without the column that pyarrow makes from an unnamed index."""
    unnamed = [name for name in index_columns(table.schema) if UNNAMED_INDEX.fullmatch(name)]
    return table.drop_columns(unnamed)


def _with_plain_columns(part: str, table: pa.Table) -> pa.Table:
    """A table with column names in Unicode normal form, and with plain types."""
    schema = plain_schema(with_normal_names(part, table.schema))
    return pa.Table.from_arrays([plain_column(column) for column in table.columns], schema=schema)


def _dataset_of_columns(python_data: _PythonData) -> Dataset:
    name = python_data.name
    request = _read_request(python_data)
    frames = _frames_by_split(python_data, request.options)
    # Paths of images in memory are as trustworthy as the program itself.
    decoded = read_frames(name, frames, request, within=Path(Path.cwd().anchor))
    if python_data.clients:
        decoded = _with_clients(python_data, decoded)
    decoded = decoded.with_warnings(*dict.fromkeys(python_data.warnings))
    decoded = verified_with_test_split(name, decoded, request.options)
    fields = python_data.fields
    return as_dataset(name, decoded, fields.get("mean"), fields.get("std"))


def _read_request(python_data: _PythonData) -> ReadRequest:
    """The read request of the user's fields; a mapping from clients sets the column of owners."""
    name = python_data.name
    fields = dict(python_data.fields)
    if python_data.clients:
        if "owner" in fields:
            raise ConfigError(f"dataset {name!r}: the keys of data are the clients; remove owner")
        fields["owner"] = CLIENT_COLUMN
    if fields.get("owner") == FILE:
        raise ConfigError(
            f"dataset {name!r}: data from Python have no files; set owner to a column of clients, "
            "or pass a mapping from clients to their data"
        )
    return request_of_fields(fields)


def _frames_by_split(python_data: _PythonData, options: ReadingOptions) -> dict[str, ArrowFrame]:
    """The frame of each split, with a column of owners if there are clients.

    Raises DataError if column types or class names differ.
    """
    _check_class_names(python_data.sources)
    by_split: dict[str, ArrowFrame] = {}
    for split in SPLITS:
        part = f"{python_data.name}, {split}"
        tables = []
        columns: dict[str, list[str]] = {}
        for source in python_data.of_split(split):
            assert source.table is not None
            table = source.table
            if python_data.clients:
                client = python_data.clients[source.client or 0]
                _check_has_examples(python_data.name, client, source)
                column = pa.array([client] * len(table), pa.string())
                table = table.append_column(CLIENT_COLUMN, column)
            if source.client is not None:
                columns[client] = table.column_names
            tables.append(table)
        try:
            if tables:
                rows = _concatenated_rows(tables)
                by_split[split] = ArrowFrame(part, rows, options, columns)
        except pa.ArrowException as error:
            raise DataError(
                f"{part}: clients have columns of different types ({on_one_line(error)}); use the "
                "same types for all clients"
            ) from error
    return by_split


def _check_has_examples(name: str, client: str, source: _Source) -> None:
    """Raise DataError for the training data of a client if they have no rows."""
    if source.split == "train" and source.client is not None and not len(source.table or ()):
        raise DataError(f"{name}, client {client} has no train examples; remove the client")


def _concatenated_rows(tables: Sequence[pa.Table]) -> pa.Table:
    """The concatenation of tables; its metadata contain the index column of any of them."""
    table = pa.concat_tables(tables, promote_options="permissive")
    index = sorted(set().union(*(index_columns(table.schema) for table in tables)))
    metadata = {**(table.schema.metadata or {}), b"pandas": json.dumps({"index_columns": index})}
    return table.replace_schema_metadata(metadata)


def _check_class_names(sources: Sequence[_Source]) -> None:
    """Raise DataError if the same class id has different names in two sources."""
    first: dict[str, tuple[str, Any]] = {}
    for source in sources:
        assert source.table is not None
        schema = source.table.schema
        for column in schema.names:
            names = class_names(schema, column)
            part, first_names = first.setdefault(column, (source.part, names))
            if names != first_names:
                raise DataError(
                    f"column {column!r} has different class names in {source.part} and {part}; "
                    "cast both to the same features"
                )


def _with_clients(python_data: _PythonData, data: Decoded) -> Decoded:
    """The data with clients in the order of the mapping, and without clients in common splits."""
    number = {client: index for index, client in enumerate(python_data.clients)}
    numbers = np.array([number[owner] for owner in data.about.owners], dtype=np.int64)
    common = {source.split for source in python_data.sources if source.client is None}
    splits = {}
    for name, split in data.splits.items():
        owners = None
        if split.owners is not None and name not in common:
            owners = numbers[split.owners]
        splits[name] = replace(split, owners=owners)
    about = replace(data.about, owners=python_data.clients)
    return replace(data, splits=splits, about=about)


# Pairs: torch data sets and arrays.


def _dataset_of_pairs(python_data: _PythonData) -> Dataset:
    name = python_data.name
    fields = {k: value for k, value in python_data.fields.items() if k not in IMAGE_FIELDS}
    if "classes" not in fields:
        fields["classes"] = _classes_of(python_data.sources)
    common: dict[str, Pair] = {}
    by_split: dict[str, dict[int, Pair]] = {split: {} for split in SPLITS}
    warnings = list(python_data.warnings)
    for source in python_data.sources:
        items = _items_of(source, python_data.fields)
        warnings += items.warnings
        pair = (items.values, items.labels)
        if source.client is None:
            common[source.split] = pair
        else:
            by_split[source.split][source.client] = pair
    data = join_clients(name, python_data.clients, by_split, common)
    data = replace(data, warnings=tuple(dict.fromkeys(warnings)))
    return dataset_of_pairs(name, data, TensorFields(**fields))


def _classes_of(sources: Sequence[_Source]) -> tuple[str, ...] | None:
    """The class names that torch data sets declare; DataError if they differ."""
    first_part = ""
    first_names: tuple[str, ...] | None = None
    for source in sources:
        for names in _declared_names(source.data):
            if first_names is None:
                first_part = source.part
                first_names = names
            if names != first_names:
                difference = f"declares different classes from {first_part}"
                if source.part == first_part:
                    difference = "joins data sets that declare different classes"
                raise DataError(
                    f"{source.part} {difference}; pass classes= if the ids mean the same"
                )
    return first_names


def _declared_names(data: Any) -> Iterator[tuple[str, ...]]:
    """The class names that a torch data set declares, or those of the data sets it consists of."""
    classes = getattr(data, "classes", None)
    if isinstance(classes, (list, tuple)) and classes:
        yield tuple(map(str, classes))
    elif isinstance(data, torch_data.Subset):
        yield from _declared_names(data.dataset)
    elif isinstance(data, torch_data.ConcatDataset):
        for part in data.datasets:
            yield from _declared_names(part)


def _items_of(source: _Source, fields: Mapping[str, Any]) -> ItemsRead:
    """The values and labels of a source; raises ConfigError for objects that have none."""
    data = source.data
    request = ReadRequest(size=fields.get("size"), mode=fields.get("mode"))
    pair: Any = data
    if type(data) is torch_data.TensorDataset:
        pair = data.tensors
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and _is_pair(pair):
        check_no_image_fields(source.part, request)
        return ItemsRead(pair[0], pair[1])
    _check_items(source)
    return TorchItems(source.part, data, request).read()


def _check_items(source: _Source) -> None:
    """Raise ConfigError for an object without indexed examples."""
    data = source.data
    not_items = (str, bytes, tuple, list, Mapping, Tensor, np.ndarray, Dataset)
    has_items = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not has_items or isinstance(data, not_items):
        raise _no_data_set(source.part, data)


def _no_data_set(part: str, data: object, hint: str = "") -> ConfigError:
    """The error about an object that is none of the supported kinds of data."""
    return ConfigError(
        f"{part} is {kind_text(data)}{hint}, not a data set: pass (values, labels), a torch "
        "Dataset of (value, label) pairs with a length, a DataFrame, a Hugging Face Dataset, or "
        "the result of fedstill.from_tensors(NAME, train=(values, labels))"
    )
