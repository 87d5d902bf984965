"""Parts of a network that stay as a file has them: not trained, not sent; low-rank changes beside
them.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fedstill
import toys
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.capabilities import Addition
from fedstill.core.errors import ConfigError, CorruptFile, IncompatibleMethod
from fedstill.core.records import SERVER, Reply, Stage, State, World
from fedstill.core.trees import same_bits
from fedstill.methods.fedavg import FedAvg
from fedstill.models import building, contract
from fedstill.models.predictors import predictor
from fedstill.running.model_files import read_model, save_model
from fedstill.running.preparation import prepare
from run_bits import model_bytes, stopped

pytestmark = pytest.mark.usefixtures("with_threads")

MLP = {"name": "mlp", "hidden": (8,)}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pretrained") / "run"
    fedstill.run(toys.toy(measure=()), place, data=toys.blobs(seed=3))
    return place


def experiment(start: Path, **changes: Any) -> fedstill.Experiment:
    """A run that trains only the head of the network of another run."""
    return toys.toy(
        **{"measure": (), "start_from": str(start), "train_only": ("head.",), **changes}
    )


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters in the model file of a run."""
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_only_the_head_is_trained_sent_and_stored(pretrained: Path, tmp_path: Path) -> None:
    result = fedstill.run(experiment(pretrained), tmp_path / "one", data=toys.blobs())
    parameters = parameters_of(tmp_path / "one")
    assert set(parameters) == {"head.weight", "head.bias"}

    numbers = sum(parameter.numel() for parameter in parameters.values())
    clients = 4
    bytes_of_a_number = 4

    assert result.history[0]["bytes_up"] == clients * bytes_of_a_number * numbers
    assert result.accuracy is not None
    assert result.accuracy > 0.3


def test_it_is_the_complete_network_with_a_body_that_has_no_gradient(pretrained: Path) -> None:
    run = experiment(pretrained, rounds=1, topology={"clients": 1, "sampled": 1}, partition="iid")
    ready = prepare(resolve(run), toys.blobs())
    spec = ready.world.model(SERVER)
    params = ready.world.initial(SERVER)
    assert set(params) == contract.trainable_names(spec) == {"head.weight", "head.bias"}

    plain = contract.spec_for("mlp", spec.input_shape, spec.classes, {"hidden": (8,)})
    x = ready.sites.inputs.plain(ready.sites.train.values[:20])
    expected = predictor(plain, parameters_of(pretrained))(x)
    assert torch.equal(predictor(spec, params)(x), expected)
    assert torch.equal(predictor(spec, params).as_module()(x), expected)

    module = contract.module(spec)
    leaves = {name: parameter.clone().requires_grad_() for name, parameter in params.items()}
    contract.forward(module, leaves, x).sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox", "scaffold", "fedntd", "feddyn", "moon", "fedcurv"]
)
@pytest.mark.parametrize("engine", ["serial", "pooled"])
def test_methods_train_parts_and_resume(
    method: str, engine: str, pretrained: Path, tmp_path: Path
) -> None:
    run = experiment(pretrained, method=method, engine=engine, rounds=2)
    stopped(run, tmp_path / "resumed", stages=1)
    fedstill.resume(tmp_path / "resumed", data=toys.blobs())
    fedstill.run(run, tmp_path / "whole", data=toys.blobs())
    assert model_bytes(tmp_path / "resumed") == model_bytes(tmp_path / "whole")


@registry.method("names_its_network")
@dataclass(frozen=True)
class NamesItsNetwork(FedAvg):
    """Writes the network of its parameters into the state, like methods that change it."""

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        next_state = super().aggregate(state, replies, stage, world)
        return replace(next_state, model=world.model(SERVER))


@registry.method("adds_to_its_network")
@dataclass(frozen=True)
class AddsToItsNetwork(NamesItsNetwork):
    """The same with a second head."""

    adds = Addition.OWN_HEAD


@pytest.mark.parametrize("method", ["names_its_network", "adds_to_its_network"])
def test_a_checkpoint_restores_the_network_of_a_state(
    method: str, pretrained: Path, tmp_path: Path
) -> None:
    run = experiment(pretrained, method=method, rounds=2)
    stopped(run, tmp_path / "run", stages=1)
    resumed = fedstill.resume(tmp_path / "run", data=toys.blobs())
    uninterrupted = fedstill.run(run, tmp_path / "whole", data=toys.blobs())
    assert resumed.rounds()["accuracy"].tolist() == uninterrupted.rounds()["accuracy"].tolist()

    test = toys.blobs().test
    logits = fedstill.load_model(tmp_path / "run")(test.values)
    accuracy = (logits.argmax(1) == test.labels).float().mean()
    assert float(accuracy) == pytest.approx(resumed.accuracy)


