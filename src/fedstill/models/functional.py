"""Functions of a network, its parameters and inputs; ``Step.run`` takes such functions.

``run_with`` runs a module with tensors that are not its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedstill.core.payload import Tensors

SHARD = 100
"""Examples in one evaluation pass; fixed, because results in float32 depend on it in the last bit.
With many more, the outputs of a convolution no longer fit into a core's cache.
"""

_Place = tuple[dict[str, Any], str]
"""The dictionary of a module that holds a tensor, and its key there."""
_Part = tuple[dict[str, Any], str, "ref[nn.Module]"]
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
    originals = [places[name][0][places[name][1]] for name in tensors]
    try:
        for name, tensor in tensors.items():
            holder, key = places[name]
            holder[key] = tensor
        return m(*x)
    finally:
        for name, tensor in zip(tensors, originals, strict=True):
            holder, key = places[name]
            holder[key] = tensor


def _places(m: nn.Module) -> dict[str, _Place]:
    """By name, where a module's tensors are; nothing if names share tensors."""
    cache: WeakKeyDictionary[nn.Module, tuple[list[_Part], dict[str, _Place]]]
    cache = _found.__dict__.setdefault("cache", WeakKeyDictionary())
    parts, places = cache.get(m, (None, {}))
    if parts is None or not all(holder.get(key) is part() for holder, key, part in parts):
        tensors = dict[str, Tensor](m.named_parameters(remove_duplicate=False))
        tensors |= dict(m.named_buffers(remove_duplicate=False))
        are_distinct = len({id(tensor) for tensor in tensors.values()}) == len(tensors)
        places = {}
        if are_distinct:
            places = {name: _place(m, name) for name in tensors}
        parts = []
        for owner in m.modules():
            for key, part in owner._modules.items():
                if part is not None:
                    parts.append((owner._modules, key, ref(part)))
        cache[m] = parts, places
    return places


def _place(m: nn.Module, name: str) -> _Place:
    path, _, key = name.rpartition(".")
    owner = m.get_submodule(path)
    return (owner._parameters if key in owner._parameters else owner._buffers), key


# Functions of a network, its parameters and inputs, as ``Step.run`` takes them.


def run_part(m: nn.Module, params: Tensors, x: Tensor, name: str, *arguments: float) -> Tensor:
    """The output of a named part of a network for the part's inputs and further arguments.

    params: those of the whole network. Raises AttributeError for a network without that part.
    """
    part = m.get_submodule(name)
    prefix = name + "."
    tensors = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
    return run_with(part, tensors, x, *arguments)  # type: ignore[no-any-return]


def forward(m: nn.Module, params: Tensors, x: Tensor) -> Tensor:
    """Logits (B, C) of parameters run in a module of their architecture."""
    return run_with(m, params, x)  # type: ignore[no-any-return]


def features(m: nn.Module, params: Tensors, x: Tensor) -> Tensor:
    """Penultimate features (B, D); raises AttributeError for a model without body and head."""
    return run_part(m, params, x, "body")


def head(m: nn.Module, params: Tensors, z: Tensor) -> Tensor:
    """Logits (B, C) of features (B, D)."""
    return run_part(m, params, z, "head")


def channels_last(tensor: Tensor) -> Tensor:
    """A four-dimensional tensor in channels-last order, which the CPU's convolutions prefer; others
    as they are.

    On a CUDA card channels come first: small networks train faster so in float32
    (``python -m benchmarks.layout``).
    """
    if tensor.dim() != 4:
        return tensor
    if tensor.is_cuda:
        return tensor.contiguous(memory_format=torch.contiguous_format)
    return tensor.contiguous(memory_format=torch.channels_last)
