"""What Python hands over that is no plain value, NumPy's numbers and paths, and what is no
experiment at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

SAID: dict[str, tuple[Mapping[str, Any], str]] = {
    "seed": ({"seed": np.arange(3)[1]}, "seed = 1\n"),
    "rounds": ({"rounds": np.int64(1)}, "rounds = 1\n"),
    "lr": ({"plan": {"lr": np.float32(0.5)}}, "lr = 0.5\n"),
    "columns": ({"data": {"name": "digits", "mean": np.array([0.25])}}, "mean = [\n    0.25,\n]"),
    "names": ({"measure": np.array(["local"])}, 'measure = [\n    "local",\n]'),
    "truth": ({"partition": {"kind": "dirichlet", "alpha": np.float64(2)}}, "alpha = 2.0\n"),
}


@pytest.mark.parametrize("what", SAID)
def test_numbers_of_numpy_are_written_as_numbers(what: str) -> None:
    given, line = SAID[what]
    assert line in resolve(Experiment(**given)).toml
    assert line in resolve(Experiment().with_values(given, "Python")).toml


def test_a_run_takes_them_and_a_comparison_too(tmp_path: Path) -> None:
    experiment = toys.toy(rounds=np.int64(1), seed=np.int64(3))
    assert run(experiment, tmp_path / "run", toys.blobs()).summary["seed"] == 3
    small = Experiment(
        rounds=1, measure=[], model="logistic", topology={"clients": 2}, data={"train_size": 50}
    )  # type: ignore[arg-type]
    both = fedstill.compare(
        small,
        np.array(["fedavg"]),
        np.arange(2),
        {"plan.lr": np.array([0.5])},
        out=tmp_path / "both",
        jobs=1,
        quiet=True,
    )
    assert [(group.label, group.seeds) for group in both.groups] == [("fedavg", [0, 1])]


MINE = """
from dataclasses import dataclass
from fedstill import register
from fedstill.methods.fedavg import FedAvg
@register("method", "mine")
@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""


def test_paths_are_taken_wherever_a_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("simple.csv").write_text(
        "a,b,label\n" + "".join(f"{n},{n % 7},{n % 2}\n" for n in range(60))
    )
    Path("digits").mkdir()
    Path("digits/one.csv").write_text(Path("simple.csv").read_text())
    Path("mine.py").write_text(MINE)
    assert fedstill.load_dataset(Path("simple.csv")).about.kind == "table"
    assert fedstill.load_dataset(Path("digits")).about.kind == "table"
    assert fedstill.load_dataset("digits").about.kind == "image"
    for data in (
        Path("simple.csv"),
        {"name": Path("simple.csv")},
        {"name": tmp_path / "simple.csv"},
    ):
        settings = resolve(
            Experiment(data=data, method=Path("mine.py"), start_from=Path("simple.csv"))
        )  # type: ignore[arg-type]
        assert settings.data.name == settings.start_from == str(tmp_path / "simple.csv")
        assert settings.named.method.name == str(tmp_path / "mine.py")
    with pytest.raises(ConfigError, match="not an int"):
        fedstill.load_dataset(3)  # type: ignore[arg-type]


OTHER: dict[str, Callable[[Any], Any]] = {
    "run": run,
    "run with data": lambda it: run(it, data=toys.blobs()),
    "compare": fedstill.compare,
    "resolve": resolve,
    "variants": lambda it: variants(it, Path("out")),
    "with_data": lambda it: with_data(it, toys.blobs()),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_is_no_experiment_is_named_with_what_makes_one(what: str) -> None:
    for given, remedy in (
        ("my.toml", r"fedstill\.load\('my\.toml'\)$"),
        (Path("my.toml"), r"fedstill\.load\('my\.toml'\)$"),
        ({"rounds": 1}, r"fedstill\.Experiment\(\*\*it\)$"),
        (None, r"fedstill\.load\('my\.toml'\)$"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            OTHER[what](given)


def test_a_trained_model_takes_arrays(tmp_path: Path) -> None:
    model = fedstill.load_model(run(toys.toy(rounds=1), tmp_path / "run", toys.blobs()))
    noise = model.noise(3)
    assert torch.equal(model(noise.numpy()), model(noise))
    for given, kind in (
        ([[1.0]], "a list"),
        (np.array(["a"]), "<U1"),
        (noise.numpy()[0], r"\(N, 1, 4, 4\), not \(1, 4, 4\)"),
    ):
        with pytest.raises(ConfigError, match=kind):
            model(given)


def test_a_config_may_begin_with_the_mark_that_some_editors_write(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_bytes(b"\xef\xbb\xbfrounds = 7\n")
    assert load(tmp_path / "my.toml").rounds == 7


@pytest.mark.parametrize(
    ("table", "key"), [("method", "name"), ("partition", "kind"), ("data", "name")]
)
def test_a_table_that_is_set_twice_is_named(table: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(f"{table} = 'it'\nrounds = 1\n\n[{table}]\nx = 1\n")
    said = (
        rf"my\.toml: {table} is set twice, as a name and as a table; put the name into "
        rf"\[{table}\], as {key} = \.\.\.$"
    )
    with pytest.raises(ConfigError, match=said):
        load(tmp_path / "my.toml")


def test_an_override_may_name_a_file_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("config", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "both.py").write_text(MINE)
    (tmp_path / "here/mine.py").write_text(MINE)
    (tmp_path / "config/my.toml").write_text("rounds = 1\n")
    monkeypatch.chdir(tmp_path / "here")
    for name, place in (
        ("mine.py", "here/mine.py"),
        ("mine.py:Mine", "here/mine.py:Mine"),
        ("both.py", "config/both.py"),
    ):
        settings = resolve(load(tmp_path / "config/my.toml", (f"method={name}",)))
        assert settings.named.method.name == str(tmp_path / place)
    with pytest.raises(ConfigError, match="there is no file"):
        resolve(load(tmp_path / "config/my.toml", ("method=nowhere.py",)))


def test_the_folder_of_a_run_is_called_by_the_end_of_its_data_s_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "simple.csv").write_text(
        "a,b,label\n" + "".join(f"{n},{n % 7},{n % 2}\n" for n in range(60))
    )
    experiment = Experiment(
        rounds=1, measure=(), partition="iid", topology={"clients": 2}, data=Path("simple.csv")
    )  # type: ignore[arg-type]
    assert run(experiment).directory == Path("runs/fedavg-simple.csv-seed0-1")
