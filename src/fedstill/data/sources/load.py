"""Data sets by name: registered ones, local files and folders, functions of the user, the hub."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.core.errors import ConfigError, DataAbsent, DataError, FedstillError, UnknownName
from fedstill.core.fields import Count, plain_value
from fedstill.core.process_settings import process_settings
from fedstill.core.registry import Entry, lookup, names, register, short_name
from fedstill.core.user_code import of_kind, reason
from fedstill.data.cache import Decoded, kept
from fedstill.data.dataset import Dataset
from fedstill.data.form import Form, Kind
from fedstill.data.sources import catalog
from fedstill.data.sources.array_files import is_idx, read_idx, read_npz
from fedstill.data.sources.catalog import FOLDERS, Known
from fedstill.data.sources.encode import frames_of, read_frames, schema_of
from fedstill.data.sources.hub import read_hub
from fedstill.data.sources.image_columns import images_beside_caution, read_parquet
from fedstill.data.sources.image_sets import check_not_encoded, read_image_folder
from fedstill.data.sources.images import IMAGE_SUFFIXES
from fedstill.data.sources.limits import files_below, in_one_line
from fedstill.data.sources.records import Columns
from fedstill.data.sources.schema import check_images_only, table_schema
from fedstill.data.sources.splits import (
    FileSplits,
    file_list,
    hold_out,
    split_tables,
    splits_in,
)
from fedstill.data.sources.tables import CSV_SUFFIXES, CsvFrame, ParquetFrame, single_file
from fedstill.data.sources.tensors import as_dataset
from fedstill.data.sources.verify import verified

FORM_FIELDS = tuple(field.name for field in dataclass_fields(Form))
"""Fields of ``load_dataset`` that say what examples are made of."""

FIELDS = ("broken", "image_column", "label_column", "mean", "mode", "size", "std", *FORM_FIELDS)
"""Fields of ``load_dataset`` for data that are not registered."""

CONFIG_KEYS = {"input": "input_column", "marks": "missing_marks"}
"""The keys of ``[data]`` that have another name than the field."""

UNPACKERS = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
"""The programs that unpack files, by suffix."""

FOLDER = "a folder of parquet or CSV files, or of images by class"


@process_settings()
def load_dataset(
    name: str | Path, *, folder: str | Path | None = None, base: Path | None = None, **fields: Any
) -> Dataset:
    """A data set by name, verified, decoded once into the cache and memory-mapped from there.

    name: one of

    - a registered name (``fedstill list``) or the name of a folder in ``folder``,
    - a path, relative to ``base``, to a parquet, CSV or NPZ file, or to a folder of parquet or CSV
      files or of images by class,
    - ``"owner/name"`` on the Hugging Face hub,
    - ``"mine.py:data"``: a function that returns a Dataset. It gets ``folder`` if it has that
      parameter; its other parameters need defaults.

    folder: the folder of local data; default: ``FEDSTILL_DATA``. fields: for files, folders and the
    hub ``image_column``, ``label_column``, ``size`` (resize images to size × size), ``mode``
    (convert all images to "grey" or "rgb"), ``broken`` ("skip" leaves out images that cannot be
    decoded), ``mean``, ``std``, and the fields of ``fedstill.data.form.Form``.

    Data without a test split have a stratified fifth held out. Raises DataError for data that are
    damaged or not what their name promises, DataAbsent for data that are not there, UnknownName
    for an unknown name, and ConfigError for fields that the data do not take.
    """
    name = plain_value(name)
    fields = plain_value(fields)
    if not isinstance(name, str):
        raise ConfigError(f"a data set is named by a text or a path, not {of_kind(name)}")
    path, _, attribute = name.partition(":")
    if path.endswith(".py") or attribute:
        # Errors of the user's function are not shortened to one about the file.
        return _from_function(name, folder, base, fields)
    with in_one_line(name):
        if name in names("dataset"):
            return _registered(lookup("dataset", name, base), folder, fields)
        return _from_files(name, folder, base, fields)


# Registered data sets, and functions of the user.


def _registered(entry: Entry, folder: str | Path | None, fields: Mapping[str, Any]) -> Dataset:
    _check_fields(entry.name, fields, entry.fields, "it is read in one way alone")
    return _checked_dataset(entry.name, entry.build(**_folder_argument(entry, folder), **fields))


def _from_function(
    name: str, folder: str | Path | None, base: Path | None, fields: Mapping[str, Any]
) -> Dataset:
    """The data set that a user's function returns; its owners must be those that are asked for."""
    entry = lookup("dataset", name, base)
    owner = None
    if "owner" not in entry.fields:
        owner = fields.get("owner")
        fields = {key: value for key, value in fields.items() if key != "owner"}
    _check_fields(name, fields, entry.fields, "its function has no such parameter")
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
            f"dataset {short_name(name)!r} does not say whose its examples are, so there is no "
            f"column {owner!r}; let it return what fedstill.from_clients makes"
        )
    return data


