"""``load_model`` and ``export`` for tables, vectors, series and texts: raw rows in, the run's own
logits out.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import kinds
import toys
from fedstill.cli import call
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError, DataError
from fedstill.data.dataset import Dataset, DatasetInfo
from fedstill.data.sources import from_tensors
from fedstill.engines.passes import shards
from fedstill.export.loading import load_model
from fedstill.export.trained_model import TrainedModel
from fedstill.export.upload_folder import model_card
from fedstill.models.predictors import predictor
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import run, settings_of
from fedstill.running.standardisation import NO_SPREAD

Runs = Callable[[str], Path]

COLUMNS = {"age": (30.0, 8.0), "pressure": (120.0, 15.0)}
WORDS = ("left", "right", "up", "down")


def table(folder: Path) -> dict[str, object]:
    """A file of a table in which a value is missing, and one column holds names; and the keys that
    read it.
    """
    draw = np.random.default_rng(0)
    lines = ["age,pressure,ward,home,label"]
    for i in range(120):
        label = i % 2
        age, pressure = (
            mean + spread * (label + draw.normal()) for mean, spread in COLUMNS.values()
        )
        lines.append(
            f"{'' if i % 7 == 3 else f'{age:.2f}'},{pressure:.2f},{WORDS[i % 3]},{'ab'[i // 60]},"
            f"{label}"
        )
    (folder / "wards.csv").write_text("\n".join(lines) + "\n")
    own = {
        "columns": ("age", "pressure", "ward"),
        "categorical": ("ward",),
        "missing": "mean",
        "missing_marks": True,
    }
    return {"name": str(folder / "wards.csv"), **own}


def texts(folder: Path) -> dict[str, object]:
    draw = np.random.default_rng(0)
    said = [" ".join(draw.choice([*WORDS, WORDS[i % 2], WORDS[i % 2]], 6)) for i in range(100)]
    lines = [f'"{text}",{i % 2}' for i, text in enumerate(said)]
    (folder / "said.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    return {"name": str(folder / "said.csv"), "vocabulary": 50, "length": 5}


def experiment(data: object, **fields: object) -> Experiment:
    own = {
        "rounds": 2,
        "topology": {"clients": 3},
        "plan": {"epochs": 1, "batch": 10},
        "threads": 1,
        "measure": (),
    }
    return Experiment(data=data, **{**own, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The directory of a run on each kind, made once; tables and texts from files, the others from
    tensors.
    """
    known: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            known[kind] = folder / "run"
            if kind in ("table", "text"):
                run(experiment(table(folder) if kind == "table" else texts(folder)), known[kind])
            else:
                run(experiment({}, model=kinds.NETWORKS[kind]), known[kind], data=data_of(kind))
        return known[kind]

    return of


def data_of(kind: str) -> Dataset | None:
    return kinds.small_data(kind) if kind == "series" else None


