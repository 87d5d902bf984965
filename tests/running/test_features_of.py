"""A frozen backbone as a data set: the features of a file's network, computed once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fedstill
import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.running.preparation import prepare


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pretrained") / "run"
    fedstill.run(toys.toy(measure=()), place, data=toys.blobs(seed=3))
    return place / "model.safetensors"


def of(file: Path, **more: Any) -> dict[str, Any]:
    return {"features_of": {"name": "mlp", "file": str(file), "hidden": [8], **more}}


def test_a_head_on_features_is_the_network_with_its_body_frozen(
    pretrained: Path, tmp_path: Path
) -> None:
    same = {"measure": (), "start_from": str(pretrained)}
    frozen = fedstill.run(
        toys.toy(**same, train_only=("head.",)), tmp_path / "frozen", data=toys.blobs()
    )
    head = {"data": of(pretrained), "model": "logistic", "start_from_partial": True}
    kept = fedstill.run(toys.toy(**same, **head), tmp_path / "kept", data=toys.blobs())
    one, two = (
        safetensors.torch.load_file(tmp_path / n / "model.safetensors") for n in ("frozen", "kept")
    )
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.allclose(value, two[name], atol=1e-5), name
    assert frozen.accuracy == pytest.approx(kept.accuracy, abs=0.01)


def test_features_are_computed_once_and_made_again_where_the_cache_is_damaged(
    pretrained: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fedstill.backbone")
    settings = resolve(toys.toy(data=of(pretrained)))
    assert settings.named.model.name == "mlp", "toys name it"
    first = prepare(settings, toys.blobs())
    assert caplog.text.count("are computed once") == 2
    assert (first.dataset.about.kind, first.dataset.input_shape) == ("vector", (8,))
    again = prepare(settings, toys.blobs())
    assert caplog.text.count("are computed once") == 2
    assert torch.equal(first.sites.train.values, again.sites.train.values)
    for file in (cache / "features").iterdir():
        file.write_bytes(b"nothing")
    assert torch.equal(first.sites.train.values, prepare(settings, toys.blobs()).sites.train.values)
    assert caplog.text.count("are computed once") == 4


def test_a_head_alone_is_the_model_where_none_is_named(pretrained: Path, tmp_path: Path) -> None:
    plain = fedstill.Experiment(rounds=1, measure=(), data=of(pretrained), topology={"clients": 3})
    result = fedstill.run(plain, tmp_path / "one", data=toys.blobs())
    start = json.loads((tmp_path / "one" / "journal.jsonl").read_text().splitlines()[0])
    assert result.summary["accuracy"] > 0.2
    assert any("features of mlp" in note for note in start["notes"])
    assert len(start["features_of"]) == 64


def test_the_loaded_model_has_the_backbone_inside(pretrained: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    file.write_bytes(pretrained.read_bytes())
    result = fedstill.run(toys.toy(data=of(file), measure=()), tmp_path / "run", data=toys.blobs())
    test = toys.blobs().test
    model = fedstill.load_model(tmp_path / "run")
    assert model.input_shape == tuple(test.values.shape[1:])
    assert model.about["network"].endswith("on the features of mlp")
    assert (model(test.values).argmax(1) == test.labels).float().mean().item() == pytest.approx(
        result.accuracy
    )
    file.write_bytes((tmp_path / "run" / "model.safetensors").read_bytes())
    with pytest.raises(CorruptFile, match=r"own\.safetensors"):
        fedstill.load_model(tmp_path / "run")
    file.unlink()
    with pytest.raises(
        ConfigError,
        match=r"own\.safetensors",
    ):
        fedstill.load_model(tmp_path / "run")


def test_another_file_stops_a_resume(pretrained: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    file.write_bytes(pretrained.read_bytes())

    class Enough(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        raise Enough

    with pytest.raises(Enough):
        fedstill.run(
            toys.toy(data=of(file), measure=()), tmp_path / "a", data=toys.blobs(), on_round=stop
        )
    other = {k: v + 1 for k, v in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(other, file)
    with pytest.raises(CorruptFile, match=r"own\.safetensors"):
        fedstill.resume(tmp_path / "a", data=toys.blobs())


@pytest.mark.parametrize(
    ("said", "line"),
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
def test_what_has_no_features_is_refused_in_one_line(
    said: dict[str, Any], line: str, pretrained: Path
) -> None:
    if said["features_of"].get("file") == "FILE":
        said = {**said, "features_of": {**said["features_of"], "file": str(pretrained)}}
    with pytest.raises(ConfigError, match=line):
        prepare(resolve(toys.toy(data=said)), toys.blobs())
