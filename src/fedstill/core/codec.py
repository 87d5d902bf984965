"""Payloads as bytes and back: safetensors for the tensors, JSON for the rest, never a pickle.

A payload is one safetensors file. A tensor of a group is called ``group/name``, and a bare tensor
``group``. The header's metadata holds a JSON table with two entries: ``groups``, the names of all
groups in their order, and ``rest``, which has the names of each group's tensors in their order, and
all numbers and strings. The order matters: sums over named tensors depend on it in the last bit.
Equal payloads have equal bytes.

The bytes are those of ``safetensors.torch.save``. They are written and read here, because a payload
may be a large model: the library copies its tensors several times, and this module once.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.core.errors import BadPayload
from fedstill.core.fields import kind_text
from fedstill.core.records import Group, Payload

MAX_BYTES = 4 << 30
"""The largest payload, in bytes."""

MAX_TENSOR_HEADER = 8 << 20
"""The largest header of a payload with up to ``MAX_ENTRIES`` tensors, in bytes. It lists the names,
shapes and types of tensors. A payload that may have more tensors may have a larger header.
"""

MAX_NAME = 512
"""The most characters in the name of a group or a tensor."""

MAX_ENTRIES = 10_000
"""The most tensors, and the most groups, in a payload that comes over a network."""

MAX_LOCAL_ENTRIES = 1 << 20
"""The same for a payload that this machine wrote. Among peers, one may hold all clients' models."""

MAX_DIMS = 8
"""The most dimensions of a tensor."""

LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header: a little-endian 64-bit integer."""

HEADER_MULTIPLE = 8
"""Spaces fill a header up to a multiple of so many bytes."""

DTYPES: Mapping[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types of tensors by their names in safetensors, in the order in which a file holds them."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PLACES = {dtype: place for place, dtype in enumerate(DTYPES.values())}

_METADATA = "__metadata__"
"""The entry of a safetensors header that holds texts instead of a tensor."""

_KEY = "fedstill"
"""The text in the metadata that holds the payload's JSON."""


def encode(payload: Payload) -> bytes:
    """A payload as bytes. Tensors are stored contiguously and keep their types.

    Raises BadPayload for an invalid group, a tensor that cannot be stored (sparse), or a name that
    is not plain text.
    """
    return b"".join(encoded_parts(payload))


def encoded_parts(payload: Payload) -> list[bytes | memoryview]:
    """The bytes of a payload in parts, in their order: the header, and each tensor.

    The tensors are not copied. Use the parts before a tensor changes. Raises BadPayload as
    ``encode``.
    """
    tensors: dict[str, Tensor] = {}
    # The names of each group's tensors, or the group itself if it is a number or a string.
    contents: dict[str, Any] = {}
    for name, group in payload.items():
        if not _plain(name) or "/" in name:
            raise BadPayload(f"group name {name!r} must be plain text without '/'")
        if isinstance(group, Tensor):
            tensors[name] = group
        elif isinstance(group, Mapping):
            contents[name] = list(group)
            tensors.update({f"{name}/{k}": v for k, v in group.items()})
        elif _is_scalar(group):
            contents[name] = group
        else:
            raise BadPayload(
                f"group {name!r} is {kind_text(group)}, not tensors, a tensor, a number or a string"
            )

    dimensions = {name: getattr(tensor, "ndim", 0) for name, tensor in tensors.items()}
    _check_sizes(len(payload), dimensions, MAX_LOCAL_ENTRIES)
    try:
        metadata = json.dumps({"groups": list(payload), "rest": contents})
        storable = {name: _storable(name, tensor) for name, tensor in tensors.items()}
    except (RuntimeError, ValueError) as error:
        raise BadPayload(f"the payload cannot be stored: {error}") from error
    # The types with the largest numbers first, so that each tensor begins at a multiple of them.
    order = sorted(storable, key=lambda name: (_PLACES[storable[name].dtype], name))
    sorted_tensors = {name: storable[name] for name in order}
    return [_encoded_header(metadata, sorted_tensors), *map(_memory, sorted_tensors.values())]


