"""Clients in the training loop: their common setup, examples and batches.

``LoneClient`` is a single client; several clients that are trained together are a ``Stack``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedstill.core import trees
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
    from fedstill.core.extensions import GradientRule
    from fedstill.data.inputs import Inputs

STEP_FIELDS = ("params", "teachers", "trace", "constants", "head", "class_weights")
"""The fields of a ``TrainingStart`` that a step may read."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The setup of training in a stage, the same for all its clients."""

    plan: Plan
    stage: Stage
    inputs: Inputs
    seed: int
    """The run's seed, from which all random numbers are drawn by key."""
    precision: Precision = "fp32"
    teacher_precision: Precision = "fp32"
    """The precision of the passes of frozen teachers."""
    by_epoch: bool = False
    """Whether to store the parameters after each epoch for measures."""
    lr_round: int | None = None
    """The round for the learning-rate schedule, if it restarts with each task; None for the round
    of the stage.
    """
    rule: GradientRule | None = None
    """The rule that combines the gradients of single examples; None for the mean over a batch."""

    @property
    def lr(self) -> float:
        """The learning rate of the round."""
        if self.lr_round is None:
            return self.plan.lr_at(self.stage.round)
        return self.plan.lr_at(self.lr_round)


def with_network_of(start: TrainingStart, view: View, inputs: Inputs) -> tuple[View, Inputs]:
    """The view and the inputs, adapted to the network of a start if it has one.

    The view then has no validation examples, because scores are for the site's network. Examples of
    the start are never augmented.
    """
    if start.model is None:
        return view, inputs
    view = replace(view, model=start.model, validation=None)
    if start.examples is not None:
        inputs = replace(inputs, steps=())
    return view, inputs


def stage_examples(view: View, stage: Stage) -> Examples:
    """The examples of a site in a stage."""
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
    """The training examples of each client. If all clients have the same examples, they are one
    object, which a stack stores once.
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
    """Whether a plan needs a score after each epoch, for early stopping or to keep the best
    epoch.
    """
    return plan.keep == "best" or (plan.validation > 0 and plan.patience > 0)


def sees_every_example(plan: Plan, examples: Examples) -> bool:
    """Whether training uses every example at least once."""
    return plan.steps == 0 or plan.steps * plan.batch >= len(examples)


def stage_generator(client: int, setup: TrainingSetup, purpose: str) -> torch.Generator:
    """A client's generator for a purpose in a stage."""
    stage = setup.stage
    return generator(seed_for(setup.seed, stage.round, stage.index, client, purpose))


def on_device(value: Any, device: torch.device) -> Any:
    """A value with its tensors on a device, including tensors in mappings and tuples."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: on_device(v, device) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(on_device(v, device) for v in value)
    return value


class Progress(NamedTuple):
    """The progress of a client's training."""

    steps: int
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The examples of a step: (B,) for one client, or (K, B) for K stacked clients, whose short
    batches are padded.

    Tensors are on the device and all other values are on the host, so that no step waits for a
    copy.
    """

    positions: Tensor
    """Positions in a client's examples."""
    rows: Tensor
    """Positions in the concatenated examples of all stacked clients; equal to ``positions`` for one
    client.
    """
    mask: Tensor | None
    """1 for real examples, 0 for padding; None if nothing is padded."""
    epoch: int | Tensor
    """The epoch, counted from 0; (K,) for K clients."""
    sizes: int | Tensor
    """The number of real examples; (K,) for K clients."""
    begins_epoch: bool | Tensor
    """Whether the step is the first one of an epoch; (K,) for K clients."""
    counts: tuple[int, ...]
    """``sizes`` of each client, on the host."""
    progress: tuple[Progress, ...]
    """The progress of each client, including this step. In a stack: after its last step."""
    ending: tuple[int, ...]
    """The positions in the stack of the clients whose epoch ends with this step."""
    running: Tensor | None = None
    """Whether each of K clients is still training, (K,) bool; None if all are."""


