"""A simplex as the last layer: its geometry, that it is no entry of a model, and that it is the
same everywhere.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fedstill.core.capabilities import Need
from fedstill.core.errors import ConfigError
from fedstill.models import contract
from fedstill.models.adapted import simplex


def spec(classes: int = 4, **fields: object):
    return contract.spec_for(
        "etf", (6,), classes, {"of": "mlp", "arguments": {"hidden": (8,)}, **fields}
    )


@pytest.mark.parametrize(("width", "classes"), [(2, 2), (8, 4), (10, 10), (512, 100)])
def test_its_vertices_have_length_1_and_one_angle_and_sum_to_0(width: int, classes: int) -> None:
    v = simplex(width, classes)
    expected = torch.full(
        (classes, classes), -1 / (classes - 1), dtype=torch.float64
    ).fill_diagonal_(1.0)
    torch.testing.assert_close(v.T @ v, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(v.sum(1), torch.zeros(width, dtype=torch.float64), rtol=0, atol=1e-9)


def test_only_the_scale_is_an_entry_of_the_head() -> None:
    params = contract.initial(spec(), 0)
    assert sorted(params) == ["body.1.bias", "body.1.weight", "head.scale"]
    assert params["head.scale"] == 10
    assert contract.capabilities(spec()) == Need.FEATURES | Need.HEAD | Need.ETF | Need.LEVELS
    assert Need.ETF not in contract.capabilities(contract.spec_for("mlp", (6,), 4))


def test_a_projection_stands_under_it() -> None:
    params = contract.initial(spec(projection=5, scale=1.0), 0)
    assert params["body.1.weight"].shape == (5, 8)
    assert params["head.scale"] == 1
    assert contract.width(spec(projection=5)) == 5


def test_logits_are_the_scaled_cosines_and_do_not_know_how_long_features_are() -> None:
    m, params = contract.module(spec()), contract.initial(spec(), 0)
    h = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = contract.head(m, params, h)
    torch.testing.assert_close(
        z, 10 * (h / h.norm(dim=1, keepdim=True)) @ simplex(8, 4), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(contract.head(m, params, 2 * h), z, rtol=1e-12, atol=1e-12)
    assert not contract.head(m, params, 0 * h).any()


def test_every_thread_has_the_same() -> None:
    def head(_: int) -> torch.Tensor:
        simplex.cache_clear()
        return contract.module(spec()).head.vertices

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(head, range(6))
    assert all(torch.equal(first, v) for v in others)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"classes": 9}, r"8 features .* 9 classes.* model\.projection to 9"),
        ({"projection": 3}, "3 features .* 4 classes"),
        ({"of": "torch.nn:Flatten", "arguments": {}}, "has no body and head"),
    ],
)
def test_what_cannot_hold_it_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        contract.build(spec(**changes))
