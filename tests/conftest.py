"""What holds for the whole suite: one torch thread, clients side by side, no network, a cache of its own.

``FEDSTILL_TEST_THREADS`` in the environment is another number of torch threads (``make grid``).
"""

from __future__ import annotations

import os

import pytest
import torch

import toys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _torch_threads() -> None:
    torch.set_num_threads(toys.THREADS)
    torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True)
def _side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pooled engine's threads, however small the networks of the tests are."""
    monkeypatch.setattr("fedstill.engines.pooled.LIGHT", 0.0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ.setdefault("FEDSTILL_CACHE", str(tmp_path_factory.mktemp("cache")))
