"""Functions of a network, its parameters and inputs; ``Step.run`` takes such functions.

``run_with`` runs a module with tensors that are not its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import unfold

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


def _places(m: nn.Module) -> dict[str, _Place]:
    """By name, where a module's tensors are; nothing if names share tensors."""
    cache: WeakKeyDictionary[nn.Module, tuple[list[_Part], dict[str, _Place]]]
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


# What enters the layers of a network's body: for each linear layer and convolution the sum of its
# inputs' products.
#
# A convolution is taken as a linear layer on patches: its weights (out, channels, k, k) as (out,
# channels k²), its inputs one patch for each place of its output.


def body_layers(m: nn.Module) -> dict[str, int]:
    """The weights of a body's linear layers and convolutions by name, and how many inputs d each
    has.

    Convolutions in groups, and those whose border is no frame of zeros, are left out.
    """
    return {f"{name}.weight": _inputs_of(part) for name, part in _layers(m).items()}


def beside_layers(m: nn.Module) -> list[str]:
    """The names of a body's other parameters of two or more dimensions, of embeddings for
    example.
    """
    layers = body_layers(m)
    named = ((name, value) for name, value in m.named_parameters() if name.startswith("body"))
    return [name for name, value in named if value.dim() > 1 and name not in layers]


def input_products(m: nn.Module, params: Tensors, x: Tensor) -> dict[str, Tensor]:
    """The sum of a a^T (d, d), float64 on the CPU, over all inputs a of each layer, in one pass of
    x (B, ...).
    """
    sums: dict[str, Tensor] = {}

    def noting(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            a = _columns(layer, given[0].detach()).double()
            sums[name] = sums.get(name, 0.0) + (a.T @ a).cpu()

        return note

    handles = [
        part.register_forward_pre_hook(noting(f"{name}.weight"))
        for name, part in _layers(m).items()
    ]
    try:
        with torch.no_grad():
            features(m, params, x)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _layers(m: nn.Module) -> dict[str, nn.Module]:
    return {
        name: part for name, part in m.named_modules() if name.startswith("body") and _plain(part)
    }


def _plain(part: nn.Module) -> bool:
    if isinstance(part, nn.Conv2d):
        return (
            part.groups == 1 and part.padding_mode == "zeros" and not isinstance(part.padding, str)
        )
    return isinstance(part, nn.Linear)


def _inputs_of(part: nn.Module) -> int:
    weight = part.weight
    assert isinstance(weight, Tensor)
    return weight[0].numel()


def _columns(layer: nn.Module, x: Tensor) -> Tensor:
    """Inputs (n, d) of a layer, one for each of its outputs' places."""
    if not isinstance(layer, nn.Conv2d):
        return x.reshape(-1, x.shape[-1])
    assert not isinstance(layer.padding, str)
    # (B, d, places)
    patches = unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return patches.transpose(1, 2).reshape(-1, patches.shape[1])


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
