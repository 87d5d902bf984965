"""A module run with tensors that are not its own, for one call."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.func import functional_call

_found = threading.local()


def run_with(m: nn.Module, tensors: Mapping[str, Tensor], *x: Any) -> Any:
    """What a module gives with other parameters and buffers, by name; those that are not named are its own.

    The same as ``torch.func.functional_call``, which looks for all names at each call: here that is done once. A module
    whose names share tensors, and one that lacks a name, are torch's to run or to refuse.
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


def _places(m: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """By name, the dictionary that holds a tensor and its key there; nothing if names share tensors."""
    cache: WeakKeyDictionary[nn.Module, dict[str, tuple[dict[str, Any], str]]]
    cache = _found.__dict__.setdefault("cache", WeakKeyDictionary())
    if m not in cache:
        named = [*m.named_parameters(remove_duplicate=False), *m.named_buffers(remove_duplicate=False)]
        alone = len({id(tensor) for _, tensor in named}) == len(named)
        cache[m] = {name: _place(m, name) for name, _ in named} if alone else {}
    return cache[m]


def _place(m: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, key = name.rpartition(".")
    owner = m.get_submodule(path)
    return (owner._parameters if key in owner._parameters else owner._buffers), key
