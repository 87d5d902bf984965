"""Loads data sets by name: registered data sets, local files and folders, the user's functions, and
the Hugging Face hub.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa

from fedstill.core import descriptions, registry
from fedstill.core.errors import (
    ConfigError,
    DataAbsent,
    DataError,
    FedstillError,
    UnknownName,
    on_one_line,
)
from fedstill.core.fields import Count, kind_text, plain_value, problem
from fedstill.core.files import named_path
from fedstill.core.process_settings import process_settings
from fedstill.core.registry import Entry, lookup, register, short_name
from fedstill.core.user_code import reason
from fedstill.core.user_modules import split_name
from fedstill.data.dataset import (
    CONFIG_KEYS,
    DEFAULT_OPTIONS,
    FILE,
    Dataset,
    Decoded,
    ReadingOptions,
    ReadRequest,
    Split,
    as_dataset,
)
from fedstill.data.sources import catalog
from fedstill.data.sources.catalog import KNOWN_FOLDERS, KnownData
from fedstill.data.sources.files import (
    check_size,
    file_error,
    file_errors,
    has_suffix,
    names_by_split,
)
from fedstill.data.sources.folders import (
    DATA_SUFFIXES,
    data_root,
    is_data_file,
    local_folder,
    read_data_file,
    read_folder,
)
from fedstill.data.sources.image_sets import read_frames
from fedstill.data.sources.tables import (
    LabelledImage,
    stored_names,
    with_normal_names,
)
from fedstill.data.sources.verification import decoded_once

OPTION_TYPES = get_type_hints(ReadingOptions)
"""Fields of ``load_dataset`` on the conversion of columns to examples, and their types."""

FIELDS = ("broken", "image_column", "label_column", "mean", "mode", "size", "std", *OPTION_TYPES)
"""Fields of ``load_dataset`` for data that are not registered."""

UNPACKERS = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
"""The programs that unpack files, by suffix."""

FOLDER_KINDS = "a folder of parquet or CSV files, or of images by class"

Folder = str | Path | None
"""The folder of local data; None: the environment variable ``FEDSTILL_DATA``."""


@process_settings()
def load_dataset(
    name: str | Path, *, folder: Folder = None, base: Path | None = None, **fields: Any
) -> Dataset:
    """Load a data set by name. It is verified, decoded into the cache once, and memory-mapped.

    name: one of

    - a registered name (``fedstill list``) or the name of a folder in ``folder``,
    - a path, relative to ``base``, to a parquet, CSV or NPZ file, or to a folder of parquet or CSV
      files or of images by class,
    - ``"owner/name"`` on the Hugging Face hub,
    - ``"mine.py:data"``: a function that returns a Dataset. It is called with ``folder`` if it has
      this parameter; its other parameters need defaults.

    folder: the folder of local data; default: ``FEDSTILL_DATA``. fields: for files, folders and the
    hub, ``image_column``, ``label_column``, ``size`` (resize images to size × size), ``mode``
    (convert all images to "grey" or "rgb"), ``broken`` ("skip" leaves out images that cannot be
    decoded), ``mean``, ``std``, and the fields of ``fedstill.data.dataset.ReadingOptions``;
    ``categorical`` is a list of columns, or a mapping from columns to their categories.

    If the data have no test split, a stratified fifth is held out. Raises DataError for data that
    are damaged or differ from the known data set of that name, DataAbsent for missing data,
    UnknownName for an unknown name, and ConfigError for fields that are wrong or do not apply.
    """
    return _loaded(name, folder, base, fields)


@process_settings()
def load_public_set(name: str | Path, *, folder: Folder = None, **fields: Any) -> Dataset:
    """Load a data set like ``load_dataset``, but keep all training examples of files, folders and
    the hub: if these have no test split, it is empty.
    """
    return _loaded(name, folder, None, fields, test_is_optional=True)


def _loaded(
    name: str | Path,
    folder: Folder,
    base: Path | None,
    fields: dict[str, Any],
    *,
    test_is_optional: bool = False,
) -> Dataset:
    name = plain_value(name)
    fields = plain_value(fields)
    if not isinstance(name, str):
        raise ConfigError(
            f"the name of a data set must be a string or a path, not {kind_text(name)}"
        )
    if split_name(name).is_code:
        # Errors in the user's function are not replaced by an error about the file.
        return _from_function(name, folder, base, fields)
    with file_errors(name):
        if name in registry.names("dataset"):
            return _registered(lookup("dataset", name, base), folder, fields)
        return _by_path(name, folder, base, fields, test_is_optional=test_is_optional)


# Registered data sets and the user's functions.


def _registered(entry: Entry, folder: Folder, fields: Mapping[str, Any]) -> Dataset:
    _check_fields(entry.name, fields, descriptions.fields(entry), "it has no reading options")
    return _checked_dataset(entry.name, entry.build(**_folder_argument(entry, folder), **fields))


def _from_function(
    name: str, folder: Folder, base: Path | None, fields: Mapping[str, Any]
) -> Dataset:
    """The data set that a user's function returns; it must have the requested owners."""
    entry = lookup("dataset", name, base)
    owner = None
    if "owner" not in descriptions.fields(entry):
        owner = fields.get("owner")
        fields = {key: value for key, value in fields.items() if key != "owner"}
    _check_fields(name, fields, descriptions.fields(entry), "its function has no such parameter")
    arguments = {**_folder_argument(entry, folder), **fields}
    _check_defaults(name, entry.target, arguments)
    try:
        data = _checked_dataset(name, entry.build(**arguments))
    except FedstillError:
        raise
    except Exception as error:
        raise DataError(f"dataset {short_name(name)!r}: {reason(error, entry.target)}") from error
    if owner and not data.about.owners:
        raise DataError(
            f"dataset {short_name(name)!r} has no owners of examples, so there is no "
            f"column {owner!r}; let it return the result of fedstill.from_clients"
        )
    return data