def epoch_batches(
    n: int, plan: Plan, order: torch.Generator, device: torch.device, joined: bool = False
) -> Iterator[list[Tensor]]:
    """Batches of positions among n examples, for each epoch; ``plan.steps`` batches in total if it
    is set. Short batches at the end of an epoch are kept.

    joined: whether the last example of an epoch joins the previous batch instead of being a batch
    of its own (see ``joins_last_example``).
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
    """The order of n examples in each epoch; no epochs without examples."""
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
    """The interface of one client, or of a stack of clients, for the training loop."""

    setup: TrainingSetup
    device: torch.device
    view: View
    """The view of the client, or of the first client of a stack."""
    sizes: list[int]
    """The number of examples of each client."""
    params: dict[str, Tensor]
    """Copies of all entries of the network. Training changes them in place."""
    trace: Tensors
    """Copies of the trace, which a method may replace after each step."""
    teacher_on_batch: TeacherOnBatch | None
    """Runs a teacher on a batch; None if teachers run within the step, under ``vmap``."""

    def module(self) -> nn.Module:
        """The module that runs the parameters."""

    def batches(self) -> Iterator[Batch]:
        """All batches, in order."""

    def step_inputs(self, batch: Batch) -> StepInputs:
        """The tensors of a batch for the objective."""

    def teacher_table(self, name: str, kind: str) -> Tensor | None:
        """A teacher's outputs for all examples, computed once; None if inputs vary, or if training
        only uses some of the examples.
        """

    def per_client(self, function: Callable[..., T], *values: Any) -> T:
        """The result of ``function(start, *values)`` for every client, with its start and its part
        of the values.
        """

    def clip(self, leaves: Mapping[str, Tensor], norm: float) -> None:
        """Scale each client's gradients down to ``norm`` if their norm over all leaves exceeds
        it.
        """

    def copies(self, tree: Tensors) -> list[dict[str, Tensor]]:
        """Copies of each client's tensors in the CPU's memory."""


class LoneClient(TrainingClients):
    """A single client, whose tensors have no client axis."""

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
        self.pixel_draws: torch.Generator | None = stage_generator(view.client, setup, "pixels")
        self.teachers = self._teachers()
        self.teacher_on_batch: TeacherOnBatch | None = self.teachers.on_batch
        if setup.rule is not None:
            if setup.rule.secret:
                self.pixel_draws = None
            # Gradients of single examples are computed under vmap, where teachers run as well.
            build_modules(self.start.teachers, view.model)
            self.teacher_on_batch = None

    def _teachers(self) -> Teachers:
        from fedstill.models.network import depends_on_batch  # few methods have teachers

        models = frozen_teachers(self.start.teachers, self.view.model)
        modules = [contract.module(model.spec, "frozen") for model in models.values()]
        # With batch statistics, a teacher's outputs depend on the student's batch.
        outputs_vary = self.augments or any(map(depends_on_batch, modules))
        fixed_inputs = None
        if not outputs_vary and sees_every_example(self.setup.plan, self.examples):
            fixed_inputs = self.examples.values
        parallel_passes = 1
        if len(self.setup.stage.clients) == 1:
            # In a stage with several clients, the other clients use the cores.
            parallel_passes = workers()
        return Teachers(
            models=models,
            fixed_inputs=fixed_inputs,
            workers=parallel_passes,
            precision=self.setup.teacher_precision,
        )

    def module(self) -> nn.Module:
        return contract.module(self.view.model)

    def batches(self) -> Iterator[Batch]:
        steps = 0
        for epoch, batches in enumerate(self._epochs()):
            for i, positions in enumerate(batches):
                steps += 1
                ending: tuple[int, ...] = ()
                if i + 1 == len(batches):
                    ending = (0,)
                yield Batch(
                    positions=positions,
                    rows=positions,
                    mask=None,
                    epoch=epoch,
                    sizes=len(positions),
                    begins_epoch=i == 0,
                    counts=(len(positions),),
                    progress=(Progress(steps, epoch + 1),),
                    ending=ending,
                )

    def _epochs(self) -> Iterator[list[Tensor]]:
        """The positions of each step's examples, for each epoch."""
        (n,) = self.sizes
        plan = self.setup.plan
        order = stage_generator(self.view.client, self.setup, "order")
        if self.setup.rule is not None:
            return self.setup.rule.batches(n, plan, order, self.device)
        joined = joins_last_example(self.view.model, plan, n)
        return epoch_batches(n, plan, order, self.device, joined)

    def step_inputs(self, batch: Batch) -> StepInputs:
        examples = self.examples.take(batch.positions)
        x = examples.values
        if self.augments:
            x = self.setup.inputs.trained_on(x, self.pixel_draws)
        return StepInputs(
            x=channels_last(x),
            y=examples.labels,
            positions=batch.positions,
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
    """Examples as inputs of a network; unchanged if every step augments them."""
    if inputs.steps:
        return examples
    return Examples(inputs.plain(examples.values), examples.labels)
