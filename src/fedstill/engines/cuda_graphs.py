"""CUDA graphs: a training step's kernels are recorded once and replayed for each batch."""

from __future__ import annotations

import functools
import logging
import os
import random
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedstill.core.errors import on_one_line
from fedstill.core.records import Plan

# What of a step a replay would leave undone, or undo: numbers that the host reads or draws, and
# others' tensors.


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


# Steps of training on a CUDA card as one launch: a step's kernels are recorded once, and replayed
# for each batch.
#
# A small network's step is a hundred kernels of a few microseconds; to launch them one by one takes
# longer than they do. Replayed, a step gives the bits that it gives otherwise: each recording is
# tried against the step itself.


log = logging.getLogger("fedstill.engine")

REPLAY = "FEDSTILL_REPLAY"
"""The environment variable that keeps every step as it is, if it is 0."""

FIRST = 3
"""Steps of a client before one is recorded: in the first, what a step needs is made (teachers'
outputs, momentum); the others are watched.
"""

PAYS = 12
"""Steps of one kind in a client's training from which recording one pays."""

SPARE = 2e9
"""Bytes of a card that may lie unused in this process. What a recording leaves serves no other, so
more goes back.
"""

_turn = threading.RLock()
"""Held while a client trains on a card."""

_refused: set[Hashable] = set()
"""Kinds of steps that could not be recorded or replayed in this process; they are not tried
again.
"""

Terms = dict[str, Tensor]
Of = tuple[Any, ...]
"""Of one client's step: inputs, labels, positions twice, no mask, the epoch."""