def _folder_argument(entry: Entry, folder: Folder) -> dict[str, Any]:
    if "folder" in inspect.signature(entry.target).parameters:
        return {"folder": folder}
    return {}


def _checked_dataset(name: str, data: object) -> Dataset:
    if not isinstance(data, Dataset):
        raise ConfigError(
            f"dataset {short_name(name)!r} returned {kind_text(data)}; it must return a Dataset, "
            "such as the result of fedstill.from_tensors"
        )
    return data


def _check_defaults(name: str, target: Callable[..., Any], arguments: Collection[str]) -> None:
    """Raise ConfigError for a parameter of a user's function without a value."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in inspect.signature(target).parameters.values():
        has_default = parameter.default is not parameter.empty or parameter.kind in variadic
        if not has_default and parameter.name not in arguments:
            raise ConfigError(
                f"dataset {short_name(name)!r} has a parameter {parameter.name!r} without a "
                "default; all parameters except folder need a default"
            )


def _check_fields(
    name: str, fields: Mapping[str, Any], legal: Collection[str], explanation: str
) -> None:
    """Raise an error for a field that does not exist, or does not apply to these data."""
    for field in sorted(set(fields) - set(legal)):
        if field not in FIELDS:
            raise UnknownName("field", field, legal, place=f"dataset {name!r}")
        if field == "owner":
            # The key is partition.column or stream.column.
            raise ConfigError(
                f"dataset {short_name(name)!r} has no columns, so it has no column "
                f"{fields[field]!r}; remove the key column, or name data with this column"
            )
        key = f"data.{CONFIG_KEYS.get(field, field)}"
        raise ConfigError(
            f"{key} does not apply to dataset {short_name(name)!r}: {explanation}; remove it"
        )


# Files, folders and the hub.


def _by_path(
    name: str,
    folder: Folder,
    base: Path | None,
    fields: Mapping[str, Any],
    *,
    test_is_optional: bool,
) -> Dataset:
    """The data set of a name that is not registered.

    It is looked up in this order: a folder in ``folder``, a folder or file at the path, and a data
    set on the hub.
    """
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise UnknownName("field", unknown[0], FIELDS, place=f"dataset {name!r}")
    entry = KNOWN_FOLDERS.get(name)
    options = DEFAULT_OPTIONS
    has_checksums = False
    if entry is not None:
        options = entry.options
        has_checksums = bool(entry.digests)
    request = request_of_fields(fields, options, has_checksums=has_checksums)
    request = replace(request, test_is_optional=test_is_optional)
    mean = fields.get("mean")
    std = fields.get("std")

    path = (base or Path.cwd()) / named_path(name)
    place = local_folder(name, folder)
    if place is None and path.is_dir():
        place = path
    if place is None:
        return as_dataset(name, _file_or_hub(name, path, folder, request), mean, std)

    # The known facts about a folder apply to its usual columns and sizes.
    if request.image or request.label or request.size or request.mode:
        entry = None
    data = read_folder(name, place, request, entry)
    if entry is not None:
        mean = mean or entry.mean
        std = std or entry.std
    return as_dataset(name, data, mean, std)


def request_of_fields(
    fields: Mapping[str, Any],
    options: ReadingOptions = DEFAULT_OPTIONS,
    *,
    has_checksums: bool = False,
) -> ReadRequest:
    """The read request of the fields of ``load_dataset``; options: defaults of the others.

    Raises ConfigError for a field of a wrong type.
    """
    named = {key: _as_tuples(value) for key, value in fields.items() if key in OPTION_TYPES}
    if "categorical" in named:
        named["categorical"] = _with_categories(named["categorical"])
    for name, value in named.items():
        fault = problem(OPTION_TYPES[name], value)
        if fault:
            key = CONFIG_KEYS.get(name, name)
            raise ConfigError(f"data.{key} = {fault}; correct or remove it")
    return ReadRequest(
        image=fields.get("image_column"),
        label=fields.get("label_column"),
        size=fields.get("size"),
        options=replace(options, **named).normalised,
        has_checksums=has_checksums,
        mode=fields.get("mode"),
        broken=fields.get("broken", "refuse"),
    )


def _as_tuples(value: Any) -> Any:
    """A value with tuples for lists, arrays, and columns of pandas, also in tables."""
    if isinstance(value, Mapping):
        return {str(key): _as_tuples(inner) for key, inner in value.items()}
    if isinstance(value, str) or not isinstance(value, Iterable):
        return plain_value(value)
    return tuple(map(_as_tuples, value))


def _with_categories(columns: Any) -> Any:
    """Categorical columns with the categories of each, from a mapping or a list of columns."""
    if isinstance(columns, Mapping):
        return tuple(columns.items())
    if all(isinstance(column, str) for column in columns):
        return tuple((column, ()) for column in columns)
    return columns


SPREADSHEETS = (".xlsx", ".xls", ".ods")


def _file_or_hub(name: str, path: Path, folder: Folder, request: ReadRequest) -> Decoded:
    """The data of a name that is not a folder: the file ``path``, or a data set on the hub."""
    if is_data_file(path):
        return read_data_file(name, path, request)
    if path.is_file():
        unpacker = UNPACKERS.get(path.suffix.lower())
        remedy = f"use one of these, or {FOLDER_KINDS}"
        if unpacker:
            remedy = f"unpack it first: {unpacker} {path.name}"
        raise DataError(f"{path} is not a parquet, CSV or NPZ file; {remedy}")
    if has_suffix(path, SPREADSHEETS):
        raise DataAbsent(
            f"there is no file {path}, and fedstill does not read spreadsheets; save it as a "
            f"CSV file, and name it, e.g. {path.with_suffix('.csv').name}"
        )
    if has_suffix(path, DATA_SUFFIXES):
        raise DataAbsent(f"there is no file {path}; paths are relative to the config's folder")

    is_path = name.startswith((".", "/", "~"))
    if name.count("/") == 1 and not is_path:
        remedy = f"check the name and the network, or create a folder {path} of parquet files"
        return _from_hub(name, request, remedy)
    if "/" in name or is_path:
        raise DataAbsent(f"there is no file or folder {path}; use {FOLDER_KINDS}")
    root = data_root(folder)
    local: list[str] = []
    if root is not None and root.is_dir():
        local = [place.name for place in root.iterdir() if place.is_dir()]
    raise UnknownName("dataset", name, {*registry.names("dataset"), *local})


def _from_hub(name: str, request: ReadRequest, remedy: str) -> Decoded:
    return decoded_once(name, {"hub": name}, lambda: read_hub(name, request, remedy), request)


# Data sets of the catalogue.


def load_known(entry: KnownData, folder: Folder, size: int | None = None) -> Dataset:
    """Load a data set of the catalogue from its folder in ``folder``, from the system, or from the
    hub.

    size: the side to which images are resized. Raises DataAbsent if the data are in none of these
    places.
    """
    request = ReadRequest(size=size)
    place = local_folder(entry.name, folder)
    if place is None and entry.system is not None and Path(entry.system).is_dir():
        place = Path(entry.system)
    if place is None:
        data = _known_from_hub(entry, folder, request)
    else:
        data = read_folder(entry.name, place, request, entry)
    return as_dataset(entry.name, data, entry.mean, entry.std)


def _known_from_hub(entry: KnownData, folder: Folder, request: ReadRequest) -> Decoded:
    root = data_root(folder)
    absence = "FEDSTILL_DATA is not set"
    if root is not None:
        absence = f"there is no folder {root / entry.name}"
    if entry.hub is None:
        raise DataAbsent(f"dataset {entry.name!r} was not found: {absence}; {entry.remedy}")
    hub = entry.hub
    remedy = f"{absence}; {entry.remedy}"
    return decoded_once(hub, {"hub": hub}, lambda: read_hub(hub, request, remedy), request, entry)


# The registered data sets.


def read_digits() -> Decoded:
    """The digits as (1, 8, 8) images, without a test split.

    Reading: scikit-learn's digits have no test split, and values from 0 to 16; we scale them to 0
    to 255 and round them.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    train = Split(images, bunch.target.astype(np.int64))
    return Decoded({"train": train}, tuple(map(str, range(10))))


