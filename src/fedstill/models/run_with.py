"""A module run with tensors that are not its own, for one call."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.func import functional_call

Place = tuple[dict[str, Any], str]
"""The dictionary of a module that holds a tensor, and its key there."""
Part = tuple[dict[str, Any], str, "ref[nn.Module]"]
"""The dictionary of a module that holds a part of it, its key there, and the part."""

_found = threading.local()


def run_with(m: nn.Module, tensors: Mapping[str, Tensor], *x: Any) -> Any:
    """What a module gives with other parameters and buffers, by name; those that are not named are
    its own.

    The same as ``torch.func.functional_call``, which looks for all names at each call: here that is
    done once, and again where a part of the module has become another. A module whose names share
    tensors, and one that lacks a name, are torch's to run or to refuse.
    """
    places = _places(m)
    if not places.keys() >= tensors.keys():
        return functional_call(m, dict(tensors), x)
    own = [places[name][0][places[name][1]] for name in tensors]
    try:
        for name, tensor in tensors.items():
            holder, key = places[name]
            holder[key] = tensor
        return m(*x)
    finally:
        for name, tensor in zip(tensors, own, strict=True):
            holder, key = places[name]
            holder[key] = tensor


def _places(m: nn.Module) -> dict[str, Place]:
    """By name, where a module's tensors are; nothing if names share tensors."""
    cache: WeakKeyDictionary[nn.Module, tuple[list[Part], dict[str, Place]]]
    cache = _found.__dict__.setdefault("cache", WeakKeyDictionary())
    parts, places = cache.get(m, (None, {}))
    if parts is None or not all(holder.get(key) is part() for holder, key, part in parts):
        named = [
            *m.named_parameters(remove_duplicate=False),
            *m.named_buffers(remove_duplicate=False),
        ]
        alone = len({id(tensor) for _, tensor in named}) == len(named)
        places = {name: _place(m, name) for name, _ in named} if alone else {}
        inner = [
            (one._modules, key, part)
            for one in m.modules()
            for key, part in one._modules.items()
            if part is not None
        ]
        cache[m] = [(holder, key, ref(part)) for holder, key, part in inner], places
    return places


def _place(m: nn.Module, name: str) -> Place:
    path, _, key = name.rpartition(".")
    owner = m.get_submodule(path)
    return (owner._parameters if key in owner._parameters else owner._buffers), key
