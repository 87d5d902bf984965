"""Clients of one structure stacked: every tensor has a leading client axis, and an objective runs under ``vmap``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedstill import trees
from fedstill.engines.alone import How, chosen, draw, many_passes, moved, outputs
from fedstill.engines.order import Timetable
from fedstill.engines.step import Batch
from fedstill.keys import resident
from fedstill.models import contract
from fedstill.models.stacked import stacked
from fedstill.records import Carry, Examples, ModelSpec, Tensors, View

T = TypeVar("T")


class Stack:
    """K clients with examples: their data lie one below another, short batches are padded with their own first."""

    now = None  # teachers run under vmap, each client's own

    def __init__(self, carries: Sequence[Carry], views: Sequence[View], how: How) -> None:
        self.view, self.how, self.size = views[0], how, len(views)
        each = chosen(carries, views, how.stage)
        self.device = each[0].images.device
        parts, dims = _stacked([(c.params, c.teachers, c.trace, c.constants) for c in carries])
        self._carry, self._dims = moved(parts, self.device), dims
        # What trains has an axis of its own for every client, even where all start from the same tensors.
        self.params = {k: v.detach().to(self.device) for k, v in trees.stack([c.params for c in carries]).items()}
        self.trace: Tensors = {k: v.to(self.device) for k, v in trees.stack([c.trace for c in carries]).items()}
        self.sizes = [len(e) for e in each]
        self.common = all(e is each[0] for e in each)  # public data, in memory once
        self.examples = each[0] if self.common else _below(each)
        plain = not how.inputs.steps
        self.orders = [draw(v.client, how, "order") for v in views]
        self.pixels = [] if plain else [draw(v.client, how, "pixels") for v in views]
        self.still = Examples(how.inputs.plain(self.examples.images), self.examples.labels) if plain else None
        for teacher in carries[0].teachers.values():  # made here: initial weights cannot be drawn under vmap
            contract.module(teacher[0] if isinstance(teacher, tuple) else self.view.model, "frozen")
        self._often = all(many_passes(how.plan, e) for e in each)
        self._tables: dict[tuple[str, str], Tensor] = {}

    def module(self) -> nn.Module:
        """What their parameters run in, under ``vmap``."""
        return stacked(contract.module(self.view.model, "stacked"))

    def batches(self) -> Iterator[Batch]:
        """The clients' batches side by side, each client's in its own order; a short one ends before the others."""
        if not (self.how.plan.epochs or self.how.plan.steps):
            return
        table = Timetable.of(self.sizes, self.how.plan, self.orders)
        sizes, epoch, running = table.sizes, table.epoch, table.sizes > 0
        first = torch.cat([torch.ones(1, self.size, dtype=torch.bool), epoch[1:] > epoch[:-1]])
        offsets = torch.tensor([0, *self.sizes[:-1]]).cumsum(0)
        width = table.index.shape[2]
        real = torch.arange(width) < torch.where(running, sizes, width).unsqueeze(2)
        rows = table.index + offsets.view(1, -1, 1)
        there = [resident(v, self.device) for v in (table.index, rows, real.float(), epoch, sizes, first, running)]
        counts, ends, whole = sizes.tolist(), table.ends.tolist(), running.all(1).tolist()
        for t, (at, r, mask, ages, n, begins, still) in enumerate(zip(*there, strict=True)):
            over = tuple(k for k, end in enumerate(ends[t]) if end)
            yield Batch(at, r, mask, ages, n, begins, tuple(counts[t]), table.done, over, None if whole[t] else still)

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Inputs (K, B, channels, H, W) and labels (K, B) of a batch; every client draws for its own real examples."""
        where = batch.index if self.common else batch.rows
        some = (self.examples if self.still is None else self.still).take(where.flatten())
        images, labels = (v.view(*where.shape, *v.shape[1:]) for v in (some.images, some.labels))
        return images if self.still is not None else self._augmented(images, batch.counts), labels

    def tables(self, name: str, what: str) -> Tensor | None:
        """A teacher's outputs for all clients' data, one below another, where inputs are the same in every epoch."""
        if self.still is None or not self._often:
            return None
        if (name, what) not in self._tables:
            self._tables[name, what] = self._run_teacher(name, what, self.still)
        return self._tables[name, what]

    def each(self, run: Callable[..., T], *values: Any) -> T:
        """``run`` for every client at once, with what it started with and its part of these values."""

        def one(carry: tuple[Any, ...], *own: Any) -> T:
            return run(Carry(*carry), *own)

        if _shared(self._dims):
            return torch.func.vmap(functools.partial(one, self._carry))(*values)
        return torch.func.vmap(one, in_dims=(self._dims, *(0 for _ in values)))(self._carry, *values)

    def clip(self, leaves: Mapping[str, Tensor], norm: float) -> None:
        """Scale each client's gradients if their norm, over all leaves, is above ``norm``."""
        grads = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
        if not grads:
            return
        total = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads]).norm(dim=0)  # (K,)
        factor = (norm / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1)))

    def copies(self, tree: Tensors) -> list[dict[str, Tensor]]:
        """Copies of each client's tensors in the CPU's memory that share nothing."""
        there = {k: v.detach().contiguous() for k, v in trees.on_cpu(tree).items()}
        each = [torch.unbind_copy(v) for v in there.values()]  # type: ignore[func-returns-value]  # torch's stub
        return [dict(zip(there, own, strict=True)) for own in zip(*each, strict=True)] or [{} for _ in self.sizes]

    def _augmented(self, stored: Tensor, counts: Sequence[int]) -> Tensor:
        out = []
        for k, (images, n) in enumerate(zip(stored, counts, strict=True)):
            x = self.how.inputs.trained_on(images[:n], self.pixels[k]) if n else self.how.inputs.plain(images)
            out.append(torch.cat([x, x[:1].expand(len(images) - len(x), *x.shape[1:])]))
        return torch.stack(out)

    def _run_teacher(self, name: str, what: str, still: Examples) -> Tensor:
        teacher, dims = self._carry[1][name], self._dims[1][name]
        if _shared(dims):
            once = outputs(teacher, what, still, self.view.model, self.how)
            return once.repeat(self.size, 1) if self.common else once
        parts = [still] * self.size
        if not self.common:
            ends = torch.tensor(self.sizes).cumsum(0).tolist()
            spans = [slice(end - n, end) for end, n in zip(ends, self.sizes, strict=True)]
            parts = [Examples(still.images[s], still.labels[s]) for s in spans]
        own = [_own(teacher, dims, k) for k in range(self.size)]
        return torch.cat([outputs(t, what, p, self.view.model, self.how) for t, p in zip(own, parts, strict=True)])


