"""The commands: exit codes, refusals in one line, their output, and files that they keep."""

from __future__ import annotations

import json
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
    """A small config in the working directory, which is otherwise empty."""
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
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert Path(last_line.strip()).is_file()

    assert call(["explain", str(config), "-s", "seed=4"]) == 0
    explanation = capsys.readouterr().out
    assert "command line" in explanation
    assert "file small.toml" in explanation
    assert "optimiser steps a round" in explanation
    assert "examples, " in explanation, "the split is drawn"


def test_a_directory_is_made_under_runs(config: Path, tmp_path: Path) -> None:
    assert call(["run", str(config), "-q"]) == 0
    assert call(["run", str(config), "-q"]) == 0
    names = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert names == ["fedntd-digits-seed0-1", "fedntd-digits-seed0-2"]


@pytest.mark.parametrize(
    "kind", ["method", "dataset", "partition", "model", "topology", "measure", "stream"]
)
def test_list_prints_names_of_every_kind(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["list", kind]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_a_mistake_is_refused_in_one_line_and_leaves_nothing_behind(
    words: list[str],
    message: str,
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(words) == 2
    stderr = capsys.readouterr().err
    assert message in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert "Traceback" not in stderr
    assert not (tmp_path / "runs").exists()


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
def test_a_path_that_the_file_system_refuses_is_named_in_one_line(
    words: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here, a name is too long. It is the same for a path below a folder without permission."""
    assert call([word.replace("X", "x" * 300) for word in words.split()]) == 2
    stderr = capsys.readouterr().err
    assert len(stderr.splitlines()) == 1
    assert stderr.endswith(": File name too long; choose another path\n")


def test_a_directory_with_another_run_is_not_changed(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", str(config), "--out", "one", "-q"]) == 0
    summary = Path("one/summary.json").read_bytes()
    assert call(["run", str(config), "--out", "one", "-q"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert Path("one/summary.json").read_bytes() == summary


def seconds_by_summary(folder: Path) -> dict[Path, float]:
    """The duration of each run of a comparison, by its summary."""
    summaries = folder.glob("*/*/summary.json")
    return {path: json.loads(path.read_text())["seconds"] for path in summaries}


def test_the_same_comparison_again_leaves_finished_runs_alone(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--methods", "fedavg,fedntd", "--seeds", "1,2", "--out", "all", "-q"]
    words = ["compare", str(config), *options]
    assert call(words) == 0
    printed = capsys.readouterr().out
    assert "fedavg" in printed
    assert "±" in printed
    assert Path("all/report.html").is_file()
    seconds = seconds_by_summary(Path("all"))
    assert len(seconds) == 4

    assert call([*words, "--grid", "plan.lr=0.01"]) == 0, "other settings are other folders"
    # A folder of results may keep no models, and an earlier version knew fewer keys.
    for model in Path("all").glob("*/*/model.safetensors"):
        model.unlink()
    for run_config in Path("all").glob("*/*/config.toml"):
        text = run_config.read_text()
        with_changed_config(run_config.parent, text.replace('device = "cpu"\n', ""))
    assert call(words) == 0
    assert seconds_by_summary(Path("all")).items() >= seconds.items()

    assert call([*words, "-s", "rounds=3"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_a_failed_run_is_named_and_does_not_stop_the_others_of_a_comparison(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--grid", "plan.lr=0.01,1e8", "--seeds", "1", "--out", "two", "-q"]
    assert call(["compare", str(config), *options]) == 1
    assert "plan.lr" in capsys.readouterr().err
    assert len(list(Path("two").glob("*/*/summary.json"))) == 1


@pytest.mark.slow
def test_ctrl_c_ends_after_the_stage(config: Path) -> None:
    words = ["run", str(config), "--out", "long", "-s", "rounds=100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedstill", *words], stderr=subprocess.PIPE, text=True
    )
    journal = Path("long/journal.jsonl")
    while not journal.is_file() or journal.stat().st_size < 5000:
        time.sleep(0.1)

    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "fedstill resume long" in stderr


def test_on_windows_the_command_recommends_wsl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
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
