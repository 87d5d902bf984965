"""Rows of columns as the arrays of a data set: a table's numbers and categories, vectors, series,
texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedstill.core.errors import DataError
from fedstill.data.cache import Decoded
from fedstill.data.form import LENGTH, About, Form
from fedstill.data.sources.column_files import Frame
from fedstill.data.sources.columns import checked_label, with_ids
from fedstill.data.sources.schema import (
    InputColumns,
    names_of_rows,
    refuse_other_labels,
    refuse_other_types,
    too_close,
)
from fedstill.data.table_encoding import (
    Categories,
    begins,
    category_name,
    lacks,
    names_in_order,
    numbers,
    table_rows,
    with_features,
    with_marks,
)
from fedstill.data.text import encoded

# A column of lists as an array: vectors, or the channels of a series; and which examples lack a
# value.


Floats = NDArray[np.float32]


def nested(what: str, column: pa.ChunkedArray, depth: int, length: int) -> Floats:
    """Lists of numbers as (n, D), lists of lists as (n, channels, L); cut to ``length``, or filled
    up with NaN.

    An example that is null, or has a list that is, is NaN. Raises DataError where all are, or
    lengths differ.
    """
    array = _whole_column(column)
    rows = np.flatnonzero(~_lacks_lists(array, depth))
    if not len(rows):
        raise DataError(
            f"{what}: no example has all its values; write them, or leave the column out"
        )
    known = _stacked(what, array.take(pa.array(rows)), depth, length, rows)
    if len(rows) == len(array):
        return known
    values = np.full((len(array), *known.shape[1:]), np.nan, dtype=np.float32)
    values[rows] = known
    return values


def with_gaps(column: pa.ChunkedArray, depth: int, length: int) -> NDArray[np.bool_]:
    """Which examples (n,) are null, or lack a list, or one of the numbers that ``length`` keeps."""
    array = _whole_column(column)
    lacks = _lacks_lists(array, depth)
    rows, flat = np.arange(len(array)), array
    for _ in range(depth):
        sizes = _sizes(flat)
        rows, flat = np.repeat(rows, sizes), flat.flatten()
    gaps = np.isnan(_numbers(flat)) & (_places(sizes) < (length or np.inf))
    lacks[rows[gaps]] = True
    return lacks


def _whole_column(column: pa.ChunkedArray) -> Any:
    whole = column.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole


def _lacks_lists(array: Any, depth: int) -> NDArray[np.bool_]:
    """Which examples (n,) are null, or have a list that is."""
    lacks = np.zeros(len(array), dtype=bool)
    rows = np.arange(len(array))
    for level in range(depth):
        lacks[rows[array.is_null().to_numpy(zero_copy_only=False)]] = True
        if level < depth - 1:
            rows, array = np.repeat(rows, _sizes(array)), array.flatten()
    return lacks


def _stacked(what: str, array: Any, depth: int, length: int, rows: NDArray[np.int64]) -> Floats:
    """Examples without a null list; ``rows``: their numbers, for people."""
    shape, flat = [len(array)], array
    for level in range(depth):
        sizes, last = _sizes(flat), level == depth - 1
        flat = flat.flatten()
        if last and length:
            return _padded(_numbers(flat), sizes, length).reshape(*shape, length)
        wrong = np.flatnonzero((sizes != sizes[0]) | (sizes < 1))
        if len(wrong):
            parts, todo = (
                ("values", "correct it, or leave it out") if last else ("channels", "leave it out")
            )
            if last and depth > 1:
                todo = "set data.length to cut and fill up all to one length"
            raise DataError(
                f"{what}: example {rows[wrong[0] // max(1, int(np.prod(shape[1:])))]} has "
                f"{sizes[wrong[0]]} {parts}, "
                f"the first {sizes[0]}; {todo}"
            )
        shape.append(int(sizes[0]))
    return _numbers(flat).reshape(shape)


def _numbers(flat: Any) -> Floats:
    return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.float32)


def _sizes(array: Any) -> NDArray[np.int64]:
    """How long each list is; 0 for one that is null."""
    if pa.types.is_fixed_size_list(array.type):
        sizes = np.full(len(array), array.type.list_size, dtype=np.int64)
    else:
        sizes = np.diff(array.offsets.to_numpy()).astype(np.int64)
    sizes[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return sizes


def _places(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each number in its list."""
    places: NDArray[np.int64] = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return places


