"""``load_model``: what a run answers with, as a module that has the accuracy that the run
printed.
"""

from __future__ import annotations

import json
import logging
import runpy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import toys
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.files import digest
from fedstill.core.method import Method
from fedstill.core.records import Reply, Stage, State, World
from fedstill.core.registry import method, register
from fedstill.data.dataset import Dataset
from fedstill.engines.passes import shards
from fedstill.export.loading import load_model
from fedstill.export.trained_model import TrainedModel
from fedstill.export.upload_folder import write_folder
from fedstill.methods.fit import with_students
from fedstill.running import packs
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import run, settings_of
from flowers import needs_flower, over_flower
from run_bits import stopped


@register("model", "toy_batch_stats")
def batch_stats(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A network whose normalisation has no running statistics: an answer depends on the batch."""
    return nn.Sequential(
        nn.BatchNorm2d(input_shape[0], track_running_stats=False),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


@method("toy_kept")
@dataclass(frozen=True)
class Kept(Method):
    """Each client trains for itself; the server keeps what they send, and its own model as it
    was.
    """

    personal: ClassVar[frozenset[str]] = frozenset({"train"})

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        return with_students(state, replies)


FOUR = ["mlp", "logistic", "toy_batchnorm", "qkt_cnn"]
"""Networks that differ, one with running statistics."""
ASKS = pytest.mark.uses("querying")
ENSEMBLE = pytest.param("ensemble", marks=ASKS)
EXPERIMENTS = {
    **{
        name: toys.toy(name, **toys.suited(name))
        for name in ("fedntd", "scaffold", "fedseq", "pfnm")
    },
    "batchnorm": toys.toy("fedavg", model="toy_batchnorm"),
    "batch_stats": toys.toy("fedavg", model="toy_batch_stats"),
    **{
        name: toys.toy(name, **toys.suited(name), measure_every=1)
        for name in ("local_only", "ft_fedavg")
    },
    "fedmd": toys.toy(
        "fedmd", **toys.suited("fedmd"), measure_every=1, clients={"models": FOUR}, plan={"lr": 0.1}
    ),
    "a_function": toys.toy("toy_peers", rounds=1, topology={"clients": 6}),
}
if toys.has("querying"):
    EXPERIMENTS |= {
        "ensemble": toys.toy("ensemble", **toys.suited("ensemble")),
        "clue": toys.toy("clue", **toys.suited("clue")),
        "some_vote": toys.toy({"name": "ensemble", "participants": 2}, **toys.suited("ensemble")),
        "qkt": toys.toy("qkt", **toys.suited("qkt"), measure_every=1),
    }
FOR_ALL = (
    "fedntd",
    "scaffold",
    "fedseq",
    "pfnm",
    ENSEMBLE,
    "batchnorm",
    "batch_stats",
    "fedmd",
    "a_function",
    "ft_fedavg",
)

Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The directory of each experiment's run on data in memory, made once; nothing of the data is
    left in it.
    """
    known: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in known:
            known[name] = tmp_path_factory.mktemp("run") / "run"
            run(EXPERIMENTS[name], known[name], data=toys.blobs())
        return known[name]

    return of


@pytest.fixture
def own(runs: Runs, tmp_path: Path) -> Path:
    """A finished run in a folder that a test may change."""
    return Path(shutil.copytree(runs("fedntd"), tmp_path / "run"))


def right(model: TrainedModel, data: Dataset) -> torch.Tensor:
    """Which test images a module predicts right, in plain PyTorch."""
    with torch.no_grad():
        logits = torch.cat([model(images) for images in data.test.values.split(100)])
    return logits.argmax(1) == data.test.labels


def measured(folder: Path, client: int) -> list[int]:
    """How many test images of each class a client's own model predicted right, when it was last
    measured.
    """
    events = [
        e
        for e in read_journal(folder / "journal.jsonl")
        if e["event"] == "client" and e["client"] == client
    ]
    return [e["correct_by_class"] for e in events if "correct_by_class" in e][-1]


@pytest.mark.parametrize("name", FOR_ALL)
def test_the_model_has_the_accuracy_that_the_run_printed(name: str, runs: Runs) -> None:
    folder, data = runs(name), toys.blobs()
    model = load_model(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert not model.training
    assert float(right(model, data).double().mean()) == summary["accuracy"]
    assert model.classes == data.classes
    assert model.input_shape == data.input_shape
    about = model.about
    assert (about["seed"], about["method"], about["finished"]) == (7, summary["method"], True)
    assert about["fedstill"] == read_journal(folder / "journal.jsonl")[0]["fedstill"]


@pytest.mark.parametrize("name", ["fedntd", "batchnorm", "batch_stats", ENSEMBLE])
def test_its_logits_are_those_of_the_evaluation_to_the_bit(name: str, runs: Runs) -> None:
    folder = runs(name)
    ready = prepare(settings_of(folder), toys.blobs())
    state = (
        Checkpoints(folder / "checkpoints", digest((folder / "config.toml").read_bytes()))
        .latest()
        .state
    )  # type: ignore[union-attr]
    predict = next(iter(ready.settings.method.predictors(state, ready.world).values()))
    model, images = load_model(folder), toys.blobs().test.values
    for raw, inputs in zip(images.split(100), shards(images, ready.sites.inputs), strict=True):
        with torch.no_grad():
            assert torch.equal(model(raw), predict(inputs))


@pytest.mark.parametrize(
    ("name", "client"),
    [
        ("local_only", 3),
        pytest.param("qkt", 1, marks=ASKS),
        ("ft_fedavg", 0),
        ("fedmd", 0),
        ("fedmd", 1),
        ("fedmd", 2),
        ("fedmd", 3),
    ],
)
def test_a_clients_own_model_is_the_one_that_was_measured(
    name: str, client: int, runs: Runs
) -> None:
    folder, data = runs(name), toys.blobs()
    model = load_model(folder, client=client)
    hits = data.test.labels[right(model, data)]
    assert torch.bincount(hits, minlength=toys.CLASSES).tolist() == measured(folder, client)
    assert model.about["model"] == f"client {client}"
    if name == "fedmd":
        assert model.about["network"].startswith(FOUR[client])


@pytest.mark.parametrize(
    ("name", "client"),
    [pytest.param("clue", 3, marks=ASKS), pytest.param("some_vote", 2, marks=ASKS)],
)
def test_models_that_answer_together_are_one_module(name: str, client: int, runs: Runs) -> None:
    folder, data = runs(name), toys.blobs()
    model = load_model(folder, client=client)
    said = read_journal(folder / "journal.jsonl")[-1]["others"][f"client {client}"]["accuracy"]
    assert float(right(model, data).double().mean()) == said
    assert model.about["network"].startswith("2 x mlp")
    assert sum(p.numel() for p in model.parameters()) == 2 * 181


@needs_flower
def test_a_clients_memory_on_flower_is_found_at_its_site_if_that_is_here(tmp_path: Path) -> None:
    folder, data = tmp_path / "run", toys.blobs()
    run(over_flower(replace(EXPERIMENTS["fedmd"], rounds=1)), folder, data=data)
    model = load_model(folder, client=2)
    hits = data.test.labels[right(model, data)]
    assert torch.bincount(hits, minlength=toys.CLASSES).tolist() == measured(folder, 2)
    shutil.rmtree(folder / "sites")
    with pytest.raises(ConfigError, match="client 2"):
        load_model(folder, client=2)


@pytest.mark.parametrize(
    ("name", "client", "words"),
    [
        (
            "local_only",
            None,
            "name a client from 0 to 5",
        ),
        ("fedntd", 3, "fedntd trains one model"),
        ("local_only", 6, "client = 6 must be from 0 to 5"),
    ],
)
def test_a_model_that_there_is_not_is_one_line(
    name: str, client: int | None, words: str, runs: Runs
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_model(runs(name), client=client)
    assert "\n" not in str(caught.value)


def test_a_servers_model_that_nobody_trained_is_not_given(tmp_path: Path) -> None:
    run(toys.toy("toy_kept", rounds=1), tmp_path / "run", data=toys.blobs())
    with pytest.raises(ConfigError, match="toy_kept"):
        load_model(tmp_path / "run")
    acted = [
        e["client"]
        for e in read_journal(tmp_path / "run" / "journal.jsonl")
        if e["event"] == "client"
    ]
    assert load_model(tmp_path / "run", client=acted[0]).about["own_after"] == ["train"]
    other = min({*range(6)} - {*acted})
    with pytest.raises(ConfigError, match=f"client {other} "):
        load_model(tmp_path / "run", client=other)


def test_a_result_is_a_run_too(runs: Runs, tmp_path: Path) -> None:
    result = run(replace(EXPERIMENTS["fedntd"], rounds=1), tmp_path / "run", data=toys.blobs())
    assert float(right(load_model(result), toys.blobs()).double().mean()) == result.accuracy


def test_of_a_stopped_run_it_is_the_model_of_the_last_checkpoint(tmp_path: Path) -> None:
    folder = stopped(toys.toy("toy_chain", rounds=2), tmp_path / "run", stages=6)
    model = load_model(folder)
    assert not model.about["finished"]
    assert (model.about["round"], model.about["stages"]) == (2, 2)
    state = (
        Checkpoints(folder / "checkpoints", digest((folder / "config.toml").read_bytes()))
        .latest()
        .state
    )  # type: ignore[union-attr]
    assert {k: v.tolist() for k, v in model.network.state_dict().items()} == {
        k: v.tolist() for k, v in state.params.items()
    }


def test_a_run_that_has_trained_nothing_is_refused(own: Path) -> None:
    shutil.rmtree(own / "checkpoints")
    (own / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"checkpoints/.*model\.safetensors"):
        load_model(own)
    (own / "summary.json").unlink()
    with pytest.raises(ConfigError, match="fedstill resume"):
        load_model(own)
    (own / "journal.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no model"):
        load_model(own)


def test_without_checkpoints_it_is_the_final_model(own: Path, runs: Runs) -> None:
    whole = load_model(own)
    shutil.rmtree(own / "checkpoints")
    images = toys.blobs().test.values
    with torch.no_grad():
        assert torch.equal(load_model(own)(images), whole(images))
    (own / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CorruptFile, match=r"model.safetensors is damaged"):
        load_model(own)


def test_weights_of_another_network_are_named(own: Path) -> None:
    shutil.rmtree(own / "checkpoints")
    text = (own / "config.toml").read_text()
    (own / "config.toml").write_text(text.replace("hidden = [\n    8,\n]", "hidden = [9]"))
    with pytest.raises(CorruptFile, match="mlp"):
        load_model(own)


def test_a_pack_has_no_models(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    packed = packs.pack(own)
    shutil.rmtree(own)
    for path in (packed, own):
        with pytest.raises(ConfigError, match="packed"):
            load_model(path)


@pytest.mark.parametrize(
    "stored", [{}, {"shape": [1, 4], "mean": [0], "std": [1], "pixels": "uint8"}, 7]
)
def test_inputs_that_are_malformed_are_named(own: Path, stored: object) -> None:
    lines = (own / "journal.jsonl").read_text().splitlines()
    start = json.dumps({**json.loads(lines[0]), "inputs": stored})
    (own / "journal.jsonl").write_text("\n".join([start, *lines[1:]]) + "\n")
    with pytest.raises(CorruptFile, match=r"journal\.jsonl.*inputs"):
        load_model(own)


def test_a_file_of_ones_own_that_changed_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom fedstill.methods.fedavg import FedAvg\n"
        "from fedstill.core.registry import method\n@method('mine')\n@dataclass(frozen=True)\n"
        "class Mine(FedAvg):\n    '''Mine.'''\n"
    )
    run(replace(toys.toy("mine.py", rounds=1), base=tmp_path), tmp_path / "run", data=toys.blobs())
    assert load_model(tmp_path / "run").about["method"] == "mine.py"
    assert not caplog.records
    path.write_text(path.read_text() + "\n")
    with caplog.at_level(logging.WARNING):
        load_model(tmp_path / "run", trust_code=True)
    assert "mine.py" in caplog.text
    path.unlink()
    with pytest.raises(ConfigError, match=r"mine\.py"):
        load_model(tmp_path / "run")


def test_pixels_are_taken_as_uint8_or_divided_by_255_and_as_nothing_else(runs: Runs) -> None:
    model, images = load_model(runs("fedntd")), toys.blobs().test.values
    with torch.no_grad():
        assert torch.equal(model(images), model(images.float() / 255))
        assert model(images[:0]).shape == (0, toys.CLASSES)
        for wrong, words in [
            (
                images[0],
                r"\(N, 1, 4, 4\), not \(1, 4, 4\)",
            ),
            (images[:, :, :3], "images must be"),
            (images.long(), "torch.int64"),
            (images.float(), "from 0 to 1"),
            (2 * images.float() / 255 - 1, "divided by 255"),
        ]:
            with pytest.raises(ConfigError, match=words):
                model(wrong)


def test_data_that_are_floats_are_taken_as_they_are(tmp_path: Path) -> None:
    data = toys.blobs()
    floats = [replace(e, values=e.values.float() / 64 - 2) for e in (data.train, data.test)]
    data = replace(data, train=floats[0], test=floats[1])
    result = run(replace(EXPERIMENTS["fedntd"], rounds=1), tmp_path / "run", data=data)
    model = load_model(result)
    assert model.pixels == "float32"
    assert float(right(model, data).double().mean()) == result.accuracy
    with pytest.raises(ConfigError, match=r"torch\.uint8"):
        model(toys.blobs().test.values)

    write_folder(model, tmp_path / "run", tmp_path / "shared")
    names = runpy.run_path(str(tmp_path / "shared" / "model.py"))
    classifier = names["Classifier"].load(tmp_path / "shared")
    images = data.test.values
    with torch.no_grad():
        logits = model(images)
        for module in (model, classifier):
            torch.testing.assert_close(module(images.double()), logits)
            torch.testing.assert_close(module(images.half()), logits, rtol=0.01, atol=0.01)
    for wrong in (toys.blobs().test.values, images.long()):
        with pytest.raises(ValueError, match="must be floats"):
            classifier(wrong)