def _folder_argument(entry: Entry, folder: str | Path | None) -> dict[str, Any]:
    if "folder" in inspect.signature(entry.target).parameters:
        return {"folder": folder}
    return {}


def _checked_dataset(name: str, data: object) -> Dataset:
    if not isinstance(data, Dataset):
        raise ConfigError(
            f"dataset {short_name(name)!r} gave {of_kind(data)}; it must return a Dataset, as "
            "fedstill.from_tensors makes one"
        )
    return data


def _check_defaults(name: str, target: Callable[..., Any], arguments: Collection[str]) -> None:
    """Raise ConfigError for a parameter of a user's function that nothing sets."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in inspect.signature(target).parameters.values():
        has_default = parameter.default is not parameter.empty or parameter.kind in variadic
        if not has_default and parameter.name not in arguments:
            raise ConfigError(
                f"dataset {short_name(name)!r} has a parameter {parameter.name!r} without a "
                "default; it is given the parameter folder only, so give the others a default"
            )


def _check_fields(
    name: str, fields: Mapping[str, Any], legal: Collection[str], explanation: str
) -> None:
    """Raise an error for a field that does not exist, or that these data do not take."""
    for unknown in sorted(set(fields) - set(legal)):
        if unknown not in FIELDS:
            raise UnknownName("field", unknown, legal, where=f"dataset {name!r}")
        key = f"data.{CONFIG_KEYS.get(unknown, unknown)}"
        raise ConfigError(
            f"{key} is not for dataset {short_name(name)!r}: {explanation}; leave it out"
        )


# Data sets of the catalogue.


def load_known(known: Known, folder: str | Path | None, size: int | None = None) -> Dataset:
    """A data set of the catalogue: from its folder in ``folder``, from the system, or the hub.

    size: the side to which images are resized. Raises DataAbsent if it is at none of these.
    """
    columns = Columns(size=size)
    place = local_folder(known.name, folder)
    if place is None and known.system is not None and Path(known.system).is_dir():
        place = Path(known.system)
    if place is not None:
        data = read_folder(known.name, place, columns, known)
        return as_dataset(known.name, data, known.mean, known.std)

    root = data_root(folder)
    absence = f"there is no folder {root / known.name}" if root else "FEDSTILL_DATA is not set"
    if known.hub is None:
        raise DataAbsent(f"dataset {known.name!r} is not here: {absence}; {known.remedy}")
    hub = known.hub
    remedy = f"{absence}; {known.remedy}"
    origin = {"hub": hub, "columns": vars(columns), "known": repr(known)}
    data = kept(known.name, origin, lambda: verified(hub, read_hub(hub, columns, remedy), known))
    return as_dataset(known.name, data, known.mean, known.std)


# The registered data sets.


# Digits: scikit-learn's 1,797 handwritten digits, which ship inside the library.


def read_digits() -> Decoded:
    """The digits as (1, 8, 8) images, a fifth of every class held out for the test.

    Reading: scikit-learn has no train/test split and values 0 to 16; they are scaled to 0 to 255
    and rounded.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    whole = Decoded({"train": (images, bunch.target.astype(np.int64))}, tuple(map(str, range(10))))
    return hold_out(whole)


Folder = str | Path | None


