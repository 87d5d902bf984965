"""Experiments in Python: values may be numbers of NumPy and paths, and an argument that is no
experiment is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstill
import toys
from fedstill.config.experiment import Experiment, load
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError
from fedstill.running.compare import variants
from fedstill.running.runner import run, with_data


@dataclass(frozen=True)
class NumPyValue:
    """Values of an experiment, and the line that they become in a resolved config."""

    values: Mapping[str, Any]
    line: str


NUMPY_VALUES = {
    "seed": NumPyValue({"seed": np.arange(3)[1]}, "seed = 1\n"),
    "rounds": NumPyValue({"rounds": np.int64(1)}, "rounds = 1\n"),
    "lr": NumPyValue({"plan": {"lr": np.float32(0.5)}}, "lr = 0.5\n"),
    "columns": NumPyValue(
        {"data": {"name": "digits", "mean": np.array([0.25])}}, "mean = [\n    0.25,\n]"
    ),
    "names": NumPyValue({"measure": np.array(["local"])}, 'measure = [\n    "local",\n]'),
    "float": NumPyValue(
        {"partition": {"kind": "dirichlet", "alpha": np.float64(2)}}, "alpha = 2.0\n"
    ),
}


@pytest.mark.parametrize("name", NUMPY_VALUES)
def test_values_of_numpy_are_written_as_plain_values(name: str) -> None:
    value = NUMPY_VALUES[name]
    assert value.line in resolve(Experiment(**value.values)).toml
    assert value.line in resolve(Experiment().with_values(value.values, "Python")).toml


def test_a_run_takes_numbers_of_numpy(tmp_path: Path) -> None:
    experiment = toys.toy(rounds=np.int64(1), seed=np.int64(3))
    assert run(experiment, tmp_path / "run", toys.blobs()).summary["seed"] == 3


def test_a_comparison_takes_arrays(tmp_path: Path) -> None:
    experiment = Experiment(
        rounds=1, measure=[], model="logistic", topology={"clients": 2}, data={"train_size": 50}
    )  # type: ignore[arg-type]
    comparison = fedstill.compare(
        experiment,
        np.array(["fedavg"]),
        np.arange(2),
        {"plan.lr": np.array([0.5])},
        out=tmp_path / "both",
        jobs=1,
        quiet=True,
    )
    (group,) = comparison.groups
    assert group.label == "fedavg"
    assert group.seeds == [0, 1]


TABLE = "a,b,label\n" + "".join(f"{row},{row % 7},{row % 2}\n" for row in range(60))

MINE = """
from dataclasses import dataclass
from fedstill import register
from fedstill.methods.fedavg import FedAvg
@register("method", "mine")
@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a table, a method, and a folder with the name of a data set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "simple.csv").write_text(TABLE)
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "one.csv").write_text(TABLE)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.mark.parametrize("is_table", [False, True], ids=["name", "table"])
@pytest.mark.parametrize("is_absolute", [False, True], ids=["relative", "absolute"])
def test_a_config_takes_a_path_wherever_it_takes_a_name(
    is_table: bool, is_absolute: bool, folder: Path
) -> None:
    path = Path("simple.csv")
    if is_absolute:
        path = folder / path
    data: Any = path
    if is_table:
        data = {"name": path}
    experiment = Experiment(data=data, method=Path("mine.py"), start_from=Path("simple.csv"))  # type: ignore[arg-type]

    settings = resolve(experiment)
    assert settings.data.name == str(folder / "simple.csv")
    assert settings.start_from == str(folder / "simple.csv")
    assert settings.named.method.name == str(folder / "mine.py")


