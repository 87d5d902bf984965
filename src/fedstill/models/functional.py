"""Functions of a network, its parameters and inputs, such as ``Step.run`` takes.

``run_with`` runs a module with other tensors than its own.
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
"""The batch size of evaluation. It is fixed, because the last bit of float32 results depends on it.
In much larger batches, the outputs of a convolution do not fit into a core's cache.
"""

_Place = tuple[dict[str, Any], str]
"""The dictionary of a module that holds a tensor, and its key there."""
_Part = tuple[dict[str, Any], str, "ref[nn.Module]"]
"""The dictionary that holds a submodule, its key there, and the submodule."""

_caches = threading.local()


def run_with(m: nn.Module, tensors: Mapping[str, Tensor], *x: Any) -> Any:
    """The output of a module with other parameters and buffers, by name. It uses its own tensors
    for missing names.

    The same as ``torch.func.functional_call``, which looks up all names in every call. This
    function looks them up once, and again after a submodule has been replaced. If two names share a
    tensor, or if the module lacks a name, it calls torch's function.
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
    """The places of a module's tensors by name; empty if two names share a tensor."""
    cache: WeakKeyDictionary[nn.Module, tuple[list[_Part], dict[str, _Place]]]
    cache = _caches.__dict__.setdefault("cache", WeakKeyDictionary())
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
    if key in owner._parameters:
        return owner._parameters, key
    return owner._buffers, key


# Functions of a network, its parameters and inputs, as ``Step.run`` takes them.


def run_part(m: nn.Module, params: Tensors, x: Tensor, name: str, *arguments: float) -> Tensor:
    """The output of a named part of a network for the part's inputs and further arguments.

    params: the parameters of the whole network. Raises AttributeError if it has no such part.
    """
    part = m.get_submodule(name)
    prefix = name + "."
    tensors = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
    return run_with(part, tensors, x, *arguments)  # type: ignore[no-any-return]


def forward(m: nn.Module, params: Tensors, x: Tensor) -> Tensor:
    """The logits (B, C) of a network with the given parameters."""
    return run_with(m, params, x)  # type: ignore[no-any-return]


def features(m: nn.Module, params: Tensors, x: Tensor) -> Tensor:
    """Penultimate features (B, D); raises AttributeError for a model without body and head."""
    return run_part(m, params, x, "body")


def head(m: nn.Module, params: Tensors, z: Tensor) -> Tensor:
    """Logits (B, C) of features (B, D)."""
    return run_part(m, params, z, "head")


def channels_last(tensor: Tensor) -> Tensor:
    """A four-dimensional tensor in channels-last memory format, in which convolutions on CPUs are
    faster; other tensors are returned unchanged.

    On CUDA devices, the format is channels-first, in which small networks train faster in float32
    (``python -m benchmarks.layout``).
    """
    if tensor.dim() != 4:
        return tensor
    if tensor.is_cuda:
        return tensor.contiguous(memory_format=torch.contiguous_format)
    return tensor.contiguous(memory_format=torch.channels_last)
