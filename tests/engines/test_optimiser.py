"""Our optimisers move parameters as torch.optim's do, whatever order gradients lie in, and whenever
they come.
"""

from __future__ import annotations

import pytest
import torch

from fedstill.core.records import Plan
from fedstill.engines.optimiser import optimiser

PLANS = {
    "sgd": Plan(lr=0.1),
    "momentum": Plan(lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": Plan(optimiser="adam", lr=0.1, weight_decay=0.01),
}


def theirs(plan: Plan, leaves: list[torch.Tensor]) -> torch.optim.Optimizer:
    if plan.optimiser == "adam":
        return torch.optim.Adam(leaves, lr=plan.lr, weight_decay=plan.weight_decay, foreach=False)
    return torch.optim.SGD(
        leaves, lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay, foreach=False
    )


@pytest.mark.parametrize("name", PLANS)
def test_four_steps_are_torchs(name: str) -> None:
    draw = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    starts = [
        some(7, 5),
        some(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        some(6),
        some(3),
    ]
    ours, plain = ([v.clone().requires_grad_() for v in starts] for _ in range(2))
    one, other = optimiser(PLANS[name], ours, PLANS[name].lr), theirs(PLANS[name], plain)
    for step in range(4):
        grads = [some(5, 7).T, some(4, 3, 2, 2), some(6) if step else None, None]
        for own, leaf, grad in zip(ours, plain, grads, strict=True):
            own.grad, leaf.grad = grad, None if grad is None else grad.clone()
        one.step()
        other.step()
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    assert torch.equal(ours[3], starts[3]), "a leaf without gradient stays as it is"
