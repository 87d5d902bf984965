"""Optimisers of local training: torch's own update rules, fresh for every client and stage.

The fused kernels go through memory once where others go five times. They are called by torch's
functional forms, since making a ``torch.optim.Optimizer`` imports the compiler (seconds, once a
process), and since a functional step works on one client's tensors and on a stack of clients'
alike.
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
    """Moves its leaves, in place, by their gradients."""

    def step(self) -> None:
        """One update; a leaf without gradient stays as it is."""

    def state(self) -> list[Tensor]:
        """What it keeps from step to step."""


def optimiser(plan: Plan, leaves: Sequence[Tensor], lr: float) -> Optimiser:
    """The optimiser that a plan names, with empty state."""
    return Adam(plan, leaves, lr) if plan.optimiser == "adam" else Sgd(plan, leaves, lr)


class Sgd:
    """Stochastic gradient descent with momentum and weight decay, as
    ``torch.optim.SGD(fused=True)``.
    """

    def __init__(self, plan: Plan, leaves: Sequence[Tensor], lr: float) -> None:
        self.plan, self.leaves, self.lr = plan, list(leaves), lr
        self.momentum: list[Tensor | None] = [None] * len(self.leaves)

    def state(self) -> list[Tensor]:
        """The momentum of leaves that have been moved."""
        return [v for v in self.momentum if v is not None]

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        active = [i for i, leaf in enumerate(self.leaves) if leaf.grad is not None]
        begun = [i for i in active if self.momentum[i] is not None]
        # the kernel takes them apart
        for some in (begun, [i for i in active if self.momentum[i] is None]):
            if not some:
                continue
            buffers = [self.momentum[i] for i in some]
            sgd(
                [self.leaves[i] for i in some],
                [_gradient(self.leaves[i]) for i in some],
                buffers,
                fused=True,
                weight_decay=self.plan.weight_decay,
                momentum=self.plan.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            for i, buffer in zip(some, buffers, strict=True):
                self.momentum[i] = buffer


class Adam:
    """Adam with torch's defaults (0.9, 0.999, 1e-8) and L2 weight decay, as
    ``torch.optim.Adam(fused=True)``.
    """

    def __init__(self, plan: Plan, leaves: Sequence[Tensor], lr: float) -> None:
        self.plan, self.leaves, self.lr = plan, list(leaves), lr
        self.first = [torch.zeros_like(leaf) for leaf in self.leaves]
        self.second = [torch.zeros_like(leaf) for leaf in self.leaves]
        self.steps = [torch.zeros((), device=leaf.device) for leaf in self.leaves]

    def state(self) -> list[Tensor]:
        """Means, mean squares and counts."""
        return [*self.first, *self.second, *self.steps]

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        active = [i for i, leaf in enumerate(self.leaves) if leaf.grad is not None]
        adam(
            [self.leaves[i] for i in active],
            [_gradient(self.leaves[i]) for i in active],
            [self.first[i] for i in active],
            [self.second[i] for i in active],
            [],
            [self.steps[i] for i in active],
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
    """A leaf's gradient in the leaf's order of memory: the fused kernels go through both from end
    to end.
    """
    assert leaf.grad is not None
    return (
        leaf.grad
        if leaf.grad.stride() == leaf.stride()
        else torch.empty_like(leaf).copy_(leaf.grad)
    )
