"""``fedstill query``: one query answered from a finished local run; what cannot be answered is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

import toys
from fedstill.cli import call
from fedstill.data.sources import load_dataset
from fedstill.errors import ConfigError, CorruptFile, UnknownName
from fedstill.experiment.answering import ask
from fedstill.experiment.config.experiment import Experiment
from fedstill.experiment.run_directory.journal import read_journal
from fedstill.experiment.running.runner import run
from fedstill.models.contract import initial, spec_for
from fedstill.models.model_files import read_model, save_model

CHANGES = {"plan.transfer.epochs": 2, "plan.refine.epochs": 2}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("local") / "run"
    experiment = Experiment(
        rounds=1,
        method="local_only",
        reuse=False,
        data={"name": "digits", "train_size": 600, "test_size": 200},
        model={"name": "mlp", "hidden": (16,)},
        partition={"kind": "pathological", "classes_per_client": 3},
        topology={"clients": 6},
        query={"fewer_than": 1},
        plan={"epochs": 20, "lr": 0.01},
    )
    run(experiment, folder)
    return folder


@pytest.fixture(scope="module")
def lacking(local: Path) -> tuple[int, int]:
    """A class that client 0 lacks, and one that it has."""
    counts = read_journal(local / "journal.jsonl")[0]["label_counts"][0]
    return counts.index(0), next(c for c, n in enumerate(counts) if n)


def test_the_command_says_who_teaches_and_writes_the_students_model(
    local: Path, lacking: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "student.safetensors"
    few = [w for k, v in CHANGES.items() for w in ("-s", f"{k}={v}")]
    tokens = ["query", str(local), "--client", "0", "--classes", str(lacking[0]), "--out", str(out), *few]
    assert call(tokens) == 0
    said = capsys.readouterr().out
    for words in ("client 0 asks for", "client 5", "asked for", "forgetting", "average accuracy", "yes"):
        assert words in said
    spec, params = read_model(out)
    assert spec.name == "mlp"
    assert set(params) == set(initial(spec, 0))


def test_it_is_what_qkt_does_in_a_run(local: Path, lacking: tuple[int, int], tmp_path: Path) -> None:
    found = ask(local, 0, [lacking[0]], CHANGES)
    tree = json.loads(json.dumps({"classes": {"0": [lacking[0]]}, "fewer_than": 1}))
    experiment = Experiment(
        rounds=1,
        method="qkt",
        reuse=False,
        data={"name": "digits", "train_size": 600, "test_size": 200},
        model={"name": "mlp", "hidden": (16,)},
        partition={"kind": "pathological", "classes_per_client": 3},
        topology={"clients": 6},
        query=tree,
        plan={"fit": {"epochs": 20, "lr": 0.01}, "transfer": {"epochs": 2}, "refine": {"epochs": 2}},
    )
    run(experiment, tmp_path / "qkt")
    (told,) = read_journal(tmp_path / "qkt" / "journal.jsonl")[-1]["answers"]
    gain = found.after[lacking[0]] - found.before[lacking[0]]
    assert told["gain"] == pytest.approx(gain)
    events = [e for e in read_journal(tmp_path / "qkt" / "journal.jsonl") if e.get("name") == "transfer"]
    assert [e["teachers"] for e in events if "teachers" in e] == [found.used]


def test_without_a_teacher_above_the_threshold_the_local_model_comes_back(
    local: Path, lacking: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask(local, 0, [lacking[0]], {"method.threshold": 1.0})
    assert found.used == []
    assert found.after == found.before


def test_a_teacher_may_come_from_a_file_and_be_of_another_network(
    local: Path, lacking: tuple[int, int], tmp_path: Path
) -> None:
    spec = spec_for("logistic", (1, 8, 8), 10, {})
    save_model(tmp_path / "guest.safetensors", spec, initial(spec, 1))
    found = ask(local, 0, [lacking[0]], CHANGES, [tmp_path / "guest.safetensors"])
    assert found.names[6] == "guest.safetensors"
    assert 6 in found.used, "an untrained model predicts every class a little"


def test_a_bad_teacher_file_is_named(local: Path, lacking: tuple[int, int], tmp_path: Path) -> None:
    def refused(error: type[Exception], said: str, path: Path) -> None:
        with pytest.raises(error, match=said) as caught:
            ask(local, 0, [lacking[0]], CHANGES, [path])
        assert "\n" not in str(caught.value)

    good = spec_for("logistic", (1, 8, 8), 10, {})
    params = initial(good, 1)
    path = tmp_path / "t.safetensors"
    refused(ConfigError, "there is no model file", path)
    path.write_bytes(b"no safetensors at all")
    refused(CorruptFile, "is damaged", path)
    save_model(path, good, params)
    path.write_bytes(path.read_bytes()[:-40])
    refused(CorruptFile, "is damaged", path)
    few = spec_for("logistic", (1, 8, 8), 4, {})
    save_model(path, few, initial(few, 0))
    refused(ConfigError, "knows 4 classes, the run has 10", path)
    wide = spec_for("logistic", (1, 9, 9), 10, {})
    save_model(path, wide, initial(wide, 0))
    refused(ConfigError, r"takes images of \(1, 9, 9\)", path)
    save_model(path, spec_for("resnext", (1, 8, 8), 10, {}), params)
    refused(UnknownName, "unknown model 'resnext'", path)
    save_model(path, good, {k: v[:1] for k, v in params.items()})
    refused(CorruptFile, "is missing, strange or of another shape", path)
    path.write_bytes(safetensors.torch.save(params))
    refused(ConfigError, "does not say of which network", path)


@pytest.mark.parametrize(
    ("client", "classes", "said"),
    [
        ("0", "own", "it has class"),
        ("0", "99", "there is no class 99"),
        ("9", "lacking", "there is no client 9"),
        ("0", "seven", "unknown class 'seven'"),
    ],
)
def test_a_query_that_cannot_be_answered_is_one_line_and_exit_code_2(
    local: Path, lacking: tuple[int, int], capsys: pytest.CaptureFixture[str], client: str, classes: str, said: str
) -> None:
    asked = {"own": str(lacking[1]), "lacking": str(lacking[0])}.get(classes, classes)
    assert call(["query", str(local), "--client", client, "--classes", asked]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_run_without_local_models_is_refused(tmp_path: Path) -> None:
    assert len(load_dataset("digits").train) > 0
    run(toys.toy("fedavg", rounds=1), tmp_path / "fedavg", toys.blobs())
    with pytest.raises(ConfigError, match="has no models that clients trained alone"):
        ask(tmp_path / "fedavg", 0, [1], data=toys.blobs())


def test_a_damaged_checkpoint_is_said(local: Path, lacking: tuple[int, int], tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "copy"
    shutil.copytree(local, other)
    for path in (other / "checkpoints" / "objects").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptFile, match="no whole checkpoint is left"):
        ask(other, 0, [lacking[0]], CHANGES)
