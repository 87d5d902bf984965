"""Small runs to report on: two methods, two seeds, a client that fails, and a run that was stopped
on its way.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import toys
from fedstill.running import runner


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four finished runs: fedavg and a method with a failing client, seeds 7 and 8."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (7, 8):
        runner.run(toys.toy("fedavg", seed=seed), folder / f"avg{seed}", data=toys.blobs())
        failing = toys.toy({"name": "toy_failing", "who": 1, "how": "nan"}, seed=seed)
        runner.run(failing, folder / "deeper" / f"failing{seed}", data=toys.blobs())
    return folder


@pytest.fixture
def some_runs(finished: Path, tmp_path: Path) -> Path:
    """The same in a folder of one's own, without checkpoints, which would know what the journals
    were.
    """
    kept = shutil.ignore_patterns("checkpoints")
    return Path(shutil.copytree(finished, tmp_path / "runs", ignore=kept))
