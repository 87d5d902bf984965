"""The clients that the training loop trains: what it asks of them, and a client by itself. Several
clients at once are a ``Stack``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedstill.core import trees
from fedstill.core.records import Examples, Tensors, TrainingStart, View
from fedstill.data.inputs import Inputs, channels_last
from fedstill.engines.batches import Batch, Progress, epoch_batches
from fedstill.engines.cores import workers
from fedstill.engines.frozen_teachers import Teachers, build_modules, frozen_teachers
from fedstill.engines.step import Now, StepInputs
from fedstill.engines.training_setup import (
    TrainingSetup,
    examples_by_client,
    on_device,
    sees_every_example,
    stage_generator,
)
from fedstill.models import contract
from fedstill.models.contract import joins_last_example

STEP_FIELDS = ("params", "teachers", "trace", "constants", "head")
"""The fields of a ``TrainingStart`` that a step may read."""

T = TypeVar("T")


class TrainingClients(Protocol):
    """One client, or a stack of clients, as the training loop sees them."""

    setup: TrainingSetup
    device: torch.device
    view: View
    """What the client sees; of a stack, what its first client sees."""
    sizes: list[int]
    """The number of examples of each client."""
    params: dict[str, Tensor]
    """Copies of all entries of the network. Training changes them in place."""
    trace: Tensors
    """Copies of the trace, which a method may replace after each step."""
    teacher_on_batch: Now | None
    """Runs a teacher on a batch; None if a step has to do so, under ``vmap``."""

    def module(self) -> nn.Module:
        """The module that the parameters run in."""

    def batches(self) -> Iterator[Batch]:
        """All batches, in order."""

    def step_inputs(self, batch: Batch) -> StepInputs:
        """The tensors of a batch that an objective sees."""

    def teacher_table(self, name: str, kind: str) -> Tensor | None:
        """A teacher's outputs for all examples, computed once; None if inputs vary, or if training
        takes only some of the examples.
        """

    def per_client(self, function: Callable[..., T], *values: Any) -> T:
        """The result of ``function(start, *values)`` for every client: its start, and its part of
        the values.
        """

    def clip(self, leaves: Mapping[str, Tensor], norm: float) -> None:
        """Scale down each client's gradients if their norm, over all leaves, is above ``norm``."""

    def copies(self, tree: Tensors) -> list[dict[str, Tensor]]:
        """Each client's tensors, in the CPU's memory and independent of the originals."""


class LoneClient(TrainingClients):
    """A client by itself: its tensors have no client axis."""

    def __init__(self, start: TrainingStart, view: View, setup: TrainingSetup) -> None:
        self.view = view
        self.setup = setup
        (examples,) = examples_by_client([start], [view], setup.stage)
        self.examples = normalised_once(examples, setup.inputs)
        self.augments = bool(setup.inputs.steps)
        self.sizes = [len(self.examples)]
        self.device = self.examples.values.device
        resident_fields = {
            name: on_device(getattr(start, name), self.device) for name in STEP_FIELDS
        }
        self.start: TrainingStart = replace(start, **resident_fields)
        self.params = {
            name: channels_last(value.detach().to(self.device, copy=True))
            for name, value in start.params.items()
        }
        self.trace: Tensors = {
            name: value.to(self.device, copy=True) for name, value in start.trace.items()
        }
        self.pixel_draws = stage_generator(view.client, setup, "pixels")
        self.teachers = self._teachers()
        self.teacher_on_batch: Now | None = self.teachers.on_batch
        if setup.rule is not None:
            # The gradients of single examples are computed under vmap, and teachers run there, too.
            build_modules(self.start.teachers, view.model)
            self.teacher_on_batch = None

    def _teachers(self) -> Teachers:
        fixed_inputs = None
        if not self.augments and sees_every_example(self.setup.plan, self.examples):
            fixed_inputs = self.examples.values
        side_by_side = 1
        if len(self.setup.stage.clients) == 1:
            # In a stage of several clients, the other clients use the cores.
            side_by_side = workers()
        return Teachers(
            models=frozen_teachers(self.start.teachers, self.view.model),
            fixed_inputs=fixed_inputs,
            workers=side_by_side,
            precision=self.setup.precision,
        )

    def module(self) -> nn.Module:
        return contract.module(self.view.model)

    def batches(self) -> Iterator[Batch]:
        steps = 0
        for epoch, batches in enumerate(self._epochs()):
            for i, index in enumerate(batches):
                steps += 1
                ending: tuple[int, ...] = ()
                if i + 1 == len(batches):
                    ending = (0,)
                yield Batch(
                    index=index,
                    rows=index,
                    mask=None,
                    epoch=epoch,
                    sizes=len(index),
                    begins_epoch=i == 0,
                    counts=(len(index),),
                    progress=(Progress(steps, epoch + 1),),
                    ending=ending,
                )

    def _epochs(self) -> Iterator[list[Tensor]]:
        """The positions of each step's examples, epoch by epoch."""
        (n,) = self.sizes
        plan = self.setup.plan
        order = stage_generator(self.view.client, self.setup, "order")
        if self.setup.rule is not None:
            return self.setup.rule.batches(n, plan, order, self.device)
        joined = joins_last_example(self.view.model, plan, n)
        return epoch_batches(n, plan, order, self.device, joined)

    def step_inputs(self, batch: Batch) -> StepInputs:
        examples = self.examples.take(batch.index)
        x = examples.values
        if self.augments:
            x = self.setup.inputs.trained_on(x, self.pixel_draws)
        return StepInputs(
            x=channels_last(x),
            y=examples.labels,
            positions=batch.index,
            rows=batch.rows,
            mask=batch.mask,
            epoch=batch.epoch,
        )

    def teacher_table(self, name: str, kind: str) -> Tensor | None:
        return self.teachers.table(name, kind)

    def per_client(self, function: Callable[..., T], *values: Any) -> T:
        return function(self.start, *values)

    def clip(self, leaves: Mapping[str, Tensor], norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(leaves.values(), norm)

    def copies(self, tree: Tensors) -> list[dict[str, Tensor]]:
        return [trees.clone(trees.on_cpu(tree))]


def normalised_once(examples: Examples, inputs: Inputs) -> Examples:
    """The examples as a network sees them; as they are stored, if every step augments them anew."""
    if inputs.steps:
        return examples
    return Examples(inputs.plain(examples.values), examples.labels)
