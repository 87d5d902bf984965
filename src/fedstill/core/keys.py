"""Keyed randomness: a seed is a hash of its place in the run and its purpose.

No generator's state needs to be saved, and a resumed run draws the same numbers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

GLOBAL_GENERATOR_LOCK = threading.RLock()
"""Held while a thread uses and restores the global generator: no other thread may use it then."""


def seed_for(run: int, round: int, stage: int, client: int, purpose: str) -> int:
    """The seed for a purpose at a place in a run: an integer in [0, 2**63).

    >>> seed_for(1, 2, 0, 3, "batches") == seed_for(1, 2, 0, 3, "batches")
    True
    >>> seed_for(1, 2, 0, 3, "batches") == seed_for(1, 2, 0, 4, "batches")
    False
    """
    text = f"{run}|{round}|{stage}|{client}|{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(seed: int) -> torch.Generator:
    """A torch generator on the CPU that starts at ``seed``."""
    return torch.Generator().manual_seed(seed)


def seed_global(seed: int) -> None:
    """Seed torch's global generators, as ``torch.manual_seed`` does.

    Without CUDA this is much faster: ``torch.manual_seed`` formats the caller's stack for every
    type of device that the machine lacks.
    """
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seed torch's global generators for the block, and restore the CPU's afterwards.

    ``restoring_global_state`` restores them without seeding.
    """
    with GLOBAL_GENERATOR_LOCK:
        previous = torch.get_rng_state()
        seed_global(seed)
    try:
        yield
    finally:
        with GLOBAL_GENERATOR_LOCK:
            torch.set_rng_state(previous)


@contextmanager
def restoring_global_state(cuda: bool = False) -> Iterator[None]:
    """Restore torch's global CPU generator after the block.

    The block must be short, because other threads wait for it. cuda: also restore the generator of
    the current CUDA device, if CUDA is in use.
    """
    devices: list[int] = []
    if cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = [torch.cuda.current_device()]
    with GLOBAL_GENERATOR_LOCK, torch.random.fork_rng(devices=devices):
        yield


def to_device(draws: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers that were drawn on the CPU to a device; asynchronously to a CUDA device."""
    if device.type == "cuda":
        return draws.pin_memory().to(device, non_blocking=True)
    return draws.to(device)


def numpy_generator(seed: int) -> np.random.Generator:
    """A NumPy generator that starts at ``seed``."""
    return np.random.Generator(np.random.PCG64(seed))
