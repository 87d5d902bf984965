"""Batches of a client: the order of its examples, its inputs, and its teachers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedstill.core import trees
from fedstill.core.keys import resident
from fedstill.core.records import Examples, Plan, Tensors, TrainingStart, View
from fedstill.data.inputs import channels_last
from fedstill.engines.cores import workers
from fedstill.engines.frozen_teachers import Teachers, frozen_teachers
from fedstill.engines.step import Batch
from fedstill.engines.training_setup import (
    How,
    examples_by_client,
    many_passes,
    on_device,
    stage_generator,
)
from fedstill.models import contract
from fedstill.models.contract import joins_last_example
from fedstill.privacy.private_training import poisson_batches

# In which order clients take their examples: of one client its batches, of several a table of all
# their steps.


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


# One client in training: its batches in their order, its inputs, and its teachers' outputs where
# they can be kept.


T = TypeVar("T")


class LoneClient:
    """One client, its tensors without a client axis."""

    def __init__(self, start: TrainingStart, view: View, how: How) -> None:
        self.view, self.how = view, how
        (self.examples,) = examples_by_client([start], [view], how.stage)
        self.device = self.examples.values.device
        there = {
            name: on_device(getattr(start, name), self.device)
            for name in ("params", "teachers", "constants", "head", "trace")
        }
        self.carry: TrainingStart = replace(start, **there)
        self.params = {
            k: channels_last(v.detach().to(self.device, copy=True)) for k, v in start.params.items()
        }
        self.trace: Tensors = {k: v.to(self.device, copy=True) for k, v in start.trace.items()}
        self.draws = stage_generator(view.client, how, "pixels")
        plain = not how.inputs.steps
        self.still = (
            Examples(how.inputs.plain(self.examples.values), self.examples.labels)
            if plain
            else None
        )
        lasting = self.still is not None and many_passes(how.plan, self.examples)
        self.teachers = Teachers(
            frozen_teachers(self.carry.teachers, view.model),
            self.still.values if lasting and self.still is not None else None,
            # in a stage of many, other clients have the cores
            workers() if len(how.stage.clients) == 1 else 1,
            how.precision,
        )

    def module(self) -> nn.Module:
        """What its parameters run in."""
        return contract.module(self.view.model)

    def make_teachers(self) -> None:
        """Build what teachers run in: initial weights cannot be drawn under ``vmap``."""
        for teacher in frozen_teachers(self.carry.teachers, self.view.model).values():
            contract.module(teacher.spec, "frozen")

    def batches(self) -> Iterator[Batch]:
        """The batches of all epochs, in order."""
        steps, order = 0, stage_generator(self.view.client, self.how, "order")
        size, plan, private = len(self.examples), self.how.plan, self.how.private
        if private is None:
            joined = joins_last_example(self.view.model, plan, size)
            epochs = epoch_batches(size, plan, order, self.device, joined)
        else:
            epochs = poisson_batches(size, plan, order, self.device, private.secret)
        for epoch, indices in enumerate(epochs):
            for i, index in enumerate(indices):
                steps, last = steps + 1, i + 1 == len(indices)
                n, done = len(index), ((steps, epoch + 1),)
                yield Batch(index, index, None, epoch, n, i == 0, (n,), done, (0,) if last else ())

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs and labels of a batch."""
        some = (self.examples if self.still is None else self.still).take(batch.index)
        x = (
            some.values
            if self.still is not None
            else self.how.inputs.trained_on(some.values, self.draws)
        )
        return channels_last(x), some.labels

    def tables(self, name: str, what: str) -> Tensor | None:
        """A teacher's outputs for all examples, made once; None where inputs vary, or not all
        examples are seen.
        """
        return self.teachers.table(name, what)

    def now(self, name: str, what: str, x: Tensor) -> Tensor:
        """A teacher's outputs for one batch."""
        return self.teachers.now(name, what, x)

    def each(self, run: Callable[..., T], *values: Any) -> T:
        """``run`` with what the client started with, and these values."""
        return run(self.carry, *values)

    def clip(self, leaves: Mapping[str, Tensor], norm: float) -> None:
        """Scale gradients whose norm, over all leaves, is above ``norm``."""
        torch.nn.utils.clip_grad_norm_(leaves.values(), norm)

    def copies(self, tree: Tensors) -> list[dict[str, Tensor]]:
        """Copies of each client's tensors in the CPU's memory that share nothing."""
        return [trees.clone(trees.on_cpu(tree))]
