"""A wide random layer below the head: its features, and which entries are trained and sent."""

from __future__ import annotations

import pytest
import torch

from fedstill.core.errors import ConfigError
from fedstill.models import contract
from fedstill.models.adapted import lifted_body, lifted_spec, random_directions
from fedstill.models.contract import spec_for

SMALL = spec_for("mlp", (1, 4, 4), 3, {"hidden": (6,)})


def test_its_features_are_relu_of_fixed_directions_and_its_entries_those_of_the_network() -> None:
    spec = lifted_spec(SMALL, 40)
    small_params = contract.initial(SMALL, 1)
    initial = contract.initial(spec, 0)
    params = {**initial, **lifted_body(small_params, 40)}
    x = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))

    small_features = contract.features(contract.module(SMALL), small_params, x)
    features = contract.features(contract.module(spec), params, x)
    logits = contract.forward(contract.module(spec), params, x)

    body_entries = {name for name in initial if name.startswith("body")}
    assert body_entries == set(lifted_body(small_params, 40))
    assert initial["head.weight"].shape == (3, 40)
    assert contract.width(spec) == 40
    lifted = (small_features @ random_directions(6, 40)).clamp(min=0)
    torch.testing.assert_close(features, lifted)
    expected_logits = features @ params["head.weight"].T + params["head.bias"]
    torch.testing.assert_close(logits, expected_logits)


def test_the_directions_are_always_the_same() -> None:
    random_directions.cache_clear()
    expected = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))

    assert torch.equal(random_directions(6, 40), expected)


def test_a_width_of_0_is_the_network_itself() -> None:
    params = contract.initial(SMALL, 1)
    body_entries = {name for name in params if name.startswith("body.")}

    assert lifted_spec(SMALL, 0) is SMALL
    assert set(lifted_body(params, 0)) == body_entries


def test_a_network_without_a_linear_head_is_refused() -> None:
    etf = {"of": "etf", "arguments": {"of": "mlp", "arguments": {"hidden": (6,)}}}
    with pytest.raises(ConfigError, match="body and linear head"):
        contract.build(spec_for("lifted", (1, 4, 4), 3, etf))
