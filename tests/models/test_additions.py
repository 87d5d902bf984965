"""Entries that methods add to networks: zeros that change neither the logits of a network nor its
random initial values.
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


def params_with_additions(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Initial parameters, with random numbers in the added entries."""
    generator = torch.Generator().manual_seed(1)
    params = contract.initial(spec, 3)
    for name, value in params.items():
        if is_added(spec, name):
            params[name] = torch.randn(value.shape, generator=generator)
    return params


@pytest.mark.parametrize("model", ["logistic", "cnn", "resnet10", "sphere_mlp"])
def test_additions_change_no_initial_value_and_no_logit(model: str) -> None:
    plain = contract.spec_for(model, (3, 32, 32), 5)
    extended = replace(plain, adds=BOTH.adds)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    plain_params = contract.initial(plain, 3)
    params = contract.initial(extended, 3)

    added = params.keys() - plain_params.keys()
    assert added <= contract.trainable_names(extended)
    for name in added:
        assert is_added(extended, name)
        assert not params[name].any()
    assert same_bits(plain_params, only(params, plain_params))
    logits = predictor(extended, params)(x)
    assert torch.equal(logits, predictor(plain, plain_params)(x))


def test_the_shift_is_added_to_the_features_and_the_second_head_reads_them() -> None:
    params = params_with_additions(BOTH)
    plain_params = only(params, contract.initial(PLAIN, 0))
    x = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))

    features = contract.features(contract.module(BOTH), params, x)

    added = {name: value for name, value in params.items() if is_added(BOTH, name)}
    assert {name: tuple(value.shape) for name, value in added.items()} == ADDED
    plain_features = contract.features(contract.module(PLAIN), plain_params, x)
    torch.testing.assert_close(features, plain_features + params["body.shift"])
    common_logits = features @ params["head.weight"].T + params["head.bias"]
    client_logits = features @ params["own.weight"].T + params["own.bias"]
    both_heads = with_both_heads(params)
    torch.testing.assert_close(personal_logits(params, features), client_logits)
    torch.testing.assert_close(predictor(BOTH, params)(x), common_logits)
    torch.testing.assert_close(predictor(BOTH, both_heads)(x), common_logits + client_logits)


def test_a_network_without_a_bias_has_none_in_its_second_head() -> None:
    spec = replace(contract.spec_for("sphere_mlp", (6,), 4), adds=("own_head",))
    params = params_with_additions(spec)
    features = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))

    assert "own.bias" not in params
    client_logits = features @ params["own.weight"].T
    torch.testing.assert_close(personal_logits(params, features), client_logits)
    weight = with_both_heads(params)["head.weight"]
    torch.testing.assert_close(weight, params["head.weight"] + params["own.weight"])


def test_a_run_can_start_from_a_file_of_the_plain_network(tmp_path: Path) -> None:
    """The added entries are zeros, as in a new network."""
    plain_file = str(tmp_path / "plain.safetensors")
    extended_file = str(tmp_path / "both.safetensors")
    extended_params = params_with_additions(BOTH)
    save_model(tmp_path / "plain.safetensors", PLAIN, contract.initial(PLAIN, 3))
    save_model(tmp_path / "both.safetensors", BOTH, extended_params)

    from_plain = start_model_of(plain_file, BOTH, lambda: contract.initial(BOTH, 0))
    from_extended = start_model_of(extended_file, BOTH, dict)
    spec, params = read_model(tmp_path / "both.safetensors")

    assert same_bits(from_plain.params, contract.initial(BOTH, 3))
    assert same_bits(from_extended.params, extended_params)
    assert spec == BOTH
    assert same_bits(params, extended_params)


def test_a_network_without_a_linear_head_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"toy_headless.*body and head"):
        prepare(resolve(toys.toy("fedrod", model="toy_headless")), toys.blobs())


@registry.register("model", "toy_headless")
class Headless(torch.nn.Module):
    """A network that is one sequence of layers."""

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
