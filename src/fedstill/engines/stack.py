"""Clients of one structure stacked: every tensor has a leading client axis, and an objective runs
under ``vmap``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedstill.core import trees
from fedstill.core.keys import resident
from fedstill.core.records import Examples, ModelSpec, Tensors, TrainingStart, View
from fedstill.engines.batches import Timetable
from fedstill.engines.frozen_teachers import FrozenModel, frozen_teachers
from fedstill.engines.passes import ModelPasses
from fedstill.engines.step import Batch
from fedstill.engines.training_setup import (
    How,
    examples_by_client,
    many_passes,
    on_device,
    stage_generator,
)
from fedstill.models import contract
from fedstill.models.stacked import stacked

# What several clients start with, as one carry; and which clients can be stacked.


@dataclass(frozen=True)
class StackedCarry:
    """The carries of K clients of one structure (``Structures``) as one.

    ``carry``: each tensor has a leading client axis (K, ...), except those that are one object for
    all clients; a number that differs is a tensor (K,). ``axes``: a carry of the same form that
    says for each value which axis is the clients', 0, or None where there is none. Neither says
    which examples a client trains on (``TrainingStart.only``).
    """

    carry: TrainingStart
    axes: TrainingStart

    @staticmethod
    def of(carries: Sequence[TrainingStart], device: torch.device) -> StackedCarry:
        """The carries as one, on a device."""
        values, axes = _stacked([parts(c) for c in carries])
        return StackedCarry(TrainingStart(**on_device(values, device)), TrainingStart(**axes))

    def of_client(self, k: int) -> TrainingStart:
        """The k-th client's own."""
        return TrainingStart(**_own(parts(self.carry), parts(self.axes), k))


def parts(start: TrainingStart) -> dict[str, Any]:
    """What of a carry is stacked, by name: ``vmap`` looks into dictionaries, not into records."""
    return {
        name: getattr(start, name) for name in ("params", "teachers", "trace", "constants", "head")
    }


def shared(axes: Any) -> bool:
    """Whether nothing in a value has a client axis."""
    if isinstance(axes, (Mapping, tuple)):
        return all(map(shared, axes.values() if isinstance(axes, Mapping) else axes))
    return axes is None


class Structures:
    """What clients must share to be stacked: equal for two clients if their tensors fit on each
    other.

    An object that was sent to many is examined once. It is found by its id, and kept, so that the
    id stays unique.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Mapping[Any, Any], Any]] = {}

    def of(self, start: TrainingStart, view: View) -> Any:
        """The structure of one client."""
        return view.model, *map(self._of, (*parts(start).values(), start.only))

    def _of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.shape, value.dtype
        if isinstance(value, Mapping):
            if id(value) not in self._known:
                self._known[id(value)] = (
                    value,
                    tuple((k, self._of(value[k])) for k in sorted(value)),
                )
            return self._known[id(value)][1]
        if isinstance(value, tuple):
            return tuple(map(self._of, value))
        if isinstance(value, (bool, int, float)):
            return type(value)
        return value if isinstance(value, (str, ModelSpec, type(None))) else id(value)


def _stacked(values: Sequence[Any]) -> tuple[Any, Any]:
    """Values of one structure as one, and for each in it which axis is the clients': 0, or None if
    it is shared.
    """
    first = values[0]
    if all(v is first for v in values) and not isinstance(first, (Mapping, tuple)):
        return first, None  # no copies of what was sent to all
    if isinstance(first, Tensor):
        return torch.stack([v.detach() for v in values]), 0
    if isinstance(first, Mapping):
        pairs = {k: _stacked([v[k] for v in values]) for k in first}
        return {k: v for k, (v, _) in pairs.items()}, {k: axis for k, (_, axis) in pairs.items()}
    if isinstance(first, tuple):
        both = [_stacked(each) for each in zip(*values, strict=True)]
        return tuple(v for v, _ in both), tuple(axis for _, axis in both)
    if all(v == first for v in values):
        return first, None
    return torch.tensor(values, dtype=torch.float64 if isinstance(first, float) else None), 0


def _own(value: Any, axes: Any, k: int) -> Any:
    """The k-th client's part of a stacked value."""
    if isinstance(axes, Mapping):
        return {name: _own(value[name], axis, k) for name, axis in axes.items()}
    if isinstance(axes, tuple):
        return tuple(_own(v, axis, k) for v, axis in zip(value, axes, strict=True))
    return value if axes is None else value[k]


