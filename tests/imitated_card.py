"""CUDA graphs imitated on the CPU: the operations of a step are recorded, and executed again on the
same tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedstill.engines import cuda_graphs, hardware, loop
from fedstill.engines.hardware import WORKERS

aten = torch.ops.aten
UNDECLARED_WRITES = {aten.native_batch_norm: (3, 4), aten._native_batch_norm_legit: (3, 4)}
"""The positions of arguments that operations write to, although their schemas do not declare it."""


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among the arguments or results of an operation.

    torch's own ``tree_leaves`` takes longer than the operations of small networks.
    """
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def by_address(values: Any) -> dict[int, Tensor]:
    """The tensors among values by the address of their memory."""
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_in(values)}


def written_arguments(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments that an operation writes to."""
    written = [args[position] for position in UNDECLARED_WRITES.get(operation.overloadpacket, ())]
    for position, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if position < len(args):
            written.append(args[position])
        else:
            written.append(kwargs.get(argument.name))
    return written


@dataclass(frozen=True)
class Operation:
    """An executed operation with its arguments and results."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: list[Tensor]


@dataclass(frozen=True)
class Original:
    """A tensor that recorded operations write to, and a copy of its memory before them."""

    tensor: Tensor
    storage: Any


class OperationRecorder(TorchDispatchMode):
    """Records the operations that torch executes below autograd.

    ``originals``: by address, the tensors that the operations change but did not create.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.originals: dict[int, Original] = {}
        self._created: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._store_originals(written_arguments(func, args, kwargs))
        result = func(*args, **kwargs)
        # Results that are views of arguments are not new.
        self._created |= by_address(result).keys() - by_address((args, kwargs)).keys()
        self.operations.append(Operation(func, args, kwargs, tensors_in(result)))
        return result

    def _store_originals(self, written: Iterable[Any]) -> None:
        for address, tensor in by_address(list(written)).items():
            if address not in self._created and address not in self.originals:
                self.originals[address] = Original(tensor, tensor.untyped_storage().clone())


class Graph:
    """Imitates ``torch.cuda.CUDAGraph``. Recording changes no tensor and draws no random number; a
    replay executes the operations on the recorded tensors.
    """

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.recorder = OperationRecorder()
        self.generator_state = torch.get_rng_state()
        self.recorder.__enter__()

    def capture_end(self) -> None:
        self.recorder.__exit__(None, None, None)
        torch.set_rng_state(self.generator_state)
        for original in self.recorder.originals.values():
            original.tensor.untyped_storage().copy_(original.storage)

    @torch.no_grad()
    def replay(self) -> None:
        for operation in self.recorder.operations:
            results = tensors_in(operation.function(*operation.args, **operation.kwargs))
            for recorded, result in zip(operation.results, results, strict=True):
                if recorded.numel() and recorded.data_ptr() != result.data_ptr():
                    recorded.detach().copy_(result)


def may_record(device: torch.device) -> bool:
    """Whether steps may be recorded; also on the CPU."""
    return os.environ.get(hardware.REPLAY, "1") != "0"


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record and replay steps on the CPU as on a card, unless the environment turns it off."""
    card = SimpleNamespace(
        CUDAGraph=Graph,
        graph_pool_handle=lambda: (0, 0),
        current_device=lambda: 0,
        default_generators=[None],
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    monkeypatch.setattr(cuda_graphs, "torch", SimpleNamespace(**{**vars(torch), "cuda": card}))
    monkeypatch.setattr(cuda_graphs, "_refused", set())
    # The recorder does not see the operations of a teacher's pass in another thread.
    monkeypatch.setenv(WORKERS, "1")
    for module in (cuda_graphs, loop):
        monkeypatch.setattr(module, "may_record_steps", may_record)
