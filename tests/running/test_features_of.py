"""A frozen backbone as a data set: the features of a file's network, computed once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

import fedstill
import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.running.preparation import prepare
from run_bits import stopped


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pretrained") / "run"
    fedstill.run(toys.toy(measure=()), place, data=toys.blobs(seed=3))
    return place / "model.safetensors"


def features_of(file: Path, **fields: Any) -> dict[str, Any]:
    """The table ``[data]`` with the features of a network in a file."""
    return {"features_of": {"name": "mlp", "file": str(file), "hidden": [8], **fields}}


def test_a_head_on_features_is_the_network_with_its_body_frozen(
    pretrained: Path, tmp_path: Path
) -> None:
    start = {"measure": (), "start_from": str(pretrained)}
    frozen_body = toys.toy(**start, train_only=("head.",))
    frozen = fedstill.run(frozen_body, tmp_path / "frozen", data=toys.blobs())
    head = {"data": features_of(pretrained), "model": "logistic", "start_from_partial": True}
    head_alone = fedstill.run(toys.toy(**start, **head), tmp_path / "head", data=toys.blobs())

    assert frozen.model.keys() == head_alone.model.keys()
    for name, parameter in frozen.model.items():
        assert torch.allclose(parameter, head_alone.model[name], atol=1e-5), name
    assert frozen.accuracy == pytest.approx(head_alone.accuracy, abs=0.01)


def test_features_are_computed_once_and_again_if_the_cache_is_damaged(
    pretrained: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fedstill.backbone")
    settings = resolve(toys.toy(data=features_of(pretrained)))
    assert settings.named.model.name == "mlp", "toys name it"
    first = prepare(settings, toys.blobs())
    assert caplog.text.count("are computed once") == 2
    assert (first.dataset.about.kind, first.dataset.input_shape) == ("vector", (8,))

    from_cache = prepare(settings, toys.blobs())
    assert caplog.text.count("are computed once") == 2
    assert torch.equal(first.sites.train.values, from_cache.sites.train.values)

    for file in (cache / "features").iterdir():
        file.write_bytes(b"nothing")
    computed_again = prepare(settings, toys.blobs())
    assert torch.equal(first.sites.train.values, computed_again.sites.train.values)
    assert caplog.text.count("are computed once") == 4


def test_a_full_disk_is_a_warning_for_features(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    prepared = prepare(resolve(toys.toy(data=features_of(pretrained))), toys.blobs())
    assert prepared.dataset.input_shape == (8,)
    assert "No space left on device" in caplog.text


def test_the_model_is_a_head_alone_if_the_config_names_none(
    pretrained: Path, tmp_path: Path
) -> None:
    experiment = fedstill.Experiment(
        rounds=1, measure=(), data=features_of(pretrained), topology={"clients": 3}
    )
    result = fedstill.run(experiment, tmp_path / "one", data=toys.blobs())

    start = json.loads((tmp_path / "one" / "journal.jsonl").read_text().splitlines()[0])
    assert result.summary["accuracy"] > 0.2
    assert any("features of mlp" in note for note in start["notes"])
    assert len(start["features_of"]) == 64


def test_the_loaded_model_has_the_backbone_inside(pretrained: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    file.write_bytes(pretrained.read_bytes())
    experiment = toys.toy(data=features_of(file), measure=())
    result = fedstill.run(experiment, tmp_path / "run", data=toys.blobs())
    test = toys.blobs().test
    model = fedstill.load_model(tmp_path / "run")
    assert model.input_shape == tuple(test.values.shape[1:])
    assert model.about["network"].endswith("on the features of mlp")
    is_correct = model(test.values).argmax(1) == test.labels
    assert is_correct.float().mean().item() == pytest.approx(result.accuracy)

    file.write_bytes((tmp_path / "run" / "model.safetensors").read_bytes())
    with pytest.raises(CorruptFile, match=r"own\.safetensors"):
        fedstill.load_model(tmp_path / "run")

    file.unlink()
    with pytest.raises(ConfigError, match=r"own\.safetensors"):
        fedstill.load_model(tmp_path / "run")


def test_a_run_is_not_resumed_with_another_file(pretrained: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    file.write_bytes(pretrained.read_bytes())
    stopped(toys.toy(data=features_of(file), measure=()), tmp_path / "run", stages=1)

    changed = {k: v + 1 for k, v in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(changed, file)
    with pytest.raises(CorruptFile, match=r"own\.safetensors"):
        fedstill.resume(tmp_path / "run", data=toys.blobs())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"features_of": {"file": "x"}}, "data.features_of needs name"),
        ({"features_of": {"name": "mlp"}}, "data.features_of needs file"),
        ({"features_of": {"name": "mlp", "file": "absent"}}, "there is no model"),
        (
            {"features_of": {"name": "mlp", "file": "FILE", "hidden": [9]}},
            "has no entry 'body.1.weight' that matches mlp",
        ),
        (
            {"features_of": {"name": "mlp", "file": "FILE", "depth": 9}},
            "unknown key 'data.features_of.depth'",
        ),
        (
            {"features_of": {"name": "mlp", "file": "FILE", "hidden": [8]}, "augment": ("flip",)},
            "varies examples",
        ),
        (
            {"features_of": {"name": "mlp", "file": "FILE", "hidden": [8]}, "public_from": "mnist"},
            "leave out data.public_from",
        ),
    ],
)
def test_faulty_keys_of_features_are_an_error_that_names_them(
    data: dict[str, Any], message: str, pretrained: Path
) -> None:
    if data["features_of"].get("file") == "FILE":
        data = {**data, "features_of": {**data["features_of"], "file": str(pretrained)}}
    with pytest.raises(ConfigError, match=message):
        prepare(resolve(toys.toy(data=data)), toys.blobs())
