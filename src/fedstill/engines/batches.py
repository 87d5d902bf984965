"""The order in which clients take their examples, and the batches that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedstill.core.keys import resident
from fedstill.core.records import Plan


class Progress(NamedTuple):
    """How far a client's training has come."""

    steps: int
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The examples of one step: (B,) of one client, or (K, B) of K stacked clients, whose short
    batches are padded.

    Tensors are on the device and everything else is on the host, so that no step waits for a copy.
    """

    index: Tensor
    """Positions in a client's examples."""
    rows: Tensor
    """Positions in the examples of all stacked clients, one client below another. The same as
    ``index`` for one client.
    """
    mask: Tensor | None
    """1 for real examples, 0 for padding; None if nothing is padded."""
    epoch: int | Tensor
    """The epoch from 0, of K clients (K,)."""
    sizes: int | Tensor
    """The number of real examples, of K clients (K,)."""
    begins_epoch: bool | Tensor
    """Whether the step is the first of an epoch, of K clients (K,)."""
    counts: tuple[int, ...]
    """``sizes`` of each client, on the host."""
    progress: tuple[Progress, ...]
    """How far each client has come, counting this step. In a stack: after its last step."""
    ending: tuple[int, ...]
    """The places in the stack of the clients whose epoch ends with this step."""
    running: Tensor | None = None
    """Which of K clients are still training, (K,) bool; None if all are."""


def epoch_batches(
    n: int, plan: Plan, order: torch.Generator, device: torch.device, joined: bool = False
) -> Iterator[list[Tensor]]:
    """Batches of positions among n examples, epoch by epoch; in all ``plan.steps`` batches if that
    is set. A last, short batch is kept.

    joined: the last batch of an epoch would have one example, and the batch before it takes that
    example, too (see ``joins_last_example``).
    """
    remaining_steps = plan.steps
    for positions in _permutations(n, plan, order, joined):
        batches = list(torch.split(resident(positions, device), plan.batch))
        if joined:
            batches[-2:] = [torch.cat(batches[-2:])]
        if plan.steps:
            batches = batches[:remaining_steps]
        remaining_steps -= len(batches)
        yield batches


def _permutations(
    n: int, plan: Plan, order: torch.Generator, joined: bool = False
) -> Iterator[Tensor]:
    """The order of n examples in each epoch. Without examples there are no epochs."""
    if n == 0:
        return
    epochs = plan.epochs
    if plan.steps:
        epochs = -(-plan.steps // plan.batches_per_epoch(n, joined))
    for _ in range(epochs):
        if plan.shuffle:
            yield torch.randperm(n, generator=order)
        else:
            yield torch.arange(n)


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """What each of K clients with examples does in each of T steps. A client does the same as it
    would alone, so some finish before others.

    One epoch of 3 and of 5 examples, unshuffled, in batches of two: the first client finishes after
    two steps, the second after three, and the last batch of each has one real example.

    >>> plan = Plan(epochs=1, batch=2, shuffle=False)
    >>> table = Timetable.of([3, 5], plan, [torch.Generator(), torch.Generator()])
    >>> for step in range(3):
    ...     print(table.index[step].tolist(), table.sizes[step].tolist(), table.ends[step].tolist())
    [[0, 1], [0, 1]] [2, 2] [False, False]
    [[2, 2], [2, 3]] [1, 2] [True, False]
    [[0, 0], [4, 4]] [0, 1] [False, True]
    >>> table.progress
    (Progress(steps=2, epochs=1), Progress(steps=3, epochs=1))
    """

    index: Tensor
    """(T, K, B) positions in each client's examples. A short batch is padded with its first
    position, and a client that has finished has zeros.
    """
    sizes: Tensor
    """(T, K) real examples; 0 for a client that has finished."""
    epoch: Tensor
    """(T, K) from 0."""
    ends: Tensor
    """(T, K), whether a client's epoch ends with the step."""
    progress: tuple[Progress, ...]
    """Each client's steps and epochs in all."""

    @classmethod
    def of(cls, sizes: Sequence[int], plan: Plan, orders: Sequence[torch.Generator]) -> Timetable:
        """The timetable of clients with ``sizes`` examples each, at least one, and a generator each
        for their order.
        """
        n = torch.tensor(sizes)
        batches_per_epoch = -(-n // plan.batch)
        steps = plan.epochs * batches_per_epoch
        if plan.steps:
            steps = torch.full_like(n, plan.steps)
        # plan.steps may cut the last epoch short
        epochs = -(-steps // batches_per_epoch)

        # (T, 1), to be compared with (K,)
        time = torch.arange(int(steps.max())).unsqueeze(1)
        running = time < steps
        # Only the last batch of an epoch may be short.
        is_last = time % batches_per_epoch + 1 == batches_per_epoch
        last_size = n - (batches_per_epoch - 1) * plan.batch
        batch_sizes = torch.where(is_last, last_size, plan.batch)

        positions = [
            _padded_batches(size, plan, order) for size, order in zip(sizes, orders, strict=True)
        ]
        return cls(
            index=_side_by_side(positions, steps=len(time)),
            sizes=batch_sizes * running,
            epoch=time // batches_per_epoch * running,
            ends=running & (is_last | (time + 1 == steps)),
            progress=tuple(map(Progress, steps.tolist(), epochs.tolist())),
        )


def _padded_batches(n: int, plan: Plan, order: torch.Generator) -> Tensor:
    """One client's batches (its steps, its widest batch), the short ones padded with their first
    position.
    """
    orders = torch.stack(list(_permutations(n, plan, order)))  # (epochs, n)
    width = min(plan.batch, n)
    missing = -n % width
    last_begin = n + missing - width
    padding = orders[:, last_begin : last_begin + 1].expand(-1, missing)
    padded = torch.cat([orders, padding], dim=1)
    # Every epoch is a number of full batches now, so batches may be counted through all epochs.
    batches = padded.view(-1, width)
    if plan.steps:
        return batches[: plan.steps]
    return batches


def _side_by_side(positions: Sequence[Tensor], steps: int) -> Tensor:
    """The batches of all clients (steps, K, the widest batch of all), the narrower ones padded with
    their first position.
    """
    width = max(batches.shape[1] for batches in positions)
    index = torch.zeros(steps, len(positions), width, dtype=torch.int64)
    for k, batches in enumerate(positions):
        index[: len(batches), k] = batches[:, :1]
        index[: len(batches), k, : batches.shape[1]] = batches
    return index
