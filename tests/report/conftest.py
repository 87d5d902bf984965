"""Small runs to report on: two methods, two seeds, and a client that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_journals import editable_copy

import toys
from fedstill.running import runner


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four finished runs: fedavg and a method with a failing client, seeds 7 and 8."""
    folder = tmp_path_factory.mktemp("runs")
    failing_method = {"name": "toy_failing", "who": 1, "how": "nan"}
    for seed in (7, 8):
        averaging = toys.toy("fedavg", seed=seed)
        runner.run(averaging, folder / f"avg{seed}", data=toys.blobs())
        failing = toys.toy(failing_method, seed=seed)
        runner.run(failing, folder / "deeper" / f"failing{seed}", data=toys.blobs())
    return folder


@pytest.fixture
def some_runs(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished runs whose journals a test may edit."""
    return editable_copy(finished, tmp_path / "runs")
