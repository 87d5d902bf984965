"""Loaded and exported models of tables, vectors, series and texts give the logits of the run on raw
rows.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import kinds
import toys
from fedstill.cli import call
from fedstill.config.experiment import Experiment
from fedstill.core.errors import ConfigError, DataError
from fedstill.core.records import Examples
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
    """The keys that read a new file of a table, in which ages are missing and a column holds
    names.
    """
    draw = np.random.default_rng(0)
    lines = ["age,pressure,ward,home,label"]
    for number in range(120):
        label = number % 2
        values = []
        for mean, spread in COLUMNS.values():
            value = mean + spread * (label + draw.normal())
            values.append(f"{value:.2f}")
        age, pressure = values
        if number % 7 == 3:
            age = ""
        lines.append(f"{age},{pressure},{WORDS[number % 3]},{'ab'[number // 60]},{label}")
    (folder / "wards.csv").write_text("\n".join(lines) + "\n")
    return {
        "name": str(folder / "wards.csv"),
        "columns": ("age", "pressure", "ward"),
        "categorical": ("ward",),
        "missing": "mean",
        "missing_marks": True,
    }


def texts(folder: Path) -> dict[str, object]:
    """The keys that read a new file of texts, in which a word tells the class."""
    draw = np.random.default_rng(0)
    lines = ["text,label"]
    for number in range(100):
        label = number % 2
        likely_words = [*WORDS, WORDS[label], WORDS[label]]
        text = " ".join(draw.choice(likely_words, 6))
        lines.append(f'"{text}",{label}')
    (folder / "texts.csv").write_text("\n".join(lines) + "\n")
    return {"name": str(folder / "texts.csv"), "vocabulary": 50, "length": 5}


def experiment(data: object, **changes: object) -> Experiment:
    """A short run of three clients on data of some kind."""
    values = {
        "rounds": 2,
        "topology": {"clients": 3},
        "plan": {"epochs": 1, "batch": 10},
        "threads": 1,
        "measure": (),
    }
    return Experiment(data=data, **{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The directory of a run on each kind, which is made once. Tables and texts come from files,
    and series from tensors.
    """
    folders: dict[str, Path] = {}

    def run_of(kind: str) -> Path:
        if kind in folders:
            return folders[kind]
        folder = tmp_path_factory.mktemp(kind)
        match kind:
            case "table":
                run(experiment(table(folder)), folder / "run")
            case "text":
                run(experiment(texts(folder)), folder / "run")
            case "series":
                on_series = experiment({}, model=kinds.NETWORKS["series"])
                run(on_series, folder / "run", data=data_of("series"))
        folders[kind] = folder / "run"
        return folders[kind]

    return run_of


def data_of(kind: str) -> Dataset | None:
    """The data in memory of a kind; None if they are in a file that the config names."""
    if kind == "series":
        return kinds.small_data("series")
    return None


@dataclass(frozen=True)
class RawTest:
    """The test set of a run before it is standardised, and the logits of the run on it."""

    values: torch.Tensor
    logits: torch.Tensor


def raw_test(folder: Path, kind: str) -> RawTest:
    """The raw test set of a run."""
    ready = prepare(settings_of(folder), data_of(kind))
    test = ready.sites.common_test
    assert test is not None
    state = safetensors.torch.load_file(folder / "model.safetensors")
    predict = predictor(ready.world.server_model, state)
    with torch.no_grad():
        logits = [predict(inputs) for inputs in shards(test.values, ready.sites.inputs)]
    return RawTest(ready.dataset.test.values, torch.cat(logits))


