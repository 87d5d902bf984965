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
from fedstill.core.fields import Count, plain_value, problem
from fedstill.core.process_settings import process_settings
from fedstill.core.user_code import of_kind
from fedstill.data.cache import Decoded
from fedstill.data.dataset import Dataset
from fedstill.data.form import FILE, Broken, Form, Mode, nfc
from fedstill.data.sources.encode import read_frames, schema_of
from fedstill.data.sources.image_columns import decoded_splits, owner_tables
from fedstill.data.sources.image_sets import check_not_encoded
from fedstill.data.sources.load import FIELDS, FORM_FIELDS
from fedstill.data.sources.records import Columns
from fedstill.data.sources.schema import class_names, index_columns
from fedstill.data.sources.splits import SPLITS, hold_out, split_named
from fedstill.data.sources.tables import normalised, with_missing
from fedstill.data.sources.tensors import (
    Pair,
    TensorFields,
    TorchItems,
    as_dataset,
    check_no_image_fields,
    dataset_of_loader,
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
        if key in fields and (reason := problem(hint, fields[key])):
            raise ConfigError(f"dataset {name!r}: {key} = {reason}")
    cautions: list[str] = []
    clients = _client_names(name, data) if is_by_client(data) else ()
    sources = _sources(name, data, {"test": test, "validation": validation}, cautions)
    sources = [_with_table(source, cautions) for source in sources]

    request = _Request(
        name=name, sources=sources, clients=clients, fields=fields, cautions=cautions
    )
    with_columns = [source for source in sources if source.table is not None]
    if not with_columns:
        _check_fields(name, fields, PAIR_FIELDS)
        return _dataset_of_pairs(request)
    if len(with_columns) < len(sources):
        without_columns = next(source for source in sources if source.table is None)
        raise DataError(
            f"{with_columns[0].part} has columns, and {without_columns.part} has none; give "
            "data of one kind"
        )
    _check_fields(name, fields, FIELDS)
    return _dataset_of_columns(request)


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
            raise UnknownName("field", key, legal, where=f"dataset {name!r}")
        kind = "columns" if legal is PAIR_FIELDS else "tensors"
        raise ConfigError(
            f"dataset {name!r}: {key} is for data with {kind}; leave it out (these data have "
            f"{', '.join(legal)})"
        )


# The sources: the data of each split, of one client or of all.


@dataclass(frozen=True, eq=False)
class _Source:
    """Data that the user passed.

    client: the number of the client that they belong to; None if they are common to all. table:
    their columns, if they have columns.
    """

    part: str
    split: str
    client: int | None
    data: Any
    table: pa.Table | None = None


@dataclass(frozen=True, eq=False)
class _Request:
    """What the user asked for, and warnings about it so far."""

    name: str
    sources: Sequence[_Source]
    clients: tuple[str, ...]
    fields: Mapping[str, Any]
    cautions: list[str]

    def of_split(self, split: str) -> list[_Source]:
        """The sources of a split, in the order of clients."""
        return [source for source in self.sources if source.split == split]


def _client_names(name: str, data: Any) -> tuple[str, ...]:
    names = tuple(nfc(str(key)) for key in data)
    if not names:
        raise DataError(f"{name}: the mapping is empty; give the data of at least one client")
    if len(set(names)) < len(names):
        raise DataError(f"{name}: two clients have the same name as text; rename one of them")
    return names


def _sources(
    name: str, data: Any, common: Mapping[str, object], cautions: list[str]
) -> list[_Source]:
    """The sources of all splits; a common one replaces those of the clients, with a warning."""
    sources = []
    if is_by_client(data):
        for number, (client, client_data) in enumerate(data.items()):
            part = f"{name}, client {client}"
            for split, source in _splits_of(part, client_data, cautions).items():
                sources.append(_Source(f"{part}, {split}", split, number, source))
    else:
        for split, source in _splits_of(name, data, cautions).items():
            sources.append(_Source(f"{name}, {split}", split, None, source))

    for split, common_data in common.items():
        if common_data is None:
            continue
        if any(source.split == split for source in sources):
            cautions.append(f"{split}= is given, so the other data of the split are not used")
        sources = [source for source in sources if source.split != split]
        sources.append(_Source(f"{name}, {split}", split, None, common_data))
    return sources


def _splits_of(part: str, data: Any, cautions: list[str]) -> dict[str, Any]:
    """The data of each split of one client, or of all."""
    if isinstance(data, Mapping):
        return _named_splits(part, data, cautions)
    if isinstance(data, (tuple, list)) and len(data) == 2 and not _is_pair(data):
        train, test = data
        splits = {"train": train, "test": test}
        return {split: source for split, source in splits.items() if source is not None}
    return {"train": data}


def _is_pair(data: Sequence[Any]) -> bool:
    """Whether two objects are values and labels, and not training and test data."""
    return any(isinstance(value, (Tensor, np.ndarray)) for value in data)


def _named_splits(part: str, data: Mapping[Any, Any], cautions: list[str]) -> dict[str, Any]:
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
    if unknown:
        cautions.append(f"left out: the splits {', '.join(unknown)}")
    return splits


# Columns: data frames and Hugging Face data sets.


CLIENT_COLUMN = "<client>"
"""The column that says to which client of a mapping a row belongs."""

UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
"""The name that pyarrow gives to an index of pandas that has none."""

ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class ArrowFrame:
    """A table in memory as a split of a data set."""

    table: pa.Table
    form: Form

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
        return with_missing(self.table.select(list(names)), self.form.missing_values)

    def cells(self, image: str, label: str) -> Iterator[tuple[Any, Any]]:
        """Each row's encoded image and its label."""
        for batch in self.table.select([image, label]).to_batches(ROWS_AT_ONCE):
            images = batch.column(image).to_pylist()
            labels = batch.column(label).to_pylist()
            yield from zip(images, labels, strict=True)


def _with_table(source: _Source, cautions: list[str]) -> _Source:
    """The source with its table if it has columns; of a DataLoader, its data set."""
    data = source.data
    if isinstance(data, torch_data.DataLoader):
        data = dataset_of_loader(source.part, data, cautions)
    table: pa.Table | None = None
    if _is_of(data, "datasets", "Dataset"):
        table = _hugging_face_table(data, cautions)
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
    return replace(source, data=data, table=table)


def _without_unnamed_index(table: pa.Table) -> pa.Table:
    """A table of a DataFrame without the numbers of its rows, which pyarrow makes a column."""
    unnamed = [name for name in index_columns(table.schema) if UNNAMED_INDEX.fullmatch(name)]
    return table.drop_columns(unnamed)


def _hugging_face_table(data: Any, cautions: list[str]) -> pa.Table:
    if data.format["type"] == "custom":
        cautions.append(
            "the transform of a Hugging Face data set is not applied; apply it with map()"
        )
    table = data.with_format("arrow", columns=data.format["columns"])[:]
    return table.replace_schema_metadata(data.features.arrow_schema.metadata)


def _with_plain_columns(part: str, table: pa.Table) -> pa.Table:
    """A table with the names of its columns in one Unicode form, and with Arrow's own types."""
    schema = normalised(Path(part), table.schema)
    for index, field in enumerate(schema):
        if isinstance(field.type, pa.BaseExtensionType):
            schema = schema.set(index, field.with_type(field.type.storage_type))
        elif pa.types.is_string_view(field.type):
            schema = schema.set(index, field.with_type(pa.large_string()))
    return table.rename_columns(schema.names).cast(schema)


def _dataset_of_columns(request: _Request) -> Dataset:
    name = request.name
    columns = _columns(request)
    tables = _tables_by_split(request)
    frames = {split: ArrowFrame(table, columns.form) for split, table in tables.items()}
    schema = schema_of(name, frames, columns)
    if schema is not None:
        check_not_encoded(name, columns)
        decoded = read_frames(name, frames, schema)
    else:
        # The paths of images that Python has in memory are as trustworthy as the program.
        root = Path(Path.cwd().anchor)
        owners = owner_tables(name, frames, columns.form)
        decoded = decoded_splits(name, frames, columns, root, owners)
    if request.clients:
        decoded = _with_clients(request, decoded)
    decoded = replace(decoded, about=decoded.about.warned(*dict.fromkeys(request.cautions)))
    decoded = verified(name, hold_out(decoded, columns.form))
    return as_dataset(name, decoded, request.fields.get("mean"), request.fields.get("std"))


def _columns(request: _Request) -> Columns:
    fields = request.fields
    form = {key: _as_tuple(fields[key]) for key in FORM_FIELDS if key in fields}
    if request.clients:
        if "owner" in form:
            raise ConfigError(
                f"dataset {request.name!r}: the keys of data are the clients; leave owner out"
            )
        form["owner"] = CLIENT_COLUMN
    if form.get("owner") == FILE:
        raise ConfigError(
            f"dataset {request.name!r}: data from Python have no files; name a column of clients, "
            "or pass a mapping from clients to their data"
        )
    categorical = fields.get("categorical", ())
    if isinstance(categorical, Mapping):
        form["categorical"] = _as_tuple(list(categorical.items()))
    elif all(isinstance(column, str) for column in categorical):
        form["categorical"] = tuple((column, ()) for column in categorical)
    return Columns(
        image=fields.get("image_column"),
        label=fields.get("label_column"),
        size=fields.get("size"),
        form=Form(**form).normalised,
        mode=fields.get("mode"),
        broken=fields.get("broken", "refuse"),
    )


def _as_tuple(value: Any) -> Any:
    """Lists as tuples, at any depth."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_as_tuple, value))
    return value


def _tables_by_split(request: _Request) -> dict[str, pa.Table]:
    """The rows of each split, one source below another, with a column of clients if there are any.

    Raises DataError for columns of different types, and for class names that differ.
    """
    _check_class_names(request.sources)
    by_split = {}
    for split in SPLITS:
        tables = []
        for source in request.of_split(split):
            assert source.table is not None
            table = source.table
            if request.clients:
                # Rows that are common to all need some client, and lose it after they are read.
                client = request.clients[source.client or 0]
                column = pa.array([client] * len(table), pa.string())
                table = table.append_column(CLIENT_COLUMN, column)
            tables.append(table)
        try:
            if tables:
                by_split[split] = _below_each_other(tables)
        except pa.ArrowException as error:
            raise DataError(
                f"{request.name}, {split}: clients have columns of different types "
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


def _with_clients(request: _Request, data: Decoded) -> Decoded:
    """The data with clients in the order of the mapping, and common splits without clients."""
    number = {client: index for index, client in enumerate(request.clients)}
    numbers = np.array([number[owner] for owner in data.about.owners], dtype=np.int64)
    common = {source.split for source in request.sources if source.client is None}
    owners = {split: numbers[codes] for split, codes in data.owners.items() if split not in common}
    return replace(data, owners=owners, about=replace(data.about, owners=request.clients))


# Pairs: torch data sets, and arrays.


def _dataset_of_pairs(request: _Request) -> Dataset:
    fields = {key: value for key, value in request.fields.items() if key not in IMAGE_FIELDS}
    if "classes" not in fields:
        fields["classes"] = _classes_of(request.sources)
    common: dict[str, Pair] = {}
    by_split: dict[str, dict[int, Pair]] = {split: {} for split in SPLITS}
    for source in request.sources:
        pair = _pair_of(source, request)
        if source.client is None:
            common[source.split] = pair
        else:
            by_split[source.split][source.client] = pair
    data = join_clients(request.name, request.clients, by_split, common)
    data = replace(data, cautions=tuple(dict.fromkeys(request.cautions)))
    return dataset_of_pairs(request.name, data, TensorFields(**fields))


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


def _pair_of(source: _Source, request: _Request) -> Pair:
    """The values and labels of a source; raises ConfigError for objects that have none."""
    data = source.data
    columns = Columns(size=request.fields.get("size"), mode=request.fields.get("mode"))
    pair: Any = data
    if type(data) is torch_data.TensorDataset:
        pair = data.tensors
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and _is_pair(pair):
        check_no_image_fields(source.part, columns)
        return pair[0], pair[1]
    _check_items(source)
    return TorchItems(source.part, data, columns).read(request.cautions)


def _check_items(source: _Source) -> None:
    """Raise ConfigError for an object that does not give examples by number."""
    data = source.data
    sequences = (str, bytes, tuple, list, Mapping, Tensor, np.ndarray, Dataset)
    is_stream = isinstance(data, torch_data.IterableDataset) or _is_of(
        data, "datasets", "IterableDataset"
    )
    has_items = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if has_items and not is_stream and not isinstance(data, sequences):
        return
    hint = ", which is read in one order only" if is_stream else ""
    raise ConfigError(
        f"{source.part} is {of_kind(data)}{hint}, not a data set: give (values, labels), a torch "
        "Dataset of (value, label) pairs with a length, a DataFrame, a Hugging Face Dataset, or "
        "what fedstill.from_tensors(NAME, train=(values, labels)) makes"
    )
