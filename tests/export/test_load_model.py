"""``load_model`` returns the model of a run as a module that has the accuracy of the run."""

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
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError, CorruptFile
from fedstill.core.files import digest
from fedstill.core.method import Method
from fedstill.core.records import Examples, Reply, Stage, State, World
from fedstill.core.registry import method, register
from fedstill.core.trees import same_bits
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


ARCHITECTURES = ["mlp", "logistic", "toy_batchnorm", "qkt_cnn"]
"""The networks of clients in FedMD, one with running statistics."""


def suited(name: str, **changes: object) -> Experiment:
    """A toy experiment with a method, and what the method needs."""
    return toys.toy(name, **toys.suited(name), **changes)


SHORT_SEARCH = {"name": "pfnm", "gamma": (1.0,), "variance": (1.0,), "prior_variance": (1.0,)}
"""PFNM with one set of constants."""
QUERYING = pytest.mark.uses("querying")
ENSEMBLE = pytest.param("ensemble", marks=QUERYING)
EXPERIMENTS = {
    "fedntd": suited("fedntd"),
    "scaffold": suited("scaffold"),
    "fedseq": suited("fedseq"),
    "pfnm": toys.toy(SHORT_SEARCH, **toys.suited("pfnm")),
    "batchnorm": toys.toy("fedavg", model="toy_batchnorm"),
    "batch_stats": toys.toy("fedavg", model="toy_batch_stats"),
    "local_only": suited("local_only", measure_every=1),
    "ft_fedavg": suited("ft_fedavg", measure_every=1),
    "fedmd": suited("fedmd", measure_every=1, clients={"models": ARCHITECTURES}, plan={"lr": 0.1}),
    "a_function": toys.toy("toy_peers", rounds=1, topology={"clients": 6}),
}
if toys.has("querying"):
    two_of_all = {"name": "ensemble", "participants": 2}
    EXPERIMENTS |= {
        "ensemble": suited("ensemble"),
        "clue": suited("clue"),
        "some_vote": toys.toy(two_of_all, **toys.suited("ensemble")),
        "qkt": suited("qkt", measure_every=1),
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
    """The directory of each experiment's run, which is made once. Its data are in memory alone."""
    folders: dict[str, Path] = {}

    def run_of(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("run") / "run"
            run(EXPERIMENTS[name], folders[name], data=toys.blobs())
        return folders[name]

    return run_of


@pytest.fixture
def copied_run(runs: Runs, tmp_path: Path) -> Path:
    """A finished run in a folder that a test may change."""
    return Path(shutil.copytree(runs("fedntd"), tmp_path / "run"))


def is_correct(model: TrainedModel, data: Dataset) -> torch.Tensor:
    """Whether a module predicts each test image correctly, in plain PyTorch."""
    with torch.no_grad():
        logits = torch.cat([model(images) for images in data.test.values.split(100)])
    return logits.argmax(1) == data.test.labels


def accuracy_of(model: TrainedModel, data: Dataset) -> float:
    """The share of test images that a module predicts correctly."""
    return float(is_correct(model, data).double().mean())


def correct_by_class(model: TrainedModel, data: Dataset) -> list[int]:
    """The number of test images of each class that a module predicts correctly."""
    labels = data.test.labels[is_correct(model, data)]
    return torch.bincount(labels, minlength=toys.CLASSES).tolist()


def last_state(folder: Path) -> State:
    """The state in the last checkpoint of a run."""
    config = digest((folder / "config.toml").read_bytes())
    checkpoint = Checkpoints(folder / "checkpoints", config).latest()
    assert checkpoint is not None
    return checkpoint.state


def measured(folder: Path, client: int) -> list[int]:
    """The same of a client's own model when the run last measured it."""
    last_measurement: list[int] = []
    for event in read_journal(folder / "journal.jsonl"):
        if event["event"] == "client" and event["client"] == client:
            last_measurement = event.get("correct_by_class", last_measurement)
    return last_measurement


@pytest.mark.parametrize("name", FOR_ALL)
def test_the_model_has_the_accuracy_that_the_run_printed(name: str, runs: Runs) -> None:
    folder = runs(name)
    data = toys.blobs()
    model = load_model(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert not model.training
    assert accuracy_of(model, data) == summary["accuracy"]
    assert model.classes == data.classes
    assert model.input_shape == data.input_shape
    assert model.about["seed"] == 7
    assert model.about["method"] == summary["method"]
    assert model.about["finished"]
    assert model.about["fedstill"] == read_journal(folder / "journal.jsonl")[0]["fedstill"]


@pytest.mark.parametrize("name", ["fedntd", "batchnorm", "batch_stats", ENSEMBLE])
def test_its_logits_are_those_of_the_evaluation_to_the_bit(name: str, runs: Runs) -> None:
    folder = runs(name)
    ready = prepare(settings_of(folder), toys.blobs())
    predictors = ready.settings.method.predictors(last_state(folder), ready.world)
    predict = next(iter(predictors.values()))
    model = load_model(folder)
    images = toys.blobs().test.values
    for raw, inputs in zip(images.split(100), shards(images, ready.sites.inputs), strict=True):
        with torch.no_grad():
            assert torch.equal(model(raw), predict(inputs))


@pytest.mark.parametrize(
    ("name", "client"),
    [
        ("local_only", 3),
        pytest.param("qkt", 1, marks=QUERYING),
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
    folder = runs(name)
    data = toys.blobs()
    model = load_model(folder, client=client)
    assert correct_by_class(model, data) == measured(folder, client)
    assert model.about["model"] == f"client {client}"
    if name == "fedmd":
        assert model.about["network"].startswith(ARCHITECTURES[client])


@pytest.mark.parametrize(
    ("name", "client"),
    [pytest.param("clue", 3, marks=QUERYING), pytest.param("some_vote", 2, marks=QUERYING)],
)
def test_models_that_answer_together_are_one_module(name: str, client: int, runs: Runs) -> None:
    folder = runs(name)
    data = toys.blobs()
    model = load_model(folder, client=client)
    last_event = read_journal(folder / "journal.jsonl")[-1]
    assert accuracy_of(model, data) == last_event["others"][f"client {client}"]["accuracy"]
    assert model.about["network"].startswith("2 x mlp")
    assert sum(entry.numel() for entry in model.parameters()) == 2 * 181


@needs_flower
def test_a_clients_memory_on_flower_is_found_at_its_site_if_that_is_here(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    data = toys.blobs()
    run(over_flower(replace(EXPERIMENTS["fedmd"], rounds=1)), folder, data=data)
    model = load_model(folder, client=2)
    assert correct_by_class(model, data) == measured(folder, 2)

    shutil.rmtree(folder / "sites")
    with pytest.raises(ConfigError, match="client 2"):
        load_model(folder, client=2)


@pytest.mark.parametrize(
    ("name", "client", "words"),
    [
        ("local_only", None, "name a client from 0 to 5"),
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

    journal = read_journal(tmp_path / "run" / "journal.jsonl")
    trained = {event["client"] for event in journal if event["event"] == "client"}
    model = load_model(tmp_path / "run", client=min(trained))
    assert model.about["own_after"] == ["train"]

    untrained = min(set(range(6)) - trained)
    with pytest.raises(ConfigError, match=f"client {untrained} "):
        load_model(tmp_path / "run", client=untrained)


def test_a_result_is_a_run_too(tmp_path: Path) -> None:
    result = run(replace(EXPERIMENTS["fedntd"], rounds=1), tmp_path / "run", data=toys.blobs())
    assert accuracy_of(load_model(result), toys.blobs()) == result.accuracy


def test_of_a_stopped_run_it_is_the_model_of_the_last_checkpoint(tmp_path: Path) -> None:
    folder = stopped(toys.toy("toy_chain", rounds=2), tmp_path / "run", stages=6)
    model = load_model(folder)
    assert not model.about["finished"]
    assert model.about["round"] == 2
    assert model.about["stages"] == 2
    assert same_bits(model.network.state_dict(), last_state(folder).params)


def test_a_run_that_has_trained_nothing_is_refused(copied_run: Path) -> None:
    shutil.rmtree(copied_run / "checkpoints")
    (copied_run / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"checkpoints/.*model\.safetensors"):
        load_model(copied_run)
    (copied_run / "summary.json").unlink()
    with pytest.raises(ConfigError, match="fedstill resume"):
        load_model(copied_run)
    (copied_run / "journal.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no model"):
        load_model(copied_run)


def test_without_checkpoints_it_is_the_final_model(copied_run: Path) -> None:
    from_checkpoint = load_model(copied_run)
    shutil.rmtree(copied_run / "checkpoints")
    images = toys.blobs().test.values
    with torch.no_grad():
        assert torch.equal(load_model(copied_run)(images), from_checkpoint(images))

    (copied_run / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CorruptFile, match=r"model.safetensors is damaged"):
        load_model(copied_run)


def test_weights_of_another_network_are_named(copied_run: Path) -> None:
    shutil.rmtree(copied_run / "checkpoints")
    text = (copied_run / "config.toml").read_text()
    (copied_run / "config.toml").write_text(text.replace("hidden = [\n    8,\n]", "hidden = [9]"))
    with pytest.raises(CorruptFile, match="mlp"):
        load_model(copied_run)


def test_a_pack_has_no_models(
    copied_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSTILL_CACHE", str(tmp_path / "cache"))
    packed = packs.pack(copied_run)
    shutil.rmtree(copied_run)
    for path in (packed, copied_run):
        with pytest.raises(ConfigError, match="packed"):
            load_model(path)


@pytest.mark.parametrize(
    "stored", [{}, {"shape": [1, 4], "mean": [0], "std": [1], "pixels": "uint8"}, 7]
)
def test_inputs_that_are_malformed_are_named(copied_run: Path, stored: object) -> None:
    lines = (copied_run / "journal.jsonl").read_text().splitlines()
    start = json.dumps({**json.loads(lines[0]), "inputs": stored})
    (copied_run / "journal.jsonl").write_text("\n".join([start, *lines[1:]]) + "\n")
    with pytest.raises(CorruptFile, match=r"journal\.jsonl.*inputs"):
        load_model(copied_run)


METHOD_FILE = '''
from dataclasses import dataclass
from fedstill.methods.fedavg import FedAvg
from fedstill.core.registry import method

@method("mine")
@dataclass(frozen=True)
class Mine(FedAvg):
    """Mine."""
'''


def test_a_file_of_ones_own_that_changed_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(METHOD_FILE)
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
    model = load_model(runs("fedntd"))
    images = toys.blobs().test.values
    with torch.no_grad():
        assert torch.equal(model(images), model(images.float() / 255))
        assert model(images[:0]).shape == (0, toys.CLASSES)

    centred = 2 * images.float() / 255 - 1
    for wrong, words in (
        (images[0], r"\(N, 1, 4, 4\), not \(1, 4, 4\)"),
        (images[:, :, :3], "images must be"),
        (images.long(), "torch.int64"),
        (images.float(), "from 0 to 1"),
        (centred, "divided by 255"),
    ):
        with pytest.raises(ConfigError, match=words):
            model(wrong)


def in_floats(examples: Examples) -> Examples:
    """The same examples with pixels from -2 to 2."""
    return replace(examples, values=examples.values.float() / 64 - 2)


def test_data_that_are_floats_are_taken_as_they_are(tmp_path: Path) -> None:
    blobs = toys.blobs()
    data = replace(blobs, train=in_floats(blobs.train), test=in_floats(blobs.test))
    result = run(replace(EXPERIMENTS["fedntd"], rounds=1), tmp_path / "run", data=data)
    model = load_model(result)
    assert model.pixels == "float32"
    assert accuracy_of(model, data) == result.accuracy
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