@register("dataset", "digits")
def digits() -> Dataset:
    """1,797 handwritten digits, 8×8 grey, included in scikit-learn; a fifth is held out for
    testing.
    """
    entry = catalog.DIGITS
    data = decoded_once("digits", {"registered": "digits"}, read_digits, ReadRequest(), entry)
    return as_dataset("digits", data, entry.mean, entry.std)


@register("dataset", "mnist")
def mnist(folder: Folder = None) -> Dataset:
    """MNIST: 70,000 handwritten digits, 28×28 grey, 10 classes."""
    return load_known(catalog.MNIST, folder)


@register("dataset", "fashion-mnist")
def fashion_mnist(folder: Folder = None) -> Dataset:
    """Fashion-MNIST: 70,000 pieces of clothing, 28×28 grey, 10 classes."""
    return load_known(catalog.FASHION_MNIST, folder)


@register("dataset", "cifar10")
def cifar10(folder: Folder = None) -> Dataset:
    """CIFAR-10: 60,000 photographs, 32×32 RGB, 10 classes."""
    return load_known(catalog.CIFAR10, folder)


@register("dataset", "cifar100")
def cifar100(folder: Folder = None) -> Dataset:
    """CIFAR-100: 60,000 photographs, 32×32 RGB, 100 fine classes."""
    return load_known(catalog.CIFAR100, folder)


