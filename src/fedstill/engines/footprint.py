"""The cost of a network's passes by arithmetic: operations, and the numbers that its layers give.

Both are counted once for each architecture, on torch's device ``meta``, where tensors have shapes
but no numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedstill.core.records import ModelSpec
from fedstill.models import contract


@lru_cache(maxsize=64)
def forward_flops(model: ModelSpec) -> float:
    """Floating-point operations of one example's forward pass. Like torch's counter, it counts
    products only.
    """
    # Imported late, because only runs that choose an engine need it.
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    _forward_under(counter, model)
    return float(counter.get_total_flops())


@lru_cache(maxsize=64)
def embedding_size(model: ModelSpec) -> int:
    """The number of entries of a network's embeddings. A pass looks up a few of them, but a step
    has a gradient for all.
    """
    embeddings = [m for m in contract.module(model).modules() if isinstance(m, nn.Embedding)]
    return sum(embedding.weight.numel() for embedding in embeddings)


@lru_cache(maxsize=64)
def activations(model: ModelSpec) -> int:
    """The numbers that a network's layers give for one example in a forward pass. Views are not
    counted again.
    """
    counter = _ActivationCounter()
    _forward_under(counter, model)
    return counter.count


def step_flops(model: ModelSpec, batch: float) -> float:
    """Floating-point operations of a training step. A backward pass takes two forward passes, and
    embeddings have no products but a gradient and an update.
    """
    return 3 * forward_flops(model) * batch + 2 * embedding_size(model)


def _forward_under(counter: Any, model: ModelSpec) -> None:
    """Run one example's forward pass under a counter, without numbers if the network allows it."""
    module = contract.module(model, "frozen").eval()
    for device in ("meta", "cpu"):
        entries = {
            name: value.to(device)
            for name, value in (*module.named_parameters(), *module.named_buffers())
        }
        x = contract.example(model, 1, device)
        try:
            with counter, torch.no_grad():
                contract.forward(module, entries, x)
            return
        # Torch raises these for an operation that meta lacks, and if the network looks at numbers.
        except (NotImplementedError, RuntimeError):
            if device == "cpu":
                raise


class _ActivationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point numbers that operations give, except those that give a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(returned.alias_info for returned in func._schema.returns):
            return result
        values = result if isinstance(result, (tuple, list)) else (result,)
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point():
                self.count += value.numel()
        return result
