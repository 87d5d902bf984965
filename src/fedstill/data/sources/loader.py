"""The one loader: a data set by name, from wherever it is found first, at last on the Hugging Face
hub, whose images and other data are read through the ``datasets`` library.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from fedstill.core.errors import ConfigError, DataAbsent, DataError, FedstillError, UnknownName
from fedstill.core.fields import plain_value
from fedstill.core.process_settings import process_settings
from fedstill.core.registry import lookup, names, short_name
from fedstill.core.user_code import of_kind, reason
from fedstill.data.cache import Decoded, kept
from fedstill.data.dataset import Dataset
from fedstill.data.form import Broken, Form, Mode, nfc
from fedstill.data.sources.catalog import FOLDERS, Known
from fedstill.data.sources.columns import Columns
from fedstill.data.sources.encode import read_frames
from fedstill.data.sources.folders import (
    DATA_FILES,
    at_home,
    data_root,
    is_data_file,
    local_folder,
    read_file,
    read_folder,
)
from fedstill.data.sources.image_sets import check_not_encoded
from fedstill.data.sources.limits import in_one_line, refuse_large
from fedstill.data.sources.parquet import decoded_splits
from fedstill.data.sources.schema import table_schema
from fedstill.data.sources.splits import SPLITS, hold_out, split_named
from fedstill.data.sources.tables import normalised, with_missing
from fedstill.data.sources.tensors import as_dataset
from fedstill.data.sources.verify import verified

HUB_SECONDS = 10
ROWS_A_BATCH = 1000


def read_hub(name: str, columns: Columns, remedy: str) -> Decoded:
    """A data set of the Hugging Face hub.

    Raises DataAbsent with ``remedy`` if the hub does not answer or has no such data set.
    """
    _reach(name, remedy)
    with _reading(f"hub dataset {name!r}", remedy):
        import datasets

        streams = datasets.load_dataset(name, streaming=True)
        by_split = {split_named(split) or split: stream for split, stream in streams.items()}
        streams = {split: by_split[split] for split in SPLITS if split in by_split}
        left_out = [split for split in by_split if split not in streams]
        caution = f"left out: the splits {', '.join(left_out)} of the hub" if left_out else ""
        data = _read_streams(name, streams, columns)
    return replace(data, about=data.about.warned(caution))


def _read_streams(name: str, streams: Mapping[str, Any], columns: Columns) -> Decoded:
    frames = {split: HubFrame(name, stream, columns.form) for split, stream in streams.items()}
    if frames:
        first = next(iter(frames.values()))
        schema = table_schema(name, first.schema, columns)
        if schema is not None:
            check_not_encoded(name, columns)
            return read_frames(name, frames, schema)
    tables = {split: _Stream(stream) for split, stream in streams.items()}
    return decoded_splits(name, tables, columns, within=name)


@dataclass(frozen=True)
class HubFrame:
    """A streaming data set as columns: what is no image."""

    name: str
    stream: Any
    form: Form

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types; none if the hub does not tell them."""
        if not self.stream.features:
            return pa.schema([])
        return normalised(Path(self.name), self.stream.features.arrow_schema)

    @property
    def files(self) -> tuple[Path, ...]:
        """None: it is on the hub."""
        return ()

    def read(self, names: Sequence[str], optional: bool = False) -> pa.Table:
        """Some columns, all rows; raises DataError for more than may be read."""
        features = self.stream.features.arrow_schema
        stored_names = [name for name in features.names if nfc(name) in names]
        schema = pa.schema([features.field(name) for name in stored_names])
        tables = [schema.empty_table()]
        size = 0
        for batch in self.stream.select_columns(stored_names).iter(batch_size=ROWS_A_BATCH):
            tables.append(pa.Table.from_pydict(batch, schema=schema))
            size += tables[-1].nbytes
            refuse_large(f"hub dataset {self.name!r}", size)
        table = pa.concat_tables(tables).combine_chunks()
        table = table.rename_columns([nfc(name) for name in stored_names])
        return with_missing(table.select(list(names)), self.form.missing_values)


@dataclass(frozen=True)
class _Stream:
    """A streaming data set as the rows of a split."""

    stream: Any
    rows: int = 0

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types."""
        return self.stream.features.arrow_schema if self.stream.features else pa.schema([])

    def cells(self, image: str, label: str) -> Iterator[tuple[Any, Any]]:
        """Each row's encoded image and its label."""
        import datasets

        stream = self.stream.select_columns([image, label]).cast_column(
            image, datasets.Image(decode=False)
        )
        for batch in stream.iter(batch_size=ROWS_A_BATCH):
            yield from zip(batch[image], batch[label], strict=True)


