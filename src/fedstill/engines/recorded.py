"""Steps of training on a CUDA card as one launch: a step's kernels are recorded once, and replayed for each batch.

A small network's step is a hundred kernels of a few microseconds; to launch them one by one takes longer than they do.
Replayed, a step gives the bits that it gives otherwise: each recording is tried against the step itself.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedstill.errors import on_one_line
from fedstill.records import Plan

log = logging.getLogger("fedstill.engine")

REPLAY = "FEDSTILL_REPLAY"
"""The environment variable that keeps every step as it is, if it is 0."""

FIRST = 2
"""Steps of a client before one is recorded: in these, what a step needs is made (teachers' outputs, momentum)."""

PAYS = 12
"""Steps of one kind in a client's training from which recording one pays."""

SPARE = 2e9
"""Bytes of a card that may lie unused in this process. What a recording leaves serves no other, so more goes back."""

_turn = threading.RLock()
"""Held while a client trains on a card."""

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.equal, aten.lift_fresh}
"""Operations whose result the host needs, or that bring one of its numbers: in a replay they would not be done."""
COPIES = {aten._to_copy, aten.copy_}

Terms = dict[str, Tensor]
Of = tuple[Any, ...]
"""Of one client's step: inputs, labels, positions twice, no mask, the epoch."""


class OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether anything of a step is done by the host."""

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        masked = func.overloadpacket is aten.index and any(i is not None and i.dtype == torch.bool for i in args[1])
        copied = func.overloadpacket in COPIES
        here = any(isinstance(v, Tensor) and not v.is_cuda and (copied or v.dim()) for v in (*args, given))
        self.seen |= func.overloadpacket in WAITS or masked or here
        return given


@dataclass
class Recording:
    """A step's kernels, with the tensors that they read and the terms that they leave."""

    graph: torch.cuda.CUDAGraph
    of: Of
    terms: Terms

    def replay(self, of: Of) -> Terms:
        """The step on another batch of the same size."""
        for mine, given in zip(self.of[:3], of[:3], strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.terms


@dataclass
class Recorder:
    """A client's steps: ``act`` does one, in place of ``moves``, and gives its terms; recorded where that pays.

    ``asked``: what the objective has asked of a step beside its tensors; a recording holds for one epoch alone if it
    has asked for that. ``steps``: how many whole batches training has, and an epoch.
    """

    act: Callable[[Of], Terms]
    moves: Callable[[], Sequence[Tensor]]
    asked: set[str]
    batch: int
    steps: tuple[int, int]
    done: dict[int, int] = field(default_factory=dict)
    recordings: dict[int, Recording] = field(default_factory=dict)
    never: bool = False

    def __call__(self, of: Of) -> Terms:
        """One step, as ``act`` does it."""
        epoch = of[5] if "epoch" in self.asked else -1
        if recording := self.recordings.get(epoch) if len(of[1]) == self.batch else None:
            return recording.replay(of)
        if self.never or len(of[1]) != self.batch or self.steps["epoch" in self.asked] < PAYS:
            return self.act(of)
        before = self.done.get(epoch, 0)
        self.done[epoch] = before + 1
        if before < FIRST - 1:
            return self.act(of)
        if before < FIRST:
            with OnHost() as watch:  # type: ignore[no-untyped-call]
                terms = self.act(of)
            self.never = watch.seen
            return terms
        return self._record(of, epoch)

    def _record(self, of: Of, epoch: int) -> Terms:
        """This step, done twice from one place: as it is, and replayed. The recording is kept if no bit differs."""
        mine: Of = (of[0].clone(), of[1].clone(), index := of[2].clone(), index, None, of[5])
        state, drawn = self.moves(), torch.cuda.get_rng_state()
        start = [v.detach().clone() for v in state]
        terms = {k: v.detach().clone() for k, v in self.act(mine).items()}
        if len(self.moves()) != len(state):  # momentum begins late
            self.never = True
            return terms
        end, drawn_then = [v.detach().clone() for v in state], torch.cuda.get_rng_state()
        put(state, start)
        torch.cuda.set_rng_state(drawn)
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                given = self.act(mine)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            log.info("a step cannot be recorded, and is launched kernel by kernel: %s", on_one_line(error))
            self.never = True
        else:
            recording = Recording(graph, mine, {k: v.detach() for k, v in given.items()})
            graph.replay()
            self.never = not all_equal([*state, *recording.terms.values()], [*end, *terms.values()])
        if self.never:
            put(state, end)
            torch.cuda.set_rng_state(drawn_then)
        else:
            self.recordings[epoch] = recording
        return terms


def whole_batches(plan: Plan, examples: int) -> tuple[int, int]:
    """How many batches training has that are not cut short by an epoch's end, and how many of them an epoch.

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
    """Whether tensors are equal, one by one; the host waits once."""
    return bool(torch.stack([(a == b).all() for a, b in zip(some, others, strict=True)]).all())


def is_wanted(device: torch.device) -> bool:
    """Whether steps on a device may be recorded."""
    return device.type == "cuda" and os.environ.get(REPLAY, "1") != "0"


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """On a CUDA card, in a stream in which steps can be recorded; what came before is done first, threads take turns.

    What another thread did meanwhile would be recorded, too.
    """
    if not is_wanted(device):
        yield
        return
    own, other = _stream(device), torch.cuda.current_stream(device)
    with _turn:
        own.wait_stream(other)
        with torch.cuda.stream(own):
            yield
        other.wait_stream(own)
        if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > SPARE:
            torch.cuda.empty_cache()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream in a process: cuBLAS keeps its workspace for each."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
