"""Fixtures for runs that are stopped, killed or damaged: the bits of uninterrupted runs, and a
process that forks runs which may be killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import toys
from fedstill.running.runner import run
from forking import SETTINGS, Helper
from run_bits import UninterruptedBits, bits


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    """A process that forks a child for each run, which may be killed."""
    process = Helper()
    yield process
    process.close()


@pytest.fixture(scope="module")
def uninterrupted_bits(tmp_path_factory: pytest.TempPathFactory) -> UninterruptedBits:
    """A function that returns the bits of the uninterrupted run of a setting. Each setting runs
    once in a module.
    """
    bits_by_setting: dict[str, dict[str, Any]] = {}

    def bits_of(name: str) -> dict[str, Any]:
        if name not in bits_by_setting:
            folder = tmp_path_factory.mktemp("uninterrupted") / "run"
            run(SETTINGS[name], folder, data=toys.blobs())
            bits_by_setting[name] = bits(folder)
        return bits_by_setting[name]

    return bits_of
