"""The cores of this machine: how many there are, how many to use, and jobs side by side with one
torch thread each.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from fedstill.core.errors import ConfigError
from fedstill.core.process_settings import at_the_end, is_settled, process_settings, torch_threads

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


def side_by_side(jobs: Sequence[Callable[[], T]], workers: int) -> list[T]:
    """The result of each job, in order. Every job has one torch thread, so the bits do not depend
    on ``workers``.
    """
    if min(workers, len(jobs)) < 2:
        with torch_threads(1):
            return [job() for job in jobs]
    if not is_settled():
        with process_settings():  # which ends the threads
            return side_by_side(jobs, workers)
    futures = [_pool(workers).submit(job) for job in jobs]
    return [future.result() for future in futures]


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that stay until the run ends, because each builds the modules that its jobs run in.
    The number of torch threads is a setting of each thread.
    """
    pool = ThreadPoolExecutor(workers, "shard", torch.set_num_threads, (1,))

    def end() -> None:
        _pool.cache_clear()
        pool.shutdown()

    at_the_end(end)
    return pool


if hasattr(os, "register_at_fork"):
    # A child process has none of its parent's threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)
