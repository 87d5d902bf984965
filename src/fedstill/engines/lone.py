"""One client in training: its batches in their order, its inputs, and its teachers' outputs where
they can be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedstill import trees
from fedstill.data.inputs import channels_last
from fedstill.engines.cores import workers
from fedstill.engines.frozen import Teachers, frozen_teachers
from fedstill.engines.how import How, examples_by_client, many_passes, on_device, stage_generator
from fedstill.engines.order import epoch_batches
from fedstill.engines.private import poisson_batches
from fedstill.engines.step import Batch
from fedstill.models import contract
from fedstill.models.probing import joins_last_example
from fedstill.records import Carry, Examples, Tensors, View

T = TypeVar("T")


class LoneClient:
    """One client, its tensors without a client axis."""

    def __init__(self, carry: Carry, view: View, how: How) -> None:
        self.view, self.how = view, how
        (self.examples,) = examples_by_client([carry], [view], how.stage)
        self.device = self.examples.values.device
        there = {
            name: on_device(getattr(carry, name), self.device)
            for name in ("params", "teachers", "constants", "head", "trace")
        }
        self.carry: Carry = replace(carry, **there)
        self.params = {
            k: channels_last(v.detach().to(self.device, copy=True)) for k, v in carry.params.items()
        }
        self.trace: Tensors = {k: v.to(self.device, copy=True) for k, v in carry.trace.items()}
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