def _reach(name: str, remedy: str) -> None:
    """Ask the hub for a data set with one short request, because the library's own retries hang
    without a network.
    """
    from huggingface_hub import HfApi

    try:
        HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None).dataset_info(
            name, timeout=HUB_SECONDS
        )
    except (
        Exception
    ) as error:  # many kinds, by version and transport; all mean that there is nothing to read
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataAbsent(
            f"the Hugging Face hub does not give {name!r} ({reason}); {remedy}"
        ) from error


@contextlib.contextmanager
def _reading(what: str, remedy: str) -> Iterator[None]:
    """Turn what the libraries raise on bad files into one DataError that says where and what to
    do.
    """
    import datasets
    import pyarrow

    kinds = (OSError, ValueError, TypeError, RuntimeError, KeyError, AttributeError)
    libraries = (pyarrow.ArrowException, datasets.exceptions.DatasetsError)
    try:
        yield
    except MemoryError as error:
        with in_one_line(what):
            raise error
    except (*kinds, *libraries) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(f"{what} cannot be read ({reason}); {remedy}") from error


FORM = tuple(field.name for field in dataclass_fields(Form))
"""Options that say what examples are made of."""

FIELDS = ("broken", "image_column", "label_column", "mean", "mode", "size", "std", *FORM)
"""Options for data that are not in the catalogue."""

CONFIG_KEYS = {"input": "input_column", "marks": "missing_marks"}
"""How keys of ``[data]`` are called that are options by another name."""

PACKED = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
"""How the names of packed files end, and what unpacks them."""

FOLDER = "a folder of parquet or CSV files, or of images by class"


@process_settings()
def load_dataset(
    name: str | Path, *, folder: str | Path | None = None, base: Path | None = None, **fields: Any
) -> Dataset:
    """A data set by name, verified, decoded once into the cache folder and memory-mapped from
    there.

    name: a registered name (``fedstill list``), a folder in ``folder``, a path (relative to
    ``base``) to one parquet, CSV or NPZ file or to a folder of parquet or CSV files or of images by
    class, ``"owner/name"`` on the Hugging Face hub, or one's own function ``"mine.py:data"``, which
    returns a Dataset (it is given ``folder``, if it has that parameter; all others need a default).
    folder: the folder of local data; default: the environment's ``FEDSTILL_DATA``.
    fields: for files, folders and the hub ``image_column``, ``label_column``, ``size`` (resize to
    size × size), ``mode`` (convert all images to "grey" or "rgb"), ``broken`` ("skip" leaves out
    images that cannot be decoded), ``mean``, ``std``, and the fields of
    ``fedstill.data.form.Form``. Data without a
    test split have a stratified fifth held out. Raises DataError for data that are damaged or not
    what their name promises, DataAbsent for those that are not here, UnknownName for no such name,
    ConfigError for a name that is neither a text nor a path, and for fields of data that are read
    in one way alone.
    """
    name, fields = plain_value(name), plain_value(fields)
    if not isinstance(name, str):
        raise ConfigError(f"a data set is named by a text or a path, not {of_kind(name)}")
    # of one's own function the line is said that raised
    if not name.partition(":")[0].endswith(".py"):
        with in_one_line(name):
            return _loaded(name, folder, base, fields)
    return _loaded(name, folder, base, fields)


def _loaded(
    name: str, folder: str | Path | None, base: Path | None, fields: dict[str, Any]
) -> Dataset:
    path, _, attribute = name.partition(":")
    if name not in names("dataset") and not path.endswith(".py") and not attribute:
        return _load_other(name, folder, base, fields)
    entry = lookup("dataset", name, base)
    column = fields.get("owner") if path.endswith(".py") and "owner" not in entry.fields else None
    fields = {key: value for key, value in fields.items() if key != "owner" or column is None}
    _refuse_unknown(name, fields, entry.fields)
    given = {"folder": folder} if "folder" in inspect.signature(entry.target).parameters else {}
    if not path.endswith(".py"):
        return _a_dataset(name, entry.build(**given, **fields))
    _refuse_required(name, entry.target, {*given, *fields})
    try:
        data = _a_dataset(name, entry.build(**given, **fields))
    except FedstillError:
        raise
    except Exception as error:
        raise DataError(f"dataset {short_name(name)!r}: {reason(error, entry.target)}") from error
    if column and not data.about.owners:
        raise DataError(
            f"dataset {short_name(name)!r} says of no example whose it is, so there is no column "
            f"{column!r}; let it "
            "return what fedstill.from_clients makes"
        )
    return data


def _a_dataset(name: str, data: object) -> Dataset:
    if not isinstance(data, Dataset):
        raise ConfigError(
            f"dataset {short_name(name)!r} gave {of_kind(data)}; it must return a Dataset, as "
            "fedstill.from_tensors "
            "makes one"
        )
    return data


def _refuse_required(name: str, target: Callable[..., Any], given: Collection[str]) -> None:
    plain = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in inspect.signature(target).parameters.values():
        if (
            parameter.default is parameter.empty
            and parameter.kind not in plain
            and parameter.name not in given
        ):
            raise ConfigError(
                f"dataset {short_name(name)!r} has a parameter {parameter.name!r} without a "
                "default; it is given the "
                "parameter folder only, so give the others a default"
            )


