"""A wide random layer under the head: what it gives, and what of it is trained and sent."""

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
    params, plain = contract.initial(spec, 0), contract.initial(SMALL, 1)
    assert {k for k in params if k.startswith("body")} == set(lifted_body(plain, 40))
    assert params["head.weight"].shape == (3, 40)
    assert contract.width(spec) == 40
    x = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    both = {**params, **lifted_body(plain, 40)}
    h = contract.features(contract.module(SMALL), plain, x)
    e = contract.features(contract.module(spec), both, x)
    torch.testing.assert_close(e, (h @ random_directions(6, 40)).clamp(min=0))
    logits = contract.forward(contract.module(spec), both, x)
    torch.testing.assert_close(logits, e @ both["head.weight"].T + both["head.bias"])


def test_the_directions_are_always_the_same() -> None:
    random_directions.cache_clear()
    assert torch.equal(
        random_directions(6, 40), torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    )


def test_a_width_of_nothing_is_the_network_itself() -> None:
    assert lifted_spec(SMALL, 0) is SMALL
    plain = contract.initial(SMALL, 1)
    assert set(lifted_body(plain, 0)) == {k for k in plain if k.startswith("body.")}


def test_a_network_without_a_linear_head_is_refused() -> None:
    etf = {"of": "etf", "arguments": {"of": "mlp", "arguments": {"hidden": (6,)}}}
    with pytest.raises(ConfigError, match="body and linear head"):
        contract.build(spec_for("lifted", (1, 4, 4), 3, etf))
