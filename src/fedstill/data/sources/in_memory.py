"""Data that Python has: data frames, Hugging Face and torch data sets, and such data by client.

pandas, ``datasets`` and torchvision are not imported here: their objects are recognised by their
interface, or by a class of a module that is imported already.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch.utils.data as torch_data
from torch import Tensor

from fedstill.core.errors import ConfigError, DataError, UnknownName, on_one_line
from fedstill.core.fields import Count, kind_text, nfc, plain_value, problem
from fedstill.core.process_settings import process_settings
from fedstill.data.dataset import (
    FILE,
    Broken,
    Dataset,
    Decoded,
    Mode,
    ReadingOptions,
    ReadRequest,
    as_dataset,
)
from fedstill.data.sources.image_sets import read_columns
from fedstill.data.sources.load import FIELDS, request_of_fields
from fedstill.data.sources.schema import class_names, index_columns
from fedstill.data.sources.splits import SPLITS, hold_out, split_named
from fedstill.data.sources.tables import normalised, with_missing
from fedstill.data.sources.tensors import (
    ItemsRead,
    LoaderData,
    Pair,
    TensorFields,
    TorchItems,
    check_no_image_fields,
    dataset_of_pairs,
    join_clients,
)
from fedstill.data.sources.verify import verified

PAIR_FIELDS = ("mode", "size", *(field.name for field in dataclasses.fields(TensorFields)))
"""Options for data without columns; mode and size are for PIL images."""

IMAGE_FIELDS: Mapping[str, Any] = {"size": Count | None, "mode": Mode | None, "broken": Broken}
"""Options for images, and the values that they may have."""


@process_settings()
def from_python(
    name: str, data: object, test: object = None, validation: object = None, **fields: Any
) -> Dataset:
    """A data set of data that Python has, of all clients together or by client.

    data: one of these, a pair (train, test) of these, or a mapping of splits (train, validation,
    test) to these:

    - columns: a pandas DataFrame or another table with the Arrow interface, or a Hugging Face
      ``Dataset``. They are read as the columns of a parquet file are: rows of a table, texts, lists
      of numbers, or images.
    - pairs (value, label): a torch ``Dataset`` with a length, or the data set of a ``DataLoader``.
      Values are tensors, NumPy arrays or PIL images; each is read once, in order. An attribute
      ``classes``, as torchvision has it, names the classes.
    - (values, labels), as for ``from_tensors``.

    Or a mapping from clients to any of these: a run of it has these clients, and ``partition`` need
    not be set. Without a test set, a stratified fifth of the training data is held out.

    test, validation: such data for these splits, common to all clients. fields: of columns, those
    of ``load_dataset``, such as ``label_column``, ``columns``, ``categorical`` and ``missing``; of
    other data, those of ``from_tensors``, and ``size`` and ``mode`` of PIL images. Raises
    ConfigError for other objects and for fields that the data do not have, and DataError as
    ``load_dataset`` and ``from_tensors`` do.
    """
    fields = plain_value(fields)
    for key, hint in IMAGE_FIELDS.items():
        if key not in fields:
            continue
        fault = problem(hint, fields[key])
        if fault:
            raise ConfigError(f"dataset {name!r}: {key} = {fault}")
    python_data = _python_data(name, data, {"test": test, "validation": validation}, fields)
    with_columns = [source for source in python_data.sources if source.table is not None]
    if not with_columns:
        _check_fields(name, fields, PAIR_FIELDS)
        return _dataset_of_pairs(python_data)
    if len(with_columns) < len(python_data.sources):
        without_columns = next(source for source in python_data.sources if source.table is None)
        raise DataError(
            f"{with_columns[0].part} has columns, and {without_columns.part} has none; give "
            "data of one kind"
        )
    _check_fields(name, fields, FIELDS)
    return _dataset_of_columns(python_data)


def is_by_client(data: object) -> bool:
    """Whether data are a mapping from clients to their data, and not one of splits."""
    if not isinstance(data, Mapping) or _is_of(data, "datasets", "DatasetDict"):
        return False
    return not any(split_named(str(key)) for key in data)


def _is_of(data: object, module: str, name: str) -> bool:
    """Whether an object is of a class of a library, which its maker has imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(data, kind)