@register("dataset", "cinic10")
def cinic10(folder: Folder = None) -> Dataset:
    """CINIC-10: 270,000 photographs, 32×32 RGB, the classes of CIFAR-10; one third each for
    training, validation and test.
    """
    return load_known(catalog.CINIC10, folder)


@register("dataset", "ham10000")
def ham10000(folder: Folder = None, size: Count = 32) -> Dataset:
    """HAM10000: 10,015 skin lesions, resized to size×size RGB, 7 classes of very different sizes; a
    fifth is held out for testing.

    size: Height and width of an image.

    Reading: there is no official split for this use, and SFedKD does not state the image size.
    """
    return load_known(replace(catalog.HAM10000, shape=(3, size, size)), folder, size)


@register("dataset", "bloodmnist")
def bloodmnist(folder: Folder = None) -> Dataset:
    """BloodMNIST: 17,092 blood cells, 28×28 RGB, 8 classes."""
    return load_known(catalog.BLOODMNIST, folder)


@register("dataset", "pathmnist")
def pathmnist(folder: Folder = None) -> Dataset:
    """PathMNIST: 107,180 patches of colon tissue, 28×28 RGB, 9 classes."""
    return load_known(catalog.PATHMNIST, folder)


# The Hugging Face hub, read with the datasets library.


