"""The hardware of a run: cores and threads, freed memory, and the precision of passes."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from fedstill.core.errors import ConfigError

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


def run_in_parallel(jobs: Sequence[Callable[[], T]], workers: int) -> list[T]:
    """Run jobs in parallel, and return their results in order. Each job has one torch thread, so
    that the bits do not depend on ``workers``.
    """
    if min(workers, len(jobs)) < 2:
        with torch_threads(1):
            return [job() for job in jobs]
    from fedstill.core.process_settings import is_settled, process_settings  # for threads alone

    if not is_settled():
        # The threads end together with the context of process settings.
        with process_settings():
            return run_in_parallel(jobs, workers)
    futures = [_pool(workers).submit(job) for job in jobs]
    return [future.result() for future in futures]


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """A pool of threads that persists until the run ends, because each thread builds its own
    modules. The number of torch threads is set in each thread.
    """
    pool = ThreadPoolExecutor(workers, "shard", torch.set_num_threads, (1,))

    from fedstill.core.process_settings import at_the_end  # for threads alone

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


# ---- precision -----------------------------------------------------------------------------------

Precision = Literal["fp32", "bf16", "tf32"]
"""``fp32``: everything in float32.

``bf16``: forward and backward passes of students and teachers in bfloat16; parameters, losses and
the optimiser in float32.

``tf32``: float32, but a CUDA device rounds products to ten bits.
"""

P = ParamSpec("P")


def at_precision(run: Callable[P, T], precision: Precision, device: torch.device) -> Callable[P, T]:
    """A forward pass at a precision; its outputs are converted to float32, for the losses."""
    if precision != "bf16":
        return run

    def in_bfloat16(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            return _floats(run(*args, **kwargs))

    return in_bfloat16


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