@pytest.mark.usefixtures("folder")
def test_a_path_is_a_file_even_if_a_data_set_has_its_name() -> None:
    assert fedstill.load_dataset(Path("simple.csv")).about.kind == "table"
    assert fedstill.load_dataset(Path("digits")).about.kind == "table"
    assert fedstill.load_dataset("digits").about.kind == "image"
    with pytest.raises(ConfigError, match="not an int"):
        fedstill.load_dataset(3)  # type: ignore[arg-type]


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "run": run,
    "run with data": lambda argument: run(argument, data=toys.blobs()),
    "compare": fedstill.compare,
    "resolve": resolve,
    "variants": lambda argument: variants(argument, Path("out")),
    "with_data": lambda argument: with_data(argument, toys.blobs()),
}
"""Functions of an experiment."""


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("my.toml", r"fedstill\.load\('my\.toml'\)$"),
        (Path("my.toml"), r"fedstill\.load\('my\.toml'\)$"),
        ({"rounds": 1}, r"fedstill\.Experiment\(\*\*it\)$"),
        (None, r"fedstill\.load\('my\.toml'\)$"),
    ],
    ids=["text", "path", "dict", "none"],
)
def test_an_argument_that_is_no_experiment_is_refused_with_the_function_that_makes_one(
    argument: object, advice: str, name: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        FUNCTIONS[name](argument)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model of a run on images of 4 × 4."""
    folder = tmp_path_factory.mktemp("model") / "run"
    return fedstill.load_model(run(toys.toy(rounds=1), folder, toys.blobs()))


def test_a_trained_model_takes_arrays(model: Any) -> None:
    noise = model.noise(3)
    assert torch.equal(model(noise.numpy()), model(noise))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([[1.0]], "a list"),
        (np.array(["a"]), "<U1"),
        (np.zeros((1, 4, 4)), r"\(N, 1, 4, 4\), not \(1, 4, 4\)"),
    ],
    ids=["list", "texts", "one image"],
)
def test_a_trained_model_refuses_other_inputs(inputs: object, message: str, model: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        model(inputs)


def test_a_config_may_begin_with_the_mark_that_some_editors_write(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_bytes(b"\xef\xbb\xbfrounds = 7\n")
    assert load(tmp_path / "my.toml").rounds == 7


@pytest.mark.parametrize(
    ("table", "key"), [("method", "name"), ("partition", "kind"), ("data", "name")]
)
def test_a_table_that_is_set_twice_is_named(table: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(f"{table} = 'it'\nrounds = 1\n\n[{table}]\nx = 1\n")
    message = (
        rf"my\.toml: {table} is set twice, as a name and as a table; put the name into "
        rf"\[{table}\], as {key} = \.\.\.$"
    )
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "my.toml")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config in another folder than the working directory. Both have a file ``both.py``."""
    for name in ("config", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "both.py").write_text(MINE)
    (tmp_path / "here" / "mine.py").write_text(MINE)
    (tmp_path / "config" / "my.toml").write_text("rounds = 1\n")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "config" / "my.toml"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("mine.py", "here/mine.py"),
        ("mine.py:Mine", "here/mine.py:Mine"),
        ("both.py", "config/both.py"),
    ],
)
def test_an_override_finds_a_file_beside_the_config_or_else_in_the_working_directory(
    name: str, path: str, config: Path, tmp_path: Path
) -> None:
    settings = resolve(load(config, (f"method={name}",)))
    assert settings.named.method.name == str(tmp_path / path)


@pytest.mark.parametrize("override", ["data.folder=sets", "data={name=digits,folder=sets}"])
def test_a_folder_of_the_working_directory_is_found_in_a_table_too(
    override: str, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "here" / "sets").mkdir()
    assert resolve(load(config, (override,))).data.folder == str(tmp_path / "here" / "sets")


def test_an_override_that_names_no_file_is_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        resolve(load(config, ("method=nowhere.py",)))


@pytest.mark.usefixtures("folder")
def test_a_run_directory_is_named_after_the_last_part_of_the_path_of_its_data() -> None:
    experiment = Experiment(
        rounds=1, measure=(), partition="iid", topology={"clients": 2}, data=Path("simple.csv")
    )  # type: ignore[arg-type]
    assert run(experiment).directory == Path("runs/fedavg-simple.csv-seed0-1")
