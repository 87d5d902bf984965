"""The cost of a network's passes by arithmetic: operations, and the numbers that its layers give.

Both are counted once for each architecture, in the forward pass of one example.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedstill.core.records import ModelSpec
from fedstill.models import contract


@lru_cache(maxsize=64)
def forward_flops(model: ModelSpec) -> float:
    """Floating-point operations of one example's forward pass. Like torch's counter, it counts
    products only.
    """
    # On the device meta, torch would import its compiler to know the shape of a ReLU's result.
    counter = _ProductCounter()
    _forward_under(counter, model, "cpu")
    return float(counter.count)


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
    try:
        _forward_under(counter, model, "meta")
    # Torch raises these for an operation that meta lacks, and if the network looks at numbers.
    except (NotImplementedError, RuntimeError):
        counter = _ActivationCounter()
        _forward_under(counter, model, "cpu")
    return counter.count


def step_flops(model: ModelSpec, batch: float) -> float:
    """Floating-point operations of a training step. A backward pass takes two forward passes, and
    embeddings have no products but a gradient and an update.
    """
    return 3 * forward_flops(model) * batch + 2 * embedding_size(model)


def _forward_under(counter: _Counter, model: ModelSpec, device: Literal["meta", "cpu"]) -> None:
    """Run one example's forward pass on a device under a counter; tensors on meta have shapes but
    no numbers.
    """
    module = contract.module(model, "frozen").eval()
    entries = {
        name: value.to(device)
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    x = contract.example(model, 1, device)
    with counter, torch.no_grad():
        contract.forward(module, entries, x)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up a number for each operation of a pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler, in about a second, to exclude the mode from compiling.
        Nothing is compiled under a counter.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.count += self.counted(func, args, kwargs, result)
        return result

    def counted(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The number that an operation adds."""
        raise NotImplementedError


class _ProductCounter(_Counter):  # type: ignore[no-untyped-call]
    """Counts floating-point operations of products, by the formulas of torch's own counter."""

    def counted(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The operations of a product; 0 of anything else."""
        formula = flop_registry.get(func.overloadpacket)
        if formula is None:
            return 0
        return int(formula(*args, **kwargs, out_val=result))


class _ActivationCounter(_Counter):  # type: ignore[no-untyped-call]
    """Counts the floating-point numbers that operations give, except those that give a view."""

    def counted(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The numbers that an operation gives; 0 of a view."""
        if any(returned.alias_info for returned in func._schema.returns):
            return 0
        values = result if isinstance(result, (tuple, list)) else (result,)
        return sum(
            value.numel()
            for value in values
            if isinstance(value, Tensor) and value.is_floating_point()
        )