def _storable(name: str, tensor: object) -> Tensor:
    """A tensor in the form in which it is stored, which may share its memory."""
    if not isinstance(tensor, Tensor):
        raise BadPayload(f"{name!r} is {kind_text(tensor)}, not a tensor")
    _, slash, entry = name.partition("/")
    if not slash:
        entry = name
    if not _plain(entry):
        raise BadPayload(f"tensor name {name!r} must be plain text without '..' as a part")
    if tensor.layout != torch.strided or tensor.dtype not in _NAMES:
        raise BadPayload(f"tensor {name!r} cannot be stored: {tensor.layout}, {tensor.dtype}")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, as bytes."""
    # A tensor with one element may have any strides.
    row = tensor.as_strided((tensor.numel(),), (1,))
    return row.view(torch.uint8).numpy().data


def _encoded_header(metadata: str, tensors: Mapping[str, Tensor]) -> bytes:
    """The header of a payload with its length before it."""
    header: dict[str, Any] = {_METADATA: {_KEY: metadata}}
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end = begin + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    length = math.ceil(len(text) / HEADER_MULTIPLE) * HEADER_MULTIPLE
    return struct.pack("<Q", length) + text.ljust(length)


def decode(data: bytes | memoryview, limit: int = MAX_BYTES, entries: int = MAX_ENTRIES) -> Payload:
    """The payload that ``encode`` made these bytes of.

    ``limit``: the most bytes. ``entries``: the most tensors, and the most groups. Raises BadPayload
    for anything beyond these, and for bytes that are not a payload; all limits are checked before
    a tensor is made.
    """
    header = _header(data, limit, entries)
    metadata = header.metadata
    try:
        tensors = {name: place.tensor(data) for name, place in header.places.items()}
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise BadPayload(f"the bytes are not tensors: {error}") from error
    groups: dict[str, Group] = {}
    for name in metadata["groups"]:
        value = metadata["rest"].get(name)
        if isinstance(value, list):
            groups[name] = {key: _pop(tensors, f"{name}/{key}") for key in value}
        elif value is None:
            groups[name] = _pop(tensors, name)
        else:
            groups[name] = value
    if tensors:
        raise BadPayload(f"tensors of no group: {sorted(tensors)[:3]}")
    return Payload(groups)


@dataclass(frozen=True)
class _Place:
    """A tensor in the bytes of a payload. ``begin``: its first byte; ``size``: their number."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    size: int

    @staticmethod
    def of(entry: Any, begin: int) -> _Place:
        """The place that an entry of a header describes, in bytes that begin at ``begin``.

        Raises ValueError, KeyError or TypeError for a malformed entry.
        """
        shape = entry["shape"]
        start, end = entry["data_offsets"]
        if set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError("a tensor has a type, a shape and two offsets")
        if not isinstance(shape, list) or not all(map(_is_size, [*shape, start, end])):
            raise ValueError("sizes and offsets of a tensor are whole numbers")
        dtype = DTYPES[entry["dtype"]]
        if end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError("a tensor does not have as many bytes as its shape says")
        return _Place(dtype, tuple(shape), begin + start, end - start)

    def tensor(self, data: bytes | memoryview) -> Tensor:
        """The tensor, in memory of its own.

        torch aligns that memory: kernels may sum in another order otherwise.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        if self.size:
            _memory(tensor)[:] = memoryview(data)[self.begin : self.begin + self.size]
        return tensor


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _pop(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise BadPayload(f"tensor {name!r} is missing")
    return tensors.pop(name)


@dataclass(frozen=True)
class _Header:
    """The header of a payload. ``metadata``: the table of ``groups`` and ``rest``; ``places``: the
    tensors by name.
    """

    metadata: dict[str, Any]
    places: Mapping[str, _Place]


def _header(data: bytes | memoryview, limit: int, entries: int) -> _Header:
    """The header of a payload; raises BadPayload for one that is not valid."""
    if len(data) > limit:
        raise BadPayload(f"{len(data)} bytes are more than the limit of {limit}")
    if len(data) < LENGTH_BYTES:
        raise BadPayload(f"{len(data)} bytes are too few for a payload")
    (size,) = struct.unpack("<Q", data[:LENGTH_BYTES])
    largest = MAX_TENSOR_HEADER * max(1, entries // MAX_ENTRIES)
    if size > min(largest, len(data) - LENGTH_BYTES):
        raise BadPayload(
            f"a header of {size} bytes does not fit in {len(data)} bytes (at most {largest})"
        )
    begin = LENGTH_BYTES + size
    text = bytes(data[LENGTH_BYTES:begin])
    if _may_exceed(text, entries):
        raise BadPayload(f"it holds more than {entries} tensors, the limit")
    try:
        header = json.loads(text.decode(), object_pairs_hook=table_of_unique_keys)
        metadata = json.loads(header.pop(_METADATA)[_KEY], object_pairs_hook=table_of_unique_keys)
        groups = len(metadata["groups"])
        dimensions = {name: len(entry["shape"]) for name, entry in header.items()}
        _check_sizes(groups, dimensions, entries)
        places = {name: _Place.of(entry, begin) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadPayload(
            f"the header is not a payload's: {type(error).__name__} {str(error)[:100]}"
        ) from error
    if not _is_valid(metadata):
        raise BadPayload("the header does not describe groups")
    _check_places(places, begin, len(data))
    return _Header(metadata, places)


def _check_places(places: Mapping[str, _Place], begin: int, end: int) -> None:
    """Raise BadPayload unless tensors follow each other from the first byte to the last."""
    for place in sorted(places.values(), key=lambda place: (place.begin, place.size)):
        if place.begin != begin:
            raise BadPayload("tensors overlap, or there are bytes between them")
        begin += place.size
    if begin != end:
        raise BadPayload("the bytes do not end with the last tensor")


def _may_exceed(header: bytes, entries: int) -> bool:
    """Whether a header has too many braces or commas for so many tensors.

    Counting them is fast, and parsing a huge header would not be. A tensor has one table, of at
    most ``MAX_DIMS`` sizes, a type, two offsets and its name in the metadata.
    """
    return header.count(b"{") > entries + 4 or header.count(b",") > 12 * entries + 64


def _check_sizes(groups: int, dimensions: Mapping[str, int], entries: int) -> None:
    """Raise BadPayload for too many groups or tensors, or too many dimensions of a tensor."""
    if max(groups, len(dimensions)) > entries:
        raise BadPayload(
            f"it holds {groups} groups and {len(dimensions)} tensors, over the limit of {entries}"
        )
    for name, count in dimensions.items():
        if count > MAX_DIMS:
            raise BadPayload(f"{name[:80]!r} has {count} dimensions, over the limit of {MAX_DIMS}")


def _is_valid(metadata: Any) -> bool:
    """Whether a payload's metadata have the form that ``encode`` gives them."""
    if not isinstance(metadata, dict) or set(metadata) != {"groups", "rest"}:
        return False
    groups = metadata["groups"]
    contents = metadata["rest"]
    return (
        _are_names(groups)
        and not any("/" in name for name in groups)
        and isinstance(contents, dict)
        and set(contents) <= set(groups)
        and all(_are_names(value) or _is_scalar(value) for value in contents.values())
    )


def _is_scalar(value: object) -> bool:
    if isinstance(value, str):
        return value == value.encode(errors="ignore").decode()  # False for half a surrogate pair
    return isinstance(value, (bool, int, float))


def _are_names(names: Any) -> bool:
    return (
        isinstance(names, list) and all(_plain(n) for n in names) and len(set(names)) == len(names)
    )


def _plain(name: object) -> bool:
    """Whether a name is short printable text, and a relative path inside its folder.

    Files may be called after it.
    """
    return (
        isinstance(name, str)
        and 0 < len(name) <= MAX_NAME
        and name.isprintable()
        and "\\" not in name
        and name != _METADATA
        and not {"", ".", ".."} & set(name.split("/"))
    )


def table_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON table as a dictionary; raises ValueError if two entries have the same key."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table
