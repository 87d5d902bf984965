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
def small(tmp_path: Path) -> fedstill.Experiment:
    path = tmp_path / "small.toml"
    path.write_text(toys.SMALL)
    return load(path)


def test_python_and_the_command_do_the_same_runs(
    small: fedstill.Experiment, tmp_path: Path
) -> None:
    both = fedstill.compare(small, ["fedavg", "fedntd"], [1, 2], out=tmp_path / "here", quiet=True)
    command = [
        "compare",
        str(tmp_path / "small.toml"),
        "--methods",
        "fedavg,fedntd",
        "--seeds",
        "1,2",
        "--quiet",
    ]
    assert call([*command, "--out", str(tmp_path / "there")]) == 0
    for run in ("fedavg/seed1", "fedntd/seed2"):
        assert_same_bits(bits(tmp_path / "here" / run), bits(tmp_path / "there" / run))
    assert "fedntd" in repr(both)
    assert "fedntd" in both._repr_html_()
    assert (tmp_path / "here/report.html").is_file()
    frame = both.table()
    assert frame[["group", "seeds"]].values.tolist() == [["fedavg", 2], ["fedntd", 2]]
    again = fedstill.compare(small, ["fedavg", "fedntd"], [1, 2], out=tmp_path / "here", quiet=True)
    assert again.table().equals(frame)


@pytest.mark.slow
def test_a_script_needs_no_guard(small: fedstill.Experiment, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import fedstill\nprint('once')\nbase = fedstill.load('small.toml')\n"
        "both = fedstill.compare(base, seeds=[1, 2], grid={'rounds': [1]}, jobs=2, quiet=True, "
        "track='tensorboard')\n"
        "print(both.runs().finished.all())\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("once\nTrue\n", 0), done.stderr
    assert list(tmp_path.glob("runs/compare-1/*/seed1/tensorboard/*"))


def test_what_cannot_be_compared_is_refused_first(
    small: fedstill.Experiment, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="lists"):
        fedstill.compare(small, "fedavg", out=tmp_path / "out")
    with pytest.raises(ConfigError, match="must be at least 1"):
        fedstill.compare(small, jobs=0, out=tmp_path / "out")

    class Mine(fedstill.Method):
        """A method of this function."""

    with pytest.raises(ConfigError, match="cannot import Mine"):
        fedstill.compare(toys.toy(Mine), out=tmp_path / "out")
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


def test_a_row_says_that_a_run_of_it_failed_in_its_first_round(
    small: fedstill.Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sometimes.py").write_text(SOMETIMES)
    out = tmp_path / "out"
    command = [
        "compare",
        str(tmp_path / "small.toml"),
        "--methods",
        f"fedavg,{tmp_path / 'sometimes.py'}",
        "--quiet",
    ]
    assert call([*command, "--seeds", "1,2,3", "--out", str(out)]) == 1
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in printed if line[:1] == ["fedavg"]] == ["3"]
    (row,) = [line for line in printed if line[:1] == ["sometimes.py,"]]
    assert (row[1], row[-3:]) == ("unfinished", ["2", "of", "3"])
    for name in ("results.md", "results.tex"):
        (line,) = [
            line for line in (out / "tables" / name).read_text().splitlines() if "sometimes" in line
        ]
        assert "(1 of 3 runs unfinished" in line
        assert " 2 of 3 " in line
        assert "unfinished" not in "".join(
            line for line in (out / "tables" / name).read_text().splitlines() if "fedavg" in line
        )
    frame = fedstill.Comparison.of(out).table()
    assert frame[["seeds", "finished"]].values.tolist() == [[3, True], [2, False]]
    with pytest.raises(RunsFailed, match="1 of 1 runs failed"):  # and a row of nothing is none
        fedstill.compare(
            small, [str(tmp_path / "sometimes.py")], [2], out=tmp_path / "none", quiet=True
        )
    assert not (tmp_path / "none/report.html").exists()


def test_runs_that_fail_are_named_and_the_others_are_kept(
    small: fedstill.Experiment, tmp_path: Path
) -> None:
    wrong = "model.safetensors"
    (tmp_path / "out/fedntd/seed1").mkdir(parents=True)
    fedstill.run(
        small.with_values({"seed": 1, "threads": 1}, "Python"),
        tmp_path / "out/fedntd/seed1",
        overwrite=True,
    )
    (tmp_path / "out/fedntd/seed1/summary.json").unlink()
    for path in (tmp_path / "out/fedntd/seed1/checkpoints").rglob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(
        RunsFailed,
        match=r"fedntd, seed 1: .*Comparison\.of",
    ):
        fedstill.compare(small, ["fedntd"], [1, 2], out=tmp_path / "out", quiet=True)
    assert (tmp_path / "out/fedntd/seed2" / wrong).is_file()


def test_after_ctrl_c_the_same_call_goes_on(small: fedstill.Experiment, tmp_path: Path) -> None:
    long = small.with_values({"rounds": 60}, "Python")
    journal = tmp_path / "out/fedntd/seed1/journal.jsonl"

    def press() -> None:
        while not journal.is_file() or b'"round"' not in journal.read_bytes():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Thread(target=press)
    timer.start()
    with pytest.raises(Interrupted, match=r"stopped with \d of 2 runs unfinished"):
        fedstill.compare(long, seeds=[1, 2], out=tmp_path / "out", quiet=True)
    timer.join()
    assert (
        fedstill.compare(long, seeds=[1, 2], out=tmp_path / "out", quiet=True).runs().finished.all()
    )
