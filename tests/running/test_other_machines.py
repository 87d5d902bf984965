"""Runs of a machine with a CUDA card, or with units for bfloat16, are read on a machine without."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

import toys
from fedstill.cli import call
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError
from fedstill.engines import devices
from fedstill.export.loading import load_model
from fedstill.running.runner import resume, run
from run_bits import before_round_1, stopped, with_changed_config

LACKING = [
    ('device = "cuda"', "torch sees no CUDA device on this machine"),
    ('precision = "bf16"', "no units for bfloat16"),
]


@pytest.fixture(params=LACKING, ids=["cuda", "bf16"])
def lacking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A line of a config that this machine cannot carry out, and a part of the error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: False)
    return request.param


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(toys.toy("fedntd"), folder, data=toys.blobs())
    return folder


def trained_with(folder: Path, line: str) -> Path:
    """The run, as if it had been trained with this line in its config."""
    key = line.partition(" ")[0]
    config = (folder / "config.toml").read_text()
    config, count = re.subn(f"^{key} .*$", line, config, flags=re.MULTILINE)
    assert count == 1
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return with_changed_config(folder, config)


def compare_command(config: Path, out: Path) -> list[str]:
    """The command that compares FedAvg with itself over seeds, which are to be appended."""
    return ["compare", str(config), "--methods", "fedavg", "--out", str(out), "--quiet", "--seeds"]


def test_a_model_is_loaded(finished: Path, lacking: tuple[str, str], tmp_path: Path) -> None:
    other_run = trained_with(Path(shutil.copytree(finished, tmp_path / "run")), lacking[0])
    images = toys.blobs().test.values
    assert torch.equal(load_model(other_run)(images), load_model(finished)(images))
    assert call(["export", str(other_run), "--folder", str(tmp_path / "shared")]) == 0


def test_a_finished_run_gives_its_result_and_a_begun_one_is_refused(
    finished: Path, lacking: tuple[str, str], tmp_path: Path
) -> None:
    line, message = lacking
    other_run = trained_with(Path(shutil.copytree(finished, tmp_path / "run")), line)
    assert resume(other_run).accuracy == resume(finished).accuracy
    unfinished = trained_with(
        before_round_1(stopped(toys.toy("fedntd"), tmp_path / "begun", 1)), line
    )
    with pytest.raises(ConfigError, match=message):
        resume(unfinished, data=toys.blobs())


@pytest.mark.uses("benchmark")
def test_a_table_is_printed_and_its_runs_are_not_begun(
    lacking: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, message = lacking
    cell = ["--cells", "FedAvg:CIFAR-10 .1", "--seeds", "1", "-s", line.replace(" ", "")]
    words = ["reproduce", "fedadkd/table2", *cell, "--out", str(tmp_path)]

    assert call([*words, "--table"]) == 0
    assert "53.9" in capsys.readouterr().out
    assert call(words) == 2
    assert message in capsys.readouterr().err


def test_a_comparison_of_finished_runs_is_read_and_no_other_is_begun(
    lacking: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, message = lacking
    config = tmp_path / "small.toml"
    config.write_text(toys.SMALL)
    words = compare_command(config, tmp_path / "out")
    assert call([*words, "1"]) == 0
    trained_with(next((tmp_path / "out").glob("*/seed1")), line)
    config.write_text(f"{line}\n{toys.SMALL}")
    capsys.readouterr()

    assert call([*words, "1"]) == 0
    assert "fedavg" in capsys.readouterr().out

    assert call([*words, "1,2"]) == 2
    assert message in capsys.readouterr().err


def test_a_finished_run_is_not_deleted_for_one_that_cannot_begin_here(
    lacking: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, message = lacking
    config = tmp_path / "small.toml"
    config.write_text(toys.SMALL)
    words = [*compare_command(config, tmp_path / "out"), "1"]

    assert call(words) == 0

    (summary,) = (tmp_path / "out").glob("*/seed1/summary.json")
    summary_bytes = summary.read_bytes()
    config.write_text(f"{line}\n{toys.SMALL}")
    capsys.readouterr()

    assert call([*words, "--overwrite"]) == 2
    assert message in capsys.readouterr().err
    assert summary.read_bytes() == summary_bytes


def test_a_new_run_is_refused_before_anything_is_read(lacking: tuple[str, str]) -> None:
    key, value = lacking[0].replace('"', "").split(" = ")
    with pytest.raises(ConfigError, match=lacking[1]):
        resolve(Experiment(**{key: value}))
    assert getattr(resolve(Experiment(**{key: value}), check_device=False), key) == value
