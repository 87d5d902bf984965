"""The runs that others are compared with, each made once."""

from __future__ import annotations

from typing import Any

import pytest

import toys
from fedstill.running.runner import run
from forking import SETTINGS
from run_bits import Whole, bits


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The bits of each setting's uninterrupted run, made once."""
    known: dict[str, dict[str, Any]] = {}

    def bits_of(name: str) -> dict[str, Any]:
        if name not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            run(SETTINGS[name], folder, data=toys.blobs())
            known[name] = bits(folder)
        return known[name]

    return bits_of
