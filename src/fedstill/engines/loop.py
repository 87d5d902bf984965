"""The one local training loop, of a client or a stack of them: objective, plan and start in,
trained parameters out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedstill.core import trees
from fedstill.core.keys import drawing_from, seed_for
from fedstill.core.records import Plan, Stage, Step, Tensors, TrainingResult, TrainingStart, View
from fedstill.core.user_code import bad_return
from fedstill.core.work import ClientWork
from fedstill.data.inputs import Inputs
from fedstill.engines.batches import LoneClient
from fedstill.engines.cuda_graphs import Recorder, is_wanted, on_own_stream, whole_batches
from fedstill.engines.optimiser import optimiser
from fedstill.engines.precision import Precision, products
from fedstill.engines.stack import Stack
from fedstill.engines.step import Batch, Networks, Seen
from fedstill.engines.training_setup import (
    How,
    as_carried,
    scores_count,
    stage_examples,
    stage_generator,
)
from fedstill.engines.user_functions import terms_of
from fedstill.models import contract
from fedstill.models.contract import draws_random_numbers, freeze_norms
from fedstill.privacy.private_training import Private, example_gradients, noised_mean

# What training keeps account of: the best epoch so far, and the sums of an objective's terms.


@dataclass
class BestEpoch:
    """The best epoch so far, and how long ago it was."""

    plan: Plan
    score: float = float("-inf")
    params: dict[str, Tensor] = field(default_factory=dict)
    stale: int = 0
    scores: list[float] = field(default_factory=list)

    @property
    def asked(self) -> bool:
        """Whether the plan does anything with a score: it is not computed for nothing."""
        return scores_count(self.plan)

    def seen(self, score: float | None, params: Tensors) -> bool:
        """Take an epoch's score, None where there is nothing to score by; True if training should
        stop.
        """
        if score is None:
            return False
        self.scores.append(score)
        if score > self.score:
            self.score, self.params, self.stale = score, trees.clone(params), 0
        else:
            self.stale += 1
        return 0 < self.plan.patience <= self.stale


class RunningSums:
    """Running sums of the objective's terms in an epoch, kept as tensors so that no step waits for
    a number.
    """

    def __init__(self) -> None:
        self.terms: dict[str, Tensor] = {}
        self.counts: int | Tensor = 0

    def add(self, terms: Mapping[str, Tensor], batch: Batch) -> None:
        """Add a step's terms; those of an epoch before are dropped."""
        more = {k: v.detach() * batch.sizes for k, v in terms.items()}
        if isinstance(batch.first, Tensor):
            zero = torch.zeros((), device=batch.first.device)
            old = {k: torch.where(batch.first, zero.to(v.dtype), v) for k, v in self.terms.items()}
            self.counts = torch.where(batch.first, 0, self.counts) + batch.sizes
        else:
            old = {} if batch.first else self.terms
            self.counts = batch.sizes if batch.first else self.counts + batch.sizes
        self.terms = {k: old[k] + v if k in old else v for k, v in more.items()}

    def means(self, clients: int) -> list[dict[str, float]]:
        """The mean of each term over the examples of the last epoch, for each client."""
        by_term = {k: (v / self.counts).reshape(-1).tolist() for k, v in self.terms.items()}
        return [{k: v[i] for k, v in by_term.items()} for i in range(clients)]


# The gradient of an objective, and where it is taken: at the parameters in training, or where a
# method looks ahead.


def backward(terms: Mapping[str, Tensor], leaves: Tensors) -> bool:
    """Give leaves the gradient of the sum of all terms; one on which no term depends has none.

    False if no term depends on anything that is trained.
    """
    parts = [v if v.dtype == torch.float64 else v.float() for v in terms.values()]
    for leaf in leaves.values():
        leaf.grad = None
    if not parts:
        return False
    loss = (parts[0] if len(parts) == 1 else torch.stack(parts)).sum()
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.requires_grad


def gradients(leaves: Tensors) -> dict[str, Tensor]:
    """Copies of the leaves' gradients; zeros where one has none."""
    return {
        k: torch.zeros_like(v) if v.grad is None else v.grad.detach().clone()
        for k, v in leaves.items()
    }


