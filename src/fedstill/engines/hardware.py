"""The hardware of a run: cores and threads, freed memory, GPUs, and the precision of arithmetic."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.process_settings import (
    at_the_end,
    is_cuda,
    is_settled,
    process_settings,
    round_products,
)

WORKERS = "FEDSTILL_WORKERS"
"""The environment variable with the number of parallel jobs; by default one per core."""

T = TypeVar("T")


# ---- cores and threads ---------------------------------------------------------------------------


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def workers() -> int:
    """The number of parallel jobs. Raises ConfigError if the environment variable is not a positive
    integer.
    """
    value = os.environ.get(WORKERS, "")
    if not value:
        return cores()
    if not value.isdecimal() or int(value) == 0:
        raise ConfigError(f"{WORKERS} = {value!r} in the environment must be a positive integer")
    return int(value)


@dataclass(frozen=True)
class ThreadCounts:
    """The number of torch threads of each client in a stage with ``several`` clients, and of a
    client ``alone`` or a stack. The last bit of a sum depends on it, so it is part of a run's
    config.
    """

    several: int = 1
    alone: int = 1


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads within the block."""
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def side_by_side(jobs: Sequence[Callable[[], T]], workers: int) -> list[T]:
    """Run jobs in parallel, and return their results in order. Each job has one torch thread, so
    that the bits do not depend on ``workers``.
    """
    if min(workers, len(jobs)) < 2:
        with torch_threads(1):
            return [job() for job in jobs]
    if not is_settled():
        # The threads end together with the context of process settings.
        with process_settings():
            return side_by_side(jobs, workers)
    futures = [_pool(workers).submit(job) for job in jobs]
    return [future.result() for future in futures]


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """A pool of threads that persists until the run ends, because each thread builds its own
    modules. The number of torch threads is set in each thread.
    """
    pool = ThreadPoolExecutor(workers, "shard", torch.set_num_threads, (1,))

    def end() -> None:
        _pool.cache_clear()
        pool.shutdown()

    at_the_end(end)
    return pool


if hasattr(os, "register_at_fork"):
    # A child process does not inherit its parent's threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)


# ---- memory --------------------------------------------------------------------------------------

# A step allocates and frees the activations and gradients of a batch. If the C library returns
# their pages to the system, the next step waits until they are mapped again.
# ``python -m benchmarks.allocator`` measures the effect.

KEEP_FREED = "FEDSTILL_KEEP_FREED"
"""The environment variable that disables this if it is 0. The process then uses less memory between
stages.
"""

# mallopt's names for its parameters.
_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD = -1
_LARGEST_BLOCK = 32 * 2**20
"""The largest value of ``_MMAP_THRESHOLD`` that glibc accepts, in bytes."""
_NEVER_TRIM = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, permanently; return whether it does.

    This only works with glibc.
    """
    if sys.platform != "linux" or os.environ.get(KEEP_FREED) == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_TRIM_THRESHOLD, _NEVER_TRIM))


# ---- several runs at once ------------------------------------------------------------------------

BYTES_A_RUN = 1.5e9
"""The memory that a run of typical size needs at most; it only limits the number of parallel runs.
"""

BYTES_ON_CARD = 3e9
"""The same for the memory of a GPU, of which each process needs half a gigabyte for itself."""

VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"
"""The environment variable with the GPUs that are visible to a process."""


@dataclass(frozen=True)
class Card:
    """A GPU: its name in ``CUDA_VISIBLE_DEVICES``, and its free memory in bytes."""

    name: str
    free: float

    @property
    def room(self) -> int:
        """The number of runs that fit into its memory, at least one."""
        return max(1, int(self.free / BYTES_ON_CARD))


@dataclass(frozen=True)
class Slots:
    """The number of parallel runs.

    ``cards``: the GPU of each of them, by its name in ``CUDA_VISIBLE_DEVICES``; empty if the runs
    see the same GPUs as this process.
    """

    jobs: int
    cards: tuple[str, ...] = ()


def jobs_that_fit(device: str = "cpu") -> int:
    """The number of parallel runs on a device: one for each core, or fewer if the memory of the
    machine or of its GPU is insufficient.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fit = min(cores(), int(free / BYTES_A_RUN))
    if is_cuda(device) and torch.cuda.is_available():
        fit = min(fit, int(torch.cuda.mem_get_info(device)[0] / BYTES_ON_CARD))
    return max(1, fit)