def test_a_model_file_has_the_entries_that_are_not_trained(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = prepare(resolve(experiment(pretrained)), toys.blobs())
    spec = ready.world.model(SERVER)
    params = ready.world.initial(SERVER)
    x = ready.sites.inputs.plain(ready.sites.train.values[:20])
    expected = predictor(spec, params)(x)
    path = tmp_path / "model.safetensors"
    save_model(path, spec, params)

    # As in another process, which has neither the fixed entries nor the modules.
    monkeypatch.setattr(building, "_held", {})
    monkeypatch.setattr(contract, "thread_modules", functools.cache(threading.local))
    read_spec, read_params = read_model(path)
    assert read_spec == spec
    assert same_bits(read_params, params)
    assert torch.equal(predictor(read_spec, read_params)(x), expected)

    entries = safetensors.torch.load_file(path)
    entries["body.1.weight"] += 1
    note = json.dumps(spec.to_dict())
    path.write_bytes(safetensors.torch.save(entries, {"fedstill_model": note}))
    with pytest.raises(CorruptFile, match=r"model\.safetensors"):
        read_model(path)


def test_a_low_rank_network_starts_as_the_network_and_trains_only_its_factors(
    pretrained: Path, tmp_path: Path
) -> None:
    """The factors may be named by a pattern, or one by one."""
    lora = {"name": "low_rank", "of": "mlp", "arguments": {"hidden": (8,)}, "rank": 2}
    low_rank = experiment(pretrained, model=lora, start_from_partial=True, rounds=2)
    by_pattern = replace(low_rank, train_only=("head.", "*.lora_*"))
    ready = prepare(resolve(by_pattern), toys.blobs())
    spec = ready.world.model(SERVER)
    params = ready.world.initial(SERVER)
    assert sorted(params) == ["body.1.lora_a", "body.1.lora_b", "head.bias", "head.weight"]

    x = ready.sites.inputs.plain(ready.sites.train.values[:20])
    plain = contract.spec_for("mlp", spec.input_shape, spec.classes, {"hidden": (8,)})
    parameters = parameters_of(pretrained)
    assert torch.allclose(predictor(spec, params)(x), predictor(plain, parameters)(x), atol=1e-6)

    lora_b = torch.ones(8, 2)
    changed = {**params, "body.1.lora_b": lora_b}
    weight = parameters["body.1.weight"] + 4.0 * lora_b @ params["body.1.lora_a"]
    expected = predictor(plain, {**parameters, "body.1.weight": weight})(x)
    assert torch.allclose(predictor(spec, changed)(x), expected, atol=1e-4)

    assert fedstill.run(by_pattern, tmp_path / "one", data=toys.blobs()).accuracy is not None
    by_name = replace(low_rank, train_only=("head.", "*.lora_a", "*.lora_b"))
    assert fedstill.run(by_name, tmp_path / "two", data=toys.blobs()).accuracy is not None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"start_from": ""}, "train_only needs start_from"),
        (
            {"train_only": ("tail.",)},
            r"train_only = \['tail.'\] matches no entry; the network has body.1.weight, ",
        ),
        (
            {"train_only": ("*",)},
            "train_only matches all 4 entries",
        ),
        (
            {"model": {"name": "mlp", "hidden": (9,)}, "start_from_partial": True},
            "start_from has no entry 'body.1.weight', which train_only keeps fixed; add "
            "'body.1.weight' to",
        ),
        (
            {"clients": {"models": ["mlp", "logistic"]}},
            "clients.models names others",
        ),
        (
            {"method": "pfnm", "topology": {"clients": 6}, "rounds": 1},
            "widths of layers",
        ),
    ],
)
def test_entries_that_cannot_be_fixed_are_refused(
    changes: dict[str, Any], line: str, pretrained: Path
) -> None:
    with pytest.raises(ConfigError, match=line):
        prepare(resolve(experiment(pretrained, **changes)), toys.blobs())


TIED = """
from torch import nn
class Tied(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.body[3].weight = self.body[1].weight
        self.head = nn.Linear(16, classes)
    def forward(self, x):
        return self.head(self.body(x))
"""


def test_a_fixed_body_may_use_one_tensor_twice(tmp_path: Path) -> None:
    (tmp_path / "tied.py").write_text(TIED)
    tied = {"name": f"{tmp_path / 'tied.py'}:Tied"}
    module = contract.build(contract.spec_for(tied["name"], (1, 4, 4), 5))
    weights = tmp_path / "tied.safetensors"
    entries = {name: entry.clone() for name, entry in module.state_dict().items()}
    safetensors.torch.save_file(entries, weights)
    run = experiment(weights, model=tied)
    assert fedstill.run(run, tmp_path / "one", data=toys.blobs()).accuracy is not None

    with pytest.raises(ConfigError, match=r"body\.1\.weight and body\.3\.weight"):
        prepare(resolve(toys.toy(measure=(), model=tied)), toys.blobs())


def test_the_loaded_model_is_complete(pretrained: Path, tmp_path: Path) -> None:
    result = fedstill.run(experiment(pretrained), tmp_path / "one", data=toys.blobs())
    model = fedstill.load_model(result)
    test = toys.blobs().test
    with torch.no_grad():
        is_correct = model(test.values).argmax(1) == test.labels
    assert float(is_correct.double().mean()) == pytest.approx(result.accuracy)


def test_a_head_that_a_second_one_adds_to_must_be_trained(pretrained: Path) -> None:
    body_alone = experiment(pretrained, method="fedrod", train_only=("body.1.",))
    with pytest.raises(IncompatibleMethod, match=r"head\.weight"):
        prepare(resolve(body_alone), toys.blobs())
    prepare(resolve(experiment(pretrained, method="fedrod")), toys.blobs())