def raw_test(folder: Path, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The test set before it is standardised, and the run's own logits on it."""
    ready = prepare(settings_of(folder), data_of(kind))
    test = ready.sites.common_test
    assert test is not None
    state = safetensors.torch.load_file(folder / "model.safetensors")
    predict = predictor(ready.world.server_model, state)
    with torch.no_grad():
        own = torch.cat([predict(inputs) for inputs in shards(test.values, ready.sites.inputs)])
    return ready.dataset.test.values, own


@pytest.mark.parametrize("kind", ["table", "series", "text"])
def test_logits_of_raw_examples_are_those_of_the_runs_evaluation(kind: str, runs: Runs) -> None:
    folder = runs(kind)
    model = load_model(folder)
    raw, own = raw_test(folder, kind)
    with torch.no_grad():
        logits = torch.cat([model(some) for some in raw.split(100)])
    assert torch.equal(logits, own)
    called = {
        "table": ("tabular", "rows of a table"),
        "series": ("other", "series"),
        "text": ("text", "texts"),
    }
    task, words = called[kind]
    card = model_card(model, None)
    assert f"pipeline_tag: {task}" in card
    assert f"A classifier of {words} with {len(model.classes)} classes" in card
    if kind == "table":
        assert raw.isnan().any(), "a value is missing"
        assert abs(float(raw[:, 1].mean())) > 50, "raw rows are in the units of the file"


def test_a_constant_column_is_0_in_the_model_and_stays_constant_in_its_noise() -> None:
    own = DatasetInfo("table")
    model = TrainedModel(
        torch.nn.Identity(),
        ("a", "b"),
        (2,),
        (0.0, 5.0),
        (2.0, NO_SPREAD),
        about={},
        pixels="float32",
        inputs=own,
    )
    assert model(torch.tensor([[4.0, 905.0]])).tolist() == [[2.0, 0.0]]
    assert model.noise(3)[:, 1].tolist() == [5.0] * 3


def rows_of(folder: Path) -> list[dict[str, object]]:
    """Rows as a person has them, in another order of columns."""
    known = [
        {"home": "a", "ward": "up", "pressure": 131.5, "age": 41.0},
        {"ward": "left", "age": None, "pressure": 99},
    ]
    return [*known, {"ward": "right", "age": float("nan"), "pressure": 100.25}]


def test_rows_of_a_table_are_encoded_as_the_run_encoded_its_own(runs: Runs) -> None:
    model = load_model(runs("table"))
    features = ("age", "pressure", "ward=left", "ward=right", "ward=up", "age is missing")
    assert model.inputs.features == features
    nan = float("nan")
    wanted = torch.tensor(
        [[41, 131.5, 0, 0, 1, 0], [nan, 99, 1, 0, 0, 1], [nan, 100.25, 0, 1, 0, 1]]
    )
    given = model.encode(rows_of(runs("table")))
    torch.testing.assert_close(given, wanted, rtol=0, atol=0, equal_nan=True)
    by_column = {"pressure": [131.5], "age": [41], "ward": ["up"], "other": [1]}
    assert torch.equal(model.encode(by_column), wanted[:1])
    assert torch.equal(model.encode({"pressure": 131.5, "age": 41, "ward": "up"}), wanted[:1]), (
        "a dict is one row"
    )
    with torch.no_grad():
        assert model(given).isfinite().all(), "a missing value is the mean"


def test_marks_of_missing_values_are_missing_in_encoded_rows(tmp_path: Path) -> None:
    data = {**table(tmp_path), "missing_values": ["", -9, "?"]}
    run(experiment(data, rounds=1), tmp_path / "run")
    model = load_model(tmp_path / "run")
    marked = model.encode([{"ward": "up", "pressure": -9, "age": 41.0}])
    missing = model.encode([{"ward": "up", "pressure": None, "age": 41.0}])
    assert marked[0, 1].isnan()
    torch.testing.assert_close(marked, missing, equal_nan=True)


def test_a_data_frame_is_encoded_too(runs: Runs) -> None:
    import pandas

    model, rows = load_model(runs("table")), rows_of(runs("table"))
    torch.testing.assert_close(
        model.encode(pandas.DataFrame(rows)), model.encode(rows), equal_nan=True
    )


def test_texts_are_encoded_as_the_run_encoded_its_own(runs: Runs, tmp_path: Path) -> None:
    import pandas

    model, data = load_model(runs("text")), prepare(settings_of(runs("text"))).dataset
    lines = (runs("text").parent / "said.csv").read_text().splitlines()[1:]
    ids = model.encode([line.split('"')[1] for line in lines])
    known = {tuple(row) for row in [*data.train.values.tolist(), *data.test.values.tolist()]}
    assert {tuple(row) for row in ids.tolist()} == known
    assert torch.equal(model.encode("up, up!"), model.encode(["UP UP"]))
    frame = pandas.DataFrame({"note": ["up", "left right"]})
    assert torch.equal(model.encode(frame["note"]), model.encode(["up", "left right"]))
    for table_of_texts in (frame, {"note": ["up"]}):
        with pytest.raises(ConfigError, match="one column"):
            model.encode(table_of_texts)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([{"age": 1}], "row 0 lacks 'pressure'"),
        ([7], "row 0 is an int, not a dict"),
        ({"age": [1]}, "the rows lack column 'pressure'"),
        (
            {"age": [1], "pressure": 2, "ward": ["up"]},
            "column 'pressure' is an int",
        ),
        (
            [{"age": 1, "pressure": 2, "ward": "north"}],
            "'north' in column 'ward'.*left, right, up",
        ),
        (
            [{"age": "old", "pressure": 2, "ward": "up"}],
            "column 'age' holds a value that is not a number",
        ),
        ([{"age": {}, "pressure": 2, "ward": "up"}], "column 'age'"),
    ],
)
def test_rows_that_do_not_fit_are_one_line(given: object, words: str, runs: Runs) -> None:
    with pytest.raises(DataError, match=words) as caught:
        load_model(runs("table")).encode(given)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_encoded_or_taken_is_one_line(runs: Runs) -> None:
    with pytest.raises(ConfigError, match=r"encode.*series"):
        load_model(runs("series")).encode([[1.0]])
    table_model, text_model = load_model(runs("table")), load_model(runs("text"))
    with pytest.raises(ConfigError, match=r"\(N, 6\), not \(6,\)"):
        table_model(torch.zeros(6))
    with pytest.raises(ConfigError, match=r"torch\.int64"):
        table_model(torch.zeros(1, 6, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"torch\.float32.* encode\(texts\)"):
        text_model(torch.zeros(1, 5))
    with pytest.raises(ConfigError, match="0 to 49"):
        text_model(torch.full((1, 5), 50))


def test_a_client_that_standardised_its_own_has_its_mean_inside(tmp_path: Path) -> None:
    data = kinds.small_data("table")
    folder = tmp_path / "run"
    own = {
        "partition": {"kind": "iid"},
        "method": "local_only",
        "model": kinds.NETWORKS["table"],
        "rounds": 1,
    }
    run(experiment({"standardise": "own"}, **own), folder, data=data)
    model, ready = load_model(folder, client=1), prepare(settings_of(folder), data)
    part = ready.sites.positions(1)
    torch.testing.assert_close(
        model.normalised(data.train.values[part]), ready.sites.train.values[part]
    )
    assert model.about["standardised"] == "own"


def test_a_common_model_has_the_mean_of_the_client_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = kinds.small_data("table")
    folder = tmp_path / "run"
    own = {"partition": {"kind": "iid"}, "model": kinds.NETWORKS["table"], "rounds": 1}
    run(experiment({"standardise": "own"}, **own), folder, data=data)
    ready = prepare(settings_of(folder), data)
    part = ready.sites.positions(1)

    common, of_client = load_model(folder), load_model(folder, client=1)
    raw, standardised = data.train.values[part], ready.sites.train.values[part]
    with torch.no_grad():
        torch.testing.assert_close(of_client(raw), common(standardised))

    exports = ["export", str(folder), "--folder"]
    assert call([*exports, str(tmp_path / "common")]) == 0
    assert "standardise its inputs" in capsys.readouterr().out
    card = (tmp_path / "common" / "README.md").read_text()
    assert "numbers as in the run's data" not in card
    assert "the model contains none" in card

    assert call([*exports, str(tmp_path / "one"), "--client", "1"]) == 0
    out = capsys.readouterr().out
    assert "standardise its inputs" not in out
    assert "--client 1" in out
    card = (tmp_path / "one" / "README.md").read_text()
    assert "numbers as in the run's data" in card
    assert "of client 1;" in card


@pytest.mark.parametrize("kind", ["table", pytest.param("series", marks=pytest.mark.slow), "text"])
def test_a_run_is_exported_whatever_its_examples_are(
    kind: str, runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, shared = runs(kind), tmp_path / "shared"
    assert (
        call(["export", str(folder), "--pt2", str(tmp_path / "m.pt2"), "--folder", str(shared)])
        == 0
    )
    raw, own = raw_test(folder, kind)
    program = torch.export.load(tmp_path / "m.pt2").module()
    torch.testing.assert_close(program(raw), own, rtol=1e-5, atol=1e-6)
    safetensors.torch.save_file({"raw": raw}, tmp_path / "raw.safetensors")
    code = f"""
import sys
sys.path.insert(0, {str(shared)!r})
sys.dont_write_bytecode = True
import runpy
from model import Classifier
from safetensors.torch import load_file, save_file
logits = Classifier.load()(load_file({str(tmp_path / "raw.safetensors")!r})["raw"])
save_file({{"logits": logits.detach()}}, {str(tmp_path / "out.safetensors")!r})
runpy.run_path({str(shared / "model.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"examples ({kind})" in done.stdout
    logits = safetensors.torch.load_file(tmp_path / "out.safetensors")["logits"]
    torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-6)
    inputs = json.loads((shared / "config.json").read_text())["inputs"]
    assert inputs["kind"] == kind
    card = (shared / "README.md").read_text()
    assert "images" not in card
    assert {
        "table": "numbers as in the run's data",
        "text": "made by words",
    }.get(kind, "series") in card


@pytest.mark.parametrize("kind", ["table", "series", "text"])
def test_onnx_takes_raw_examples(kind: str, runs: Runs, tmp_path: Path) -> None:
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(needed, reason="the extra onnx is not installed")
    import onnxruntime

    path = tmp_path / "m.onnx"
    assert call(["export", str(runs(kind)), "--onnx", str(path)]) == 0
    raw, own = raw_test(runs(kind), kind)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"values": raw.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), own, rtol=1e-4, atol=1e-5)
    assert json.loads(session.get_modelmeta().custom_metadata_map["inputs"])["kind"] == kind


def test_the_start_event_of_images_is_as_it_was(tmp_path: Path) -> None:
    own = experiment(
        {"name": "digits", "train_size": 60, "test_size": 20}, model="logistic", rounds=1
    )
    run(own, tmp_path / "run")
    start = read_journal(tmp_path / "run" / "journal.jsonl")[0]
    assert start["inputs"] == {"shape": [1, 8, 8], "pixels": "uint8", "mean": [0.5], "std": [0.5]}


@pytest.fixture(scope="module")
def on_features(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The directory of a run on standardised features of a backbone, by ``data.standardise``."""
    folder = tmp_path_factory.mktemp("features")
    run(toys.toy(measure=()), folder / "body", data=toys.blobs(seed=3))
    backbone = {"name": "mlp", "file": str(folder / "body" / "model.safetensors"), "hidden": [8]}

    def of(standardise: str) -> Path:
        place = folder / standardise
        if not place.exists():
            data = {"features_of": backbone, "standardise": standardise}
            own = toys.toy(data=data, model="logistic", measure=(), rounds=1)
            run(own, place, data=toys.blobs())
        return place

    return of


def logits_in_the_run(folder: Path, client: int) -> torch.Tensor:
    """The logits of the run's model on a client's training examples, as the run standardised
    them.
    """
    ready = prepare(settings_of(folder), toys.blobs())
    predict = predictor(
        ready.world.server_model, safetensors.torch.load_file(folder / "model.safetensors")
    )
    with torch.no_grad():
        return predict(ready.sites.train.values[ready.sites.positions(client)])


def images_of_client(folder: Path, client: int) -> torch.Tensor:
    ready = prepare(settings_of(folder), toys.blobs())
    return toys.blobs().train.values[ready.sites.positions(client)]


def test_features_are_standardised_in_the_model_and_in_each_export(
    on_features: Runs, tmp_path: Path
) -> None:
    folder, shared, path = on_features("pooled"), tmp_path / "shared", tmp_path / "m.pt2"
    images, wanted = images_of_client(folder, 2), logits_in_the_run(folder, 2)
    with torch.no_grad():
        torch.testing.assert_close(load_model(folder)(images), wanted, rtol=1e-5, atol=1e-5)
    assert call(["export", str(folder), "--pt2", str(path), "--folder", str(shared)]) == 0
    program = torch.export.load(path).module()
    torch.testing.assert_close(program(images), wanted, rtol=1e-5, atol=1e-5)
    classifier = runpy.run_path(str(shared / "model.py"))["Classifier"].load(shared)
    torch.testing.assert_close(classifier(images), wanted, rtol=1e-5, atol=1e-5)


def test_features_are_standardised_in_onnx(on_features: Runs, tmp_path: Path) -> None:
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(needed, reason="the extra onnx is not installed")
    import onnxruntime

    folder, path = on_features("pooled"), tmp_path / "m.onnx"
    assert call(["export", str(folder), "--onnx", str(path)]) == 0
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": images_of_client(folder, 2).numpy()})
    torch.testing.assert_close(
        torch.from_numpy(logits), logits_in_the_run(folder, 2), rtol=1e-4, atol=1e-4
    )


def test_a_backbone_takes_vectors_as_in_the_run(tmp_path: Path) -> None:
    blobs = toys.blobs()
    pairs = [
        (part.values.flatten(1).float() / 255, part.labels) for part in (blobs.train, blobs.test)
    ]
    ones = [1.0] * pairs[0][0].shape[1]
    vectors = from_tensors("vectors", *pairs, mean=ones, std=ones)
    run(toys.toy(measure=()), tmp_path / "body", data=vectors)
    backbone = {
        "name": "mlp",
        "file": str(tmp_path / "body" / "model.safetensors"),
        "hidden": [8],
    }
    own = toys.toy(data={"features_of": backbone}, model="logistic", measure=(), rounds=1)
    folder = tmp_path / "run"
    run(own, folder, data=vectors)

    ready = prepare(settings_of(folder), vectors)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    predict = predictor(ready.world.server_model, weights)
    with torch.no_grad():
        wanted = predict(ready.sites.train.values)
        torch.testing.assert_close(load_model(folder)(pairs[0][0]), wanted, rtol=1e-4, atol=1e-4)


def test_features_that_each_client_standardised_need_the_client(on_features: Runs) -> None:
    folder = on_features("own")
    model = load_model(folder, client=2)
    with torch.no_grad():
        logits = model(images_of_client(folder, 2))
    torch.testing.assert_close(logits, logits_in_the_run(folder, 2), rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="client = 0"):
        load_model(folder)


@pytest.mark.parametrize(("kind", "words"), [("table", "must be floats"), ("text", "must be inte")])
def test_the_folder_refuses_numbers_of_another_type(
    kind: str, words: str, runs: Runs, tmp_path: Path
) -> None:
    assert call(["export", str(runs(kind)), "--folder", str(tmp_path / "shared")]) == 0
    names = runpy.run_path(str(tmp_path / "shared" / "model.py"))
    classifier = names["Classifier"].load(tmp_path / "shared")
    raw, logits = raw_test(runs(kind), kind)
    with torch.no_grad():
        torch.testing.assert_close(classifier(raw), logits, rtol=1e-5, atol=1e-5)
    wrong = raw.long()
    if kind == "text":
        wrong = raw.float()
    with pytest.raises(ValueError, match=words):
        classifier(wrong)
