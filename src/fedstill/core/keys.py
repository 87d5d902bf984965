"""Randomness by key, not by stream: every seed is a hash of what it is for, so nothing needs to be
saved.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_global = threading.RLock()
"""Held while a thread puts the global generator aside for a moment: then no other looks at it, or
seeds it for another run of this process.
"""


def seed_for(run: int, round: int, stage: int, client: int, purpose: str) -> int:
    """The seed of one purpose at one place of a run: an integer in [0, 2**63).

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
    """Start torch's global generators at ``seed``, as ``torch.manual_seed`` does.

    That function formats the caller's stack for each kind of device that is not there; seeding
    takes far less.
    """
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seed torch's global generators within the block, and restore the CPU's afterwards.

    ``put_aside`` only restores them.
    """
    with _global:
        found = torch.get_rng_state()
        seed_global(seed)
    try:
        yield
    finally:
        with _global:
            torch.set_rng_state(found)


@contextmanager
def put_aside(card: bool = False) -> Iterator[None]:
    """Restore torch's global generator on the CPU after the block. Other threads wait meanwhile, so
    the block must be short.

    card: whether to restore that of the current CUDA device, too, if one is in use.
    """
    devices: list[int] = []
    if card and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = [torch.cuda.current_device()]
    with _global, torch.random.fork_rng(devices=devices):
        yield


def global_state() -> list[torch.Tensor]:
    """Where torch's global generators stand: the CPU's, and the current CUDA device's if one is in
    use.
    """
    with _global:
        states = [torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states.append(torch.cuda.get_rng_state())
        return states


def has_moved(since: list[torch.Tensor]) -> bool:
    """Whether anything has drawn from them since ``global_state``.

    If CUDA was first used in between, only the CPU's generator is compared.
    """
    return any(not torch.equal(a, b) for a, b in zip(global_state(), since, strict=False))


def resident(draws: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers that were drawn on the CPU, on a device. Nothing waits for a copy to a CUDA
    device.
    """
    if device.type == "cuda":
        return draws.pin_memory().to(device, non_blocking=True)
    return draws.to(device)


def numpy_generator(seed: int) -> np.random.Generator:
    """A NumPy generator that starts at ``seed``."""
    return np.random.Generator(np.random.PCG64(seed))