@register("dataset", "digits")
def digits(folder: Folder = None) -> Dataset:
    """1,797 handwritten digits, 8×8 grey, that ship with scikit-learn; a fifth is held out for the
    test.
    """
    known = catalog.DIGITS
    data = kept("digits", {"sums": known.sums}, lambda: verified("digits", read_digits(), known))
    return as_dataset("digits", data, known.mean, known.std)


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
    """CINIC-10: 270,000 photographs, 32×32 RGB, CIFAR-10's classes, a third each for train,
    validation and test.
    """
    return load_known(catalog.CINIC10, folder)


@register("dataset", "ham10000")
def ham10000(folder: Folder = None, size: Count = 32) -> Dataset:
    """HAM10000: 10,015 skin lesions, resized to size×size RGB, 7 very uneven classes; a fifth held
    out for the test.

    size: Height and width of an image.

    Reading: there is no official split for this use, and SFedKD does not say the image size.
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


# Files, folders and the hub.


@dataclass(frozen=True)
class _Request:
    """A data set that is asked for by name, with the path that the name stands for."""

    name: str
    path: Path
    folder: str | Path | None
    columns: Columns


def _from_files(
    name: str, folder: str | Path | None, base: Path | None, fields: Mapping[str, Any]
) -> Dataset:
    _check_fields(name, fields, FIELDS, "")
    mean: Sequence[float] | None = fields.get("mean")
    std: Sequence[float] | None = fields.get("std")
    columns = _columns(name, fields)
    path = (base or Path.cwd()) / at_home(name)
    place = local_folder(name, folder)
    if place is None and path.is_dir():
        place = path
    if place is None:
        return as_dataset(name, _file_or_hub(_Request(name, path, folder, columns)), mean, std)

    changed = columns.image or columns.label or columns.size or columns.mode
    known = None if changed else FOLDERS.get(name)
    data = read_folder(name, place, columns, known)
    if known is not None:
        mean = mean or known.mean
        std = std or known.std
    return as_dataset(name, data, mean, std)


def _file_or_hub(request: _Request) -> Decoded:
    name = request.name
    path = request.path
    if is_data_file(path):
        return read_file(name, path, request.columns)
    if path.is_file():
        unpacker = UNPACKERS.get(path.suffix.lower())
        remedy = f"give one of these, or {FOLDER}"
        if unpacker:
            remedy = f"unpack it first: {unpacker} {path.name}"
        raise DataError(f"{path} is a file, and not a parquet, CSV or NPZ file; {remedy}")
    if path.suffix.lower() in DATA_SUFFIXES:
        raise DataAbsent(f"there is no file {path}; paths are relative to the config's folder")

    is_path = name.startswith((".", "/", "~"))
    if name.count("/") == 1 and not is_path:
        return _from_hub(request)
    if "/" in name or is_path:
        raise DataAbsent(f"there is no file or folder {path}; give {FOLDER}")
    root = data_root(request.folder)
    local: list[str] = []
    if root is not None and root.is_dir():
        local = [place.name for place in root.iterdir() if place.is_dir()]
    raise UnknownName("dataset", name, {*names("dataset"), *local})


def _from_hub(request: _Request) -> Decoded:
    name = request.name
    columns = request.columns
    remedy = f"check the name and the network, or make a folder {request.path} of parquet files"
    origin = {"hub": name, "columns": vars(columns)}

    def decode() -> Decoded:
        return verified(name, hold_out(read_hub(name, columns, remedy), in_place=True))

    return kept(name, origin, decode)


def _columns(name: str, fields: Mapping[str, Any]) -> Columns:
    """What the fields of ``load_dataset`` say about columns and images, checked."""
    size = fields.get("size")
    if size is not None and not (isinstance(size, int) and 1 <= size <= 4096):
        raise ConfigError(
            f"dataset {name!r}: size = {size!r} is not a whole number from 1 to 4096; leave it out "
            "or give one"
        )
    known = FOLDERS.get(name)
    form = Form() if known is None else known.form
    form = replace(form, **{key: value for key, value in fields.items() if key in FORM_FIELDS})
    return Columns(
        image=fields.get("image_column"),
        label=fields.get("label_column"),
        size=size,
        form=form.normalised,
        known=known is not None and bool(known.sums),
        mode=fields.get("mode"),
        broken=fields.get("broken", "refuse"),
    )


# Local places.


DATA_SUFFIXES = (".parquet", *CSV_SUFFIXES, ".npz")
"""The suffixes of files that may hold a data set by themselves."""


def data_root(folder: str | Path | None) -> Path | None:
    """The folder of local data: ``folder``, or the environment's ``FEDSTILL_DATA``, or None."""
    root = folder if folder is not None else os.environ.get("FEDSTILL_DATA")
    return at_home(root) if root else None


