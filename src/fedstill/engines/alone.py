"""One client in training: its batches in their order, its inputs, and its teachers' outputs where they can be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedstill import trees
from fedstill.data.inputs import Inputs, layout
from fedstill.engines.cores import workers
from fedstill.engines.order import epochs
from fedstill.engines.passes import ModelPasses
from fedstill.engines.step import Batch
from fedstill.engines.teachers import Teachers
from fedstill.keys import generator, seed_for
from fedstill.models import contract
from fedstill.records import Carry, Examples, ModelSpec, Plan, Stage, Teacher, Tensors, View

T = TypeVar("T")


@dataclass(frozen=True)
class How:
    """How a stage trains: the same for all its clients. ``by_epoch``: keep each epoch's parameters, to measure them."""

    plan: Plan
    stage: Stage
    inputs: Inputs
    seed: int
    precision: str = "fp32"
    by_epoch: bool = False


class Alone:
    """One client, its tensors without a client axis."""

    def __init__(self, carry: Carry, view: View, how: How) -> None:
        self.view, self.how = view, how
        (self.examples,) = chosen([carry], [view], how.stage)
        self.device = self.examples.images.device
        self.carry: Carry = replace(
            carry, teachers=moved(carry.teachers, self.device), constants=moved(carry.constants, self.device)
        )
        self.params = {k: layout(v.detach().to(self.device, copy=True)) for k, v in carry.params.items()}
        self.trace: Tensors = {k: v.to(self.device, copy=True) for k, v in carry.trace.items()}
        self.pixels = draw(view.client, how, "pixels")
        plain = not how.inputs.steps
        self.still = Examples(how.inputs.plain(self.examples.images), self.examples.labels) if plain else None
        lasting = self.still is not None and many_passes(how.plan, self.examples)
        self.teachers = Teachers(
            self.carry.teachers,
            view.model,
            self.still.images if lasting and self.still is not None else None,
            workers() if len(how.stage.clients) == 1 else 1,  # in a stage of many, other clients have the cores
            how.precision,
        )

    def module(self) -> nn.Module:
        """What its parameters run in."""
        return contract.module(self.view.model)

    def batches(self) -> Iterator[Batch]:
        """The batches of all epochs, in order."""
        steps, order = 0, draw(self.view.client, self.how, "order")
        for epoch, indices in enumerate(epochs(len(self.examples), self.how.plan, order, self.device)):
            for i, index in enumerate(indices):
                steps, last = steps + 1, i + 1 == len(indices)
                n, done = len(index), ((steps, epoch + 1),)
                yield Batch(index, index, None, epoch, n, i == 0, (n,), done, (0,) if last else ())

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs and labels of a batch."""
        some = (self.examples if self.still is None else self.still).take(batch.index)
        x = some.images if self.still is not None else self.how.inputs.trained_on(some.images, self.pixels)
        return layout(x), some.labels

    def tables(self, name: str, what: str) -> Tensor | None:
        """A teacher's outputs for all examples, made once; None where inputs vary, or not all examples are seen."""
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


def outputs(teacher: Teacher, what: str, examples: Examples, spec: ModelSpec, how: How) -> Tensor:
    """Logits or features of a frozen teacher for each example; ``spec``: its architecture, unless it brings its own."""
    spec, params = teacher if isinstance(teacher, tuple) else (spec, teacher)
    passes = ModelPasses(spec, how.inputs, how.precision)
    return (passes.logits if what == "logits" else passes.features)(params, examples)


def examples_of(view: View, stage: Stage) -> Examples:
    """What a site trains on in a stage."""
    return view.public if stage.view == "public" and view.public is not None else view.data


def chosen(carries: Sequence[Carry], views: Sequence[View], stage: Stage) -> list[Examples]:
    """What each site trains on of what it sees in a stage; one object where that is the same for all."""
    each, first = [examples_of(v, stage) for v in views], carries[0].only
    if first is not None and all(
        e is each[0] and c.only is not None and torch.equal(c.only, first) for e, c in zip(each, carries, strict=True)
    ):
        return [each[0].take(first.to(each[0].labels.device))] * len(each)
    return [e if c.only is None else e.take(c.only.to(e.labels.device)) for e, c in zip(each, carries, strict=True)]


def scores_count(plan: Plan) -> bool:
    """Whether a plan asks for a client's score after each epoch: to stop early, or to keep the best one."""
    return plan.keep == "best" or (plan.validation > 0 and plan.patience > 0)


def draw(client: int, how: How, purpose: str) -> torch.Generator:
    """A client's generator for one purpose in a stage."""
    return generator(seed_for(how.seed, how.stage.round, how.stage.index, client, purpose))


def many_passes(plan: Plan, examples: Examples) -> bool:
    """Whether training sees every example at least once."""
    return plan.steps == 0 or plan.steps * plan.batch >= len(examples)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors on a device, through mappings and pairs; everything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: moved(v, device) for k, v in value.items()}
    return tuple(moved(v, device) for v in value) if isinstance(value, tuple) else value
