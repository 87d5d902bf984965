"""Fixtures for runs that are stopped, killed or damaged: the bits of uninterrupted runs, and a
process that forks runs which may be killed.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.running.runner import run
from forking import SETTINGS, Helper
from run_bits import StoppedCopy, UninterruptedBits, bits, stopped


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    """A process that forks a child for each run, which may be killed."""
    process = Helper()
    yield process
    process.close()


@pytest.fixture(scope="session")
def uninterrupted_bits(tmp_path_factory: pytest.TempPathFactory) -> UninterruptedBits:
    """A function that returns the bits of the uninterrupted run of a setting. Each setting runs
    once.
    """
    bits_by_setting: dict[str, dict[str, Any]] = {}

    def bits_of(name: str) -> dict[str, Any]:
        if name not in bits_by_setting:
            folder = tmp_path_factory.mktemp("uninterrupted") / "run"
            run(SETTINGS[name], folder, data=toys.blobs())
            bits_by_setting[name] = bits(folder)
        return bits_by_setting[name]

    return bits_of


@pytest.fixture(scope="session")
def stopped_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """A function that returns the directory of a run of a setting that was stopped after some
    stages. Each of them runs once, so tests may only copy it.
    """

    @functools.cache
    def stopped_run(name: str, stages: int) -> Path:
        folder = tmp_path_factory.mktemp("stopped") / "run"
        return stopped(SETTINGS[name], folder, stages)

    return stopped_run


@pytest.fixture
def stopped_copy(stopped_runs: Callable[[str, int], Path], tmp_path: Path) -> StoppedCopy:
    """A function that copies the directory of a stopped run, which the test may change."""

    def copy(name: str, stages: int = 2) -> Path:
        return Path(shutil.copytree(stopped_runs(name, stages), tmp_path / "run"))

    return copy
