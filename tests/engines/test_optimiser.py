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


def torchs_optimiser(plan: Plan, leaves: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimiser of torch with the settings of a plan."""
    if plan.optimiser == "adam":
        return torch.optim.Adam(leaves, lr=plan.lr, weight_decay=plan.weight_decay, foreach=False)
    return torch.optim.SGD(
        leaves, lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay, foreach=False
    )


@pytest.mark.parametrize("name", PLANS)
def test_four_steps_are_torchs(name: str) -> None:
    """The third leaf has a gradient from the second step on, and the fourth never has one."""
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    image_like = normal(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    starts = [normal(7, 5), image_like, normal(6), normal(3)]
    leaves = [start.clone().requires_grad_() for start in starts]
    expected_leaves = [start.clone().requires_grad_() for start in starts]
    plan = PLANS[name]
    ours = optimiser(plan, leaves, plan.lr)
    theirs = torchs_optimiser(plan, expected_leaves)

    for step in range(4):
        gradients = [normal(5, 7).T, normal(4, 3, 2, 2)]
        if step > 0:
            gradients.append(normal(6))
        # The last leaves have no gradient.
        for leaf, expected_leaf, gradient in zip(leaves, expected_leaves, gradients, strict=False):
            leaf.grad = gradient
            expected_leaf.grad = gradient.clone()
        ours.step()
        theirs.step()
        torch.testing.assert_close(leaves, expected_leaves, rtol=1e-12, atol=1e-12)

    assert torch.equal(leaves[3], starts[3]), "a leaf without gradient stays as it is"