def _check_fields(name: str, fields: Mapping[str, Any], legal: Sequence[str]) -> None:
    """Raise ConfigError for a field that does not exist, or not for such data."""
    for key in fields:
        if key in legal:
            continue
        if key not in (*FIELDS, *PAIR_FIELDS):
            raise UnknownName("field", key, legal, place=f"dataset {name!r}")
        kind = "tensors"
        if legal is PAIR_FIELDS:
            kind = "columns"
        raise ConfigError(
            f"dataset {name!r}: {key} is for data with {kind}; leave it out (these data have "
            f"{', '.join(legal)})"
        )


# The sources: the data of each split, of one client or of all.


@dataclass(frozen=True, eq=False)
class _Source:
    """Data that the user passed for a split, of one client or of all."""

    part: str
    """The place of the data, for messages."""
    split: str
    client: int | None
    """The number of the client that the data belong to; None if they are common to all."""
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


@dataclass(frozen=True, eq=False)
class _Splits:
    """The data of each split, and a warning about splits that are left out."""

    data: Mapping[str, Any]
    warning: str = ""


def _python_data(
    name: str, data: object, common: Mapping[str, object], fields: Mapping[str, Any]
) -> _PythonData:
    """All data; a common split replaces those of the clients, with a warning."""
    sources: list[_Source] = []
    warnings = []
    clients: tuple[str, ...] = ()
    if is_by_client(data):
        assert isinstance(data, Mapping)
        clients = _client_names(name, data)
        for number, (client, client_data) in enumerate(data.items()):
            part = f"{name}, client {client}"
            splits = _splits_of(part, client_data)
            warnings.append(splits.warning)
            for split, split_data in splits.data.items():
                sources.append(_Source(f"{part}, {split}", split, number, split_data))
    else:
        splits = _splits_of(name, data)
        warnings.append(splits.warning)
        for split, split_data in splits.data.items():
            sources.append(_Source(f"{name}, {split}", split, None, split_data))

    for split, common_data in common.items():
        if common_data is None:
            continue
        if any(source.split == split for source in sources):
            warnings.append(f"{split}= is given, so the other data of the split are not used")
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


def _client_names(name: str, data: Any) -> tuple[str, ...]:
    names = tuple(nfc(str(key)) for key in data)
    if not names:
        raise DataError(f"{name}: the mapping is empty; give the data of at least one client")
    if len(set(names)) < len(names):
        raise DataError(f"{name}: two clients have the same name as text; rename one of them")
    return names


def _splits_of(part: str, data: Any) -> _Splits:
    """The data of each split of one client, or of all."""
    if isinstance(data, Mapping):
        return _named_splits(part, data)
    if isinstance(data, (tuple, list)) and len(data) == 2 and not _is_pair(data):
        splits = {"train": data[0], "test": data[1]}
        return _Splits({split: source for split, source in splits.items() if source is not None})
    return _Splits({"train": data})


def _is_pair(data: Sequence[Any]) -> bool:
    """Whether two objects are values and labels, and not training and test data."""
    return any(isinstance(value, (Tensor, np.ndarray)) for value in data)


def _named_splits(part: str, data: Mapping[Any, Any]) -> _Splits:
    splits: dict[str, Any] = {}
    unknown = []
    for key, source in data.items():
        split = split_named(str(key))
        if split in splits:
            raise DataError(f"{part} has two splits that are {split}; join them, or leave one out")
        if split:
            splits[split] = source
        else:
            unknown.append(str(key))
    if "train" not in splits:
        raise DataError(
            f"{part} has no split train among {', '.join(map(repr, map(str, data))) or 'none'}; "
            "name the training data train"
        )
    if unknown and not _is_of(data, "datasets", "DatasetDict"):
        raise DataError(
            f"{part}: {unknown[0]!r} is no split; the keys are either splits (train, validation, "
            "test) or clients"
        )
    warning = ""
    if unknown:
        warning = f"left out: the splits {', '.join(unknown)}"
    return _Splits(splits, warning)


