"""Parquet files of encoded images and labels, read a few rows at a time after their claims have
been looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedstill.core.errors import DataError, on_one_line
from fedstill.data.cache import Decoded
from fedstill.data.form import Form
from fedstill.data.sources.column_files import (
    PAGE_BUFFER,
    ParquetFrame,
    claims,
    only_file,
    refuse_claims,
)
from fedstill.data.sources.columns import SPLIT_NAMES, Columns, decoded_splits
from fedstill.data.sources.limits import in_one_line, refuse_ratio
from fedstill.data.sources.schema import holds_text, input_columns, no_owner
from fedstill.data.sources.tabular import owned, read_frames, shown_first

ROWS_AT_ONCE = 1
"""A value that a file holds once may stand in all its rows: a thousand of them at once may be any
size.
"""


def by_split(files: Sequence[Path], *suffixes: str) -> dict[str, list[Path]]:
    """The files of every split that end so, by the first word of a file's name or else its
    folder's; else train.
    """
    out: dict[str, list[Path]] = {}
    for path in files:
        if path.suffix.lower() in suffixes:
            out.setdefault(said_split(path) or "train", []).append(path)
    return out


def said_split(path: Path) -> str:
    """The split that the first word of a file's name says, or else of its folder's; empty if none
    does.
    """
    words = [re.split(r"[-_.]", part)[0].lower() for part in (path.name, path.parent.name)]
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), "")


def read_parquet(folder: Path, files: Mapping[str, Sequence[Path]], columns: Columns) -> Decoded:
    """The parquet files of a folder in the Hugging Face layout, by split: images, or what else
    their columns hold.

    Raises DataError if one is damaged, has no clear input and label, or says that it is larger than
    what may be read.
    """
    what = str(only_file(files) or folder)
    try:
        with in_one_line(what):
            frames = {split: ParquetFrame(tuple(paths)) for split, paths in files.items()}
            if inputs := input_columns(what, shown_first(frames).schema, columns):
                return read_frames(what, frames, inputs)
            splits = {split: _Split(tuple(paths)) for split, paths in files.items()}
            return _with_owners(
                what, decoded_splits(what, splits, columns, within=folder), frames, columns.form
            )
    except DataError:
        raise
    except (
        Exception
    ) as error:  # many kinds, by version of the library; all mean that the file is not what it says
        raise DataError(
            f"{_damaged(files) or folder} cannot be read ({on_one_line(error)}); it is damaged or "
            "not a data set; "
            "download or write it again"
        ) from error


def _damaged(files: Mapping[str, Sequence[Path]]) -> Path | None:
    """The first file that does not even open."""
    for path in (path for paths in files.values() for path in paths):
        try:
            pq.ParquetFile(path).close()
        except Exception:
            return path
    return None


def _with_owners(
    what: str, data: Decoded, frames: Mapping[str, ParquetFrame], form: Form
) -> Decoded:
    """Images with whose they are, where a column says it."""
    if not form.owner:
        return data
    if form.owner not in (columns := next(iter(frames.values())).schema.names):
        raise DataError(no_owner(what, form, columns))
    names, codes = owned(
        what, {split: frame.read([form.owner]) for split, frame in frames.items()}, form.owner
    )
    return replace(data, owners=codes, about=replace(data.about, owners=names))


@dataclass(frozen=True)
class _Split:
    """The rows of some files."""

    files: tuple[Path, ...]

    @cached_property
    def rows(self) -> int:
        """How many rows the files say that they hold."""
        return sum(claims(path).num_rows for path in self.files)

    @cached_property
    def features(self) -> Mapping[str, Any]:
        """What ``datasets`` makes of the first file's schema."""
        import datasets

        with in_one_line(self.files[0]):
            return dict(datasets.Features.from_arrow_schema(pq.read_schema(self.files[0])))

    def cells(self, image: str, label: str) -> Iterator[tuple[Any, Any]]:
        """Each row's image, as {"bytes": …, "path": …}, and its label."""
        for path in self.files:
            with in_one_line(path):
                yield from _rows(path, image, label)


def _rows(path: Path, image: str, label: str) -> Iterator[tuple[Any, Any]]:
    """The rows of one file, one after another."""
    about, schema, stored = claims(path), pq.read_schema(path), path.stat().st_size
    wanted = [*_image_columns(path, schema, image), _label_column(path, schema, label)]
    refuse_claims(path, about, wanted)
    kind = schema.field(image).type
    key = "" if pa.types.is_struct(kind) else "bytes" if _is_binary(kind) else "path"
    seen = unpacked = 0
    with pq.ParquetFile(path, buffer_size=PAGE_BUFFER, pre_buffer=False) as file:
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=wanted, use_threads=False):
            for cell, value in zip(
                batch.column(image).to_pylist(), batch.column(label).to_pylist(), strict=True
            ):
                cell = {key: cell} if key and cell is not None else cell
                seen, unpacked = seen + 1, unpacked + len((cell or {}).get("bytes") or b"")
                refuse_ratio(path, unpacked, stored)
                yield cell, value
    if seen != about.num_rows:
        raise DataError(
            f"{path} says that it holds {about.num_rows:,} rows, and holds {seen:,}; write it again"
        )


def _image_columns(path: Path, schema: pa.Schema, name: str) -> list[str]:
    """The columns that the images are in; DataError if they hold anything but bytes, or paths of
    files.
    """
    kind = _kind(path, schema, name)
    if pa.types.is_struct(kind):
        parts = [kind.field(i) for i in range(kind.num_fields)]
        named = [
            p
            for p in parts
            if p.name in ("bytes", "path") and (_is_binary(p.type) or holds_text(p.type))
        ]
        if named:
            return [f"{name}.{part.name}" for part in named]
    elif _is_binary(kind) or holds_text(kind):
        return [name]
    raise DataError(
        f"{path}: column {name!r} holds {str(kind)[:100]}, not encoded images; write it again with "
        "them"
    )


def _label_column(path: Path, schema: pa.Schema, name: str) -> str:
    kind = _kind(path, schema, name)
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    plain = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_null,
        holds_text,
    )
    if not any(is_one(kind) for is_one in plain):
        raise DataError(
            f"{path}: column {name!r} holds {str(kind)[:100]}, not class ids or names; set "
            "data.label_column"
        )
    return name


def _kind(path: Path, schema: pa.Schema, name: str) -> pa.DataType:
    if (count := len(schema.get_all_field_indices(name))) != 1:
        first = "as the first file of its split has"
        raise DataError(
            f"{path} must have exactly one column {name!r}, {first}; it has {count}; write it again"
        )
    return schema.field(name).type


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