def onnx_logits(path: Path, name: str, values: torch.Tensor) -> torch.Tensor:
    """The logits of an ONNX model, whose input has a name."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {name: values.numpy()})
    return torch.from_numpy(logits)


needs_onnx = pytest.mark.skipif(
    not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))),
    reason="the extra onnx is not installed",
)


def exported_classifier(folder: Path) -> Any:
    """The classifier of an exported folder."""
    names = runpy.run_path(str(folder / "model.py"))
    return names["Classifier"].load(folder)


@pytest.mark.parametrize(
    ("kind", "task", "examples"),
    [
        ("table", "tabular", "rows of a table"),
        ("series", "other", "series"),
        ("text", "text", "texts"),
    ],
)
def test_logits_of_raw_examples_are_those_of_the_runs_evaluation(
    kind: str, task: str, examples: str, runs: Runs
) -> None:
    folder = runs(kind)
    model = load_model(folder)
    test = raw_test(folder, kind)
    with torch.no_grad():
        logits = torch.cat([model(batch) for batch in test.values.split(100)])
    assert torch.equal(logits, test.logits)
    if kind == "table":
        assert test.values.isnan().any(), "a value is missing"
        assert abs(float(test.values[:, 1].mean())) > 50, "rows are in the units of the file"

    card = model_card(model, None)
    assert f"pipeline_tag: {task}" in card
    assert f"A classifier of {examples} with {len(model.classes)} classes" in card


def test_a_constant_column_is_0_in_the_model_and_stays_constant_in_its_noise() -> None:
    model = TrainedModel(
        torch.nn.Identity(),
        classes=("a", "b"),
        input_shape=(2,),
        mean=(0.0, 5.0),
        std=(2.0, NO_SPREAD),
        about={},
        pixels="float32",
        inputs=DatasetInfo("table"),
    )
    assert model(torch.tensor([[4.0, 905.0]])).tolist() == [[2.0, 0.0]]
    assert model.noise(3)[:, 1].tolist() == [5.0] * 3


NAN = float("nan")
ROWS: list[dict[str, object]] = [
    {"home": "a", "ward": "up", "pressure": 131.5, "age": 41.0},
    {"ward": "left", "age": None, "pressure": 99},
    {"ward": "right", "age": NAN, "pressure": 100.25},
]
"""Rows as a person has them, in another order of columns."""


def test_rows_of_a_table_are_encoded_as_the_run_encoded_its_own(runs: Runs) -> None:
    model = load_model(runs("table"))
    features = ("age", "pressure", "ward=left", "ward=right", "ward=up", "age is missing")
    assert model.inputs.features == features
    expected = torch.tensor(
        [[41, 131.5, 0, 0, 1, 0], [NAN, 99, 1, 0, 0, 1], [NAN, 100.25, 0, 1, 0, 1]]
    )

    encoded = model.encode(ROWS)

    torch.testing.assert_close(encoded, expected, rtol=0, atol=0, equal_nan=True)
    with torch.no_grad():
        assert model(encoded).isfinite().all(), "a missing value is the mean"

    by_column = {"pressure": [131.5], "age": [41], "ward": ["up"], "other": [1]}
    single_row = {"pressure": 131.5, "age": 41, "ward": "up"}
    assert torch.equal(model.encode(by_column), expected[:1])
    assert torch.equal(model.encode(single_row), expected[:1])


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

    model = load_model(runs("table"))
    encoded = model.encode(pandas.DataFrame(ROWS))
    torch.testing.assert_close(encoded, model.encode(ROWS), equal_nan=True)


def test_texts_are_encoded_as_the_run_encoded_its_own(runs: Runs) -> None:
    import pandas

    model = load_model(runs("text"))
    data = prepare(settings_of(runs("text"))).dataset
    all_texts = pandas.read_csv(runs("text").parent / "texts.csv")["text"]
    ids = model.encode(list(all_texts))
    ids_of_run = torch.cat([data.train.values, data.test.values])
    assert torch.equal(ids.unique(dim=0), ids_of_run.unique(dim=0))
    assert torch.equal(model.encode("up, up!"), model.encode(["UP UP"]))

    frame = pandas.DataFrame({"note": ["up", "left right"]})
    assert torch.equal(model.encode(frame["note"]), model.encode(["up", "left right"]))
    for table_of_texts in (frame, {"note": ["up"]}):
        with pytest.raises(ConfigError, match="one column"):
            model.encode(table_of_texts)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"age": 1}], "row 0 lacks 'pressure'"),
        ([7], "row 0 is an int, not a dict"),
        ({"age": [1]}, "the rows lack column 'pressure'"),
        ({"age": [1], "pressure": 2, "ward": ["up"]}, "column 'pressure' is an int"),
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
def test_rows_that_do_not_fit_are_one_line(rows: object, words: str, runs: Runs) -> None:
    with pytest.raises(DataError, match=words) as caught:
        load_model(runs("table")).encode(rows)
    assert "\n" not in str(caught.value)


def test_values_of_another_kind_are_refused(runs: Runs) -> None:
    with pytest.raises(ConfigError, match=r"encode.*series"):
        load_model(runs("series")).encode([[1.0]])

    table_model = load_model(runs("table"))
    text_model = load_model(runs("text"))
    with pytest.raises(ConfigError, match=r"\(N, 6\), not \(6,\)"):
        table_model(torch.zeros(6))
    with pytest.raises(ConfigError, match=r"torch\.int64"):
        table_model(torch.zeros(1, 6, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"torch\.float32.* encode\(texts\)"):
        text_model(torch.zeros(1, 5))
    with pytest.raises(ConfigError, match="0 to 49"):
        text_model(torch.full((1, 5), 50))


def standardised_by_clients(**changes: object) -> Experiment:
    """One round on a table, whose columns each client standardises by its own means."""
    return experiment(
        {"standardise": "own"},
        partition={"kind": "iid"},
        model=kinds.NETWORKS["table"],
        rounds=1,
        **changes,
    )


def test_a_clients_model_standardises_by_the_means_of_the_client(tmp_path: Path) -> None:
    data = kinds.small_data("table")
    folder = tmp_path / "run"
    run(standardised_by_clients(method="local_only"), folder, data=data)
    model = load_model(folder, client=1)
    ready = prepare(settings_of(folder), data)
    part = ready.sites.positions(1)
    normalised = model.normalised(data.train.values[part])
    torch.testing.assert_close(normalised, ready.sites.train.values[part])
    assert model.about["standardised"] == "own"


def test_a_common_model_has_the_mean_of_the_client_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = kinds.small_data("table")
    folder = tmp_path / "run"
    run(standardised_by_clients(), folder, data=data)
    ready = prepare(settings_of(folder), data)
    part = ready.sites.positions(1)

    common = load_model(folder)
    of_client = load_model(folder, client=1)
    raw = data.train.values[part]
    standardised = ready.sites.train.values[part]
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
    folder = runs(kind)
    shared = tmp_path / "shared"
    program_file = tmp_path / "m.pt2"
    words = ["export", str(folder), "--pt2", str(program_file), "--folder", str(shared)]
    assert call(words) == 0

    test = raw_test(folder, kind)
    program = torch.export.load(program_file).module()
    torch.testing.assert_close(program(test.values), test.logits, rtol=1e-5, atol=1e-6)

    safetensors.torch.save_file({"raw": test.values}, tmp_path / "raw.safetensors")
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
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert f"examples ({kind})" in result.stdout
    logits = safetensors.torch.load_file(tmp_path / "out.safetensors")["logits"]
    torch.testing.assert_close(logits, test.logits, rtol=1e-5, atol=1e-6)

    inputs = json.loads((shared / "config.json").read_text())["inputs"]
    assert inputs["kind"] == kind
    card = (shared / "README.md").read_text()
    assert "images" not in card
    descriptions = {
        "table": "numbers as in the run's data",
        "text": "made by words",
        "series": "series",
    }
    assert descriptions[kind] in card


@needs_onnx
@pytest.mark.parametrize("kind", ["table", "series", "text"])
def test_onnx_takes_raw_examples(kind: str, runs: Runs, tmp_path: Path) -> None:
    import onnx

    path = tmp_path / "m.onnx"
    assert call(["export", str(runs(kind)), "--onnx", str(path)]) == 0
    test = raw_test(runs(kind), kind)
    logits = onnx_logits(path, "values", test.values)
    torch.testing.assert_close(logits, test.logits, rtol=1e-4, atol=1e-5)
    facts = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert json.loads(facts["inputs"])["kind"] == kind


def test_the_start_event_of_images_is_as_it_was(tmp_path: Path) -> None:
    data = {"name": "digits", "train_size": 60, "test_size": 20}
    run(experiment(data, model="logistic", rounds=1), tmp_path / "run")
    start = read_journal(tmp_path / "run" / "journal.jsonl")[0]
    assert start["inputs"] == {"shape": [1, 8, 8], "pixels": "uint8", "mean": [0.5], "std": [0.5]}


@pytest.fixture(scope="module")
def on_features(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The directory of a run on standardised features of a backbone, by ``data.standardise``."""
    folder = tmp_path_factory.mktemp("features")
    run(toys.toy(measure=()), folder / "body", data=toys.blobs(seed=3))
    backbone = backbone_of(folder / "body")

    def run_of(standardise: str) -> Path:
        if not (folder / standardise).exists():
            data = {"features_of": backbone, "standardise": standardise}
            on_backbone = toys.toy(data=data, model="logistic", measure=(), rounds=1)
            run(on_backbone, folder / standardise, data=toys.blobs())
        return folder / standardise

    return run_of


