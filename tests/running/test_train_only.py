"""Parts of a network that stay as a file has them: not trained, not sent; low-rank changes beside
them.
"""

from __future__ import annotations

import json
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

pytestmark = pytest.mark.usefixtures("with_threads")

MLP = {"name": "mlp", "hidden": (8,)}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pretrained") / "run"
    fedstill.run(toys.toy(measure=()), place, data=toys.blobs(seed=3))
    return place


def experiment(start: Path, **changes: Any) -> fedstill.Experiment:
    return toys.toy(
        **{"measure": (), "start_from": str(start), "train_only": ("head.",), **changes}
    )


def test_only_the_head_is_trained_sent_and_kept(pretrained: Path, tmp_path: Path) -> None:
    result = fedstill.run(experiment(pretrained), tmp_path / "one", data=toys.blobs())
    kept = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors")
    assert set(kept) == {"head.weight", "head.bias"}
    numbers = sum(v.numel() for v in kept.values())
    sent = next(iter(result.rounds().to_dict("records")))
    assert sent["bytes_up"] == 4 * 4 * numbers, "four clients, four bytes a number"
    assert result.accuracy is not None
    assert result.accuracy > 0.3


def test_it_is_the_whole_network_with_a_body_that_has_no_gradient(pretrained: Path) -> None:
    """One client, one round, by hand: the head is trained on the features of the file's body."""
    run = experiment(pretrained, rounds=1, topology={"clients": 1, "sampled": 1}, partition="iid")
    ready = prepare(resolve(run), toys.blobs())
    spec, whole = (
        ready.world.model(SERVER),
        safetensors.torch.load_file(pretrained / "model.safetensors"),
    )
    x = ready.sites.inputs.plain(ready.sites.train.values[:20])
    params = ready.world.initial(SERVER)
    assert set(params) == contract.trainable_names(spec) == {"head.weight", "head.bias"}
    plain = contract.spec_for("mlp", spec.input_shape, spec.classes, {"hidden": (8,)})
    assert torch.equal(predictor(spec, params)(x), predictor(plain, whole)(x))
    m = contract.module(spec)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    contract.forward(m, leaves, x).sum().backward()
    assert all(v.grad is None for v in m.parameters())
    assert torch.equal(predictor(spec, params).as_module()(x), predictor(plain, whole)(x))


