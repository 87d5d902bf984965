"""What a pass of two examples tells of a network before it is trained."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from fedstill import registry
from fedstill.keys import put_aside
from fedstill.models import contract
from fedstill.records import ModelSpec


@functools.lru_cache(maxsize=1024)
def draws_random_numbers(spec: ModelSpec, training: bool = True) -> bool:
    """Whether a forward pass draws from torch's global generator: dropout, noise; ``training``: in training mode.

    A layer of dropout is seen; whatever else draws, a pass of two examples without content tells. A network that can
    take none of these is said not to draw.
    """
    m = contract.module(spec, "frozen")
    if training and any(isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0 for layer in m.modules()):
        return True
    try:
        return _moves(m.train(training), contract.example(spec, 2))
    except Exception:  # the run's own examples, which it will be given, tell whether it can take any
        return False
    finally:
        m.eval()


def is_of_library(spec: ModelSpec) -> bool:
    """Whether a network is one that the library has, and not a user's, nor made of one."""
    names = (spec.name, *(str(v) for k, v in spec.fields if k in ("of", "own", "shared")))
    return all(str(registry.lookup("model", name).target.__module__).startswith("fedstill.models.") for name in names)


@functools.lru_cache(maxsize=64)
def built_size(spec: ModelSpec) -> int:
    """How many parameters a network of the library has, told by shapes alone: no memory is taken for them."""
    with put_aside(), torch.device("meta"):
        return sum(value.numel() for value in contract.built(spec.name, spec, dict(spec.fields)).parameters())


def _moves(m: nn.Module, x: Tensor) -> bool:
    """Whether a pass moves the generator; statistics of the module stay as they are."""
    for layer in m.modules():
        if isinstance(layer, contract.NORMS):
            layer.eval()
    with put_aside(card=True), torch.no_grad():
        before = torch.get_rng_state()
        contract.forward(m, {name: value.clone() for name, value in m.named_buffers()}, x)
        return not torch.equal(torch.get_rng_state(), before)
