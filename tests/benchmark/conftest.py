"""The entries of a tiny suite, made once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import tiny_ranking
from fedstill.benchmark.competing import enter_rows
from fedstill.benchmark.entries import Entry, read_entry
from fedstill.benchmark.scoring import Execute
from fedstill.benchmark.suites import Suite
from fedstill.running.compare import Outcome, Variant


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Suite:
    """The tiny suite, in the place of digits-space."""
    return tiny_ranking.install(monkeypatch)


@pytest.fixture(scope="session")
def tiny_entries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the entries of all its rows."""
    out = tmp_path_factory.mktemp("ranking")
    with pytest.MonkeyPatch.context() as patch:
        tiny = tiny_ranking.install(patch)
        enter_rows(tiny, list(tiny.recipe.rows), out, tiny_ranking.do)
    yield out / "entries" / tiny.name
    shutil.rmtree(out)


@pytest.fixture
def entry(suite: Suite, tiny_entries: Path, tmp_path: Path) -> Entry:
    """A copy of FedAvg's entry, to be changed."""
    return read_entry(Path(shutil.copytree(tiny_entries / "fedavg", tmp_path / "fedavg")))


@pytest.fixture
def fedntd(suite: Suite, tiny_entries: Path, tmp_path: Path) -> Entry:
    """A copy of FedNTD's entry, to be changed."""
    return read_entry(Path(shutil.copytree(tiny_entries / "fedntd", tmp_path / "fedntd")))


@pytest.fixture(scope="session")
def do(tmp_path_factory: pytest.TempPathFactory) -> Execute:
    """Executes runs, each config once in all tests: a replay does not depend on the entry."""
    store = tmp_path_factory.mktemp("replays")
    stored: dict[str, Path] = {}

    def carried_out(runs: Sequence[Variant]) -> list[Outcome]:
        for run in runs:
            if run.settings.toml in stored:
                shutil.copytree(stored[run.settings.toml], run.folder)
        outcomes = tiny_ranking.do(runs)
        for run in runs:
            if run.settings.toml not in stored:
                copy = store / str(len(stored))
                stored[run.settings.toml] = Path(shutil.copytree(run.folder, copy))
        return outcomes

    return carried_out