def _padded(numbers: Floats, sizes: NDArray[np.int64], length: int) -> Floats:
    out = np.full((len(sizes), length), np.nan, dtype=np.float32)
    places = _places(sizes)
    kept = places < length
    out[np.repeat(np.arange(len(sizes)), sizes)[kept], places[kept]] = numbers[kept]
    return out


OneFrame = TypeVar("OneFrame", bound=Frame)
SPLITS = ("train", "validation", "test")
"""In this order they are read: the first says what the columns of all hold."""

Tables = Mapping[str, pa.Table]


def read_frames(what: str, frames: Mapping[str, Frame], inputs: InputColumns) -> Decoded:
    """All rows of {split: frame} as arrays; numbers as float32, with NaN where ``missing = "mean"``
    will fill them in.

    Labels that are text become ids in alphabetical order. Raises DataError for a row that misses a
    value (unless the form says what to do about it), holds one that is not finite, or is of another
    length than the first.
    """
    form = inputs.form
    tables = _tables(what, frames, inputs)
    names, codes = owned(what, tables, form.owner) if form.owner else ((), {})
    about = About(form.kind, owners=names)  # type: ignore[arg-type]
    values, about = MAKERS[form.kind](what, tables, inputs, about)
    keep, notes = _whole(what, values, tables, form, codes, about)
    raw = {
        s: (v[keep[s]], _labels(f"{what}, {s}", tables[s][inputs.label], keep[s]))
        for s, v in values.items()
    }
    refuse_other_labels(what, {split: labels for split, (_, labels) in raw.items()})
    data = with_ids(what, raw, inputs.classes)
    first, named = next(iter(tables.values())), dict(form.categorical)
    doubts = too_close(first, [name for name in form.columns if name not in named])
    doubts += names_of_rows(first, form.columns) if inputs.unasked else []
    return replace(
        data,
        read={s: _sums(t, inputs) for s, t in tables.items()}
        if inputs.known and not form.length
        else {},
        owners={split: own[keep[split]] for split, own in codes.items()},
        about=replace(about, notes=(*about.notes, *notes)).warned(inputs.left, *doubts),
    )


def shown_first(frames: Mapping[str, OneFrame]) -> OneFrame:
    """The split whose columns are those of the data set: train, if there is one."""
    return frames[sorted(frames, key=SPLITS.index)[0]]


def _tables(what: str, frames: Mapping[str, Frame], inputs: InputColumns) -> dict[str, pa.Table]:
    """The columns to read of every split, which hold the same as those of the first."""
    gaps = inputs.form.kind == "table" and inputs.form.missing != "refuse"
    tables: dict[str, pa.Table] = {}
    first = ""
    for split in sorted(frames, key=SPLITS.index):
        frame, names = frames[split], frames[split].schema.names
        where = str(frame.files[0]) if len(frame.files) == 1 else f"{what}, {split}"
        first = first or where
        if lacking := [name for name in inputs.names if name not in names]:
            raise DataError(
                f"{where} has no column {lacking[0]!r} among "
                f"{', '.join(map(repr, names))[:300] or 'none'}, and "
                f"{first} has it; write it there, or name the columns to read in data.columns"
            )
        tables[split] = frame.read(inputs.names, gaps)
        refuse_other_types(where, tables[split], first, next(iter(tables.values())), inputs)
        if not len(tables[split]):
            raise DataError(f"{where} holds no examples; leave the file out or download it again")
    return tables


