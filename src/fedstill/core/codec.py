"""Payloads as bytes and back: safetensors for the tensors, JSON for the rest, never a pickle.

A payload is one safetensors file. A tensor of a group is called ``group/name``, and a bare tensor
``group``. The header's metadata holds a JSON table with two entries: ``groups``, the names of all
groups in their order, and ``rest``, which has the names of each group's tensors in their order, and
all numbers and strings. The order matters: sums over named tensors depend on it in the last bit.
Equal payloads have equal bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from fedstill.core.errors import BadPayload
from fedstill.core.records import Group, Payload

MAX_BYTES = 4 << 30
"""The largest payload, in bytes."""

MAX_TENSOR_HEADER = 8 << 20
"""The largest header of a payload, in bytes. It lists the names, shapes and types of tensors."""

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

_METADATA = "__metadata__"
"""The entry of a safetensors header that holds texts instead of a tensor."""

_KEY = "fedstill"
"""The text in the metadata that holds the payload's JSON."""


def encode(payload: Payload) -> bytes:
    """A payload as bytes. Tensors are stored contiguously and keep their types.

    Raises BadPayload for an invalid group, a tensor that cannot be stored (sparse), or a name that
    is not plain text.
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
                f"group {name!r} is a {type(group).__name__}, not tensors, a tensor, a number or a "
                "string"
            )

    dimensions = {name: getattr(tensor, "ndim", 0) for name, tensor in tensors.items()}
    _check_sizes(len(payload), dimensions, MAX_LOCAL_ENTRIES)
    try:
        metadata = json.dumps({"groups": list(payload), "rest": contents})
        storable = {name: _storable(name, tensor) for name, tensor in tensors.items()}
        return safetensors.torch.save(storable, {_KEY: metadata})
    except (SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise BadPayload(f"the payload cannot be stored: {error}") from error


def decode(data: bytes, limit: int = MAX_BYTES, entries: int = MAX_ENTRIES) -> Payload:
    """The payload that ``encode`` made these bytes of.

    ``limit``: the most bytes. ``entries``: the most tensors, and the most groups. Raises BadPayload
    for anything beyond these, and for bytes that are not a payload; all limits are checked before
    a tensor is made.
    """
    metadata = _metadata(data, limit, entries)
    try:
        # Copies, which torch aligns in memory: kernels may sum in another order otherwise.
        tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load(data).items()}
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError) as error:
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


def _storable(name: str, tensor: object) -> Tensor:
    """A copy of a tensor in the form in which it is stored."""
    if not isinstance(tensor, Tensor):
        raise BadPayload(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    _, slash, entry = name.partition("/")
    if not slash:
        entry = name
    if not _plain(entry):
        raise BadPayload(f"tensor name {name!r} must be plain text without '..' as a part")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().clone()


def _pop(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise BadPayload(f"tensor {name!r} is missing")
    return tensors.pop(name)


def _metadata(data: bytes, limit: int, entries: int) -> dict[str, Any]:
    """The JSON table of ``groups`` and ``rest``, once the header is known to be valid."""
    if len(data) > limit:
        raise BadPayload(f"{len(data)} bytes are more than the limit of {limit}")
    if len(data) < LENGTH_BYTES:
        raise BadPayload(f"{len(data)} bytes are too few for a payload")
    (size,) = struct.unpack("<Q", data[:LENGTH_BYTES])
    if size > min(MAX_TENSOR_HEADER, len(data) - LENGTH_BYTES):
        raise BadPayload(
            f"a header of {size} bytes does not fit in {len(data)} bytes (at most "
            f"{MAX_TENSOR_HEADER})"
        )
    text = data[LENGTH_BYTES : LENGTH_BYTES + size]
    if _may_exceed(text, entries):
        raise BadPayload(f"it holds more than {entries} tensors, the limit")
    try:
        header = json.loads(text.decode(), object_pairs_hook=table_of_unique_keys)
        metadata = json.loads(header[_METADATA][_KEY], object_pairs_hook=table_of_unique_keys)
        groups = len(metadata["groups"])
        dimensions = {
            name: len(entry["shape"]) for name, entry in header.items() if name != _METADATA
        }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadPayload(
            f"the header is not a payload's: {type(error).__name__} {str(error)[:100]}"
        ) from error
    _check_sizes(groups, dimensions, entries)
    if not _is_valid(metadata):
        raise BadPayload("the header does not describe groups")
    return metadata  # type: ignore[no-any-return]


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
