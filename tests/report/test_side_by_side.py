"""Comparisons from Python: the same runs as the command's, as an object."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import fedstill
import toys
from fedstill.cli import call
from fedstill.config.experiment import load
from fedstill.core.errors import ConfigError, Interrupted, RunsFailed
from run_bits import assert_same_bits, bits


@pytest.fixture
def small_config(tmp_path: Path) -> Path:
    """The config of a small experiment with fedntd."""
    path = tmp_path / "small.toml"
    path.write_text(toys.SMALL)
    return path


@pytest.fixture
def small(small_config: Path) -> fedstill.Experiment:
    """The experiment of the small config."""
    return load(small_config)


def call_compare(config: Path, **options: str) -> int:
    """The exit code of ``fedstill compare --quiet`` with a config and with options."""
    words = []
    for option, value in options.items():
        words += [f"--{option}", value]
    return call(["compare", str(config), "--quiet", *words])


def test_python_and_the_command_do_the_same_runs(
    small: fedstill.Experiment, small_config: Path, tmp_path: Path
) -> None:
    methods = ["fedavg", "fedntd"]
    python = tmp_path / "python"
    command = tmp_path / "command"

    comparison = fedstill.compare(small, methods, [1, 2], out=python, quiet=True)
    exit_code = call_compare(small_config, methods="fedavg,fedntd", seeds="1,2", out=str(command))

    assert exit_code == 0
    for run in ("fedavg/seed1", "fedntd/seed2"):
        assert_same_bits(bits(python / run), bits(command / run))

    assert "fedntd" in repr(comparison)
    assert "fedntd" in comparison._repr_html_()
    assert (python / "report.html").is_file()
    frame = comparison.table()
    assert frame[["group", "seeds"]].values.tolist() == [["fedavg", 2], ["fedntd", 2]]

    repeated = fedstill.compare(small, methods, [1, 2], out=python, quiet=True)
    assert repeated.table().equals(frame)


SCRIPT = """
import fedstill

print("once")
base = fedstill.load("small.toml")
grid = {"rounds": [1]}
comparison = fedstill.compare(
    base, seeds=[1, 2], grid=grid, jobs=2, quiet=True, track="tensorboard"
)
print(comparison.runs().finished.all())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("small_config")
def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """The processes of a comparison do not execute the calling script again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "once\nTrue\n"
    assert list(tmp_path.glob("runs/compare-1/*/seed1/tensorboard/*"))


def test_a_comparison_that_is_impossible_is_refused_before_it_writes_anything(
    small: fedstill.Experiment, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="lists"):
        fedstill.compare(small, "fedavg", out=tmp_path / "out")
    with pytest.raises(ConfigError, match="must be at least 1"):
        fedstill.compare(small, jobs=0, out=tmp_path / "out")

    class LocalMethod(fedstill.Method):
        """A method of this function, which a worker process cannot import."""

    with pytest.raises(ConfigError, match="cannot import LocalMethod"):
        fedstill.compare(toys.toy(LocalMethod), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


SOMETIMES = """
from dataclasses import dataclass
from fedstill.methods.fedavg import FedAvg
from fedstill.core.registry import method

@method("sometimes")
@dataclass(frozen=True)
class Sometimes(FedAvg):
    bad: tuple[int, ...] = (2,)
    def aggregate(self, state, replies, stage, world):
        if world.seed in self.bad:
            raise ValueError("not with this seed")
        return super().aggregate(state, replies, stage, world)
"""


def lines_with(word: str, path: Path) -> list[str]:
    """The lines of a text file that contain a word."""
    return [line for line in path.read_text().splitlines() if word in line]


def test_a_row_says_that_a_run_of_it_failed_in_its_first_round(
    small_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method = tmp_path / "sometimes.py"
    method.write_text(SOMETIMES)
    out = tmp_path / "out"

    methods = f"fedavg,{method}"
    exit_code = call_compare(small_config, methods=methods, seeds="1,2,3", out=str(out))

    assert exit_code == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[-1] for row in rows if row[:1] == ["fedavg"]] == ["3"]
    (row,) = [row for row in rows if row[:1] == ["sometimes.py,"]]
    assert row[1] == "unfinished"
    assert row[-3:] == ["2", "of", "3"]

    for table in (out / "tables" / "results.md", out / "tables" / "results.tex"):
        (line,) = lines_with("sometimes", table)
        assert "(1 of 3 runs unfinished" in line
        assert " 2 of 3 " in line
        assert "unfinished" not in "".join(lines_with("fedavg", table))

    frame = fedstill.Comparison.of(out).table()
    assert frame[["seeds", "finished"]].values.tolist() == [[3, True], [2, False]]


def test_a_comparison_in_which_every_run_fails_has_no_report(
    small: fedstill.Experiment, tmp_path: Path
) -> None:
    method = tmp_path / "sometimes.py"
    method.write_text(SOMETIMES)
    out = tmp_path / "out"

    with pytest.raises(RunsFailed, match=r"1 of 1 run failed: sometimes\.py, seed 2: "):
        fedstill.compare(small, [str(method)], [2], out=out, quiet=True)
    assert not (out / "report.html").exists()


def test_runs_that_fail_are_named_and_the_others_are_kept(
    small: fedstill.Experiment, tmp_path: Path
) -> None:
    """The checkpoints of the first run are damaged."""
    out = tmp_path / "out"
    first = out / "fedntd" / "seed1"
    first.mkdir(parents=True)
    fedstill.run(small.with_values({"seed": 1, "threads": 1}, "Python"), first, overwrite=True)
    (first / "summary.json").unlink()
    for path in (first / "checkpoints").rglob("*.safetensors"):
        path.write_bytes(b"")

    with pytest.raises(RunsFailed, match=r"fedntd, seed 1: .*Comparison\.of"):
        fedstill.compare(small, ["fedntd"], [1, 2], out=out, quiet=True)
    assert (out / "fedntd" / "seed2" / "model.safetensors").is_file()


def press_ctrl_c_after_a_round(journal: Path) -> None:
    """Interrupt this process as soon as a journal contains a round."""
    while not journal.is_file() or b'"round"' not in journal.read_bytes():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_after_ctrl_c_the_same_call_continues(small: fedstill.Experiment, tmp_path: Path) -> None:
    out = tmp_path / "out"
    long = small.with_values({"rounds": 60}, "Python")
    journal = out / "fedntd" / "seed1" / "journal.jsonl"

    user = threading.Thread(target=press_ctrl_c_after_a_round, args=(journal,))
    user.start()
    with pytest.raises(Interrupted, match=r"stopped with \d of 2 runs unfinished"):
        fedstill.compare(long, seeds=[1, 2], out=out, quiet=True)
    user.join()

    continued = fedstill.compare(long, seeds=[1, 2], out=out, quiet=True)
    assert continued.runs().finished.all()
