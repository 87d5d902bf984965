"""Steps of training on a CUDA card as one launch: a step's kernels are recorded once, and replayed
for each batch.

A small network's step is a hundred kernels of a few microseconds; to launch them one by one takes
longer than they do. Replayed, a step gives the bits that it gives otherwise: each recording is
tried against the step itself.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedstill.engines.on_host import OnHost, watched
from fedstill.errors import on_one_line
from fedstill.records import Plan

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