@dataclass
class Recording:
    """A step's kernels, with the tensors that they read and the terms that they leave; ``tried``:
    on another batch.
    """

    graph: torch.cuda.CUDAGraph
    of: Of
    terms: Terms
    tried: bool = False

    def replay(self, of: Of) -> Terms:
        """The step on another batch of the same size."""
        for mine, given in zip(self.of[:3], of[:3], strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.terms


@dataclass
class Recorder:
    """A client's steps: ``act`` does one, in place of ``moves``, and gives its terms; recorded
    where that pays.

    ``asked``: what the objective has asked of a step beside its tensors; a recording holds for one
    epoch alone if it has asked for that. ``steps``: how many whole batches training has, and an
    epoch. ``kind``: what such steps have in common, of which one that fails is told.
    """

    act: Callable[[Of], Terms]
    moves: Callable[[], Sequence[Tensor]]
    asked: set[str]
    batch: int
    steps: tuple[int, int]
    kind: Hashable
    done: dict[int, int] = field(default_factory=dict)
    recordings: dict[int, Recording] = field(default_factory=dict)
    watch: OnHost | None = None

    def __call__(self, of: Of) -> Terms:
        """One step, as ``act`` does it."""
        epoch = of[5] if "epoch" in self.asked else -1
        if (
            len(of[1]) != self.batch
            or self.kind in _refused
            or self.steps["epoch" in self.asked] < PAYS
        ):
            return self.act(of)
        if recording := self.recordings.get(epoch):
            return recording.replay(of) if recording.tried else self._try(recording, of)
        self.done[epoch] = done = self.done.get(epoch, 0) + 1
        if done == 1:
            return self.act(of)
        with watched(
            of[:3], self.moves(), self.watch.made if self.watch and done == FIRST else frozenset()
        ) as watch:
            terms = self.act(of)
        before, self.watch = self.watch, watch
        if watch.seen:
            self._refuse("a part of it is left to the host")
        elif done == FIRST and before is not None and before.done != watch.done:
            self._refuse("it is not the same operations each time")
        elif done == FIRST:
            self._record(of, epoch)
        return terms

    def _record(self, of: Of, epoch: int) -> None:
        """Record the kernels of a step; nothing is computed. It is given tensors that no pass has
        been kept of.
        """
        self.recordings.clear()  # each holds a step's memory, and epochs do not come back
        mine: Of = (of[0].clone(), of[1].clone(), index := of[2].clone(), index, None, of[5])
        before, pool = {id(tensor) for tensor in self.moves()}, torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                given = self.act(mine)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            _stopped(error, of[0].device, pool)
            self._refuse(on_one_line(error))
        else:
            self.recordings[epoch] = Recording(
                graph, mine, {k: v.detach() for k, v in given.items()}
            )
        for late in [tensor for tensor in self.moves() if id(tensor) not in before]:
            late.detach().zero_()  # momentum that began while nothing was computed
            self._refuse("momentum begins late")

    def _try(self, recording: Recording, of: Of) -> Terms:
        """This step, done twice from one place: as it is, and replayed. The recording is kept if no
        bit differs.

        It was made of another batch: what it has kept of that one shows.
        """
        state, drawn = self.moves(), torch.cuda.get_rng_state()
        start = [v.detach().clone() for v in state]
        terms = {k: v.detach().clone() for k, v in self.act(of).items()}
        # momentum begins late
        if len(self.moves()) != len(state) or {*terms} != {*recording.terms}:
            self._refuse("momentum begins late")
            return terms
        end, drawn_then = [v.detach().clone() for v in state], torch.cuda.get_rng_state()
        put(state, start)
        torch.cuda.set_rng_state(drawn)
        replayed = recording.replay(of)
        recording.tried = all_equal(
            [*state, *(replayed[k] for k in terms)], [*end, *terms.values()]
        )
        if not recording.tried:
            self._refuse("replayed it ends at other bits")
            put(state, end)
            torch.cuda.set_rng_state(drawn_then)
        return terms

    def _refuse(self, why: str) -> None:
        log.info("a step cannot be recorded, and is launched kernel by kernel: %s", why)
        self.recordings.clear()
        _refused.add(self.kind)


def _stopped(error: RuntimeError, device: torch.device, pool: Any) -> None:
    """A recording was broken off: the card is as before, and Ctrl-C is raised again.

    Its memory is no longer set aside for the recording, which torch does only of one that ends well
    (then the first call says so); and its generator no longer believes that it is recorded, as in
    some versions.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError, StopIteration):
        # the second before torch 2.8
        named = [f"_cuda_endAllocate{what}ToPool" for what in ("", "CurrentStream")]
        next(getattr(torch._C, name) for name in named if hasattr(torch._C, name))(index, pool)
        torch._C._cuda_releasePool(index, pool)
    with suppress(RuntimeError, AttributeError):
        drawing = torch.cuda.default_generators[index]
        drawing.graphsafe_set_state(drawing.clone_state())
    if isinstance(error.__context__, KeyboardInterrupt):
        raise error.__context__


def whole_batches(plan: Plan, examples: int) -> tuple[int, int]:
    """How many batches training has that are not cut short by an epoch's end, and how many of them
    an epoch.

    >>> whole_batches(Plan(epochs=5, batch=64), 500), whole_batches(Plan(steps=30, batch=8), 20)
    ((35, 7), (20, 2))
    """
    whole, all_ = examples // plan.batch, -(-examples // plan.batch)
    return plan.steps * whole // max(all_, 1) if plan.steps else plan.epochs * whole, whole


@torch.no_grad()
def put(state: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors, one by one."""
    for tensor, value in zip(state, values, strict=True):
        tensor.copy_(value)


def all_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors are equal, one by one, and not a number at the same places; the host waits
    once.
    """
    pairs = zip(some, others, strict=True)
    return bool(torch.stack([((a == b) | ((a != a) & (b != b))).all() for a, b in pairs]).all())


def is_wanted(device: torch.device) -> bool:
    """Whether steps on a device may be recorded."""
    return device.type == "cuda" and os.environ.get(REPLAY, "1") != "0"


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """On a CUDA card, in a stream in which steps can be recorded; what came before is done first,
    threads take turns.

    What another thread did meanwhile would be recorded, too, and would draw from the same
    generator.
    """
    if device.type != "cuda":
        yield
        return
    with _turn:
        if not is_wanted(device):
            yield
            return
        own, other = _stream(device), torch.cuda.current_stream(device)
        own.wait_stream(other)
        try:
            with torch.cuda.stream(own):
                yield
        finally:
            other.wait_stream(own)
        if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > SPARE:
            torch.cuda.empty_cache()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream in a process: cuBLAS keeps its workspace for each."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