T = TypeVar("T")


class Stack:
    """K clients with examples: their data are concatenated, short batches are padded with their own
    first.
    """

    now = None  # teachers run under vmap, each client's own

    def __init__(self, carries: Sequence[TrainingStart], views: Sequence[View], how: How) -> None:
        self.view, self.how, self.size = views[0], how, len(views)
        each = examples_by_client(carries, views, how.stage)
        self.device = each[0].values.device
        self.start = StackedCarry.of(carries, self.device)
        self._alike = shared(parts(self.start.axes))
        # What trains has an axis of its own for every client, even where all start from the same
        # tensors.
        self.params = {
            k: v.detach().to(self.device)
            for k, v in trees.stack([c.params for c in carries]).items()
        }
        self.trace: Tensors = {
            k: v.to(self.device) for k, v in trees.stack([c.trace for c in carries]).items()
        }
        self.sizes = [len(e) for e in each]
        self.common = all(e is each[0] for e in each)  # public data, in memory once
        self.examples = each[0] if self.common else _below(each)
        plain = not how.inputs.steps
        self.orders = [stage_generator(v.client, how, "order") for v in views]
        self.draws = [] if plain else [stage_generator(v.client, how, "pixels") for v in views]
        self.still = (
            Examples(how.inputs.plain(self.examples.values), self.examples.labels)
            if plain
            else None
        )
        for teacher in frozen_teachers(self.start.carry.teachers, self.view.model).values():
            # made here: initial weights cannot be drawn under vmap
            contract.module(teacher.spec, "frozen")
        self._often = all(many_passes(how.plan, e) for e in each)
        self._tables: dict[tuple[str, str], Tensor] = {}

    def module(self) -> nn.Module:
        """What their parameters run in, under ``vmap``."""
        return stacked(contract.module(self.view.model, "stacked"))

    def batches(self) -> Iterator[Batch]:
        """The clients' batches side by side, each client's in its own order; a short one ends
        before the others.
        """
        if not (self.how.plan.epochs or self.how.plan.steps):
            return
        table = Timetable.of(self.sizes, self.how.plan, self.orders)
        sizes, epoch, running = table.sizes, table.epoch, table.sizes > 0
        first = torch.cat([torch.ones(1, self.size, dtype=torch.bool), epoch[1:] > epoch[:-1]])
        # where a client's data begin among those of all
        offsets = torch.tensor([0, *self.sizes[:-1]]).cumsum(0)
        width = table.index.shape[2]
        # A client that has finished takes its first example again and is put back after the step:
        # of no examples at all the mean would be 0 / 0.
        real = torch.arange(width) < torch.where(running, sizes, width).unsqueeze(2)
        rows = table.index + offsets.view(1, -1, 1)
        # All steps' numbers go to the device at once, and their sizes are known on the host: no
        # step waits for either.
        there = [
            resident(v, self.device)
            for v in (table.index, rows, real.float(), epoch, sizes, first, running)
        ]
        counts, ends, whole = sizes.tolist(), table.ends.tolist(), running.all(1).tolist()
        for t, (at, r, mask, ages, n, begins, still) in enumerate(zip(*there, strict=True)):
            over = tuple(k for k, end in enumerate(ends[t]) if end)
            yield Batch(
                at,
                r,
                mask,
                ages,
                n,
                begins,
                tuple(counts[t]),
                table.done,
                over,
                None if whole[t] else still,
            )

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs (K, B, …) and labels (K, B) of a batch; every client draws for its own real
        examples.
        """
        where = batch.index if self.common else batch.rows
        some = (self.examples if self.still is None else self.still).take(where.flatten())
        values, labels = (v.view(*where.shape, *v.shape[1:]) for v in (some.values, some.labels))
        return values if self.still is not None else self._augmented(values, batch.counts), labels

    def tables(self, name: str, what: str) -> Tensor | None:
        """A teacher's outputs for all clients' data, one below another, where inputs are the same
        in every epoch.
        """
        if self.still is None or not self._often:
            return None
        if (name, what) not in self._tables:
            self._tables[name, what] = self._run_teacher(name, what, self.still)
        return self._tables[name, what]

    def each(self, run: Callable[..., T], *values: Any) -> T:
        """``run`` for every client at once, with what it started with and its part of these
        values.
        """

        def one(start: dict[str, Any], *own: Any) -> T:
            return run(TrainingStart(**start), *own)

        if self._alike:  # vmap need not look through it in every step
            return torch.func.vmap(functools.partial(run, self.start.carry))(*values)
        in_dims = (parts(self.start.axes), *(0 for _ in values))
        return torch.func.vmap(one, in_dims=in_dims)(parts(self.start.carry), *values)

    def clip(self, leaves: Mapping[str, Tensor], norm: float) -> None:
        """Scale each client's gradients if their norm, over all leaves, is above ``norm``."""
        grads = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
        if not grads:
            return
        rows = [g.unsqueeze(-1).flatten(1) for g in grads]  # a scalar's gradients are (K,)
        total = torch.stack([torch.linalg.vector_norm(g, dim=1) for g in rows]).norm(dim=0)  # (K,)
        factor = (norm / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1)))

    def copies(self, tree: Tensors) -> list[dict[str, Tensor]]:
        """Copies of each client's tensors in the CPU's memory that share nothing."""
        there = {k: v.detach().contiguous() for k, v in trees.on_cpu(tree).items()}
        each = [torch.unbind_copy(v) for v in there.values()]  # type: ignore[func-returns-value]  # torch's stub
        return [dict(zip(there, own, strict=True)) for own in zip(*each, strict=True)] or [
            {} for _ in self.sizes
        ]

    def _augmented(self, stored: Tensor, counts: Sequence[int]) -> Tensor:
        out = []
        for k, (images, n) in enumerate(zip(stored, counts, strict=True)):
            x = (
                self.how.inputs.trained_on(images[:n], self.draws[k])
                if n
                else self.how.inputs.plain(images)
            )
            out.append(torch.cat([x, x[:1].expand(len(images) - len(x), *x.shape[1:])]))
        return torch.stack(out)

    def _run_teacher(self, name: str, what: str, still: Examples) -> Tensor:
        """A teacher's outputs on the data of all: in one pass where all clients have the same, else
        each its own.
        """
        if shared(self.start.axes.teachers[name]):
            once = self._outputs(
                frozen_teachers(self.start.carry.teachers, self.view.model)[name], what, still
            )
            return once.repeat(self.size, 1) if self.common else once
        own = [
            frozen_teachers(self.start.of_client(k).teachers, self.view.model)[name]
            for k in range(self.size)
        ]
        data = [still] * self.size
        if not self.common:
            values, labels = (
                torch.split(still.values, self.sizes),
                torch.split(still.labels, self.sizes),
            )
            data = [Examples(*each) for each in zip(values, labels, strict=True)]
        return torch.cat(
            [self._outputs(teacher, what, some) for teacher, some in zip(own, data, strict=True)]
        )

    def _outputs(self, teacher: FrozenModel, what: str, examples: Examples) -> Tensor:
        passes = ModelPasses(teacher.spec, self.how.inputs, self.how.precision)
        return (passes.logits if what == "logits" else passes.features)(teacher.params, examples)


def _below(each: Sequence[Examples]) -> Examples:
    """Clients' examples, concatenated."""
    return Examples(torch.cat([e.values for e in each]), torch.cat([e.labels for e in each]))
