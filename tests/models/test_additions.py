"""What methods add to networks: zeros that change neither what a network gives nor what it
draws.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.errors import ConfigError
from fedstill.core.records import ModelSpec
from fedstill.core.trees import only, same_bits
from fedstill.models import contract
from fedstill.models.building import is_added, personal_logits, with_both_heads
from fedstill.models.predictors import predictor
from fedstill.running.model_files import read_model, save_model, start_model_of
from fedstill.running.preparation import prepare

PLAIN = contract.spec_for("mlp", (1, 4, 4), 5, {"hidden": (8,)})
BOTH = replace(PLAIN, adds=("own_head", "shift"))
ADDED = {"own.weight": (5, 8), "own.bias": (5,), "body.shift": (8,)}


def drawn(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Its initial parameters, with numbers in what is added."""
    noise = torch.Generator().manual_seed(1)
    start = contract.initial(spec, 3)
    return {
        k: torch.randn(v.shape, generator=noise) if is_added(spec, k) else v
        for k, v in start.items()
    }


@pytest.mark.parametrize("model", ["logistic", "cnn", "resnet10", "sphere_mlp"])
def test_a_network_draws_and_gives_what_it_did(model: str) -> None:
    plain = contract.spec_for(model, (3, 32, 32), 5)
    both = replace(plain, adds=BOTH.adds)
    one, other = contract.initial(plain, 3), contract.initial(both, 3)
    new = set(other) - set(one)
    assert all(is_added(both, k) and bool((other[k] == 0).all()) for k in new)
    assert new <= contract.trainable_names(both)
    assert same_bits(one, only(other, one))
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(predictor(plain, one)(x), predictor(both, other)(x))


def test_the_shift_is_one_of_the_features_and_the_second_head_reads_them() -> None:
    params, x = drawn(BOTH), torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    assert {k: tuple(v.shape) for k, v in params.items() if is_added(BOTH, k)} == ADDED
    h = (
        contract.features(contract.module(PLAIN), only(params, contract.initial(PLAIN, 0)), x)
        + params["body.shift"]
    )
    torch.testing.assert_close(contract.features(contract.module(BOTH), params, x), h)
    z = h @ params["head.weight"].T + params["head.bias"]
    own = h @ params["own.weight"].T + params["own.bias"]
    torch.testing.assert_close(personal_logits(params, h), own)
    torch.testing.assert_close(predictor(BOTH, params)(x), z)
    torch.testing.assert_close(predictor(BOTH, with_both_heads(params))(x), z + own)


def test_a_network_without_a_bias_has_none_in_its_second_head() -> None:
    spec = replace(contract.spec_for("sphere_mlp", (6,), 4), adds=("own_head",))
    params, h = drawn(spec), torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    assert "own.bias" not in params
    torch.testing.assert_close(personal_logits(params, h), h @ params["own.weight"].T)
    torch.testing.assert_close(
        with_both_heads(params)["head.weight"], params["head.weight"] + params["own.weight"]
    )


def test_a_file_of_the_plain_network_will_do_to_start_from(tmp_path: Path) -> None:
    save_model(tmp_path / "plain.safetensors", PLAIN, contract.initial(PLAIN, 3))
    start = start_model_of(
        str(tmp_path / "plain.safetensors"), BOTH, lambda: contract.initial(BOTH, 0)
    )
    assert same_bits(start.params, contract.initial(BOTH, 3))
    save_model(tmp_path / "both.safetensors", BOTH, drawn(BOTH))
    assert same_bits(
        start_model_of(str(tmp_path / "both.safetensors"), BOTH, dict).params, drawn(BOTH)
    )
    spec, params = read_model(tmp_path / "both.safetensors")
    assert spec == BOTH
    assert same_bits(params, drawn(BOTH))


def test_a_network_without_a_linear_head_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"toy_headless.*body and head"):
        prepare(resolve(toys.toy("fedrod", model="toy_headless")), toys.blobs())


@registry.register("model", "toy_headless")
class Headless(torch.nn.Module):
    def __init__(self, input_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.only = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x)


def test_where_only_the_head_is_trained_a_methods_addition_is_too(tmp_path: Path) -> None:
    save_model(tmp_path / "plain.safetensors", PLAIN, contract.initial(PLAIN, 3))
    changes = {"start_from": str(tmp_path / "plain.safetensors"), "train_only": ("head.",)}
    ready = prepare(resolve(toys.toy("fedrod", **changes)), toys.blobs())
    assert set(ready.world.initial(0)) == {"head.weight", "head.bias", "own.weight", "own.bias"}
