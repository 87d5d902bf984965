"""The wheel without extras, in an empty environment and outside of any checkout: every command
works or names the extra to install.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.environments import uv

import toys

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MINUTES = 60.0
Fedstill = Callable[..., subprocess.CompletedProcess[str]]
"""Runs the installed command with these words, and returns its output."""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small config, beside the environment that the wheel was installed into."""
    parent = tmp_path_factory.mktemp("wheel")
    uv(["build", "--wheel", "--out-dir", str(parent / "dist"), str(ROOT)], 10 * MINUTES)
    (wheel,) = (parent / "dist").glob("*.whl")
    uv(["venv", "--python", sys.executable, str(parent / "environment")], MINUTES)
    python = parent / "environment" / "bin" / "python"
    constraints = ["-c", str(ROOT / "constraints.txt")]
    uv(["pip", "install", "--python", str(python), *constraints, str(wheel)], 30 * MINUTES)

    (parent / "home").mkdir()
    folder = parent / "elsewhere"
    folder.mkdir()
    (folder / "small.toml").write_text(toys.SMALL)
    return folder


def process_options(elsewhere: Path) -> dict[str, Any]:
    """Options of a process in the folder, whose environment has nothing of this one."""
    environment = {
        "HOME": str(elsewhere.parent / "home"),
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
    }
    return {"cwd": elsewhere, "env": environment, "text": True}


def program_of(elsewhere: Path) -> str:
    """The installed command."""
    return str(elsewhere.parent / "environment" / "bin" / "fedstill")


@pytest.fixture
def fedstill(elsewhere: Path) -> Fedstill:
    """The installed command, as a function."""

    def call(*words: str, folder: Path = elsewhere) -> subprocess.CompletedProcess[str]:
        options = process_options(elsewhere) | {"cwd": folder}
        return subprocess.run(
            [program_of(elsewhere), *words],
            **options,
            capture_output=True,
            timeout=30 * MINUTES,
            check=False,
        )

    return call


def output_of(completed: subprocess.CompletedProcess[str]) -> str:
    """What a command printed, which must have succeeded."""
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_the_environment_has_no_checkout_and_no_extra(elsewhere: Path) -> None:
    python = elsewhere.parent / "environment" / "bin" / "python"
    code = (
        "import importlib.util as u, fedstill; print(fedstill.__file__, *map(u.find_spec, ('flwr', "
        "'tensorboard')))"
    )
    printed = subprocess.run(
        [python, "-c", code], cwd=elsewhere, env={}, capture_output=True, text=True, check=True
    ).stdout
    file, *extras = printed.split()
    assert file.startswith(str(elsewhere.parent / "environment"))
    assert extras == ["None", "None"]


def test_the_demo_in_an_empty_folder(tmp_path: Path, fedstill: Fedstill) -> None:
    printed = output_of(fedstill("demo", folder=tmp_path))
    for method in ("fedavg", "fedprox", "fedntd"):
        assert method in printed
    assert (tmp_path / "runs" / "demo-1" / "report.html").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_run_is_explained_resumed_and_reported(elsewhere: Path, fedstill: Fedstill) -> None:
    assert "fedntd" in output_of(fedstill("list"))
    assert "method.beta" in output_of(fedstill("explain", "small.toml"))
    assert "forgetting" in output_of(fedstill("run", "small.toml", "--out", "one", "-q"))
    assert "forgetting" in output_of(fedstill("resume", "one"))
    assert "one/report.html" in output_of(fedstill("report", "one"))
    assert (elsewhere / "one" / "report.html").stat().st_size > 10_000


def test_a_comparison_ends_with_a_table_and_a_report(elsewhere: Path, fedstill: Fedstill) -> None:
    options = ["--methods", "fedavg,fedntd", "--seeds", "1,2", "--out", "two", "-q"]
    assert "±" in output_of(fedstill("compare", "small.toml", *options))
    assert (elsewhere / "two" / "report.html").stat().st_size > 10_000


SMALLER = [
    *("-s", "topology.clients=10"),
    *("-s", "topology.sampled=3"),
    *("-s", "plan.epochs=1"),
    *("-s", "data.augment=[]"),
    *("-s", "data.train_size=400"),
]
"""Options with which a cell of a paper's table takes seconds."""


def test_a_papers_cell_on_digits(fedstill: Fedstill) -> None:
    data = ["--data", "digits", "--rounds", "2", "--seeds", "1", *SMALLER]
    options = ["--cells", "full:*", *data, "-q", "--out", "cell"]
    printed = output_of(fedstill("reproduce", "fedadkd/figure7", *options))
    assert "REDUCED OR CHANGED" in printed
    assert "55.8" in printed


def test_a_stopped_run_is_resumed(elsewhere: Path, fedstill: Fedstill) -> None:
    folder = elsewhere / "long"
    words = ["run", "small.toml", "--out", "long", "-s", "rounds=300"]
    process = subprocess.Popen(
        [program_of(elsewhere), *words], **process_options(elsewhere), stderr=subprocess.PIPE
    )
    journal = folder / "journal.jsonl"
    deadline = time.monotonic() + 10 * MINUTES
    while not (journal.is_file() and '"event":"round"' in journal.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)

    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=MINUTES)
    assert "fedstill resume long" in stderr
    assert process.returncode == 1
    assert not (folder / "summary.json").exists()

    output_of(fedstill("resume", "long", "-q"))
    assert (folder / "summary.json").is_file()


@pytest.fixture(scope="module")
def _reported(elsewhere: Path) -> None:
    """A finished run in the folder ``reported``."""
    words = ["run", "small.toml", "--out", "reported", "-q"]
    subprocess.run([program_of(elsewhere), *words], **process_options(elsewhere), check=True)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["run", "small.toml", "-s", "engine=flower"], "flower"),
        (["run", "small.toml", "--engine", "flower"], "flower"),
        (["run", "small.toml", "-s", "partition.kind=flower_datasets"], "flower-datasets"),
        (["deploy", "init", "fed", "--clients", "2"], "flower"),
        (["report", "reported", "--tensorboard", "board"], "tensorboard"),
    ],
)
@pytest.mark.usefixtures("_reported")
def test_a_missing_extra_is_named_in_one_line(
    words: list[str], extra: str, elsewhere: Path, fedstill: Fedstill
) -> None:
    """The command leaves no files behind."""
    names = {path.name for path in elsewhere.iterdir()}
    completed = fedstill(*words)
    assert completed.returncode == 2
    (line,) = completed.stderr.strip().splitlines()
    assert f"pip install 'fedstill[{extra}]'" in line
    assert {path.name for path in elsewhere.iterdir()} == names
