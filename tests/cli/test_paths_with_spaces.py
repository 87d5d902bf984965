"""A command that a message names can be pasted into a shell, whatever the path is called."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.cli import call
from fedstill.running.compare import Outcome, Variant

DEMO = pytest.param(["demo"], "runs/demo-1", id="demo")
REPRODUCE = pytest.param(
    ["reproduce", "fedntd/table14", "--cells", "FedNTD:*", "--seeds", "1"],
    "runs/fedntd-table14",
    id="reproduce",
    marks=pytest.mark.uses("benchmark"),
)


def test_a_run_in_a_folder_with_a_space_names_a_command_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my runs" / "first one"
    (tmp_path / "a.toml").write_text("")
    run = [
        "run",
        str(tmp_path / "a.toml"),
        "-s",
        "rounds=1",
        "-s",
        "topology.clients=2",
        "--out",
        str(folder),
    ]
    assert call(run) == 0
    capsys.readouterr()
    assert call(run) == 2
    said = re.search(r"`(fedstill resume .*?)`", capsys.readouterr().err.replace("\n", " "))
    assert said is not None
    program, *words = shlex.split(said[1])
    assert program == "fedstill"
    assert words == ["resume", str(folder)]
    assert call(words) == 0


def carry_out_nothing(runs: Sequence[Variant], *_: Any, **__: Any) -> list[Outcome]:
    """As if Ctrl-C came before the first run."""
    return [Outcome(run, run.settings.rounds, state="stopped") for run in runs]


def option_out(message: str) -> str:
    """The value of --out in a message, as a shell would read it."""
    words = shlex.split(message.replace(";", " "))
    return words[words.index("--out") + 1]


@pytest.mark.parametrize(("words", "folder"), [DEMO, REPRODUCE])
def test_a_stopped_command_names_the_folder_in_which_it_continues(
    words: list[str],
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedstill.report.comparison.carry_out_runs", carry_out_nothing)
    assert call([*words, "-q"]) == 1
    assert option_out(capsys.readouterr().err) == folder
    assert call([*words, "-q", "--out", "my runs"]) == 1
    assert option_out(capsys.readouterr().err) == "my runs"


def test_a_stopped_comparison_continues_with_the_named_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(toys.SMALL)
    words = ["compare", "small.toml", "-q"]
    with monkeypatch.context() as patch:
        patch.setattr("fedstill.report.comparison.carry_out_runs", carry_out_nothing)
        assert call(words) == 1
    assert call([*words, "--out", option_out(capsys.readouterr().err)]) == 0
    assert [path.name for path in Path("runs").iterdir()] == ["compare-1"]


def test_a_stopped_search_quotes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr("fedstill.running.compare.carry_out_runs", carry_out_nothing)
    folder = str(tmp_path / "my search")
    assert call(["tune", "--space", "plan.epochs=1..5", "--out", folder, "-q"]) == 1
    assert option_out(capsys.readouterr().err) == folder
