"""A simplex as the last layer: its geometry, that it is no entry of a model, and that it is the
same everywhere.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError
from fedstill.core.records import ModelSpec
from fedstill.models import contract
from fedstill.models.adapted import simplex


def spec(classes: int = 4, **fields: object) -> ModelSpec:
    """A network with eight features and a simplex as its head."""
    values = {"of": "mlp", "arguments": {"hidden": (8,)}, **fields}
    return contract.spec_for("etf", (6,), classes, values)


@pytest.mark.parametrize(("width", "classes"), [(2, 2), (8, 4), (10, 10), (512, 100)])
def test_its_vertices_have_length_1_and_one_angle_and_sum_to_0(width: int, classes: int) -> None:
    """Between two vertices, the cosine is -1 / (classes - 1)."""
    vertices = simplex(width, classes)

    identity = torch.eye(classes).double()
    cosines = identity - (1 - identity) / (classes - 1)
    zeros = torch.zeros(width).double()
    torch.testing.assert_close(vertices.T @ vertices, cosines, rtol=0, atol=1e-9)
    torch.testing.assert_close(vertices.sum(1), zeros, rtol=0, atol=1e-9)


def test_only_the_scale_is_an_entry_of_the_head() -> None:
    params = contract.initial(spec(), 0)

    assert sorted(params) == ["body.1.bias", "body.1.weight", "head.scale"]
    assert params["head.scale"] == 10
    assert contract.capabilities(spec()) == Need.FEATURES | Need.HEAD | Need.ETF | Need.LEVELS
    assert Need.ETF not in contract.capabilities(contract.spec_for("mlp", (6,), 4))


def test_a_projection_is_below_the_simplex() -> None:
    params = contract.initial(spec(projection=5, scale=1.0), 0)

    assert params["body.1.weight"].shape == (5, 8)
    assert params["head.scale"] == 1
    assert contract.width(spec(projection=5)) == 5


def test_logits_are_scaled_cosines_and_do_not_depend_on_the_length_of_features() -> None:
    module = contract.module(spec())
    params = contract.initial(spec(), 0)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(3, 8, generator=generator, dtype=torch.float64)

    logits = contract.head(module, params, features)
    logits_of_longer = contract.head(module, params, 2 * features)

    directions = features / features.norm(dim=1, keepdim=True)
    cosines = directions @ simplex(8, 4)
    torch.testing.assert_close(logits, 10 * cosines, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits_of_longer, logits, rtol=1e-12, atol=1e-12)
    assert not contract.head(module, params, 0 * features).any()


def test_the_simplex_is_the_same_in_every_thread() -> None:
    def vertices(_: int) -> torch.Tensor:
        simplex.cache_clear()
        return contract.module(spec()).head.vertices

    with ThreadPoolExecutor(3) as pool:
        first, *further = pool.map(vertices, range(6))

    assert all(torch.equal(first, value) for value in further)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"classes": 9}, r"8 features .* 9 classes.* model\.projection to 9"),
        ({"projection": 3}, "3 features .* 4 classes"),
        ({"of": "torch.nn:Flatten", "arguments": {}}, "has no body and head"),
    ],
)
def test_an_unsuited_network_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        contract.build(spec(**changes))