def looked_ahead(
    work: ClientWork,
    clients: LoneClient | Stack,
    params: Tensors,
    leaves: Tensors,
    first: Callable[..., dict[str, Tensor]] | None,
    of: tuple[Any, ...],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All parameters at the point that ``perturb`` gives, and those of them that are trained,
    which are new leaves.

    first: the objective of the first pass over a batch, ``of``; None: there is none, and the
    gradient is zero. After a first pass the other entries are copies: a batch's statistics are
    taken up once.
    """
    rest = {k: v for k, v in params.items() if k not in leaves}
    backward({} if first is None else clients.each(first, params, *of), leaves)
    if first is not None:
        rest = {k: v.clone() for k, v in rest.items()}
    here = {k: v.detach() for k, v in leaves.items()}
    point = clients.each(lambda start, w, g: work.perturb(w, g, start), here, gradients(leaves))
    there = {k: point[k].detach().to(v.dtype).requires_grad_() for k, v in leaves.items()}
    return {**params, **rest, **there}, there


@dataclass(frozen=True)
class Trained:
    """What training gave: parameters and buffers, what ran, the mean of each objective term in the
    last epoch.

    ``scores``: one for each epoch, where the plan asks for them. ``by_epoch``: the parameters after
    each epoch, where they are to be measured.
    """

    params: Tensors
    ran: TrainingResult
    losses: Mapping[str, float]
    epochs: int = 0
    scores: tuple[float, ...] = ()
    by_epoch: tuple[Tensors, ...] = ()


def train(
    work: ClientWork,
    start: TrainingStart,
    plan: Plan,
    stage: Stage,
    view: View,
    inputs: Inputs,
    seed: int,
    precision: Precision = "fp32",
    by_epoch: bool = False,
    lr_round: int | None = None,
    private: Private | None = None,
) -> Trained:
    """Train one client for one stage. A pure function of its arguments: every draw comes from the
    run's seed by key.
    """
    view, inputs = as_carried(start, view, inputs)
    draws = seed_for(seed, stage.round, stage.index, view.client, "dropout")
    device = stage_examples(view, stage).labels.device
    drawing = drawing_from(draws) if draws_random_numbers(view.model) else nullcontext()
    with on_own_stream(device), products(precision, device), drawing:
        how = How(plan, stage, inputs, seed, precision, by_epoch, lr_round, private)
        with closing(_Training(work, LoneClient(start, view, how))) as training:
            return training.run()[0]


def train_stack(
    work: ClientWork, carries: Sequence[TrainingStart], views: Sequence[View], how: How
) -> list[Trained]:
    """Train several clients of one structure (``Structures``) at once, up to rounding as ``train``
    does each.
    """
    with products(how.precision, stage_examples(views[0], how.stage).labels.device):
        return _Training(work, Stack(carries, views, how)).run()


DETACHED = (
    "gives terms that do not depend on what is trained, so nothing would be: is a tensor detached, "
    "made with .item() "
    "or NumPy, or under torch.no_grad()?"
)


class _Training:
    def __init__(self, work: ClientWork, clients: LoneClient | Stack) -> None:
        self.work, self.clients, self.plan = work, clients, clients.how.plan
        spec = clients.view.model
        names = contract.trainable_names(spec)
        self.params, self.trace = clients.params, clients.trace
        self.leaves = {k: v for k, v in self.params.items() if k in names and work.trainable(k)}
        for leaf in self.leaves.values():
            leaf.requires_grad_()
        self.lr = clients.how.lr
        self.optimiser = optimiser(self.plan, list(self.leaves.values()), self.lr)
        module = _in_training_mode(clients.module(), self.plan)
        self.private = clients.how.private
        self.noise = stage_generator(clients.view.client, clients.how, "noise")
        now = None if self.private else clients.now  # of single examples, teachers run under vmap
        if self.private and isinstance(clients, LoneClient):
            clients.make_teachers()
        self.networks = Networks(
            spec, module, clients.tables, clients.how.precision, clients.device, now
        )
        self.sums = RunningSums()
        self.kept: dict[int, list[Tensors]] = {}
        self.settles = type(work).after_step is not ClientWork.after_step
        self.adjusts = type(work).adjust_gradients is not ClientWork.adjust_gradients
        self.looks = type(work).perturb is not ClientWork.perturb
        self.ascends = type(work).ascent_terms is not ClientWork.ascent_terms
        self.recorder = self._recorder()

    def run(self) -> list[Trained]:
        best, batch = BestEpoch(self.plan), None
        for batch in self.clients.batches():
            self.step(batch)
            self.keep(batch)
            if (
                batch.ends
                and best.asked
                and best.seen(
                    self.work.validation_score(self.params, self.clients.view), self.params
                )
            ):
                break
        params = best.params if best.params and self.plan.keep == "best" else self.params
        split = [self.clients.copies(tree) for tree in (params, self.trace)]
        done = batch.done if batch else [(0, 0)] * len(split[0])
        losses = self.sums.means(len(split[0]))
        return [
            Trained(
                params,
                TrainingResult(steps, self.lr, trace),
                terms,
                epochs,
                tuple(best.scores),
                tuple(self.kept.get(i, ())),
            )
            for i, (params, trace, terms, (steps, epochs)) in enumerate(
                zip(*split, losses, done, strict=True)
            )
        ]

    def close(self) -> None:
        """Let go of recordings: left to the collector of garbage, they would go while others
        record.
        """
        self.recorder = None

    def keep(self, batch: Batch) -> None:
        """Copy the parameters of clients whose epoch ends, if they are to be measured."""
        if self.clients.how.by_epoch and batch.ends:
            each = self.clients.copies(self.params)
            for i in batch.ends:
                self.kept.setdefault(i, []).append(each[i])

    def step(self, batch: Batch) -> None:
        """One step of every client that still trains; nothing here waits for a number from the
        device.
        """
        x, y = self.clients.inputs(batch)
        if self.private is not None:
            self._step_privately(batch, (x, y, batch.index, batch.rows), self.private)
            return
        of = (x, y, batch.index, batch.rows, batch.mask, batch.epoch)
        self.sums.add(self.recorder(of) if self.recorder else self._moved(of, batch.running), batch)

    def _recorder(self) -> Recorder | None:
        """What records one client's steps on a GPU; ``after_step`` makes a new trace in each."""
        clients, plan = self.clients, self.plan
        if (
            not isinstance(clients, LoneClient)
            or self.private
            or self.settles
            or not is_wanted(clients.device)
        ):
            return None
        steps = whole_batches(plan, len(clients.examples))
        changed = lambda: [*self.params.values(), *self.optimiser.state()]  # noqa: E731
        kind = (type(self.work), clients.view.model, plan, clients.how.precision)
        return Recorder(self._moved, changed, self.networks.asked, plan.batch, steps, kind)

    def _moved(self, of: tuple[Any, ...], running: Tensor | None = None) -> dict[str, Tensor]:
        """The terms at a batch; what is trained is moved by their gradient."""
        params, at = self.params, self.leaves
        if self.looks:
            first = partial(self._objective, self.work.ascent_terms) if self.ascends else None
            params, at = looked_ahead(self.work, self.clients, params, at, first, of)
        terms = self.clients.each(partial(self._objective, self.work.terms), params, *of)
        if not backward(terms, at) and self.leaves and not (self.adjusts or self.settles):
            raise bad_return(self.work.terms, DETACHED)
        for name, leaf in self.leaves.items():
            leaf.grad = at[name].grad
        if running is None:
            self._move()
        else:
            self._move_only(running)
        return terms

    def _step_privately(
        self, batch: Batch, seen: tuple[Tensor, Tensor, Tensor, Tensor], how: Private
    ) -> None:
        """One step of one client, on noised gradients."""

        def of_one(own: Tensors, *example: Tensor) -> dict[str, Tensor]:
            objective = partial(self._objective, self.work.terms)
            return self.clients.each(objective, {**self.params, **own}, *example, None, batch.epoch)

        grads, terms = (
            example_gradients(of_one, self.leaves, seen) if len(batch.index) else ({}, {})
        )
        size = min(self.plan.batch, len(self.clients.examples))
        for name, grad in noised_mean(grads, self.leaves, how, size, self.noise).items():
            self.leaves[name].grad = grad
        self._move()
        if terms:
            self.sums.add({k: v.mean() for k, v in terms.items()}, batch)

    def _objective(
        self,
        objective: Callable[[Step, TrainingStart], dict[str, Tensor]],
        start: TrainingStart,
        params: Tensors,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        rows: Tensor,
        mask: Tensor | None,
        epoch: int,
    ) -> dict[str, Tensor]:
        step = Seen(self.networks, start, params, x, y, index, rows, mask, epoch)
        terms = terms_of(objective, objective(step, start), len(y))
        return {k: step.mean(v) if v.dim() else v for k, v in terms.items()}

    def _move_only(self, running: Tensor) -> None:
        """Clients that have finished are put back: momentum and weight decay would move them on."""
        before, trace = trees.clone(self.leaves), self.trace
        self._move()
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.copy_(_chosen(running, leaf, before[name]))
            self.trace = {k: _chosen(running, v, trace[k]) for k, v in self.trace.items()}

    def _move(self) -> None:
        if self.adjusts:
            grads = self.clients.each(
                lambda start, g: self.work.adjust_gradients(g, start), gradients(self.leaves)
            )
            for name, leaf in self.leaves.items():
                leaf.grad = grads[name].to(leaf.dtype)
        if self.plan.clip_norm > 0:
            self.clients.clip(self.leaves, self.plan.clip_norm)
        if not self.settles:
            self.optimiser.step()
            return
        before, grads = trees.clone(self.leaves), gradients(self.leaves)
        self.optimiser.step()
        with torch.no_grad():
            after, self.trace = self.clients.each(
                lambda start, b, g, a, t: self.work.after_step(b, g, a, t, start),
                before,
                grads,
                trees.clone(self.leaves),
                self.trace,
            )
            for name, leaf in self.leaves.items():
                leaf.copy_(after[name])


def _chosen(running: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(running.view(-1, *[1] * (new.dim() - 1)), new, old)


def _in_training_mode(m: nn.Module, plan: Plan) -> nn.Module:
    m.train()
    if plan.norm == "frozen":
        freeze_norms(m)
    return m