# Columns: data frames and Hugging Face data sets. They are read as the columns of files are.
#
# In a mapping from clients, each row gets the name of its client in a column of its own, which is
# the column of owners. A split that is common to all clients gets the first client's name, because
# every row needs one. When the rows have been read, ``_with_clients`` takes the owners from common
# splits, and numbers clients in the order of the mapping; reading numbers them by name.


CLIENT_COLUMN = "<client>"
"""The column that says to which client of a mapping a row belongs."""

UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
"""The name that pyarrow gives to an index of pandas that has none."""

ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class ArrowFrame:
    """A table in memory as a split of a data set."""

    table: pa.Table
    options: ReadingOptions

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types."""
        return self.table.schema

    @property
    def files(self) -> tuple[Path, ...]:
        """None: it is in memory."""
        return ()

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.table)

    def read(self, names: Sequence[str], optional: bool = False) -> pa.Table:
        """Some columns, all rows."""
        return with_missing(self.table.select(list(names)), self.options.missing_values)

    def cells(self, image: str, label: str) -> Iterator[tuple[Any, Any]]:
        """Each row's encoded image and its label."""
        for batch in self.table.select([image, label]).to_batches(ROWS_AT_ONCE):
            images = batch.column(image).to_pylist()
            labels = batch.column(label).to_pylist()
            yield from zip(images, labels, strict=True)


def _resolved(source: _Source) -> _Source:
    """The source with its columns, if it has some; of a DataLoader, with its data set."""
    data = source.data
    warnings = []
    if isinstance(data, torch_data.DataLoader):
        loaded = LoaderData.of(source.part, data)
        data = loaded.data
        warnings.append(loaded.warning)
    table: pa.Table | None = None
    if _is_of(data, "datasets", "Dataset"):
        table = data.with_format("arrow", columns=data.format["columns"])[:]
        table = table.replace_schema_metadata(data.features.arrow_schema.metadata)
        if data.format["type"] == "custom":
            warnings.append(
                "the transform of a Hugging Face data set is not applied; apply it with map()"
            )
    elif hasattr(data, "__arrow_c_stream__"):
        try:
            table = _without_unnamed_index(pa.table(data))
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise DataError(
                f"{source.part}: pyarrow cannot convert the {type(data).__name__} to columns "
                f"({on_one_line(error)}); give each column one type and a name of its own"
            ) from error
    if table is not None:
        table = _with_plain_columns(source.part, table)
    return replace(source, data=data, table=table, warnings=tuple(filter(None, warnings)))


def _without_unnamed_index(table: pa.Table) -> pa.Table:
    """A table of a DataFrame without the numbers of its rows, which pyarrow makes a column."""
    unnamed = [name for name in index_columns(table.schema) if UNNAMED_INDEX.fullmatch(name)]
    return table.drop_columns(unnamed)


def _with_plain_columns(part: str, table: pa.Table) -> pa.Table:
    """A table with the names of its columns in one Unicode form, and with Arrow's own types."""
    schema = normalised(Path(part), table.schema)
    for index, field in enumerate(schema):
        if isinstance(field.type, pa.BaseExtensionType):
            schema = schema.set(index, field.with_type(field.type.storage_type))
        elif pa.types.is_string_view(field.type):
            schema = schema.set(index, field.with_type(pa.large_string()))
    return table.rename_columns(schema.names).cast(schema)


def _dataset_of_columns(python_data: _PythonData) -> Dataset:
    name = python_data.name
    request = _read_request(python_data)
    tables = _tables_by_split(python_data)
    frames = {split: ArrowFrame(table, request.options) for split, table in tables.items()}
    # The paths of images that Python has in memory are as trustworthy as the program.
    decoded = read_columns(name, frames, request, within=Path(Path.cwd().anchor))
    if python_data.clients:
        decoded = _with_clients(python_data, decoded)
    warnings = dict.fromkeys(python_data.warnings)
    decoded = replace(decoded, about=decoded.about.with_warnings(*warnings))
    decoded = verified(name, hold_out(name, decoded, request.options))
    fields = python_data.fields
    return as_dataset(name, decoded, fields.get("mean"), fields.get("std"))