def load_known(known: Known, folder: str | Path | None, size: int | None = None) -> Dataset:
    """A data set of the catalogue: from its folder in ``folder``, from the system, from the hub, in
    this order.

    Raises DataAbsent if it is at none of these.
    """
    columns = Columns(size=size)
    place, root = local_folder(known.name, folder), data_root(folder)
    if place is None and known.system is not None and Path(known.system).is_dir():
        place = Path(known.system)
    if place is not None:
        return as_dataset(
            known.name, read_folder(known.name, place, columns, known), known.mean, known.std
        )
    where = f"there is no folder {root / known.name}" if root else "FEDSTILL_DATA is not set"
    if known.hub is None:
        raise DataAbsent(f"dataset {known.name!r} is not here: {where}; {known.remedy}")
    hub, remedy = known.hub, f"{where}; {known.remedy}"
    origin = {"hub": hub, "columns": vars(columns), "known": repr(known)}
    data = kept(known.name, origin, lambda: verified(hub, read_hub(hub, columns, remedy), known))
    return as_dataset(known.name, data, known.mean, known.std)


def _load_other(
    name: str, folder: str | Path | None, base: Path | None, fields: dict[str, Any]
) -> Dataset:
    _refuse_unknown(name, fields, FIELDS)
    columns = _columns(name, FOLDERS.get(name), **fields)
    mean: Sequence[float] | None = fields.get("mean")
    std: Sequence[float] | None = fields.get("std")
    path = (base or Path.cwd()) / at_home(name)
    place = local_folder(name, folder) or (path if path.is_dir() else None)
    if place is not None:
        changed = columns.image or columns.label or columns.size or columns.mode
        known = None if changed else FOLDERS.get(name)
        data = read_folder(name, place, columns, known)
        if known is not None:
            mean, std = mean or known.mean, std or known.std
    elif is_data_file(path):
        data = read_file(name, path, columns)
    elif path.is_file():
        unpack = PACKED.get(path.suffix.lower(), "")
        todo = (
            f"unpack it first: {unpack} {path.name}"
            if unpack
            else f"give one of these, or {FOLDER}"
        )
        raise DataError(f"{path} is a file, and not a parquet, CSV or NPZ file; {todo}")
    elif path.suffix.lower() in DATA_FILES:
        raise DataAbsent(f"there is no file {path}; paths are relative to the config's folder")
    elif name.count("/") == 1 and not name.startswith((".", "/", "~")):
        remedy = f"check the name and the network, or make a folder {path} of parquet files"
        origin = {"hub": name, "columns": vars(columns)}
        data = kept(name, origin, lambda: verified(name, hold_out(read_hub(name, columns, remedy))))
    elif "/" in name or name.startswith((".", "~")):
        raise DataAbsent(f"there is no file or folder {path}; give {FOLDER}")
    else:
        root = data_root(folder)
        local = [p.name for p in root.iterdir() if p.is_dir()] if root and root.is_dir() else []
        raise UnknownName("dataset", name, {*names("dataset"), *local})
    return as_dataset(name, data, mean, std)


def _columns(
    name: str,
    known: Known | None,
    image_column: str | None = None,
    label_column: str | None = None,
    size: int | None = None,
    mode: Mode | None = None,
    broken: Broken = "refuse",
    **others: Any,
) -> Columns:
    if size is not None and not (isinstance(size, int) and 1 <= size <= 4096):
        raise ConfigError(
            f"dataset {name!r}: size = {size!r} is not a whole number from 1 to 4096; leave it out "
            "or give one"
        )
    _check_choice(name, "mode", mode, (None, *get_args(Mode)))
    _check_choice(name, "broken", broken, get_args(Broken))
    form = replace(
        known.form if known else Form(), **{k: v for k, v in others.items() if k in FORM}
    ).normalised
    return Columns(
        image=image_column,
        label=label_column,
        size=size,
        form=form,
        known=known is not None and bool(known.sums),
        mode=mode,
        broken=broken,
    )


def _check_choice(name: str, field: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ConfigError(
            f"dataset {name!r}: {field} = {value!r} must be one of "
            f"{', '.join(repr(choice) for choice in choices)}"
        )


def _refuse_unknown(name: str, fields: dict[str, Any], legal: Any) -> None:
    for unknown in sorted(set(fields) - set(legal)):
        if unknown not in FIELDS:
            raise UnknownName("field", unknown, legal, where=f"dataset {name!r}")
        why = (
            f"its function has no parameter {unknown!r}"
            if ".py" in name
            else "it is read in one way alone"
        )
        key = f"data.{CONFIG_KEYS.get(unknown, unknown)}"
        raise ConfigError(f"{key} is not for dataset {short_name(name)!r}: {why}; leave it out")
