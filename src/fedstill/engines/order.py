"""In which order clients take their examples: of one client its batches, of several a table of all their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstill.keys import resident
from fedstill.records import Plan


def epoch_batches(n: int, plan: Plan, order: torch.Generator, device: torch.device) -> Iterator[list[Tensor]]:
    """Batches of positions, epoch by epoch; ``plan.steps`` batches in all if that is set. The last batch is kept."""
    left = plan.steps
    for positions in _permutations(n, plan, order):
        batches = list(torch.split(resident(positions, device), plan.batch))
        yield batches[:left] if plan.steps else batches
        left -= len(batches)


@dataclass(frozen=True)
class Timetable:
    """What K clients with examples do in each of T steps, the same as each would alone; some may finish before others.

    ``index``: (T, K, B) positions in each client's data, short batches padded with their own first, 0 for a client that
    has finished. ``sizes``: (T, K) real examples, 0 for one that has finished. ``epoch``: (T, K), from 0. ``ends``:
    (T, K), whether a client's epoch ends with the step. ``done``: each client's steps and epochs, when all is done.
    """

    index: Tensor
    sizes: Tensor
    epoch: Tensor
    ends: Tensor
    done: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, sizes: Sequence[int], plan: Plan, draws: Sequence[torch.Generator]) -> Timetable:
        """The table of clients with so many examples each, from 1, and their generators."""
        orders = torch.cat([p for n, draw in zip(sizes, draws, strict=True) for p in _permutations(n, plan, draw)])
        n, batch = torch.tensor(sizes), plan.batch
        in_epoch = -(-n // batch)
        steps = torch.full_like(n, plan.steps) if plan.steps else plan.epochs * in_epoch
        t = torch.arange(int(steps.max())).unsqueeze(1)
        running = t < steps
        epoch = (t // in_epoch) * running
        first = (t % in_epoch) * batch  # where in its epoch's order a batch begins
        real = (n - first).clamp(max=batch) * running
        epochs_of = -(-steps // in_epoch)
        before = (epochs_of * n).cumsum(0) - epochs_of * n  # in the orders of all, one client's after the other's
        start = (before + epoch * n + first) * running
        within = torch.arange(int(real.max()))
        at = start.unsqueeze(2) + within * (within < real.unsqueeze(2))
        index = orders[at] * running.unsqueeze(2)
        ends = running & ((first + batch >= n) | (t + 1 == steps))
        done = zip(steps.tolist(), epochs_of.tolist(), strict=True)
        return cls(index, real, epoch, ends, tuple(done))


def _permutations(n: int, plan: Plan, draw: torch.Generator) -> Iterator[Tensor]:
    """Each epoch's order of n examples; of none there are no epochs."""
    if n == 0:
        return
    for _ in range(plan.epochs if not plan.steps else -(-plan.steps // -(-n // plan.batch))):
        yield torch.randperm(n, generator=draw) if plan.shuffle else torch.arange(n)