def slots_for(devices: Set[str], jobs: int | None, numbers: Sequence[int] = ()) -> Slots:
    """The slots for parallel runs on these devices. Runs with ``device = "cuda"`` are distributed
    over the GPUs that torch sees.

    jobs: the number of parallel runs; None: as many as fit. numbers: the GPUs to use, with torch's
    indices; empty: all. Raises ConfigError for GPUs that do not exist or are not used.
    """
    if numbers:
        _check_numbers(devices, numbers)
    numbered = sorted(device for device in devices if device.startswith("cuda:"))
    if numbered:
        return Slots(jobs or min(map(jobs_that_fit, numbered)))
    if "cuda" not in devices or not torch.cuda.is_available():
        return Slots(jobs or jobs_that_fit())
    numbers = numbers or range(torch.cuda.device_count())
    if numbers == range(1):
        return Slots(jobs or jobs_that_fit("cuda"))
    names = distributed([_card(number) for number in numbers], jobs)
    return Slots(len(names), names)


def distributed(cards: Sequence[Card], jobs: int | None) -> tuple[str, ...]:
    """The GPU of each slot, in turn.

    By default, there are as many slots as the memory of the GPUs allows, at most one for each core,
    and at least one for each GPU. ``jobs`` overrides this number, regardless of memory.

    >>> distributed([Card("0", 24e9), Card("1", 6e9)], jobs=5)
    ('0', '1', '0', '1', '0')
    """
    most = jobs or max(len(cards), jobs_that_fit())
    rounds = most
    if jobs is None:
        rounds = max(card.room for card in cards)
    names = []
    for turn in range(rounds):
        names += [card.name for card in cards if jobs is not None or turn < card.room]
    return tuple(names[:most])


def _check_numbers(devices: Set[str], numbers: Sequence[int]) -> None:
    """Raise ConfigError for ``--devices`` that torch does not see, or that no run would use."""
    count = 0
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError("--devices: torch sees no CUDA device on this machine; remove the option")
    unseen = [number for number in numbers if number not in range(count)]
    if unseen:
        seen = ", ".join(map(str, range(count)))
        raise ConfigError(
            f"--devices: there is no CUDA device {unseen[0]} on this machine; torch sees {seen}"
        )
    if len(set(numbers)) != len(numbers):
        raise ConfigError(
            "--devices contains a device twice; list each device once, and set --jobs"
        )
    if "cuda" not in devices or any(device.startswith("cuda:") for device in devices):
        raise ConfigError(
            f"--devices distributes runs with device = 'cuda', but these have "
            f"{' and '.join(map(repr, sorted(devices)))}; set device = 'cuda'"
        )


def _card(number: int) -> Card:
    """The GPU with this number in torch."""
    name = str(number)
    visible = os.environ.get(VISIBLE_CARDS)
    if visible:
        name = visible.split(",")[number].strip()
    return Card(name, float(torch.cuda.mem_get_info(number)[0]))


# ---- precision -----------------------------------------------------------------------------------

Precision = Literal["fp32", "bf16", "tf32"]
"""``fp32``: everything in float32.

``bf16``: forward and backward passes of students and teachers in bfloat16; parameters, losses and
the optimiser in float32.

``tf32``: float32, but a CUDA device rounds products to ten bits.
"""

P = ParamSpec("P")


