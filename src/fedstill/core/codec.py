"""Payloads as bytes and back: safetensors for the tensors, JSON for the rest, never a pickle.

A payload is one safetensors file. A tensor of a group is named ``group/name``, a bare tensor
``group``; numbers, strings and the order of groups and of their tensors stand as JSON in the
header's metadata. Order is kept because sums over named tensors depend on it in the last bit. Equal
payloads give equal bytes.
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
MAX_TENSOR_HEADER = 8 << 20
MAX_NAME = 512
MAX_ENTRIES = 10_000
"""The most tensors, and the most groups, of one payload that comes over a network."""
OWN_ENTRIES = 1 << 20
"""The same of a payload that this machine wrote itself: among peers, one may hold the models of
all.
"""
MAX_DIMS = 8
"""The most dimensions of a tensor."""
_KEY = "fedstill"
_METADATA = "__metadata__"


def encode(payload: Payload) -> bytes:
    """A payload as bytes; tensors are stored contiguous, on the CPU, in their own type.

    Raises BadPayload for what is no group, a tensor that cannot be stored (sparse), or a name that
    is not plain text.
    """
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for name, group in payload.items():
        if not _plain(name) or "/" in name:
            raise BadPayload(f"group name {name!r} must be plain text without '/'")
        if isinstance(group, Tensor):
            tensors[name] = group
        elif isinstance(group, Mapping):
            rest[name] = list(group)
            tensors.update({f"{name}/{k}": v for k, v in group.items()})
        elif _is_scalar(group):
            rest[name] = group
        else:
            raise BadPayload(
                f"group {name!r} is a {type(group).__name__}, not tensors, a tensor, a number or a "
                "string"
            )
    _check_sizes(
        len(payload),
        {name: getattr(tensor, "ndim", 0) for name, tensor in tensors.items()},
        OWN_ENTRIES,
    )
    try:
        note = json.dumps({"groups": list(payload), "rest": rest})
        own = {name: _stored(name, tensor) for name, tensor in tensors.items()}
        return safetensors.torch.save(own, {_KEY: note})
    except (SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise BadPayload(f"the payload cannot be stored: {error}") from error


def decode(data: bytes, limit: int = MAX_BYTES, entries: int = MAX_ENTRIES) -> Payload:
    """The payload in some bytes; raises BadPayload if they are too many, malformed, or not a
    payload.

    ``entries``: how many tensors it may hold. What is refused is refused before a tensor is made.

    Every tensor owns its memory, aligned as torch aligns it: kernels may choose their order of
    summation by that.
    """
    note = _note(data, limit, entries)
    try:
        tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load(data).items()}
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError) as error:
        raise BadPayload(f"the bytes are not tensors: {error}") from error
    groups: dict[str, Group] = {}
    for name in note["groups"]:
        value = note["rest"].get(name)
        if isinstance(value, list):
            groups[name] = {k: _taken(tensors, f"{name}/{k}") for k in value}
        elif value is None:
            groups[name] = _taken(tensors, name)
        else:
            groups[name] = value
    if tensors:
        raise BadPayload(f"tensors of no group: {sorted(tensors)[:3]}")
    return Payload(groups)


def _stored(name: str, tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise BadPayload(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    _, slash, entry = name.partition("/")
    if not slash:
        entry = name
    if not _plain(entry):
        raise BadPayload(
            f"tensor name {name!r} must be plain text, and no path that leads elsewhere"
        )
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().clone()


def _taken(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise BadPayload(f"{name!r} is named but not there")
    return tensors.pop(name)


def _note(data: bytes, limit: int, entries: int) -> dict[str, Any]:
    if len(data) > limit:
        raise BadPayload(f"{len(data)} bytes are more than the limit of {limit}")
    if len(data) < 8:
        raise BadPayload(f"{len(data)} bytes are too few for a payload")
    (size,) = struct.unpack("<Q", data[:8])
    if size > min(MAX_TENSOR_HEADER, len(data) - 8):
        raise BadPayload(
            f"a header of {size} bytes does not fit in {len(data)} bytes (at most "
            f"{MAX_TENSOR_HEADER})"
        )
    text = data[8 : 8 + size]
    # counted, because parsing takes long
    if text.count(b"{") > entries + 4 or text.count(b",") > 12 * entries + 64:
        raise BadPayload(f"it holds more than {entries} tensors, the limit")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
        note = json.loads(header[_METADATA][_KEY], object_pairs_hook=_unique)
        groups = len(note["groups"])
        dims = {name: len(entry["shape"]) for name, entry in header.items() if name != _METADATA}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadPayload(
            f"the header is not a payload's: {type(error).__name__} {str(error)[:100]}"
        ) from error
    _check_sizes(groups, dims, entries)
    if not _is_note(note):
        raise BadPayload("the header does not describe groups")
    return note  # type: ignore[no-any-return]


def _check_sizes(groups: int, dims: Mapping[str, int], entries: int) -> None:
    if max(groups, len(dims)) > entries:
        raise BadPayload(
            f"it holds {groups} groups and {len(dims)} tensors, over the limit of {entries}"
        )
    for name, count in dims.items():
        if count > MAX_DIMS:
            raise BadPayload(f"{name[:80]!r} has {count} dimensions, over the limit of {MAX_DIMS}")


def _is_note(note: Any) -> bool:
    if not isinstance(note, dict) or set(note) != {"groups", "rest"}:
        return False
    groups = note["groups"]
    rest = note["rest"]
    return (
        _are_names(groups)
        and not any("/" in g for g in groups)
        and isinstance(rest, dict)
        and set(rest) <= set(groups)
        and all(_are_names(value) or _is_scalar(value) for value in rest.values())
    )


def _is_scalar(value: object) -> bool:
    if isinstance(value, str):
        return value == value.encode(errors="ignore").decode()
    return isinstance(value, (bool, int, float))


def _are_names(names: Any) -> bool:
    return (
        isinstance(names, list) and all(_plain(n) for n in names) and len(set(names)) == len(names)
    )


def _plain(name: object) -> bool:
    """Whether a name is printable text of sensible length that, read as a path, stays in its
    folder.
    """
    return (
        isinstance(name, str)
        and 0 < len(name) <= MAX_NAME
        and name.isprintable()
        and "\\" not in name
        and name != _METADATA
        and not {"", ".", ".."} & set(name.split("/"))
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key stands twice")
    return out