@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox", "scaffold", "fedntd", "feddyn", "moon", "fedcurv"]
)
@pytest.mark.parametrize("engine", ["serial", "pooled"])
def test_methods_train_parts_and_resume(
    method: str, engine: str, pretrained: Path, tmp_path: Path
) -> None:
    run = experiment(pretrained, method=method, engine=engine, rounds=2)

    class Enough(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        if event["round"] == 1:
            raise Enough

    with pytest.raises(Enough):
        fedstill.run(run, tmp_path / "a", data=toys.blobs(), on_round=stop)
    fedstill.resume(tmp_path / "a", data=toys.blobs())
    fedstill.run(run, tmp_path / "b", data=toys.blobs())
    one, two = ((tmp_path / n / "model.safetensors").read_bytes() for n in "ab")
    assert one == two


@registry.method("names_its_network")
@dataclass(frozen=True)
class NamesItsNetwork(FedAvg):
    """Writes the network of its parameters into the state, as methods that change it do."""

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        after = super().aggregate(state, replies, stage, world)
        return replace(after, model=world.model(SERVER))


@registry.method("adds_to_its_network")
@dataclass(frozen=True)
class AddsToItsNetwork(NamesItsNetwork):
    """The same with a second head."""

    adds = Addition.OWN_HEAD


@pytest.mark.parametrize("method", ["names_its_network", "adds_to_its_network"])
def test_a_checkpoint_has_all_that_a_state_says_of_its_network(
    method: str, pretrained: Path, tmp_path: Path
) -> None:
    run = experiment(pretrained, method=method, rounds=2)

    def stop(event: dict[str, Any]) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        fedstill.run(run, tmp_path / "run", data=toys.blobs(), on_round=stop)
    resumed = fedstill.resume(tmp_path / "run", data=toys.blobs())
    whole = fedstill.run(run, tmp_path / "whole", data=toys.blobs())
    assert resumed.rounds()["accuracy"].tolist() == whole.rounds()["accuracy"].tolist()

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

    # As in another process: what this one holds, and the modules that it has made, are gone.
    monkeypatch.setattr(building, "_held", {})
    monkeypatch.setattr(contract, "_modules", type(contract._modules)())
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


def test_a_low_rank_change_starts_as_the_network_and_is_all_that_moves(
    pretrained: Path, tmp_path: Path
) -> None:
    lora = {"name": "low_rank", "of": "mlp", "arguments": {"hidden": (8,)}, "rank": 2}
    run = experiment(
        pretrained, model=lora, start_from_partial=True, train_only=("head.", "*.lora_*"), rounds=2
    )
    ready = prepare(resolve(run), toys.blobs())
    spec, whole = (
        ready.world.model(SERVER),
        safetensors.torch.load_file(pretrained / "model.safetensors"),
    )
    params = ready.world.initial(SERVER)
    assert sorted(params) == ["body.1.lora_a", "body.1.lora_b", "head.bias", "head.weight"]
    x = ready.sites.inputs.plain(ready.sites.train.values[:20])
    plain = contract.spec_for("mlp", spec.input_shape, spec.classes, {"hidden": (8,)})
    assert torch.allclose(predictor(spec, params)(x), predictor(plain, whole)(x), atol=1e-6)
    moved = {**params, "body.1.lora_b": torch.ones(8, 2)}
    by_hand = {
        **whole,
        "body.1.weight": whole["body.1.weight"] + 4.0 * torch.ones(8, 2) @ params["body.1.lora_a"],
    }
    assert torch.allclose(predictor(spec, moved)(x), predictor(plain, by_hand)(x), atol=1e-4)
    result = fedstill.run(run, tmp_path / "one", data=toys.blobs())
    assert result.accuracy is not None
    exact = fedstill.run(
        experiment(
            pretrained,
            model=lora,
            start_from_partial=True,
            train_only=("head.", "*.lora_a", "*.lora_b"),
        ),
        tmp_path / "two",
        data=toys.blobs(),
    )
    assert exact.accuracy is not None


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
def test_what_cannot_be_kept_is_refused_in_one_line(
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


def test_a_body_that_stays_may_use_one_tensor_twice(tmp_path: Path) -> None:
    (tmp_path / "tied.py").write_text(TIED)
    tied = {"name": f"{tmp_path / 'tied.py'}:Tied"}
    module = contract.build(contract.spec_for(tied["name"], (1, 4, 4), 5))
    weights = tmp_path / "tied.safetensors"
    safetensors.torch.save_file({k: v.clone() for k, v in module.state_dict().items()}, weights)
    run = experiment(weights, model=tied)
    assert fedstill.run(run, tmp_path / "one", data=toys.blobs()).accuracy is not None
    with pytest.raises(ConfigError, match=r"body\.1\.weight and body\.3\.weight"):
        prepare(resolve(toys.toy(measure=(), model=tied)), toys.blobs())


def test_the_model_is_taken_out_whole(pretrained: Path, tmp_path: Path) -> None:
    result = fedstill.run(experiment(pretrained), tmp_path / "one", data=toys.blobs())
    model, data = fedstill.load_model(result), toys.blobs()
    with torch.no_grad():
        right = (model(data.test.values).argmax(1) == data.test.labels).double().mean()
    assert float(right) == pytest.approx(result.accuracy)


def test_a_head_that_a_second_one_adds_to_must_be_trained(pretrained: Path) -> None:
    with pytest.raises(IncompatibleMethod, match=r"head\.weight"):
        prepare(
            resolve(experiment(pretrained, method="fedrod", train_only=("body.1.",))), toys.blobs()
        )
    prepare(resolve(experiment(pretrained, method="fedrod")), toys.blobs())
