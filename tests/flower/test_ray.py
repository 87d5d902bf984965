"""Flower's Ray simulation as an engine: the serial engine's bits. Slow: Ray takes long to start, or
fails to.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedstill.config.experiment import Experiment
from fedstill.flower.deployment.programs import environment, program
from fedstill.running.journal import read_journal, without_times
from fedstill.running.runner import run
from flowers import needs_flower
from processes import LIMIT, beside_us, kill_all_with

pytestmark = [
    pytest.mark.slow,
    needs_flower,
    pytest.mark.skipif(
        find_spec("ray") is None,
        reason="Ray is not installed: pip install 'fedstill[flower-simulation]'",
    ),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


def test_four_clients_on_ray_give_the_bits_of_the_serial_engine(tmp_path: Path) -> None:
    what = Experiment(
        method="scaffold",
        rounds=2,
        seed=3,
        threads=1,
        data="digits",
        topology={"clients": 4, "sampled": 4},
        plan={"epochs": 1},
    )
    run(replace(what, engine="serial"), tmp_path / "serial")
    run(replace(what, engine="flower", flower={"grid": "ray", "poll": 0.2}), tmp_path / "ray")
    assert (tmp_path / "ray/model.safetensors").read_bytes() == (
        tmp_path / "serial/model.safetensors"
    ).read_bytes()
    ours, theirs = (
        [without_times(e) for e in read_journal(tmp_path / n / "journal.jsonl")]
        for n in ("ray", "serial")
    )
    assert ours == theirs
    print(
        [
            e["seconds_training"]
            for e in read_journal(tmp_path / "ray/journal.jsonl")
            if e["event"] == "round"
        ],
        "s a round",
    )


def test_flwr_run_runs_the_app_of_this_repository_in_flowers_simulation(tmp_path: Path) -> None:
    app, home = tmp_path / "app", tmp_path / "home"
    shutil.copytree(Path(__file__).parents[2] / "deploy" / "flower-app", app)
    settings = {**environment(home), "PYTHONPATH": beside_us()["PYTHONPATH"]}
    try:
        done = subprocess.run(
            [program("flwr"), "run", ".", "--stream"],
            cwd=app,
            env=settings,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        (out,) = app.glob("runs/*")
        assert (
            len([e for e in read_journal(out / "journal.jsonl") if e["event"] == "round"]) == 2
        ), done.stdout
    finally:
        kill_all_with(f"FLWR_HOME={home}")  # Flower starts a SuperLink and leaves it running
