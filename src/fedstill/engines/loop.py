"""The one local training loop: an objective, a plan and a start in; trained parameters out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedstill import trees
from fedstill.data.inputs import Inputs, layout
from fedstill.engines.optimiser import optimiser
from fedstill.engines.passes import ModelPasses
from fedstill.keys import generator, seed_for
from fedstill.models import contract
from fedstill.records import Carry, Examples, ModelSpec, Plan, Ran, Stage, Tensors, View
from fedstill.work import ClientWork


@dataclass(frozen=True)
class Trained:
    """What training gave: parameters and buffers, what ran, and the mean of each objective term in the last epoch."""

    params: Tensors
    ran: Ran
    losses: Mapping[str, float]
    epochs: int = 0


def train(work: ClientWork, carry: Carry, plan: Plan, stage: Stage, view: View, inputs: Inputs, seed: int) -> Trained:
    """Train one client for one stage. A pure function of its arguments: every draw comes from the run's seed by key."""
    dropout = contract.draws_random_numbers(view.model)
    with torch.random.fork_rng(devices=[], enabled=dropout):
        if dropout:
            torch.manual_seed(seed_for(seed, stage.round, stage.index, view.client, "dropout"))
        return _Training(work, carry, plan, stage, view, inputs, seed).run()


class _Training:
    def __init__(
        self, work: ClientWork, carry: Carry, plan: Plan, stage: Stage, view: View, inputs: Inputs, seed: int
    ) -> None:
        self.work, self.plan, self.view, self.inputs = work, plan, view, inputs
        self.examples = view.public if stage.view == "public" and view.public is not None else view.data
        self.device = self.examples.images.device
        carry = replace(
            carry, teachers=moved(carry.teachers, self.device), constants=moved(carry.constants, self.device)
        )
        self.carry = carry
        self.params = {k: layout(v.detach().to(self.device, copy=True)) for k, v in carry.params.items()}
        names = contract.trainable_names(view.model)
        self.leaves = {k: v for k, v in self.params.items() if k in names and work.trainable(k)}
        for leaf in self.leaves.values():
            leaf.requires_grad_()
        self.lr = plan.lr_at(stage.round)
        self.optimiser = optimiser(plan, list(self.leaves.values()), self.lr)
        self.module = _in_training_mode(contract.module(view.model), plan)
        self.trace = {k: v.to(self.device, copy=True) for k, v in carry.trace.items()}
        self.draw = {
            p: generator(seed_for(seed, stage.round, stage.index, view.client, p)) for p in ("order", "pixels")
        }
        self.settles = type(work).settle is not ClientWork.settle
        self.adjusts = type(work).adjust is not ClientWork.adjust
        self.still = Examples(inputs.plain(self.examples.images), self.examples.labels) if not inputs.steps else None
        self.teachers = _Teachers(carry, view.model, inputs, self.still if self._many_passes() else None)

    def _many_passes(self) -> bool:
        return self.plan.steps == 0 or self.plan.steps * self.plan.batch >= len(self.examples)

    def run(self) -> Trained:
        steps, epochs, sums, best = 0, 0, _Sums(), _Best(self.plan)
        for epoch, batches in enumerate(_epochs(len(self.examples), self.plan, self.draw["order"], self.device)):
            sums = _Sums()
            for index in batches:
                self._step(index, epoch, sums)
                steps += 1
            epochs = epoch + 1
            if self.plan.validation > 0 and best.seen(self.work.score(self.params, self.view), self.params):
                break
        params = best.params if best.params and self.plan.keep == "best" else self.params
        ran = Ran(steps, self.lr, trees.clone(trees.on_cpu(self.trace)))
        return Trained(trees.clone(trees.on_cpu(params)), ran, sums.means(), epochs)

    def _step(self, index: Tensor, epoch: int, sums: _Sums) -> None:
        step = _Batch(self, index, epoch)
        terms = self.work.terms(step, self.carry)
        reduced = {k: step.mean(v) if v.dim() else v for k, v in terms.items()}
        loss = torch.stack([v.float() if v.dtype != torch.float64 else v for v in reduced.values()]).sum()
        for leaf in self.leaves.values():
            leaf.grad = None
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        self._move()
        sums.add(reduced, len(index))

    def _move(self) -> None:
        if self.adjusts:
            grads = self.work.adjust(self._grads(), self.carry)
            for name, leaf in self.leaves.items():
                leaf.grad = grads[name].to(leaf.dtype)
        if self.plan.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.leaves.values(), self.plan.clip_norm)
        if not self.settles:
            self.optimiser.step()
            return
        before, grads = trees.clone(self.leaves), self._grads()
        self.optimiser.step()
        with torch.no_grad():
            after, self.trace = self.work.settle(before, grads, trees.clone(self.leaves), self.trace, self.carry)  # type: ignore[assignment]
            for name, leaf in self.leaves.items():
                leaf.copy_(after[name])

    def _grads(self) -> dict[str, Tensor]:
        return {k: torch.zeros_like(v) if v.grad is None else v.grad.detach().clone() for k, v in self.leaves.items()}

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at some positions."""
        y = self.examples.labels[index]
        if self.still is not None:
            return layout(self.still.images[index]), y
        return layout(self.inputs.trained_on(self.examples.images[index], self.draw["pixels"])), y


class _Batch:
    """A batch as an objective sees it (see records.Step): forward passes are made once, when first asked for."""

    def __init__(self, training: _Training, index: Tensor, epoch: int) -> None:
        self._t, self.index, self.epoch = training, index, epoch
        self.x, self.y = training.batch(index)
        self.mask = torch.ones(len(index), device=index.device)
        self.params: Tensors = training.params
        self._logits: Tensor | None = None
        self._features: Tensor | None = None

    def logits(self) -> Tensor:
        if self._logits is None:
            m = self._t.module
            if self._features is not None:
                self._logits = contract.head(m, self.params, self._features)
            else:
                self._logits = contract.forward(m, self.params, self.x)
        return self._logits

    def features(self) -> Tensor:
        if self._features is None:
            self._features = contract.features(self._t.module, self.params, self.x)
            self._logits = contract.head(self._t.module, self.params, self._features)
        return self._features

    def teacher(self, name: str) -> Tensor:
        return self._t.teachers.of(name, "logits", self.x, self.index)

    def teacher_features(self, name: str) -> Tensor:
        return self._t.teachers.of(name, "features", self.x, self.index)

    def mean(self, values: Tensor) -> Tensor:
        return values.mean()

    def share(self, raw: Tensor) -> Tensor:
        return raw / raw.sum()


@dataclass
class _Teachers:
    """Frozen teachers: where inputs are the same in every epoch their outputs are computed once, and looked up."""

    carry: Carry
    model: ModelSpec
    inputs: Inputs
    still: Examples | None
    _known: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def of(self, name: str, what: str, x: Tensor, index: Tensor) -> Tensor:
        """Logits or features of a teacher for one batch."""
        teacher = self.carry.teachers[name]
        spec, params = teacher if isinstance(teacher, tuple) else (self.model, teacher)
        if self.still is None:
            run = contract.forward if what == "logits" else contract.features
            with torch.no_grad():
                return run(contract.module(spec, "frozen").eval(), params, x)
        if (name, what) not in self._known:
            passes = ModelPasses(spec, self.inputs)
            self._known[name, what] = (passes.logits if what == "logits" else passes.features)(params, self.still)
        return self._known[name, what][index]


@dataclass
class _Best:
    """The best epoch so far, and how long ago it was."""

    plan: Plan
    score: float = float("-inf")
    params: dict[str, Tensor] = field(default_factory=dict)
    stale: int = 0

    def seen(self, score: float, params: Tensors) -> bool:
        """Take an epoch's score; True if training shall stop."""
        if score > self.score:
            self.score, self.params, self.stale = score, trees.clone(params), 0
        else:
            self.stale += 1
        return 0 < self.plan.patience <= self.stale


