"""The cores of this machine: how many there are, how many to use, and jobs side by side with one
torch thread each. And the memory that a process frees, which it keeps.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from fedstill.core.errors import ConfigError

WORKERS = "FEDSTILL_WORKERS"
"""The environment variable with the number of jobs side by side; by default one per core."""

T = TypeVar("T")


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def workers() -> int:
    """The number of jobs to do side by side. Raises ConfigError if the environment variable is not
    a number from 1.
    """
    value = os.environ.get(WORKERS, "")
    if not value:
        return cores()
    if not value.isdecimal() or int(value) == 0:
        raise ConfigError(f"{WORKERS} = {value!r} in the environment must be a whole number from 1")
    return int(value)


@dataclass(frozen=True)
class ThreadCounts:
    """The torch threads of a client in a stage of ``several`` clients, and of a client ``alone`` or
    a stack. The last bit of a sum depends on them, so they are part of a run's definition.
    """

    several: int = 1
    alone: int = 1


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Compute with this number of torch threads within the block."""
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def side_by_side(jobs: Sequence[Callable[[], T]], workers: int) -> list[T]:
    """The result of each job, in order. Every job has one torch thread, so the bits do not depend
    on ``workers``.
    """
    if min(workers, len(jobs)) < 2:
        with torch_threads(1):
            return [job() for job in jobs]
    from fedstill.core.process_settings import is_settled, process_settings  # for threads alone

    if not is_settled():
        # Whoever leaves the settings ends the threads.
        with process_settings():
            return side_by_side(jobs, workers)
    futures = [_pool(workers).submit(job) for job in jobs]
    return [future.result() for future in futures]


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that stay until the run ends, because each builds the modules that its jobs run in.
    The number of torch threads is a setting of each thread.
    """
    from fedstill.core.process_settings import at_the_end

    pool = ThreadPoolExecutor(workers, "shard", torch.set_num_threads, (1,))

    def end() -> None:
        _pool.cache_clear()
        pool.shutdown()

    at_the_end(end)
    return pool


if hasattr(os, "register_at_fork"):
    # A child process has none of its parent's threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)


# A step allocates and frees the activations and gradients of a batch. If the C library returns
# their pages to the system, the next step waits until they are found, cleared and mapped again.
# ``python -m benchmarks.allocator`` prints what keeping them is worth.

KEEP_FREED = "FEDSTILL_KEEP_FREED"
"""The environment variable that, at 0, leaves the C library as it is. The process then holds less
memory between stages.
"""

# mallopt's names for its parameters.
_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD = -1
_LARGEST_BLOCK = 32 * 2**20
"""The largest value that glibc takes for ``_MMAP_THRESHOLD``, in bytes."""
_NEVER_TRIM = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees, for good; return whether it does.

    Only glibc can be asked to.
    """
    if sys.platform != "linux" or os.environ.get(KEEP_FREED) == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_TRIM_THRESHOLD, _NEVER_TRIM))
