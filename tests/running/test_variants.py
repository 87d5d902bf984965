"""The runs of a comparison: what the command line, the config and the list of methods make of each
other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstill.config.experiment import Experiment, load
from fedstill.core.errors import ConfigError
from fedstill.running.variants import variants

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