def _read_request(python_data: _PythonData) -> ReadRequest:
    """What the user's fields say to read; a mapping from clients sets the column of owners."""
    name = python_data.name
    fields = {key: _as_tuple(value) for key, value in python_data.fields.items()}
    if python_data.clients:
        if "owner" in fields:
            raise ConfigError(
                f"dataset {name!r}: the keys of data are the clients; leave owner out"
            )
        fields["owner"] = CLIENT_COLUMN
    if fields.get("owner") == FILE:
        raise ConfigError(
            f"dataset {name!r}: data from Python have no files; name a column of clients, "
            "or pass a mapping from clients to their data"
        )
    categorical = python_data.fields.get("categorical", ())
    if isinstance(categorical, Mapping):
        fields["categorical"] = _as_tuple(list(categorical.items()))
    elif all(isinstance(column, str) for column in categorical):
        fields["categorical"] = tuple((column, ()) for column in categorical)
    return request_of_fields(fields)


def _as_tuple(value: Any) -> Any:
    """Lists as tuples, at any depth."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_as_tuple, value))
    return value


def _tables_by_split(python_data: _PythonData) -> dict[str, pa.Table]:
    """The rows of each split, one source below another, with a column of clients if there are any.

    Raises DataError for columns of different types, and for class names that differ.
    """
    _check_class_names(python_data.sources)
    by_split = {}
    for split in SPLITS:
        tables = []
        for source in python_data.of_split(split):
            assert source.table is not None
            table = source.table
            if python_data.clients:
                client = python_data.clients[source.client or 0]
                column = pa.array([client] * len(table), pa.string())
                table = table.append_column(CLIENT_COLUMN, column)
            tables.append(table)
        try:
            if tables:
                by_split[split] = _below_each_other(tables)
        except pa.ArrowException as error:
            raise DataError(
                f"{python_data.name}, {split}: clients have columns of different types "
                f"({on_one_line(error)}); make them alike"
            ) from error
    return by_split


def _below_each_other(tables: Sequence[pa.Table]) -> pa.Table:
    """One table of the rows of all, whose metadata name the index of any of them."""
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
                    f"{source.part}: the class names of column {column!r} are not those of {part}; "
                    "cast both to the same features"
                )


def _with_clients(python_data: _PythonData, data: Decoded) -> Decoded:
    """The data with clients in the order of the mapping, and common splits without clients."""
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


# Pairs: torch data sets, and arrays.


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
    """The class names that torch data sets declare; DataError if two of them differ."""
    declared: dict[str, tuple[str, ...]] = {}
    for source in sources:
        data = source.data
        while isinstance(data, torch_data.Subset):
            data = data.dataset
        classes = getattr(data, "classes", None)
        if isinstance(classes, (list, tuple)) and classes:
            declared[source.part] = tuple(map(str, classes))
    if not declared:
        return None
    first_part = next(iter(declared))
    for part, names in declared.items():
        if names != declared[first_part]:
            raise DataError(
                f"{part} has other classes than {first_part}; give classes= if their ids mean the "
                "same"
            )
    return declared[first_part]


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
    """Raise ConfigError for an object that does not give examples by number."""
    data = source.data
    not_items = (str, bytes, tuple, list, Mapping, Tensor, np.ndarray, Dataset)
    is_stream = isinstance(data, torch_data.IterableDataset) or _is_of(
        data, "datasets", "IterableDataset"
    )
    has_items = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if has_items and not is_stream and not isinstance(data, not_items):
        return
    hint = ", which is read in one order only" if is_stream else ""
    raise ConfigError(
        f"{source.part} is {kind_text(data)}{hint}, not a data set: give (values, labels), a torch "
        "Dataset of (value, label) pairs with a length, a DataFrame, a Hugging Face Dataset, or "
        "what fedstill.from_tensors(NAME, train=(values, labels)) makes"
    )