def _below(each: Sequence[Examples]) -> Examples:
    """Clients' examples, one client's below the other's."""
    return Examples(torch.cat([e.images for e in each]), torch.cat([e.labels for e in each]))


class Structures:
    """What clients must share to be stacked: equal for two clients if their tensors fit on each other.

    What was sent to many is looked at once. It lives no longer than what it was asked about, which it knows by id.
    """

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def of(self, carry: Carry, view: View) -> Any:
        """A client's."""
        parts = (carry.params, carry.teachers, carry.trace, carry.constants, carry.only)
        return view.model, *map(self._of, parts)

    def _of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.shape, value.dtype
        if isinstance(value, Mapping):
            if id(value) not in self._known:
                self._known[id(value)] = tuple((k, self._of(value[k])) for k in sorted(value))
            return self._known[id(value)]
        if isinstance(value, tuple):
            return tuple(map(self._of, value))
        if isinstance(value, (bool, int, float)):
            return type(value)
        return value if isinstance(value, (str, ModelSpec, type(None))) else id(value)


def _stacked(values: Sequence[Any]) -> tuple[Any, Any]:
    """Values of one structure as one, and which axis of each of its tensors is the clients': 0, or None if shared."""
    first = values[0]
    if all(v is first for v in values) and not isinstance(first, (Mapping, tuple)):
        return first, None
    if isinstance(first, Tensor):
        return torch.stack([v.detach() for v in values]), 0
    if isinstance(first, Mapping):
        pairs = {k: _stacked([v[k] for v in values]) for k in first}
        return {k: v for k, (v, _) in pairs.items()}, {k: d for k, (_, d) in pairs.items()}
    if isinstance(first, tuple):
        both = [_stacked(each) for each in zip(*values, strict=True)]
        return tuple(v for v, _ in both), tuple(d for _, d in both)
    if all(v == first for v in values):
        return first, None
    return torch.tensor(values, dtype=torch.float64 if isinstance(first, float) else None), 0


def _shared(dims: Any) -> bool:
    if isinstance(dims, (Mapping, tuple)):
        return all(map(_shared, dims.values() if isinstance(dims, Mapping) else dims))
    return dims is None


def _own(value: Any, dims: Any, k: int) -> Any:
    """One client's part of a stacked value."""
    if isinstance(dims, Mapping):
        return {name: _own(value[name], d, k) for name, d in dims.items()}
    if isinstance(dims, tuple):
        return tuple(_own(v, d, k) for v, d in zip(value, dims, strict=True))
    return value if dims is None else value[k]
