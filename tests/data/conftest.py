"""Fixtures of the tests that read data."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a new cache, so that no test reads what another one has stored."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDSTILL_CACHE", str(folder))
    return folder


@pytest.fixture
def place(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory and cache; the data sets of this machine are out of reach."""
    monkeypatch.delenv("FEDSTILL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path
