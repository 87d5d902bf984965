"""What a network's passes take, by arithmetic: operations, and the numbers that come out of its
layers.

Both are counted once an architecture, on torch's device ``meta``: shapes without numbers.
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
def forward_flops(spec: ModelSpec) -> float:
    """Floating-point operations of one example's forward pass, products only, as torch counts
    them.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    _without_numbers(spec, counter)
    return float(counter.get_total_flops())


@lru_cache(maxsize=64)
def embedding_size(spec: ModelSpec) -> int:
    """The numbers of a network's embeddings: a pass looks a few of them up, and a step's gradient
    has all.
    """
    return sum(
        m.weight.numel() for m in contract.module(spec).modules() if isinstance(m, nn.Embedding)
    )


@lru_cache(maxsize=64)
def activations(spec: ModelSpec) -> int:
    """Numbers that the layers of a network give for one example, in one forward pass; views are not
    counted twice.
    """
    counting = _Counting()
    _without_numbers(spec, counting)
    return counting.numbers


def step_flops(spec: ModelSpec, batch: float) -> float:
    """Floating-point operations in a step, forward and backward; embeddings have a gradient and a
    step, no product.
    """
    return 3 * forward_flops(spec) * batch + 2 * embedding_size(spec)


def _without_numbers(spec: ModelSpec, counting: Any) -> None:
    """One example's forward pass under a counter: of shapes alone, or of zeros where a network
    looks at numbers.
    """
    m = contract.module(spec, "frozen").eval()
    for device in ("meta", "cpu"):
        entries = {k: v.to(device) for k, v in (*m.named_parameters(), *m.named_buffers())}
        x = contract.example(spec, 1, device)
        try:
            with counting, torch.no_grad():
                contract.forward(m, entries, x)
            return
        except (
            NotImplementedError,
            RuntimeError,
        ):  # torch's way to say that meta lacks an operation, or its numbers
            if device == "cpu":
                raise


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the floating-point numbers that a pass makes; an operation that gives a view makes
    none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = call(*args, **(kwargs or {}))
        if not any(value.alias_info for value in call._schema.returns):
            several = out if isinstance(out, (tuple, list)) else (out,)
            self.numbers += sum(
                v.numel() for v in several if isinstance(v, Tensor) and v.is_floating_point()
            )
        return out