def is_device(name: str) -> bool:
    """Whether a config may name this device.

    >>> [is_device(name) for name in ("cpu", "cuda", "cuda:1", "mps", "cuda:x", "gpu")]
    [True, True, True, True, False, False]
    """
    return re.fullmatch(r"cpu|mps|cuda(:(0|[1-9][0-9]{0,3}))?", name) is not None


def check_precision(precision: Precision, device: str) -> None:
    """Raise ConfigError for a precision that no device of this kind supports."""
    if precision == "tf32" and not is_cuda(device):
        raise ConfigError(
            "precision = 'tf32' needs a CUDA device; on the CPU, set precision = 'fp32' or 'bf16'"
        )


def check_machine(precisions: Mapping[str, Precision], device: str) -> None:
    """Raise ConfigError if this machine does not have the device, or would emulate a precision.

    ``precisions``: the precisions by config key.
    """
    _check_device(device)
    keys = [key for key, precision in precisions.items() if precision == "bf16"]
    if keys and not has_bfloat16(device):
        kind = "processor"
        if device != "cpu":
            kind = "device"
        raise ConfigError(
            f"{keys[0]} = 'bf16': this {kind} has no units for bfloat16 and would emulate it "
            "slowly; remove the key for a new run"
        )


def _check_device(device: str) -> None:
    """Raise ConfigError if torch does not see a device; the message lists those that it sees."""
    if device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(
            "device = 'mps': torch sees no MPS device on this machine; "
            "set device = 'cpu' for a new run"
        )
    if not is_cuda(device):
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device = {device!r}: torch sees no CUDA device on this machine; "
            "set device = 'cpu' for a new run, or install torch for CUDA"
        )
    count = torch.cuda.device_count()
    index = torch.device(device).index
    if index is not None and index >= count:
        names = [f"cuda:{number} ({torch.cuda.get_device_name(number)})" for number in range(count)]
        raise ConfigError(
            f"device = {device!r}: torch only sees {', '.join(names)}; choose one of them"
        )


def has_bfloat16(device: str) -> bool:
    """Whether a device has instructions for products in bfloat16; False for MPS (untested)."""
    if device == "mps":
        return False
    if is_cuda(device):
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return any(supported for name, supported in capabilities.items() if "bf16" in name)
    # Older versions of torch.
    return bool(torch.cpu._is_avx512_bf16_supported())


def lowered(run: Callable[P, T], precision: Precision, device: torch.device) -> Callable[P, T]:
    """A forward pass at a precision; its outputs are converted to float32, for the losses."""
    if precision != "bf16":
        return run

    def in_bfloat16(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            return _floats(run(*args, **kwargs))

    return in_bfloat16


@contextmanager
def products(precision: Precision, device: torch.device) -> Iterator[None]:
    """A context in which a CUDA device rounds products to TensorFloat-32, if that is the precision.
    On the CPU, it has no effect.

    Torch has one setting for the whole process. It is safe to change it, because clients on a GPU
    train one after another.
    """
    if device.type != "cuda":
        yield
        return
    try:
        round_products(precision == "tf32")
        yield
    finally:
        round_products(False)


def _floats(value: T) -> T:
    """The outputs of a pass, converted from bfloat16 to float32."""
    if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
        return value.float()  # type: ignore[return-value]
    if not isinstance(value, tuple):
        return value
    parts = [_floats(part) for part in value]
    if hasattr(value, "_make"):  # a NamedTuple
        return value._make(parts)  # type: ignore[no-any-return]
    return tuple(parts)  # type: ignore[return-value]


# ---- recorded steps ------------------------------------------------------------------------------

REPLAY = "FEDSTILL_REPLAY"
"""The environment variable that turns recording off if it is 0."""


def may_record_steps(device: torch.device) -> bool:
    """Whether steps on a device may be recorded."""
    return device.type == "cuda" and os.environ.get(REPLAY, "1") != "0"