def at_home(path: str | Path) -> Path:
    """A path with ``~`` as the home folder. Raises DataError if there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{path} names a home folder that is not there; give the whole path"
        ) from error


def local_folder(name: str, folder: str | Path | None) -> Path | None:
    """The folder of that name in ``data_root(folder)``, or None."""
    root = data_root(folder)
    if root is None or name in ("", ".", "..") or "/" in name:
        return None
    return root / name if (root / name).is_dir() else None


def is_data_file(path: Path) -> bool:
    """Whether a path is a file that may hold a data set by itself."""
    return path.suffix.lower() in DATA_SUFFIXES and path.is_file()


def read_file(name: str, path: Path, columns: Columns) -> Decoded:
    """The data in a parquet, CSV or NPZ file, verified; without a test split, a fifth is held out.

    The file is decoded once: the key of the cache has its size and time.
    """
    status = path.stat()
    stamp = [status.st_size, status.st_mtime_ns]
    origin = {"file": str(path.resolve()), "stamp": stamp, "columns": vars(columns)}

    def decode() -> Decoded:
        suffix = path.suffix.lower()
        if suffix == ".npz":
            check_images_only(str(path), columns.form)
            check_not_encoded(str(path), columns)
            data = read_npz(path)
        elif suffix == ".parquet":
            data = read_parquet(path.parent, {"train": [path]}, columns)
        else:
            data = read_csv_files(path.parent, {"train": [path]}, columns)
        return _verified(name, data, columns)

    return kept(path.stem, origin, decode)


def read_folder(name: str, place: Path, columns: Columns, known: Known | None = None) -> Decoded:
    """The data in a folder, verified; without a test split, a fifth is held out.

    The folder is decoded once: the key of the cache has its files' names, sizes and times. Raises
    DataError for an empty folder, and for files that are no data set.
    """
    files = files_below(place, {*DATA_SUFFIXES, ".gz", *IMAGE_SUFFIXES})
    stamps = [
        (str(path.relative_to(place)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in files
    ]
    origin = {
        "folder": str(place.resolve()),
        "files": stamps,
        "columns": vars(columns),
        "known": repr(known),
    }

    def decode() -> Decoded:
        if not files:
            raise DataError(
                f"{place} is empty; it needs parquet or CSV files, or images in folders named by "
                "their class"
            )
        data = _verified(name, _decode(place, files, columns), columns, known)
        return data if known else _with_file_note(data, place, files)

    return kept(name, origin, decode)


def _verified(name: str, data: Decoded, columns: Columns, known: Known | None = None) -> Decoded:
    if "train" in data.splits:
        data = hold_out(data, columns.form, in_place=True)
    return verified(name, data, known)


def _decode(place: Path, files: Sequence[Path], columns: Columns) -> Decoded:
    """The data in a folder, by its layout: tables, IDX, NPZ, or images by class."""
    tables = table_splits(place, files)
    if tables.files:
        caution = ""
        if _are_parquet(tables):
            caution = images_beside_caution(tables.files, files, columns)
            data = read_parquet(place, tables.files, columns)
        else:
            data = read_csv_files(place, tables.files, columns)
        return replace(data, about=data.about.warned(*tables.cautions, caution))

    check_images_only(str(place), columns.form)
    archives = [path for path in files if path.parent == place and path.suffix.lower() == ".npz"]
    if not is_idx(place) and not archives:
        return read_image_folder(place, files, columns)
    check_not_encoded(str(place), columns)
    return read_idx(place) if is_idx(place) else read_npz(archives[0])


def table_splits(place: Path, files: Sequence[Path]) -> FileSplits:
    """The table files of a folder by split: parquet files, or else CSV files.

    There are none where CSV files lie beside images. Raises DataError if some splits are parquet
    files and others CSV files.
    """
    parquet = [path for path in files if path.suffix.lower() == ".parquet"]
    csv = [path for path in files if path.suffix.lower() in CSV_SUFFIXES]
    if not parquet:
        has_images = any(path.suffix.lower() in IMAGE_SUFFIXES for path in files)
        return split_tables(place, [] if has_images else csv)

    splits = split_tables(place, parquet)
    for path in csv:
        if not set(splits_in(path.stem)) <= set(splits.files):
            raise DataError(
                f"{place} has parquet files ({file_list(parquet)}) and {path.name}; the splits are "
                "read from files of one kind: write all of them as parquet or all as CSV"
            )
    if csv:
        caution = f"left out, because parquet files are read: {file_list(csv)}; move them elsewhere"
        splits = replace(splits, cautions=(*splits.cautions, caution))
    return splits


def _are_parquet(tables: FileSplits) -> bool:
    first = next(iter(tables.files.values()))[0]
    return first.suffix.lower() == ".parquet"


def read_csv_files(folder: Path, files: Mapping[str, Sequence[Path]], columns: Columns) -> Decoded:
    """The CSV files of a folder, by split.

    Raises DataError for a file that cannot be read, and for unclear columns.
    """
    what = str(single_file(files) or folder)
    frames = frames_of(CsvFrame, folder, files, columns.form)
    for frame in frames.values():
        if not frame.rows:
            where = single_file({"": frame.files}) or what
            raise DataError(f"{where} has a line of column names and no rows below it; add rows")
    schema = schema_of(what, frames, columns)
    if schema is None:
        raise DataError(
            f"{what}: a CSV file holds no images; leave data.image_column and data.kind out"
        )
    check_not_encoded(what, columns)
    return read_frames(what, frames, schema)


def _with_file_note(data: Decoded, place: Path, files: Sequence[Path]) -> Decoded:
    """The data with a note on the table files of each split, if a split has several."""
    by_split = table_splits(place, files).files
    if all(len(paths) == 1 for paths in by_split.values()):
        return data
    sources = [f"{split} from {file_list(paths)}" for split, paths in by_split.items()]
    note = f"read {'; '.join(sources)}"
    return replace(data, about=replace(data.about, notes=(*data.about.notes, note)))


# The kind of a data set's examples, before it is read.


TABLE_SUFFIXES = (".parquet", *CSV_SUFFIXES)

FILES_LOOKED_AT = 1000
"""The files of a folder among which the first table is looked for."""


def likely_kind(name: str, folder: str, label_column: str, form: Mapping[str, Any]) -> Kind:
    """The kind of a data set's examples; "image" where it is unknown before the data are read.

    name: a registered name, a path, or a folder in ``folder``; form: fields of ``Form`` that are
    set.
    """
    if "kind" in form:
        return form["kind"]  # type: ignore[no-any-return]
    if name in names("dataset") or ":" in name:
        return "image"
    known = FOLDERS.get(name)
    if known is not None and known.form.kind != "auto":
        return known.form.kind
    place = local_folder(name, folder or None) or Path(name)
    try:
        file = _first_table(place)
        if file is None:
            return "image"
        return _kind_of_table(file, file.stat().st_mtime_ns, label_column, Form(**form))
    except OSError:
        return "image"  # reading the data reports the error


def _first_table(place: Path) -> Path | None:
    """The file itself, or the first table in a folder."""
    if place.is_file():
        return place if place.suffix.lower() in TABLE_SUFFIXES else None
    if not place.is_dir():
        return None
    paths = sorted(islice(place.iterdir(), FILES_LOOKED_AT))
    tables = (path for path in paths if path.suffix.lower() in TABLE_SUFFIXES and path.is_file())
    return next(tables, None)


@lru_cache(maxsize=64)
def _kind_of_table(file: Path, modified: int, label_column: str, form: Form) -> Kind:
    """The kind of a table's examples; ``modified``, its time, is a part of the cache's key."""
    frame_type = ParquetFrame if file.suffix.lower() == ".parquet" else CsvFrame
    frame = frame_type((file,), form)
    columns = Columns(label=label_column or None, form=form.normalised)
    try:
        schema = table_schema(str(file), frame.schema, columns)
    except (DataError, ValueError, OSError):
        return "image"  # reading the data reports the error
    return "image" if schema is None else schema.form.kind  # type: ignore[return-value]
