"""Networks that are chains of layers: where they can be cut, and that a cut network gives what a
whole one does.
"""

from __future__ import annotations

import pytest
import torch

from fedstill.core.capabilities import Need
from fedstill.core.registry import register
from fedstill.models import contract
from fedstill.models.layer_chain import levels, run_from_level, run_to_levels


@pytest.mark.parametrize(
    ("model", "fields", "names"),
    [
        ("mlp", {"hidden": (8, 6)}, ["2", "4"]),
        ("mlp", {"hidden": (8,), "projection": 3}, ["2", "4", "5"]),
        ("logistic", {}, ["0"]),
        ("resnet10", {}, ["stem", "stage1", "stage2", "stage3", "stage4"]),
        ("resnet56", {}, ["stem", "stage1", "stage2", "stage3"]),
    ],
)
def test_levels_are_after_each_relu_or_block_and_before_the_head(
    model: str, fields: dict[str, object], names: list[str]
) -> None:
    spec = contract.spec_for(model, (3, 32, 32), 5, fields)
    module = contract.module(spec).eval()
    params = contract.initial(spec, 0)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    activations, features = run_to_levels(module, params, x)

    assert levels(module) == names
    assert list(activations) == names
    assert Need.LEVELS in contract.capabilities(spec)
    assert torch.equal(features, contract.features(module, params, x))
    logits = contract.forward(module, params, x)
    for level, activation in activations.items():
        assert torch.equal(run_from_level(module, params, activation, level), logits)


def test_a_body_that_is_no_chain_has_no_levels() -> None:
    spec = contract.spec_for("toy_flatten", (1, 4, 4), 5)

    assert levels(contract.module(spec)) == []
    assert Need.LEVELS not in contract.capabilities(spec)


@register("model", "toy_flatten")
class Flattened(torch.nn.Module):
    """A network whose body is one layer, and no sequence of layers."""

    def __init__(self, input_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.body = torch.nn.Flatten()
        self.head = torch.nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))
