"""Optimisers of local training: torch's own update rules, with an empty state for every client and
stage.

They call torch's fused kernels, which read and write each tensor once per step instead of about
five times. They use the functional form for two reasons: constructing a ``torch.optim.Optimizer``
imports torch's compiler, which takes seconds in every process, and a functional step works for one
client and for a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedstill.core.records import Plan


class Optimiser(Protocol):
    """Updates its leaves in place by their gradients."""

    def step(self) -> None:
        """Update the leaves; a leaf without a gradient does not change."""

    def state(self) -> list[Tensor]:
        """The tensors that persist between steps."""


def optimiser(plan: Plan, leaves: Sequence[Tensor], lr: float) -> Optimiser:
    """The optimiser of a plan."""
    if plan.optimiser == "adam":
        return Adam(plan, leaves, lr)
    return Sgd(plan, leaves, lr)


class Sgd:
    """Stochastic gradient descent with momentum and weight decay, as
    ``torch.optim.SGD(fused=True)``.
    """

    def __init__(self, plan: Plan, leaves: Sequence[Tensor], lr: float) -> None:
        self.plan = plan
        self.leaves = list(leaves)
        self.lr = lr
        self.momentum: list[Tensor | None] = [None] * len(self.leaves)

    def state(self) -> list[Tensor]:
        """The momentum of the leaves that have been updated."""
        return [momentum for momentum in self.momentum if momentum is not None]

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        with_momentum = []
        without_momentum = []
        for i, leaf in enumerate(self.leaves):
            if leaf.grad is None:
                continue
            if self.momentum[i] is None:
                without_momentum.append(i)
            else:
                with_momentum.append(i)

        # A fused call needs leaves that all have momentum, or all have no momentum yet.
        self._update(with_momentum)
        self._update(without_momentum)

    def _update(self, indices: Sequence[int]) -> None:
        """Update the leaves at these indices in the list of leaves."""
        if not indices:
            return
        momentum = [self.momentum[i] for i in indices]
        sgd(
            [self.leaves[i] for i in indices],
            [_gradient(self.leaves[i]) for i in indices],
            momentum,
            fused=True,
            weight_decay=self.plan.weight_decay,
            momentum=self.plan.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        # For leaves without momentum, the call has put new tensors into the list.
        for i, updated in zip(indices, momentum, strict=True):
            self.momentum[i] = updated


class Adam:
    """Adam with torch's defaults (0.9, 0.999, 1e-8) and L2 weight decay, as
    ``torch.optim.Adam(fused=True)``.
    """

    def __init__(self, plan: Plan, leaves: Sequence[Tensor], lr: float) -> None:
        self.plan = plan
        self.leaves = list(leaves)
        self.lr = lr
        self.means = [torch.zeros_like(leaf) for leaf in self.leaves]
        self.mean_squares = [torch.zeros_like(leaf) for leaf in self.leaves]
        self.steps = [torch.zeros((), device=leaf.device) for leaf in self.leaves]

    def state(self) -> list[Tensor]:
        """Running means of gradients and of their squares, and the numbers of steps."""
        return [*self.means, *self.mean_squares, *self.steps]

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        active = [i for i, leaf in enumerate(self.leaves) if leaf.grad is not None]
        adam(
            params=[self.leaves[i] for i in active],
            grads=[_gradient(self.leaves[i]) for i in active],
            exp_avgs=[self.means[i] for i in active],
            exp_avg_sqs=[self.mean_squares[i] for i in active],
            max_exp_avg_sqs=[],
            state_steps=[self.steps[i] for i in active],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.lr,
            weight_decay=self.plan.weight_decay,
            eps=1e-8,
            maximize=False,
        )


def _gradient(leaf: Tensor) -> Tensor:
    """A leaf's gradient in the leaf's memory order, which fused kernels require."""
    assert leaf.grad is not None
    if leaf.grad.stride() == leaf.stride():
        return leaf.grad
    return torch.empty_like(leaf).copy_(leaf.grad)