HUB_SECONDS = 10
"""The time limit for an answer of the hub, in seconds."""

ROWS_AT_ONCE = 1000
"""The number of rows of a table or stream that are converted at once."""


def read_hub(name: str, request: ReadRequest, remedy: str) -> Decoded:
    """Read a data set of the Hugging Face hub.

    Raises DataAbsent with ``remedy`` if the hub does not answer or does not have the data set, and
    DataError if it cannot be read, has two splits of the same kind, or files are to be clients.
    """
    if request.options.owner == FILE:
        raise DataError(
            f"hub dataset {name!r}: data on the hub have no files of clients; set partition.column "
            "to a column of clients"
        )
    _check_hub_has(name, remedy)
    with _hub_errors(f"hub dataset {name!r}", remedy):
        import datasets

        streams = datasets.load_dataset(name, streaming=True)
        splits = names_by_split(
            f"hub dataset {name!r}",
            streams,
            remedy="read it with datasets.load_dataset, and pass the splits to use to "
            "fedstill.from_python",
        )
        frames = {
            split: HubFrame(name, streams[hub_name], request.options)
            for split, hub_name in splits.items()
        }
        data = read_frames(name, frames, request, within=name)
    left_out = [hub_name for hub_name in streams if hub_name not in splits.values()]
    if not left_out:
        return data
    return data.with_warnings(f"ignored splits on the hub: {', '.join(left_out)}")


@dataclass(frozen=True)
class HubFrame:
    """A streamed data set as columns, or as rows of images."""

    name: str
    stream: Any
    options: ReadingOptions
    rows: int = 0
    """0, because the hub does not report the number of rows."""
    files: tuple[Path, ...] = ()
    """Empty, because the data are on the hub."""

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types; empty if the hub does not report them."""
        if not self.stream.features:
            return pa.schema([])
        return with_normal_names(self.name, self.stream.features.arrow_schema)

    def read(self, names: Sequence[str]) -> pa.Table:
        """All rows of some columns; raises DataError if they exceed the limits."""
        features = self.stream.features.arrow_schema
        on_hub = stored_names(features)
        names_to_read = [on_hub[name] for name in names]
        schema = pa.schema([features.field(name) for name in names_to_read])
        tables = [schema.empty_table()]
        size = 0
        for batch in self.stream.select_columns(names_to_read).iter(batch_size=ROWS_AT_ONCE):
            tables.append(pa.Table.from_pydict(batch, schema=schema))
            size += tables[-1].nbytes
            check_size(f"hub dataset {self.name!r}", size)
        return pa.concat_tables(tables).combine_chunks().rename_columns(list(names))

    def labelled_images(self, image: str, label: str) -> Iterator[LabelledImage]:
        """Each row's encoded image and label."""
        import datasets

        on_hub = stored_names(self.stream.features.arrow_schema)
        image = on_hub[image]
        label = on_hub[label]
        stream = self.stream.select_columns([image, label]).cast_column(
            image, datasets.Image(decode=False)
        )
        for batch in stream.iter(batch_size=ROWS_AT_ONCE):
            yield from starmap(LabelledImage, zip(batch[image], batch[label], strict=True))


def _check_hub_has(name: str, remedy: str) -> None:
    """Raise DataAbsent if the hub does not answer, or does not have the data set.

    This sends one short request, because the retries of ``datasets`` hang without a network.
    """
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    try:
        hub.dataset_info(name, timeout=HUB_SECONDS)
    except Exception as error:  # many kinds, by version and transport
        raise DataAbsent(
            f"the Hugging Face hub does not provide {name!r} ({on_one_line(error)}); {remedy}"
        ) from error


@contextlib.contextmanager
def _hub_errors(source: str, remedy: str) -> Iterator[None]:
    """A context that turns the libraries' errors about bad files into DataError."""
    import datasets

    kinds = (OSError, ValueError, TypeError, RuntimeError, KeyError, AttributeError)
    try:
        yield
    except MemoryError as error:
        raise file_error(source, error) from error
    except (*kinds, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source} cannot be read ({on_one_line(error)}); {remedy}") from error
