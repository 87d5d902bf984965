"""The command line: exit codes, one clear line, what is printed, and what is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import toys
from fedstill.cli import call, main
from run_bits import with_changed_config


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(toys.SMALL)
    return path


def test_run_resume_report_and_explain(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", str(config), "--out", "one", "-s", "method.beta=0.5"]) == 0
    assert "forgetting" in capsys.readouterr().out
    assert "beta = 0.5" in (tmp_path / "one" / "config.toml").read_text()
    assert call(["resume", "one"]) == 0
    assert call(["report", "one"]) == 0
    assert Path(capsys.readouterr().out.split("\n")[-2].strip()).is_file()
    assert call(["explain", str(config), "-s", "seed=4"]) == 0
    said = capsys.readouterr().out
    assert "command line" in said
    assert "file small.toml" in said
    assert "optimiser steps a round" in said
    assert "examples, " in said, "the split is drawn"


def test_a_directory_is_made_under_runs(config: Path, tmp_path: Path) -> None:
    assert call(["run", str(config), "-q"]) == 0
    assert call(["run", str(config), "-q"]) == 0
    names = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert names == ["fedntd-digits-seed0-1", "fedntd-digits-seed0-2"]


@pytest.mark.parametrize(
    "kind", ["method", "dataset", "partition", "model", "topology", "measure", "stream"]
)
def test_list(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["list", kind]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["bogus"], "bogus"),
        (["run"], "config"),
        (["run", "absent.toml"], "absent.toml"),
        (["run", "small.toml", "-s", "methd=1"], "did you mean 'method'"),
        (["run", "small.toml", "-s", "method.bta=1"], "did you mean 'method.beta'"),
        (["run", "small.toml", "-s", "method=fedntx"], "did you mean 'fedntd'"),
        (["run", "small.toml", "-s", "data.name=cifar11"], "did you mean 'cifar1"),
        (["run", "small.toml", "-s", "rounds=0"], "rounds = 0"),
        (["run", "small.toml", "-s", "plan.lr=-1"], "lr = -1"),
        (["run", "small.toml", "-s", "topology.sampled=7"], "topology.sampled"),
        (
            ["run", "small.toml", "-s", "partition=sharding", "-s", "partition.shards=900"],
            "shards",
        ),
        (["run", "small.toml", "-s", "data.train_size=99999"], "train_size"),
        (["run", "small.toml", "-s", "model=lenet5"], "lenet5"),
        (["resume", "absent"], "absent"),
        (["report", "absent"], "absent"),
        (["report"], "at least one"),
        (["compare", "--seeds", "a"], "a"),
        (["compare", "--methods", "fedavg,fedavg"], "are the same"),
        (["compare", "small.toml", "--grid", "method.bta=1,2"], "did you mean 'method.beta'"),
        (
            ["compare", "small.toml", "--grid", "plan.lr"],
            "the grid names no values of plan.lr, e.g. --grid plan.lr=0.1,1",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    words: list[str], line: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(words) == 2
    said = capsys.readouterr()
    assert line in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert "Traceback" not in said.err
    assert not (tmp_path / "runs").exists(), "nothing is left behind"


@pytest.mark.parametrize(
    "words",
    [
        "report X",
        "export X --csv tables",
        "why X",
        "pack X",
        "unpack X.runs.tar.xz",
        "query X --client 1 --classes 1",
        "forgetting X",
        "rank check X",
        "compare small.toml --out X",
        "compare --methods fedavg X",
    ],
)
def test_a_path_that_cannot_be_asked_for_is_one_line(
    words: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a name is that is too long, and a path below a folder that one may not enter."""
    assert call([word.replace("X", "x" * 300) for word in words.split()]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert said.endswith(": File name too long; choose another path\n")


def test_a_directory_with_another_run_is_left_alone(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", str(config), "--out", "one", "-q"]) == 0
    before = Path("one/summary.json").read_bytes()
    assert call(["run", str(config), "--out", "one", "-q"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert Path("one/summary.json").read_bytes() == before


def test_compare_goes_on_and_keeps_what_is_done(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that fails is named and does not stop the others; the same command again leaves
    finished runs alone.
    """
    words = [
        "compare",
        str(config),
        "--methods",
        "fedavg,fedntd",
        "--seeds",
        "1,2",
        "--out",
        "all",
        "-q",
    ]
    assert call(words) == 0
    said = capsys.readouterr().out
    assert "fedavg" in said
    assert "±" in said
    assert Path("all/report.html").is_file()
    seconds = {
        p: json.loads(p.read_text())["seconds"] for p in Path("all").glob("*/*/summary.json")
    }
    assert len(seconds) == 4
    assert call([*words, "--grid", "plan.lr=0.01"]) == 0, "other settings are other folders"
    for model in Path("all").glob("*/*/model.safetensors"):
        model.unlink()  # as in a folder of results, which keeps no models
    for config_there in Path("all").glob("*/*/config.toml"):
        text = config_there.read_text()
        # as written before there was such a key
        with_changed_config(config_there.parent, text.replace('device = "cpu"\n', ""))
    assert call(words) == 0
    assert {p: json.loads(p.read_text())["seconds"] for p in seconds} == seconds
    assert call([*words, "-s", "rounds=3"]) == 2
    assert "other settings" in capsys.readouterr().err
    failing = [
        "compare",
        str(config),
        "--grid",
        "plan.lr=0.01,1e8",
        "--seeds",
        "1",
        "--out",
        "two",
        "-q",
    ]
    assert call(failing) == 1
    said = capsys.readouterr()
    assert "plan.lr" in said.err
    assert len(list(Path("two").glob("*/*/summary.json"))) == 1


@pytest.mark.slow
def test_ctrl_c_ends_after_the_stage(config: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fedstill",
        "run",
        str(config),
        "--out",
        "long",
        "-s",
        "rounds=100000",
    ]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
    while (
        not Path("long/journal.jsonl").is_file() or Path("long/journal.jsonl").stat().st_size < 5000
    ):
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 1
    assert "fedstill resume long" in said


def test_windows_is_told_where_to_run_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Windows" in line
    assert "WSL" in line


@pytest.mark.parametrize("command", ["run", "explain"])
def test_an_option_and_an_override_of_one_key_are_refused(
    command: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([command, config.name, "--engine", "serial", "-s", "engine=pooled"]) == 2
    assert "engine is set twice" in capsys.readouterr().err
    words = ["--federation", "fed", "-s", "flower.federation=fed"]
    assert call([command, config.name, *words]) == 2
    assert "flower.federation is set twice" in capsys.readouterr().err
    assert not (config.parent / "runs").exists()