def _sums(table: pa.Table, inputs: InputColumns) -> tuple[str, str]:
    """SHA-256 of the inputs: numbers as float32, row by row, texts as UTF-8 with a zero byte after
    each; and of labels.

    Labels are a byte each, as for images; those that are names, as texts.
    """
    form, labels = inputs.form, table[inputs.label].to_pylist()
    if form.kind == "text":
        own = b"".join(str(text).encode() + b"\0" for text in table[form.input].to_pylist())
    elif form.kind == "table":
        numeric = [name for name in form.columns if _numeric(table[name].type)]
        own = (
            np.stack([numbers(table[name]) for name in numeric], 1).astype("<f4").tobytes()
            if numeric
            else b""
        )
    else:
        own = (
            nested("", table[form.input], 1 if form.kind == "vector" else 2, form.length)
            .astype("<f4")
            .tobytes()
        )
    small = all(isinstance(label, int) and 0 <= label < 256 for label in labels)
    marks = bytes(labels) if small else b"".join(str(label).encode() + b"\0" for label in labels)
    return hashlib.sha256(own).hexdigest(), hashlib.sha256(marks).hexdigest()


def _table(
    what: str, tables: Tables, inputs: InputColumns, about: About
) -> tuple[dict[str, Floats], About]:
    form, named = inputs.form, dict(inputs.form.categorical)
    train = tables.get("train", next(iter(tables.values())))
    each = tuple(
        (n, Categories.of(what, n, named[n], train[n]).values) for n in form.columns if n in named
    )
    about = with_features(replace(about, columns=form.columns, categories=each))
    values = {
        split: table_rows(f"{what}, {split}", table, about) for split, table in tables.items()
    }
    if form.marks:
        gaps = np.logical_or.reduce([np.isnan(rows).any(0) for rows in values.values()])
        gappy = tuple(name for name, at in begins(about).items() if gaps[at])
        missing = form.marks if isinstance(form.marks, tuple) else gappy
        about, before = with_features(about, missing), about
        values = {split: with_marks(rows, before, missing) for split, rows in values.items()}
    return values, about


def _lists(
    what: str, tables: Tables, inputs: InputColumns, about: About
) -> tuple[dict[str, Floats], About]:
    """Vectors (n, D) and series (n, channels, L)."""
    form = inputs.form
    depth = 1 if form.kind == "vector" else 2
    values = {
        s: nested(f"{what}, {s}", t[form.input], depth, form.length) for s, t in tables.items()
    }
    return values, about


def _texts(
    what: str, tables: Tables, inputs: InputColumns, about: About
) -> tuple[dict[str, Any], About]:
    form, out = inputs.form, {}
    notes: list[str] = []
    vocabulary, sha = 0, ""
    for split, table in tables.items():
        column = table[form.input]
        if column.null_count:
            at = int(np.flatnonzero(column.is_null().to_numpy())[0])
            raise DataError(
                f"{what}, {split}: example {at} has no text; leave it out, or write a word"
            )
        ids = encoded(column.to_pylist(), form.tokenizer, form.vocabulary, form.length or LENGTH)
        out[split], vocabulary, sha = ids.ids, ids.vocabulary, ids.sha
        notes.append(
            f"{split}: {100 * ids.cut:.1f} % of the texts are longer than {form.length or LENGTH} "
            "tokens: cut"
        )
    own = {"vocabulary": vocabulary, "tokenizer": form.tokenizer, "tokenizer_sha": sha}
    return out, replace(about, **own, notes=(*about.notes, *notes))  # type: ignore[arg-type]


MAKERS: Mapping[str, Callable[..., tuple[dict[str, Any], About]]] = {
    "table": _table,
    "vector": _lists,
    "series": _lists,
    "text": _texts,
}


