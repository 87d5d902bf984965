"""Payloads as bytes and back: safetensors for the tensors, JSON for the rest, never a pickle.

A payload is one safetensors file. A tensor of a group is named ``group/name``, a bare tensor ``group``; numbers, strings
and the order of groups stand as JSON in the header's metadata. Equal payloads give equal bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from fedstill.errors import BadPayload
from fedstill.records import Group, Payload

MAX_BYTES = 4 << 30
MAX_HEADER = 8 << 20
_KEY = "fedstill"


def encode(payload: Payload) -> bytes:
    """A payload as bytes; tensors are stored contiguous, on the CPU, in their own type."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for name, group in payload.items():
        if "/" in name:
            raise BadPayload(f"group name {name!r} must not contain '/'")
        if isinstance(group, Tensor):
            tensors[name] = group
        elif isinstance(group, Mapping):
            rest[name] = None
            tensors.update({f"{name}/{k}": v for k, v in group.items()})
        else:
            rest[name] = group
    own = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    note = json.dumps({"groups": list(payload), "rest": rest})
    return safetensors.torch.save(own, {_KEY: note})


def decode(data: bytes, limit: int = MAX_BYTES) -> Payload:
    """The payload in some bytes; raises BadPayload if they are too many, malformed, or not a payload."""
    note = _note(data, limit)
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError) as error:
        raise BadPayload(f"the bytes are not tensors: {error}") from error
    groups: dict[str, Group] = {}
    for name in note["groups"]:
        if name in tensors:
            groups[name] = tensors.pop(name)
        elif name not in note["rest"]:
            raise BadPayload(f"group {name!r} is named but not there")
        elif note["rest"][name] is None:
            prefix = name + "/"
            groups[name] = {k[len(prefix) :]: tensors.pop(k) for k in list(tensors) if k.startswith(prefix)}
        else:
            groups[name] = note["rest"][name]
    if tensors:
        raise BadPayload(f"tensors of no group: {sorted(tensors)[:3]}")
    return Payload(groups)


def _note(data: bytes, limit: int) -> dict[str, Any]:
    if len(data) > limit:
        raise BadPayload(f"{len(data)} bytes are more than the limit of {limit}")
    if len(data) < 8:
        raise BadPayload(f"{len(data)} bytes are too few for a payload")
    (size,) = struct.unpack("<Q", data[:8])
    if size > min(MAX_HEADER, len(data) - 8):
        raise BadPayload(f"a header of {size} bytes does not fit in {len(data)} bytes (at most {MAX_HEADER})")
    try:
        header = json.loads(data[8 : 8 + size].decode(), object_pairs_hook=_unique)
        note = json.loads(header["__metadata__"][_KEY], object_pairs_hook=_unique)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadPayload(f"the header is not a payload's: {type(error).__name__} {error}") from error
    if not _is_note(note):
        raise BadPayload("the header does not describe groups")
    return note  # type: ignore[no-any-return]


def _is_note(note: Any) -> bool:
    if not isinstance(note, dict) or set(note) != {"groups", "rest"}:
        return False
    groups, rest = note["groups"], note["rest"]
    return (
        isinstance(groups, list)
        and all(isinstance(g, str) for g in groups)
        and len(set(groups)) == len(groups)
        and isinstance(rest, dict)
        and set(rest) <= set(groups)
        and all(v is None or isinstance(v, (bool, int, float, str)) for v in rest.values())
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key stands twice")
    return out
