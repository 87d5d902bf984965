"""The runs of a comparison: what the command line, the config and the list of methods make of each
other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstill.cli import call
from fedstill.config.experiment import Experiment, load
from fedstill.config.overrides import parse_grid
from fedstill.config.settings import Settings
from fedstill.core.errors import ConfigError
from fedstill.running.compare import variants

CONFIG = '[method]\nname = "fedadkd"\nalpha = 2.0\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def alphas(experiment: Experiment, *methods: str) -> dict[str, float | None]:
    """The hyper-parameter alpha of each method; None for one without."""
    runs = variants(experiment, Path("out"), methods)
    return {
        run.settings.named.method.name: run.settings.named.method.values.get("alpha")
        for run in runs
    }


def test_fields_of_the_config_are_those_of_its_method(config: Path) -> None:
    assert alphas(load(config), "fedadkd", "fedavg") == {"fedadkd": 2.0, "fedavg": None}
    default = alphas(load(None), "fedadkd")["fedadkd"]
    assert default != 2.0
    config.write_text(CONFIG.replace("fedadkd", "fedavg").replace("alpha", "# alpha"))
    assert alphas(load(config), "fedadkd") == {"fedadkd": default}


def test_fields_of_a_config_without_a_method_hold_for_every_method(config: Path) -> None:
    config.write_text("[method]\nalpha = 2.0\n")
    assert alphas(load(config), "fedadkd") == {"fedadkd": 2.0}
    with pytest.raises(ConfigError, match=r"method\.alpha"):
        variants(load(config), Path("out"), ["fedntd"])


def test_fields_of_the_command_line_hold_for_every_method(config: Path) -> None:
    override = ("method.alpha=1.5",)
    assert alphas(load(config, override), "fedadkd") == {"fedadkd": 1.5}
    assert alphas(load(None, override), "fedadkd") == {"fedadkd": 1.5}
    with pytest.raises(ConfigError, match=r"method\.alpha"):
        variants(load(config, override), Path("out"), ["fedadkd", "fedntd"])


@pytest.mark.parametrize("override", ["method=fedprox", "method.name=fedprox"])
def test_two_ways_to_name_the_method_are_refused(config: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="--methods"):
        variants(load(config, (override,)), Path("out"), ["fedntd"])


# Values that the command line, a grid and Python set more than once.


@pytest.mark.parametrize(
    ("overrides", "options", "key"),
    [
        (["seed=5"], {"seeds": [1, 2]}, "seed"),
        (["plan.lr=0.5"], {"grid": {"plan.lr": [1.0, 2.0]}}, "plan.lr"),
        (["plan={lr=0.5}"], {"grid": {"plan.lr": [1.0, 2.0]}}, "plan.lr"),
        (["plan.lr=0.5"], {"grid": {"plan": [{"epochs": 1}, {"epochs": 2}]}}, "plan.lr"),
        (["method=fedavg"], {"grid": {"method": ["fedavg", "fedprox"]}}, "method.name"),
        ([], {"seeds": [1], "grid": {"seed": [1, 2]}}, "seed"),
        ([], {"methods": ["fedavg"], "grid": {"method.name": ["fedntd"]}}, "method.name"),
    ],
)
def test_a_value_that_is_set_twice_is_refused(
    overrides: list[str], options: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"{key} is set twice"):
        variants(load(None, tuple(overrides)), Path("out"), **options)


@pytest.mark.parametrize(
    "overrides", [("seed=1", "seed=2"), ("method.name=fedavg", "method=fedntd")]
)
def test_two_overrides_of_one_key_are_refused(overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="set twice"):
        load(None, overrides)


def test_two_grids_of_one_key_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan\.lr"):
        parse_grid(("plan.lr=1", "plan.lr=2"))


def test_python_may_set_a_value_again() -> None:
    experiment = load(None, ("rounds=3",)).with_values({"rounds": 5}, "Python")
    assert experiment.with_values({"rounds": 7}, "Python").rounds == 7


@pytest.mark.parametrize(
    "overrides",
    [
        ("method=fedadkd", "method.alpha=1.5"),
        ("method.alpha=1.5", "method=fedadkd"),
        ("method.alpha=1.5", "method.name=fedadkd"),
    ],
)
def test_a_field_of_the_command_line_stays_whatever_the_order(
    overrides: tuple[str, ...], config: Path
) -> None:
    config.write_text('[method]\nname = "fedntd"\nbeta = 2.0\n')
    assert load(config, overrides).method == {"name": "fedadkd", "alpha": 1.5}


def test_a_table_that_names_the_same_thing_again_keeps_its_fields(config: Path) -> None:
    assert load(config, ("method=fedadkd",)).table("method")["alpha"] == 2.0

    config.write_text("[model]\nhidden = [8]\n[data]\ntrain_size = 50\n[stream]\ntasks = 3\n")
    experiment = load(config, ("model=mlp", "data=mnist", "stream=classes"))
    assert experiment.model == {"hidden": [8], "name": "mlp"}
    assert experiment.data == {"train_size": 50, "name": "mnist"}
    assert experiment.stream == {"tasks": 3, "kind": "classes"}
    assert load(config, ("stream=none",)).stream["tasks"] == 3


def alphas_of_partitions(experiment: Experiment) -> list[float | None]:
    grid = {"partition": ["dirichlet", "iid"]}
    runs = variants(experiment, Path("out"), grid=grid)
    return [run.settings.named.partition.values.get("alpha") for run in runs]


def test_a_grid_of_names_drops_no_field_of_the_command_line(config: Path) -> None:
    config.write_text("[partition]\nalpha = 0.3\n")
    assert alphas_of_partitions(load(config)) == [0.3, None]
    with pytest.raises(ConfigError, match=r"partition\.alpha"):
        alphas_of_partitions(load(config, ("partition.alpha=0.7",)))


# Methods of different topologies.


SHAPES = """
rounds = 4
[data]
train_size = 200
test_size = 50
[topology]
clients = 4
sampled = 3
[plan.train]
epochs = 1
[plan.fit]
epochs = 3
optimiser = "sgd"
[model]
name = "logistic"
"""


def by_method(experiment: Experiment, *methods: str) -> dict[str, Settings]:
    """The settings of a comparison of methods."""
    runs = variants(experiment, Path("out"), methods)
    return {run.settings.named.method.name: run.settings for run in runs}


def test_methods_of_different_topologies_are_compared(config: Path) -> None:
    config.write_text(SHAPES)
    settings = by_method(load(config), "fedavg", "local_only", "fedseq")
    fedavg = settings["fedavg"]
    local_only = settings["local_only"]
    fedseq = settings["fedseq"]

    assert fedavg.named.topology.name == "parallel"
    assert local_only.named.topology.name == "peer_to_peer"
    assert fedseq.named.topology.name == "sequential"
    assert (fedavg.rounds, local_only.rounds, fedseq.rounds) == (4, 1, 4)
    assert (fedavg.clients, local_only.clients, fedseq.clients) == (4, 4, 4)
    assert fedavg.named.topology.values["sampled"] == 3
    assert fedavg.plans["train"].epochs == 1
    assert local_only.plans["fit"].epochs == 3


def test_a_value_that_no_compared_method_has_is_refused(config: Path) -> None:
    config.write_text(SHAPES)
    with pytest.raises(ConfigError, match="'fit'"):
        by_method(load(config), "fedavg", "fedprox")
    with pytest.raises(ConfigError, match="rounds"):
        by_method(load(None, ("rounds=2",)), "local_only")

    config.write_text(SHAPES.replace("sampled = 3", "samples = 3"))
    with pytest.raises(ConfigError, match=r"topology\.samples"):
        by_method(load(config), "fedavg", "local_only")


def test_values_of_the_command_line_hold_for_every_topology(config: Path) -> None:
    config.write_text(SHAPES)
    with pytest.raises(ConfigError, match="sampled"):
        by_method(load(config, ("topology.sampled=2",)), "fedavg", "local_only")
    with pytest.raises(ConfigError, match="fit"):
        by_method(load(config, ("plan.fit.lr=0.5",)), "fedavg", "local_only")

    settings = by_method(load(config, ("rounds=2",)), "fedavg", "local_only")
    assert (settings["fedavg"].rounds, settings["local_only"].rounds) == (2, 1)


@pytest.mark.parametrize(
    "override", ["topology.kind=5", "topology.first=[1]", "rounds=many", "stream.kind=5"]
)
def test_a_value_of_another_type_is_one_line(override: str, config: Path) -> None:
    config.write_text(SHAPES)
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        by_method(load(config, (override,)), "fedavg", "local_only")


@pytest.mark.uses("querying")
def test_clients_that_ask_again_have_all_rounds(config: Path) -> None:
    config.write_text(SHAPES + '[query]\ndraw = "all"\nagain = "mixed"\n')
    config.write_text(config.read_text().replace("sampled = 3\n[plan.train]\nepochs = 1\n", ""))
    settings = by_method(load(config), "qkt", "naive_kd")
    assert settings["qkt"].rounds == 4
    assert settings["naive_kd"].rounds == 4


def test_a_method_with_one_exchange_has_a_round_for_each_task(config: Path) -> None:
    config.write_text(SHAPES + '[stream]\nkind = "classes"\ntasks = 2\n')
    settings = by_method(load(config), "fedavg", "local_only")
    assert (settings["fedavg"].rounds, settings["local_only"].rounds) == (4, 2)


def test_a_comparison_shows_topologies_and_rounds(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(config.parent)
    config.write_text(SHAPES)
    words = ["compare", config.name, "--out", "all", "-q", "--methods"]
    assert call([*words, "fedavg,local_only"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert {"topology", "rounds"} <= set(head.split())
    assert any(line.split()[:3] == ["local_only", "peer_to_peer", "1"] for line in lines)
    folder = Path("all")
    table = (folder / "tables" / "results.csv").read_text(encoding="utf-8")
    assert table.startswith("label,note,topology,rounds,")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert ">peer_to_peer</td>" in page

    assert call(["report", "all/fedavg", "--tables", "alone"]) == 0
    table = Path("alone/results.csv").read_text(encoding="utf-8")
    assert not table.startswith("label,note,topology")


@pytest.mark.parametrize("grid", [{"plan.lr": 0.1}, {"method": "fedavg"}, {"plan.lr": None}])
def test_a_grid_of_a_value_that_is_no_list_is_refused(grid: dict[str, Any], tmp_path: Path) -> None:
    (key,) = grid
    with pytest.raises(ConfigError) as caught:
        variants(Experiment(), tmp_path, grid=grid)
    assert key in str(caught.value)
    assert "list" in str(caught.value)


def test_a_grid_may_be_an_array(tmp_path: Path) -> None:
    assert len(variants(Experiment(), tmp_path, grid={"plan.lr": np.array([0.1, 0.2])})) == 2


METHOD = """
from fedstill.core.registry import method
from fedstill.methods.fedavg import FedAvg

@method("mine")
class Mine(FedAvg):
    pass
"""


def test_methods_of_two_files_with_one_name_are_two_runs(tmp_path: Path) -> None:
    files = [tmp_path / folder / "mine.py" for folder in ("first", "second")]
    for file in files:
        file.parent.mkdir()
        file.write_text(METHOD)

    runs = variants(Experiment(), tmp_path / "out", [str(file) for file in files])

    assert [run.label for run in runs] == [str(file) for file in files]
    assert len({run.folder for run in runs}) == 2


def test_values_that_differ_only_in_a_slash_have_folders_of_their_own(tmp_path: Path) -> None:
    runs = variants(Experiment(), tmp_path, grid={"data.folder": ["a/b", "a-b"]})

    assert len({run.folder for run in runs}) == 2