def backbone_of(folder: Path) -> dict[str, object]:
    """The key ``data.features_of`` for the network of a run."""
    return {"name": "mlp", "file": str(folder / "model.safetensors"), "hidden": [8]}


def logits_in_the_run(folder: Path, client: int) -> torch.Tensor:
    """The logits of the run's model on a client's training examples, as the run standardised
    them.
    """
    ready = prepare(settings_of(folder), toys.blobs())
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    predict = predictor(ready.world.server_model, weights)
    with torch.no_grad():
        return predict(ready.sites.train.values[ready.sites.positions(client)])


def images_of_client(folder: Path, client: int) -> torch.Tensor:
    """A client's training images before they become features."""
    ready = prepare(settings_of(folder), toys.blobs())
    return toys.blobs().train.values[ready.sites.positions(client)]


def test_features_are_standardised_in_the_model_and_in_each_export(
    on_features: Runs, tmp_path: Path
) -> None:
    folder = on_features("pooled")
    shared = tmp_path / "shared"
    path = tmp_path / "m.pt2"
    images = images_of_client(folder, 2)
    expected = logits_in_the_run(folder, 2)
    assert call(["export", str(folder), "--pt2", str(path), "--folder", str(shared)]) == 0

    program = torch.export.load(path).module()
    for model in (load_model(folder), program, exported_classifier(shared)):
        with torch.no_grad():
            logits = model(images)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@needs_onnx
