"""Flower's Ray simulation as an engine: the serial engine's bits. Slow, because Ray takes long to
start.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import toys
from fedstill.config.experiment import Experiment
from fedstill.flower.deployment.programs import environment
from fedstill.running.journal import without_times
from fedstill.running.runner import run
from flowers import needs_flower
from journals import journal_events
from processes import LIMIT, flower_program, kill_all_with, process_environment
from run_bits import model_bytes

pytestmark = [
    pytest.mark.slow,
    needs_flower,
    pytest.mark.skipif(
        find_spec("ray") is None,
        reason="Ray is not installed: pip install 'fedstill[flower-simulation]'",
    ),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


def test_four_clients_on_ray_give_the_bits_of_the_serial_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    experiment = Experiment(
        method="scaffold",
        rounds=2,
        seed=3,
        threads=1,
        data="digits",
        topology={"clients": 4, "sampled": 4},
        plan={"epochs": 1},
    )
    run(replace(experiment, engine="serial"), tmp_path / "serial")
    capfd.readouterr()
    run(replace(experiment, engine="flower", flower={"grid": "ray", "poll": 0.2}), tmp_path / "ray")
    assert "warn" not in "".join(capfd.readouterr()).lower()
    assert model_bytes(tmp_path / "ray") == model_bytes(tmp_path / "serial")
    events = without_times(journal_events(tmp_path / "ray"))
    assert events == without_times(journal_events(tmp_path / "serial"))


def test_rounds_on_ray_are_fast_once_its_workers_have_started(tmp_path: Path) -> None:
    experiment = Experiment(
        method="fedavg",
        rounds=3,
        engine="flower",
        flower={"grid": "ray"},
        topology={"clients": 5, "sampled": 5},
        plan={"epochs": 1},
    )
    data = toys.blobs()
    run(experiment, tmp_path / "ray", data)
    run(replace(experiment, engine="serial", flower={}), tmp_path / "serial", data)
    assert model_bytes(tmp_path / "ray") == model_bytes(tmp_path / "serial")
    rounds = journal_events(tmp_path / "ray", event="round")
    # Three seconds on a quiet machine with two cores, where they take about one.
    assert sum(event["seconds"] for event in rounds) < 10


def test_flwr_run_runs_the_app_of_this_repository_in_flowers_simulation(tmp_path: Path) -> None:
    app = tmp_path / "app"
    home = tmp_path / "home"
    shutil.copytree(Path(__file__).parents[2] / "deploy" / "flower-app", app)
    settings = {**environment(home), "PYTHONPATH": process_environment()["PYTHONPATH"]}
    try:
        process = subprocess.run(
            [flower_program("flwr"), "run", ".", "--stream"],
            cwd=app,
            env=settings,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert process.returncode == 0, process.stdout
        (out,) = app.glob("runs/*")
        assert len(journal_events(out, event="round")) == 2, process.stdout
    finally:
        # Flower starts a SuperLink and leaves it running.
        kill_all_with(f"FLWR_HOME={home}")
