"""The cores of this machine: how many there are, how many to use, and side-by-side work with one
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
from fedstill.core.process_settings import torch_threads, when_settled

WORKERS = "FEDSTILL_WORKERS"
"""The environment variable that says how much to do side by side; unset, one thing a core."""

T = TypeVar("T")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers() -> int:
    """How much to do side by side; raises ConfigError if the environment says what is no number
    from 1.
    """
    said = os.environ.get(WORKERS, "")
    if said and not (said.isdecimal() and int(said)):
        raise ConfigError(f"{WORKERS} = {said!r} in the environment must be a whole number from 1")
    return int(said) if said else cores()


def side_by_side(jobs: Sequence[Callable[[], T]], workers: int) -> list[T]:
    """What each job gives, in their order; every job has one torch thread, so the bits do not
    depend on ``workers``.
    """
    if min(workers, len(jobs)) < 2:
        with torch_threads(1):
            return [job() for job in jobs]
    running = [_pool(workers).submit(job) for job in jobs]
    return [future.result() for future in running]


@functools.cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that stay, with their modules, until the run ends; the number of torch threads is a
    thread's own setting.
    """
    pool = ThreadPoolExecutor(workers, "shard", torch.set_num_threads, (1,))

    def end() -> None:
        _pool.cache_clear()
        pool.shutdown()

    when_settled(end)
    return pool


if hasattr(os, "register_at_fork"):  # a child process has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
