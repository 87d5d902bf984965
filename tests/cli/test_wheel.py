"""The wheel without extras, in an empty environment and outside of any checkout: every command
works, or says what to install.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.peers.environments import uv

import toys

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MINUTES = 60.0
SMALLER = [
    "topology.clients=10",
    "topology.sampled=3",
    "plan.epochs=1",
    "data.augment=[]",
    "data.train_size=400",
]
Fedstill = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small config, beside the environment that the wheel was installed into."""
    place = tmp_path_factory.mktemp("wheel")
    uv(["build", "--wheel", "--out-dir", str(place / "dist"), str(ROOT)], 10 * MINUTES)
    (wheel,) = (place / "dist").glob("*.whl")
    uv(["venv", "--python", sys.executable, str(place / "environment")], MINUTES)
    python = place / "environment" / "bin" / "python"
    uv(
        [
            "pip",
            "install",
            "--python",
            str(python),
            "-c",
            str(ROOT / "constraints.txt"),
            str(wheel),
        ],
        30 * MINUTES,
    )
    for name in ("home", "elsewhere"):
        (place / name).mkdir()
    (place / "elsewhere" / "small.toml").write_text(toys.SMALL)
    return place / "elsewhere"


def command(elsewhere: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    """The installed command line, and an environment with nothing of this one."""
    program = elsewhere.parent / "environment" / "bin" / "fedstill"
    settings = {"HOME": str(elsewhere.parent / "home"), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    return [str(program), *words], settings


@pytest.fixture
def fedstill(elsewhere: Path) -> Fedstill:
    def call(*words: str, folder: Path = elsewhere) -> subprocess.CompletedProcess[str]:
        what, settings = command(elsewhere, *words)
        return subprocess.run(
            what,
            cwd=folder,
            env=settings,
            capture_output=True,
            text=True,
            timeout=30 * MINUTES,
            check=False,
        )

    return call


def test_nothing_of_a_checkout_or_an_extra_is_there(elsewhere: Path) -> None:
    python = elsewhere.parent / "environment" / "bin" / "python"
    code = (
        "import importlib.util as u, fedstill; print(fedstill.__file__, *map(u.find_spec, ('flwr', "
        "'tensorboard')))"
    )
    said = subprocess.run(
        [python, "-c", code], cwd=elsewhere, env={}, capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith(str(elsewhere.parent / "environment"))
    assert said.split()[1:] == ["None", "None"]


def test_the_demo_in_an_empty_folder(tmp_path: Path, fedstill: Fedstill) -> None:
    done = fedstill("demo", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(method in done.stdout for method in ("fedavg", "fedprox", "fedntd"))
    assert (tmp_path / "runs" / "demo-1" / "report.html").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_run_and_what_can_be_made_of_it(elsewhere: Path, fedstill: Fedstill) -> None:
    for words, says in (
        (["list"], "fedntd"),
        (["explain", "small.toml"], "method.beta"),
        (["run", "small.toml", "--out", "one", "-q"], "forgetting"),
        (["resume", "one"], "forgetting"),
        (["report", "one"], "one/report.html"),
        (
            [
                "compare",
                "small.toml",
                "--methods",
                "fedavg,fedntd",
                "--seeds",
                "1,2",
                "--out",
                "two",
                "-q",
            ],
            "±",
        ),
    ):
        done = fedstill(*words)
        assert done.returncode == 0, done.stderr
        assert says in done.stdout, words
    for page in ("one/report.html", "two/report.html"):
        assert (elsewhere / page).stat().st_size > 10_000


def test_a_papers_cell_on_digits(fedstill: Fedstill) -> None:
    words = [
        "reproduce",
        "fedadkd/figure7",
        "--data",
        "digits",
        "--rounds",
        "2",
        "--seeds",
        "1",
        "--cells",
        "full:*",
    ]
    done = fedstill(*words, "-q", "--out", "cell", *(word for s in SMALLER for word in ("-s", s)))
    assert done.returncode == 0, done.stderr
    assert "REDUCED OR CHANGED" in done.stdout
    assert "55.8" in done.stdout


def test_a_stopped_run_is_resumed(elsewhere: Path, fedstill: Fedstill) -> None:
    what, settings = command(elsewhere, "run", "small.toml", "--out", "long", "-s", "rounds=300")
    run = subprocess.Popen(what, cwd=elsewhere, env=settings, stderr=subprocess.PIPE, text=True)
    journal, ends = elsewhere / "long" / "journal.jsonl", time.monotonic() + 10 * MINUTES
    while not (journal.is_file() and '"event":"round"' in journal.read_text()):
        assert time.monotonic() < ends
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    assert "fedstill resume long" in run.communicate(timeout=MINUTES)[1]
    assert run.returncode == 1
    assert not (elsewhere / "long" / "summary.json").exists()
    done = fedstill("resume", "long", "-q")
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "long" / "summary.json").is_file()


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
def test_a_missing_extra_is_one_line(
    words: list[str], extra: str, elsewhere: Path, fedstill: Fedstill
) -> None:
    if words[0] == "report" and not (elsewhere / "reported").exists():
        assert fedstill("run", "small.toml", "--out", "reported", "-q").returncode == 0
    before = {path.name for path in elsewhere.iterdir()}
    done = fedstill(*words)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert f"pip install 'fedstill[{extra}]'" in line
    assert {path.name for path in elsewhere.iterdir()} == before, "nothing is left behind"
