"""Optimisers of local training: torch's own update rules, fresh for every client and stage.

torch's functional forms are called because making a ``torch.optim.Optimizer`` imports the compiler (seconds, once a
process), and because a functional step works on one client's tensors and on a stack of clients' alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedstill.records import Plan


class Optimiser(Protocol):
    """Moves its leaves, in place, by their gradients."""

    def step(self) -> None:
        """One update; a leaf without gradient stays as it is."""


def optimiser(plan: Plan, leaves: Sequence[Tensor], lr: float) -> Optimiser:
    """The optimiser that a plan names, with empty state."""
    return Adam(plan, leaves, lr) if plan.optimiser == "adam" else Sgd(plan, leaves, lr)


class Sgd:
    """Stochastic gradient descent with momentum and weight decay, as ``torch.optim.SGD``."""

    def __init__(self, plan: Plan, leaves: Sequence[Tensor], lr: float) -> None:
        self.plan, self.leaves, self.lr = plan, list(leaves), lr
        self.momentum: list[Tensor | None] = [None] * len(self.leaves)

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        active = [i for i, leaf in enumerate(self.leaves) if leaf.grad is not None]
        buffers = [self.momentum[i] for i in active]
        sgd(
            [self.leaves[i] for i in active],
            [g for i in active if (g := self.leaves[i].grad) is not None],
            buffers,
            foreach=False,
            fused=bool(active) and self.leaves[0].is_cuda,
            weight_decay=self.plan.weight_decay,
            momentum=self.plan.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for i, buffer in zip(active, buffers, strict=True):
            self.momentum[i] = buffer


class Adam:
    """Adam with torch's defaults (0.9, 0.999, 1e-8) and L2 weight decay, as ``torch.optim.Adam``."""

    def __init__(self, plan: Plan, leaves: Sequence[Tensor], lr: float) -> None:
        self.plan, self.leaves, self.lr = plan, list(leaves), lr
        self.first = [torch.zeros_like(leaf) for leaf in self.leaves]
        self.second = [torch.zeros_like(leaf) for leaf in self.leaves]
        self.steps = [torch.zeros(()) for _ in self.leaves]

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        active = [i for i, leaf in enumerate(self.leaves) if leaf.grad is not None]
        adam(
            [self.leaves[i] for i in active],
            [g for i in active if (g := self.leaves[i].grad) is not None],
            [self.first[i] for i in active],
            [self.second[i] for i in active],
            [],
            [self.steps[i] for i in active],
            foreach=False,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.lr,
            weight_decay=self.plan.weight_decay,
            eps=1e-8,
            maximize=False,
        )