def _numeric(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def owned(
    what: str, tables: Tables, column: str
) -> tuple[tuple[str, ...], dict[str, NDArray[np.int64]]]:
    """The names of the owners, in order: numbers by size, texts by letter; and the number of each
    row's, by split.
    """
    names = _owners(tables, column)
    return names, {
        split: _codes(what, split, table, column, names) for split, table in tables.items()
    }


def _owners(tables: Tables, column: str) -> tuple[str, ...]:
    return names_in_order(
        {value for table in tables.values() for value in table[column].unique().to_pylist()}
    )


def _codes(
    what: str, split: str, table: pa.Table, column: str, owners: tuple[str, ...]
) -> NDArray[np.int64]:
    number = {name: k for k, name in enumerate(owners)}
    values = table[column].to_pylist()
    for at, value in enumerate(values):
        if lacks(value):
            raise DataError(
                f"{what}, {split}: example {at} has no {column!r}, its owner; correct it"
            )
    return np.array([number[category_name(value)] for value in values], dtype=np.int64)


def _labels(what: str, column: pa.ChunkedArray, keep: NDArray[np.bool_]) -> list[int | str]:
    return [checked_label(what, k, value) for k, value in enumerate(column.to_pylist()) if keep[k]]


def _whole(
    what: str,
    values: Mapping[str, NDArray[Any]],
    tables: Tables,
    form: Form,
    codes: Mapping[str, NDArray[np.int64]],
    about: About,
) -> tuple[dict[str, NDArray[np.bool_]], list[str]]:
    """Which rows to keep, by split, and what was left out. Raises DataError for what is missing, or
    not finite.
    """
    keep, notes = {}, []
    for split, own in values.items():
        keep[split] = np.ones(len(own), dtype=bool)
        if own.dtype.kind != "f":
            continue
        _refuse_infinite(f"{what}, {split}", own, about)
        if form.kind == "series":  # what fills one up is NaN as well
            gaps = with_gaps(tables[split][form.input], 2, form.length)
        else:
            gaps = np.isnan(own).reshape(len(own), -1).any(1)
        if not gaps.any() or (form.missing == "mean" and form.kind == "table"):
            continue
        if form.missing == "drop":
            keep[split] = ~gaps
            notes.append(_dropped(split, gaps, codes.get(split), about.owners))
            if not keep[split].any():
                raise DataError(
                    f"{what}, {split}: every row misses a value; set data.columns to those that "
                    "are known"
                )
            continue
        at = int(np.flatnonzero(gaps)[0])
        place = int(np.flatnonzero(np.isnan(own[at].reshape(-1)))[0])
        column = f" in column {about.features[place].partition('=')[0]!r}" if about.features else ""
        todo = "'drop' to leave such rows out" + (", or 'mean'" if form.kind == "table" else "")
        raise DataError(
            f"{what}, {split}: example {at} has no value{column} ({gaps.sum():,} of {len(own):,} "
            "rows miss one); set "
            f"data.missing = {todo}"
        )
    return keep, notes


def _refuse_infinite(what: str, values: Floats, about: About) -> None:
    wrong = np.flatnonzero(np.isinf(values).reshape(len(values), -1).any(1))
    if len(wrong):
        place = int(np.flatnonzero(np.isinf(values[wrong[0]].reshape(-1)))[0])
        column = f" in column {about.features[place]!r}" if about.features else ""
        raise DataError(
            f"{what}: example {wrong[0]} has a value that is not finite{column}; correct it"
        )


def _dropped(
    split: str, gaps: NDArray[np.bool_], codes: NDArray[np.int64] | None, owners: tuple[str, ...]
) -> str:
    said = f"{split}: {gaps.sum():,} of {len(gaps):,} rows were left out, as they miss a value"
    if codes is None:
        return said
    lost = np.bincount(codes[gaps], minlength=len(owners))
    each = [f"{name} {n:,}" for name, n in zip(owners, lost.tolist(), strict=True) if n]
    return f"{said} ({', '.join(each[:12])}{', …' if len(each) > 12 else ''})"
