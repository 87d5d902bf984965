"""What of a step a replay would leave undone, or undo: numbers that the host reads or draws, and
others' tensors.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAITS = {
    aten._linalg_check_errors,
    aten._local_scalar_dense,
    aten._unique2,
    aten.allclose,
    aten.bincount,
    aten.equal,
    aten.histc,
    aten.lift_fresh,
    aten.linalg_cholesky,
    aten.linalg_inv,
    aten.linalg_slogdet,
    aten.linalg_solve,
    aten.masked_select,
    aten.nonzero,
    aten.unique_consecutive,
    aten.unique_dim,
}
"""Operations whose result the host needs, or that bring one of its numbers: in a replay they would
not be done.
"""
BY_MASK = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
COPIES = {aten._to_copy, aten.copy_}

_said: dict[Any, Any] = {}
"""Warnings that were passed on: each is said once."""


class OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes, while a step is done on a device, whether any of it is left to the host, or moves what
    is not its own.

    own: the tensors that a step moves; it may write into these, and into what it makes. kept: where
    the step before made tensors, ``made`` of its watch; one that is there still, and is read, was
    kept from step to step in Python.
    ``done``: the operations, with their numbers.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, own: Sequence[Tensor], kept: Set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.kept, self.seen = device, kept, False
        self.own, self.made = {_place(tensor) for tensor in own}, {0}
        self.done: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            self.seen = True
            return func(*args, **kwargs)
        packet, written = func.overloadpacket, _written(func, args, kwargs)
        given = func(*args, **kwargs)
        self.seen |= packet in WAITS or (packet in BY_MASK and any(_is_mask(i) for i in args[1]))
        self.seen |= packet is aten.repeat_interleave and kwargs.get("output_size") is None
        for tensor in (*args, given):
            away = isinstance(tensor, Tensor) and tensor.device != self.device
            self.seen |= away and (packet in COPIES or tensor.dim() > 0)
        read = {_place(tensor) for tensor in _tensors((args, kwargs))}
        self.done.append(
            (func, *(v for v in tree_leaves((args, kwargs)) if isinstance(v, int | float)))
        )
        self.seen |= not {_place(tensor) for tensor in written} <= self.own | self.made
        self.seen |= bool((read - self.own - self.made) & self.kept)
        self.made |= {_place(tensor) for tensor in _tensors(given)} - read
        return given


@contextmanager
def watched(given: Sequence[Tensor], own: Sequence[Tensor], made: Set[int]) -> Iterator[OnHost]:
    """Meanwhile a step is done; afterwards ``seen`` says whether a replay would be something else.

    given: what it is done on. own, made: as of ``OnHost``, of the step before. Beside
    single operations: whether the host waited for a card, and whether anything drew from Python's
    or NumPy's generator.
    """
    drawn, device = (random.getstate(), _of_numpy()), given[0].device
    kept = made - {_place(tensor) for tensor in given}
    with OnHost(device, own, kept) as watch, _waits_said(device) as waits:
        yield watch
    watch.seen |= bool(waits) or drawn != (random.getstate(), _of_numpy())


@contextmanager
def _waits_said(device: torch.device) -> Iterator[list[str]]:
    """What torch says meanwhile of operations for which the host waits; its other warnings are
    passed on.
    """
    waits: list[str] = []
    if device.type != "cuda":
        yield waits
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in said:
        if "synchronizing CUDA operation" in str(one.message):
            waits.append(str(one.message))
        elif "Synchronization debug mode" not in str(one.message):
            warnings.warn_explicit(
                one.message, one.category, one.filename, one.lineno, registry=_said
            )


def _of_numpy() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return (name, np.asarray(keys).tobytes(), *rest)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes into, as its schema says."""
    named = [
        (a.name, i)
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info and a.alias_info.is_write
    ]
    return _tensors([args[i] if i < len(args) else kwargs.get(name) for name, i in named])


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _place(tensor: Tensor) -> int:
    """Where a tensor's memory is; views of it have the same. 0 of one without any."""
    there = tensor.layout == torch.strided and not tensor._is_zerotensor()
    return tensor.untyped_storage().data_ptr() if there else 0
