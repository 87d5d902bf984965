"""What holds for the whole suite: one thread, no network, a cache of its own."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ.setdefault("FEDSTILL_CACHE", str(tmp_path_factory.mktemp("cache")))
