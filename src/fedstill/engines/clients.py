"""The clients of a stage in training: the setup that they share, their examples and batches, and
what the training loop asks of them. ``LoneClient`` is a client by itself; several clients at
once are a ``Stack``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedstill.core import trees
from fedstill.core.extensions import GradientRule
from fedstill.core.keys import generator, seed_for, to_device
from fedstill.core.records import Examples, Plan, Stage, Tensors, TrainingStart, View
from fedstill.engines.hardware import Precision, workers
from fedstill.engines.step import (
    StepInputs,
    TeacherOnBatch,
    Teachers,
    build_modules,
    frozen_teachers,
)
from fedstill.models import contract
from fedstill.models.contract import joins_last_example
from fedstill.models.functional import channels_last

if TYPE_CHECKING:
    from fedstill.data.inputs import Inputs

STEP_FIELDS = ("params", "teachers", "trace", "constants", "head", "class_weights")
"""The fields of a ``TrainingStart`` that a step may read."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """How a stage trains, the same for all its clients."""

    plan: Plan
    stage: Stage
    inputs: Inputs
    seed: int
    """The run's seed. Every random number is drawn from it by key."""
    precision: Precision = "fp32"
    by_epoch: bool = False
    """Whether to keep the parameters after each epoch, so that they can be measured."""
    lr_round: int | None = None
    """The round that the learning rate follows, if it is not the stage's: its number within a
    task.
    """
    rule: GradientRule | None = None
    """How the gradients of single examples combine; None for the gradient of a batch's mean."""

    @property
    def lr(self) -> float:
        """The learning rate of the round."""
        if self.lr_round is None:
            return self.plan.lr_at(self.stage.round)
        return self.plan.lr_at(self.lr_round)


def with_network_of(start: TrainingStart, view: View, inputs: Inputs) -> tuple[View, Inputs]:
    """The view and the inputs for the network that a start brings along, if it brings one.

    The view then has no validation examples: scores are for the site's network. Examples for such a
    network are never augmented.
    """
    if start.model is None:
        return view, inputs
    view = replace(view, model=start.model, validation=None)
    if start.examples is not None:
        inputs = replace(inputs, steps=())
    return view, inputs


def stage_examples(view: View, stage: Stage) -> Examples:
    """The examples that a site has for a stage."""
    if stage.view == "public" and view.public is not None:
        return view.public
    return view.data


def available_examples(start: TrainingStart, view: View, stage: Stage) -> Examples:
    """The examples of a client's training, before ``only`` selects some of them."""
    if start.examples is None:
        return stage_examples(view, stage)
    return start.examples.to(str(view.data.labels.device))


def trained_labels(start: TrainingStart, view: View, stage: Stage) -> Tensor:
    """The labels (n,) of the examples of a client's training."""
    labels = available_examples(start, view, stage).labels
    if start.only is None:
        return labels
    return labels[start.only.to(labels.device)]


def examples_by_client(
    starts: Sequence[TrainingStart], views: Sequence[View], stage: Stage
) -> list[Examples]:
    """The examples that each client trains on. If these are the same for all clients, they are one
    object, which a stack then holds once.
    """
    available = [
        available_examples(start, view, stage) for start, view in zip(starts, views, strict=True)
    ]
    if _all_select_the_same(starts, available):
        return [_selected(available[0], starts[0])] * len(available)
    return [_selected(examples, start) for examples, start in zip(available, starts, strict=True)]


def _all_select_the_same(starts: Sequence[TrainingStart], available: Sequence[Examples]) -> bool:
    """Whether all clients select the same positions of one object."""
    positions = starts[0].only
    if positions is None:
        return False
    if any(examples is not available[0] for examples in available):
        return False
    return all(start.only is not None and torch.equal(start.only, positions) for start in starts)


def _selected(examples: Examples, start: TrainingStart) -> Examples:
    if start.only is None:
        return examples
    return examples.take(start.only)


def uses_scores(plan: Plan) -> bool:
    """Whether a plan needs a client's score after each epoch: to stop early, or to keep the best
    epoch.
    """
    return plan.keep == "best" or (plan.validation > 0 and plan.patience > 0)


def sees_every_example(plan: Plan, examples: Examples) -> bool:
    """Whether training takes every example at least once."""
    return plan.steps == 0 or plan.steps * plan.batch >= len(examples)


def stage_generator(client: int, setup: TrainingSetup, purpose: str) -> torch.Generator:
    """A client's generator for one purpose in a stage."""
    stage = setup.stage
    return generator(seed_for(setup.seed, stage.round, stage.index, client, purpose))


def on_device(value: Any, device: torch.device) -> Any:
    """A value whose tensors are on a device, also those in mappings and tuples."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: on_device(v, device) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(on_device(v, device) for v in value)
    return value


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
    for positions in epoch_orders(n, plan, order, joined):
        batches = list(torch.split(to_device(positions, device), plan.batch))
        if joined:
            batches[-2:] = [torch.cat(batches[-2:])]
        if plan.steps:
            batches = batches[:remaining_steps]
        remaining_steps -= len(batches)
        yield batches


def epoch_orders(
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
    teacher_on_batch: TeacherOnBatch | None
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
        self.teacher_on_batch: TeacherOnBatch | None = self.teachers.on_batch
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
