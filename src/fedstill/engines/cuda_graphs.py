"""CUDA graphs: the kernels of a training step are recorded once and replayed for each batch.

A step of a small network consists of about a hundred kernels of a few microseconds. Launching them
one by one takes longer than running them, and a replay launches all at once. A replayed step has
the same bits: before a recording is used, it is compared with an ordinary step.

A replay only runs kernels. It would skip the host's part of a step, such as reading or drawing
numbers, and storing values in Python. Steps are therefore watched first, and steps that involve the
host are never recorded.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedstill.core.errors import on_one_line
from fedstill.core.records import Plan
from fedstill.engines.hardware import may_record_steps
from fedstill.engines.step import StepInputs

log = logging.getLogger("fedstill.engine")

WARM_UP = 3
"""The number of a client's steps before the recording. The first step creates tensors that later
steps reuse (teachers' outputs, momentum), and the other steps are watched.
"""

MIN_STEPS = 12
"""The minimum number of steps for which a recording is worthwhile."""

SPARE_BYTES = 2e9
"""The maximum unused memory of a GPU in this process, in bytes. The memory of deleted recordings
cannot be reused, so any excess is returned to the GPU.
"""

ANY_EPOCH = -1
"""Replaces the epoch if the objective does not read it."""

_card_lock = threading.RLock()
"""Held while a client trains on a GPU."""

_refused: set[Hashable] = set()
"""The kinds of steps that could not be recorded or replayed in this process, and are not tried
again.
"""

Terms = dict[str, Tensor]


class WholeBatches(NamedTuple):
    """The number of full batches in a client's training."""

    total: int
    per_epoch: int


def whole_batches(plan: Plan, examples: int) -> WholeBatches:
    """The numbers of full batches, in total and per epoch.

    >>> whole_batches(Plan(epochs=5, batch=64), 500)
    WholeBatches(total=35, per_epoch=7)
    >>> whole_batches(Plan(steps=30, batch=8), 20)
    WholeBatches(total=20, per_epoch=2)
    """
    per_epoch = examples // plan.batch
    total = plan.epochs * per_epoch
    if plan.steps:
        with_short_ones = plan.batches_per_epoch(examples)
        total = plan.steps * per_epoch // max(with_short_ones, 1)
    return WholeBatches(total, per_epoch)


@dataclass(frozen=True)
class StepArguments:
    """The arguments of a step.

    ``running``: whether each client of a stack is still training; None if all are.
    """

    inputs: StepInputs
    running: Tensor | None = None

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """All tensors, each once."""
        values = [value for value in (*self.inputs, self.running) if isinstance(value, Tensor)]
        return list({id(tensor): tensor for tensor in values}.values())

    def clone(self) -> StepArguments:
        """The same arguments in other memory."""
        clones = {id(tensor): tensor.clone() for tensor in self.tensors}
        fields = self.inputs._asdict().items()
        changed = {name: clones[id(value)] for name, value in fields if id(value) in clones}
        return StepArguments(self.inputs._replace(**changed), clones.get(id(self.running)))


class RecordingKey(NamedTuple):
    """What all steps of a recording have in common. ``some_ended``: some clients of the stack have
    completed their training.
    """

    epoch: int
    some_ended: bool


@dataclass
class Recording:
    """The kernels of a step, and the tensors with their arguments and terms."""

    graph: torch.cuda.CUDAGraph
    arguments: StepArguments
    terms: Terms
    is_verified: bool = False
    """Whether a replay on another batch than the recorded one has been compared with a step."""

    def replay(self, arguments: StepArguments) -> Terms:
        """The step on another batch of the same size."""
        for recorded, value in zip(self.arguments.tensors, arguments.tensors, strict=True):
            recorded.copy_(value)
        self.graph.replay()
        return self.terms


@dataclass(kw_only=True)
class StepRecorder:
    """Executes the training steps of one client or of a stack, and records and replays them if it
    is worthwhile.
    """

    execute: Callable[[StepInputs, Tensor | None], Terms]
    """Executes one step of the clients that are still training, and returns its terms."""
    state: Callable[[], Sequence[Tensor]]
    """The tensors that steps change: parameters, and the optimiser's state."""
    reads_epoch: Callable[[], bool]
    """Whether the objective has read the epoch. A recording is then valid for one epoch."""
    batches: WholeBatches
    kind: Hashable
    """The kind of the steps; all steps of a kind can be recorded, or none."""
    recordings: dict[RecordingKey, Recording] = field(default_factory=dict, init=False)
    _steps: dict[RecordingKey, int] = field(default_factory=dict, init=False)
    """The number of steps without a recording."""
    _latest_watch: StepWatch | None = field(default=None, init=False)
    _full_batch: torch.Size | None = field(default=None, init=False)
    """The shape of the positions in the first batch, (B,) or (K, B) for K clients. Other batches
    may be short.
    """

    def __call__(self, inputs: StepInputs, running: Tensor | None = None) -> Terms:
        """One step, with the result of ``execute``."""
        if not self._may_replay(inputs):
            return self.execute(inputs, running)
        epoch = ANY_EPOCH
        # The epochs of stacked clients are a tensor, and part of a recording.
        if self.reads_epoch() and isinstance(inputs.epoch, int):
            epoch = inputs.epoch
        key = RecordingKey(epoch, running is not None)
        arguments = StepArguments(inputs, running)
        recording = self.recordings.get(key)
        if recording is None:
            return self._warm_up(arguments, key)
        if not recording.is_verified:
            return self._verify(recording, arguments)
        return recording.replay(arguments)

    def _may_replay(self, inputs: StepInputs) -> bool:
        if self._full_batch is None:
            self._full_batch = inputs.positions.shape
        if inputs.positions.shape != self._full_batch or self.kind in _refused:
            return False
        if self.reads_epoch() and isinstance(inputs.epoch, int):
            return self.batches.per_epoch >= MIN_STEPS
        return self.batches.total >= MIN_STEPS

    def _warm_up(self, arguments: StepArguments, key: RecordingKey) -> Terms:
        """Execute a step before the recording, and record after the last one of them."""
        step = self._steps.get(key, 0) + 1
        self._steps[key] = step
        if step == 1:
            return self._act(arguments)

        previous = self._latest_watch
        made_in_previous: Set[int] = frozenset()
        if previous is not None and step == WARM_UP:
            made_in_previous = previous.made
        with watched(arguments, self.state(), made_in_previous) as watch:
            terms = self._act(arguments)
        self._latest_watch = watch

        if watch.cannot_replay:
            self._refuse("it involves the host")
        elif step == WARM_UP:
            if previous is not None and previous.operations != watch.operations:
                self._refuse("its operations differ from those of the previous step")
            else:
                self._record(arguments, key)
        return terms

    def _act(self, arguments: StepArguments) -> Terms:
        return self.execute(arguments.inputs, arguments.running)

    def _record(self, arguments: StepArguments, key: RecordingKey) -> None:
        """Record the kernels of a step, without computing it."""
        # A recording uses the memory of a step, and recordings of earlier epochs are not needed.
        self.recordings.clear()
        # Clones, because an objective may have cached results for the originals.
        recorded = arguments.clone()
        state_ids = {id(tensor) for tensor in self.state()}
        pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                terms = self._act(recorded)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            _clean_up(error, recorded.inputs.x.device, pool)
            self._refuse(on_one_line(error))
        else:
            detached = {name: value.detach() for name, value in terms.items()}
            self.recordings[key] = Recording(graph, recorded, detached)

        started = [tensor for tensor in self.state() if id(tensor) not in state_ids]
        if started:
            # Momentum that starts in a recording has no value, because nothing was computed.
            for tensor in started:
                tensor.detach().zero_()
            self._refuse("momentum starts late")

    def _verify(self, recording: Recording, arguments: StepArguments) -> Terms:
        """Execute a step twice from the same state: directly and as a replay. The recording is used
        from then on if all bits are equal.

        The batch differs from the recorded one, so this also detects objectives that have stored
        data of the recorded batch.
        """
        state = self.state()
        start = _copies(state)
        random_state = torch.cuda.get_rng_state()

        stepped = self._act(arguments)
        terms = {name: value.detach().clone() for name, value in stepped.items()}
        if len(self.state()) != len(state):
            self._refuse("momentum starts late")
            return terms
        if terms.keys() != recording.terms.keys():
            self._refuse("the names of its terms differ from those of the recorded step")
            return terms
        end = _copies(state)
        random_state_at_end = torch.cuda.get_rng_state()

        put(state, start)
        torch.cuda.set_rng_state(random_state)
        replayed = recording.replay(arguments)
        replayed_terms = [replayed[name] for name in terms]
        recording.is_verified = all_equal([*state, *replayed_terms], [*end, *terms.values()])
        if not recording.is_verified:
            self._refuse("its replay has other bits")
            put(state, end)
            torch.cuda.set_rng_state(random_state_at_end)
        return terms

    def _refuse(self, reason: str) -> None:
        log.info("a step cannot be recorded, so its kernels are launched one by one: %s", reason)
        self.recordings.clear()
        _refused.add(self.kind)


def _clean_up(error: RuntimeError, device: torch.device, pool: Any) -> None:
    """Restore the GPU after a failed recording. Raises KeyboardInterrupt again if it was the cause.

    Torch only does this after a successful recording. Otherwise, memory stays reserved for the
    recording, and in some versions the generator stays in recording mode.
    """
    index = device.index
    if index is None:
        index = torch.cuda.current_device()
    with suppress(RuntimeError, StopIteration):
        # The second name is for torch before 2.8.
        names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
        end_allocation = next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))
        # Raises RuntimeError if the recording succeeded and has released its memory itself.
        end_allocation(index, pool)
        torch._C._cuda_releasePool(index, pool)
    with suppress(RuntimeError, AttributeError):
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
    if isinstance(error.__context__, KeyboardInterrupt):
        raise error.__context__


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def put(state: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into the tensors of a state."""
    for tensor, value in zip(state, values, strict=True):
        tensor.copy_(value)


def all_equal(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal, with NaN at the same positions. The host waits only once."""
    equal = []
    for a, b in zip(tensors, expected, strict=True):
        both_nan = (a != a) & (b != b)
        equal.append(((a == b) | both_nan).all())
    return bool(torch.stack(equal).all())


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """A context for training on a GPU, with a stream in which steps can be recorded.

    Threads take turns. Otherwise, a recording would contain the kernels of another thread, and both
    would draw from the same generator.
    """
    with _card_lock:
        if not may_record_steps(device):
            yield
            return
        recording_stream = _stream(device)
        caller_stream = torch.cuda.current_stream(device)
        recording_stream.wait_stream(caller_stream)
        try:
            with torch.cuda.stream(recording_stream):
                yield
        finally:
            caller_stream.wait_stream(recording_stream)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if unused > SPARE_BYTES:
            torch.cuda.empty_cache()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per process, because cuBLAS has a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


# Watching a step, to check whether a replay of its kernels would be equivalent.

aten = torch.ops.aten

HOST_OPERATIONS = {
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
"""Operations whose result the host needs, or that read a number from the host. A replay would skip
them.
"""

INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""Operations for which the host needs the number of entries that a mask selects."""

COPYING = {aten._to_copy, aten.copy_}

NO_MEMORY = 0
"""The address of a tensor without memory."""

_passed_on: dict[Any, Any] = {}
"""The warnings that have been passed on, so that each is shown once."""


class StepWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches a step and records whether a replay would be equivalent.

    Tensors are identified by the address of their memory, which views share.
    """

    supports_higher_order_operators = True

    def __init__(
        self, device: torch.device, state: Iterable[Tensor], made_in_previous: Set[int]
    ) -> None:
        """state: the tensors that the step changes. made_in_previous: the addresses of tensors that
        the previous step created. If one of them is read, the objective has stored it in Python.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.state = _addresses(state)
        self.made_in_previous = made_in_previous
        self.made = {NO_MEMORY}
        """The addresses of the tensors that this step created."""
        self.operations: list[tuple[Any, ...]] = []
        """All operations with their numeric arguments."""
        self.cannot_replay = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            # A higher-order operator, such as a loop, hides its operations.
            self.cannot_replay = True
            return func(*args, **kwargs)
        outputs = _written_tensors(func, args, kwargs)
        result = func(*args, **kwargs)

        if _needs_host(func.overloadpacket, args, kwargs) or self._crosses_devices(
            func.overloadpacket, (*args, result)
        ):
            self.cannot_replay = True

        read_addresses = _addresses(_tensors((args, kwargs)))
        writable = self.state | self.made
        if not _addresses(outputs) <= writable:
            self.cannot_replay = True
        if (read_addresses - writable) & self.made_in_previous:
            self.cannot_replay = True
        self.made |= _addresses(_tensors(result)) - read_addresses

        numbers = [v for v in tree_leaves((args, kwargs)) if isinstance(v, int | float)]
        self.operations.append((func, *numbers))
        return result

    def _crosses_devices(self, operation: Any, values: Iterable[Any]) -> bool:
        """Whether an operation moves a tensor between host and device. Kernels take scalars on the
        host as numbers, unless they are copied.
        """
        away = [v for v in values if isinstance(v, Tensor) and v.device != self.device]
        if operation in COPYING:
            return bool(away)
        return any(tensor.dim() > 0 for tensor in away)


@contextmanager
def watched(
    arguments: StepArguments, state: Sequence[Tensor], made_in_previous: Set[int]
) -> Iterator[StepWatch]:
    """Watch a step and set ``cannot_replay``.

    In addition to single operations, this checks whether the host waited for the GPU, and whether
    the step drew from the generators of Python or NumPy.
    """
    device = arguments.inputs.x.device
    random_state = (random.getstate(), _numpy_state())
    # Arguments may reuse the memory of a tensor of the previous step.
    made_in_previous = made_in_previous - _addresses(arguments.tensors)
    with StepWatch(device, state, made_in_previous) as watch, _sync_warnings(device) as waits:
        yield watch
    if waits or random_state != (random.getstate(), _numpy_state()):
        watch.cannot_replay = True


@contextmanager
def _sync_warnings(device: torch.device) -> Iterator[list[str]]:
    """Collect torch's warnings about operations for which the host waits, and pass on all other
    warnings.
    """
    waits: list[str] = []
    if device.type != "cuda":
        yield waits
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        text = str(warning.message)
        if "synchronizing CUDA operation" in text:
            waits.append(text)
        elif "Synchronization debug mode" not in text:
            warnings.warn_explicit(
                warning.message,
                warning.category,
                warning.filename,
                warning.lineno,
                registry=_passed_on,
            )


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *position = np.random.get_state()
    return (name, np.asarray(keys).tobytes(), *position)


def _needs_host(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host needs the result of an operation to continue."""
    if operation in HOST_OPERATIONS:
        return True
    if operation in INDEXING:
        return any(_is_mask(index) for index in args[1])
    # Without an output size, the host must sum the repeats.
    return operation is aten.repeat_interleave and kwargs.get("output_size") is None


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation modifies, according to its schema."""
    outputs = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if position < len(args):
            outputs.append(args[position])
        else:
            outputs.append(kwargs.get(argument.name))
    return _tensors(outputs)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    """The addresses of the memory of tensors. Views of a tensor have the same address."""
    return {_address(tensor) for tensor in tensors}


def _address(tensor: Tensor) -> int:
    if tensor.layout != torch.strided or tensor._is_zerotensor():
        return NO_MEMORY
    return tensor.untyped_storage().data_ptr()