def test_features_are_standardised_in_onnx(on_features: Runs, tmp_path: Path) -> None:
    folder = on_features("pooled")
    path = tmp_path / "m.onnx"
    assert call(["export", str(folder), "--onnx", str(path)]) == 0
    logits = onnx_logits(path, "images", images_of_client(folder, 2))
    torch.testing.assert_close(logits, logits_in_the_run(folder, 2), rtol=1e-4, atol=1e-4)


def test_a_backbone_takes_vectors_as_in_the_run(tmp_path: Path) -> None:
    def flat(examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        return examples.values.flatten(1).float() / 255, examples.labels

    train = flat(toys.blobs().train)
    test = flat(toys.blobs().test)
    ones = [1.0] * toys.SIDE**2
    vectors = from_tensors("vectors", train, test, mean=ones, std=ones)
    run(toys.toy(measure=()), tmp_path / "body", data=vectors)
    data = {"features_of": backbone_of(tmp_path / "body")}
    folder = tmp_path / "run"
    run(toys.toy(data=data, model="logistic", measure=(), rounds=1), folder, data=vectors)

    ready = prepare(settings_of(folder), vectors)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    predict = predictor(ready.world.server_model, weights)
    with torch.no_grad():
        expected = predict(ready.sites.train.values)
        logits = load_model(folder)(train[0])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


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
    classifier = exported_classifier(tmp_path / "shared")
    test = raw_test(runs(kind), kind)
    with torch.no_grad():
        logits = classifier(test.values)
    torch.testing.assert_close(logits, test.logits, rtol=1e-5, atol=1e-5)

    wrong = test.values.long()
    if kind == "text":
        wrong = test.values.float()
    with pytest.raises(ValueError, match=words):
        classifier(wrong)
