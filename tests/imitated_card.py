"""A card's recordings of steps, imitated on the CPU: operations are noted below autograd, and done
again in place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedstill.engines import cuda_graphs, hardware, loop
from fedstill.engines.hardware import WORKERS

aten = torch.ops.aten
UNSAID = {aten.native_batch_norm: (3, 4), aten._native_batch_norm_legit: (3, 4)}
"""Arguments that operations write into although their schemas do not say it."""


def tensors(values: Any) -> list[Tensor]:
    """The tensors among an operation's arguments or results: torch's own ``tree_leaves`` takes
    longer than the operations of a toy.
    """
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in tensors(value)]


def places(values: Any) -> dict[int, Tensor]:
    """Tensors by where their memory is."""
    return {v.untyped_storage().data_ptr(): v for v in tensors(values)}


class Noting(TorchDispatchMode):
    """Notes operations with their tensors, and what was in memory that they write into and did not
    make.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Any]] = {}
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        said = [
            (a.name, i)
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info and a.alias_info.is_write
        ]
        written = [args[i] if i < len(args) else kwargs.get(name) for name, i in said]
        for place, tensor in places(
            [*written, *(args[i] for i in UNSAID.get(func.overloadpacket, ()))]
        ).items():
            if place not in self.made and place not in self.before:
                self.before[place] = tensor, tensor.untyped_storage().clone()
        given = func(*args, **kwargs)
        read = places((args, kwargs))
        self.made |= {k: v for k, v in places(given).items() if k not in read}
        self.done.append((func, args, kwargs, tensors(given)))
        return given


class Graph:
    """While it records, memory is as before; a replay reads and writes the memory that was
    recorded.
    """

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.noting, self.drawn = Noting(), torch.get_rng_state()
        self.noting.__enter__()

    def capture_end(self) -> None:
        self.noting.__exit__(None, None, None)
        torch.set_rng_state(self.drawn)
        for tensor, before in self.noting.before.values():
            tensor.untyped_storage().copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, recorded in self.noting.done:
            again = func(*args, **kwargs)
            for old, new in zip(recorded, tensors(again), strict=True):
                if old.numel() and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have steps on the CPU recorded and replayed as on a card, if the environment does not say
    otherwise.
    """
    card = SimpleNamespace(
        CUDAGraph=Graph,
        graph_pool_handle=lambda: (0, 0),
        current_device=lambda: 0,
        default_generators=[None],
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    wanted = lambda device: os.environ.get(hardware.REPLAY, "1") != "0"  # noqa: E731
    monkeypatch.setattr(cuda_graphs, "torch", SimpleNamespace(**{**vars(torch), "cuda": card}))
    monkeypatch.setattr(cuda_graphs, "_refused", set())
    monkeypatch.setenv(WORKERS, "1")  # a teacher's pass in another thread would not be noted
    for module in (cuda_graphs, loop):
        monkeypatch.setattr(module, "may_record_steps", wanted)
