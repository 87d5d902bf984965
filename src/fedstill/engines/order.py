"""In which order clients take their examples: of one client its batches, of several a table of all
their steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstill.keys import resident
from fedstill.records import Plan


def epoch_batches(
    n: int, plan: Plan, order: torch.Generator, device: torch.device, joined: bool = False
) -> Iterator[list[Tensor]]:
    """Batches of positions, epoch by epoch; ``plan.steps`` batches in all if that is set. The last
    batch is kept.

    ``joined``: an epoch ends with one example more than a batch has, which joins the last batch
    (see ``joins_last_example``).
    """
    left = plan.steps
    for positions in _permutations(n, plan, order, joined):
        batches = list(torch.split(resident(positions, device), plan.batch))
        if joined:
            batches[-2:] = [torch.cat(batches[-2:])]
        yield batches[:left] if plan.steps else batches
        left -= len(batches)


@dataclass(frozen=True)
class Timetable:
    """What K clients with examples do in each of T steps, the same as each would alone; some may
    finish before others.

    ``index``: (T, K, B) positions in each client's data, short batches padded with their own first,
    0 for a client that has finished. ``sizes``: (T, K) real examples, 0 for one that has
    finished. ``epoch``: (T, K), from 0. ``ends``: (T, K), whether a client's epoch ends with the
    step. ``done``: each client's steps and epochs, when all is done.

    One epoch of 3 and of 5 examples, unshuffled, two at a time: the first client has finished after
    two steps, the second after three, and the last batch of each has one real example.

    >>> plan, orders = (
    ...     Plan(epochs=1, batch=2, shuffle=False),
    ...     [torch.Generator(), torch.Generator()],
    ... )
    >>> table = Timetable.of([3, 5], plan, orders)
    >>> for step in range(3):
    ...     print(table.index[step].tolist(), table.sizes[step].tolist(), table.ends[step].tolist())
    [[0, 1], [0, 1]] [2, 2] [False, False]
    [[2, 2], [2, 3]] [1, 2] [True, False]
    [[0, 0], [4, 4]] [0, 1] [False, True]
    >>> table.done
    ((2, 1), (3, 1))
    """

    index: Tensor
    sizes: Tensor
    epoch: Tensor
    ends: Tensor
    done: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, sizes: Sequence[int], plan: Plan, orders: Sequence[torch.Generator]) -> Timetable:
        """The table of clients with so many examples each, from 1, and the generators of their
        orders.
        """
        n = torch.tensor(sizes)
        batches = -(-n // plan.batch)  # in a whole epoch
        steps = torch.full_like(n, plan.steps) if plan.steps else plan.epochs * batches
        epochs = -(-steps // batches)  # the last one may be cut short by plan.steps
        t = torch.arange(int(steps.max())).unsqueeze(1)  # (T, 1), against K clients
        running = t < steps
        last = t % batches + 1 == batches  # the epoch's last batch: the only one that may be short
        real = torch.where(last, n - (batches - 1) * plan.batch, plan.batch) * running
        own = [_positions(size, plan, order) for size, order in zip(sizes, orders, strict=True)]
        return cls(
            index=_side_by_side(own, steps=len(t)),
            sizes=real,
            epoch=t // batches * running,
            ends=running & (last | (t + 1 == steps)),
            done=tuple(zip(steps.tolist(), epochs.tolist(), strict=True)),
        )


def _positions(n: int, plan: Plan, order: torch.Generator) -> Tensor:
    """One client's batches (its steps, its widest batch), each short one padded with its own first
    position.
    """
    orders = torch.stack(list(_permutations(n, plan, order)))  # (epochs, n)
    width = min(plan.batch, n)
    missing = -n % width
    begins = n + missing - width  # where the last batch of an epoch does
    padded = torch.cat([orders, orders[:, begins : begins + 1].expand(-1, missing)], dim=1)
    # an epoch is whole batches now, so they may be counted through all epochs
    batches = padded.view(-1, width)
    return batches[: plan.steps] if plan.steps else batches


def _side_by_side(own: Sequence[Tensor], steps: int) -> Tensor:
    """The batches of all clients (steps, K, the widest batch of all), narrower ones padded with
    their own first.
    """
    index = torch.zeros(
        steps, len(own), max(batches.shape[1] for batches in own), dtype=torch.int64
    )
    for k, batches in enumerate(own):
        index[: len(batches), k] = batches[:, :1]
        index[: len(batches), k, : batches.shape[1]] = batches
    return index


def _permutations(
    n: int, plan: Plan, order: torch.Generator, joined: bool = False
) -> Iterator[Tensor]:
    """Each epoch's order of n examples; of none there are no epochs."""
    if n == 0:
        return
    epochs = plan.epochs
    if plan.steps:
        epochs = -(-plan.steps // plan.batches_per_epoch(n, joined))
    for _ in range(epochs):
        yield torch.randperm(n, generator=order) if plan.shuffle else torch.arange(n)