class _Sums:
    """Running sums of the objective's terms, kept as tensors so that no step waits for a number."""

    def __init__(self) -> None:
        self.terms: dict[str, Tensor] = {}
        self.count = 0

    def add(self, terms: Mapping[str, Tensor], examples: int) -> None:
        for name, value in terms.items():
            more = value.detach() * examples
            self.terms[name] = self.terms[name] + more if name in self.terms else more
        self.count += examples

    def means(self) -> dict[str, float]:
        return {k: float(v / self.count) for k, v in self.terms.items()}


def moved(value: Any, device: torch.device) -> Any:
    """Tensors on a device, through mappings and pairs; everything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: moved(v, device) for k, v in value.items()}
    return tuple(moved(v, device) for v in value) if isinstance(value, tuple) else value


def _epochs(n: int, plan: Plan, draw: torch.Generator, device: torch.device) -> Iterator[list[Tensor]]:
    """Batches of positions, epoch by epoch; ``plan.steps`` batches in all if that is set. The last batch is kept."""
    if n == 0:
        return
    left = plan.steps
    epochs = plan.epochs if not left else -(-left // -(-n // plan.batch))
    for _ in range(epochs):
        order = torch.randperm(n, generator=draw) if plan.shuffle else torch.arange(n)
        batches = list(torch.split(order.to(device), plan.batch))
        yield batches[:left] if plan.steps else batches
        left -= len(batches)


def _in_training_mode(m: nn.Module, plan: Plan) -> nn.Module:
    m.train()
    if plan.norm == "frozen":
        for layer in m.modules():
            if isinstance(layer, contract.NORMS):
                layer.eval()
    return m
