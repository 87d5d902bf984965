"""What is noted of a CUDA card and how it is shared, with a card that is imitated; on a card:
FEDSTILL_TEST_DEVICE.
"""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.core import process_settings
from fedstill.core.errors import ConfigError
from fedstill.core.records import State
from fedstill.running import same_run
from fedstill.running.compare import BYTES_ON_CARD, jobs_that_fit
from fedstill.running.journal import VERSIONS, Journal

CARD, OTHER = "NVIDIA A100 (CUDA 12.4, cuDNN 90100)", "NVIDIA H100 (CUDA 13.0, cuDNN 91900)"


def test_the_card_is_noted_where_a_run_trains_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_run, "card_named", lambda device: CARD)
    assert same_run.software("cuda")["card"] == CARD
    assert same_run.software("cuda").keys() == set(VERSIONS)
    assert "card" not in same_run.software("cpu")
    assert process_settings.card_named("cpu") == ""


def test_a_resume_on_another_card_is_said_and_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(same_run, "card_named", lambda device: OTHER)
    start = {"event": "start", **same_run.software("cuda"), "card": CARD}
    with caplog.at_level(logging.WARNING), closing(Journal(tmp_path / "journal.jsonl")) as journal:
        same_run.note_versions(journal, [start], State(params={}, round=2), "cuda")
    assert f"was run with card {CARD} and goes on with card {OTHER}" in caplog.text
    event = json.loads((tmp_path / "journal.jsonl").read_text())
    assert event["versions"] == {"card": OTHER}


def test_as_many_runs_at_once_as_the_card_has_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = jobs_that_fit()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for free, jobs in ((0.0, 1), (1.5 * BYTES_ON_CARD, 1), (1e15, alone)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 1e15))
        assert jobs_that_fit("cuda") == jobs
        assert jobs_that_fit() == alone


def test_no_server_chooses_the_device_of_its_sites() -> None:
    deployed = {"engine": "flower", "flower": {"federation": "f"}}
    with pytest.raises(ConfigError, match="'cpu' or 'cuda'"):
        resolve(toys.toy("fedavg", device="auto", **deployed))
    assert resolve(toys.toy("fedavg", device="cpu", **deployed)).device == "cpu"


def test_what_is_kept_in_the_processors_memory_is_not_put_on_a_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = toys.toy("fedavg", device="auto")
    assert resolve(asked, check_device=False).device == "cuda"
    kept = toys.toy("fedavg", device="auto", start_from=__file__, train_only=["head"])
    assert resolve(kept, check_device=False).device == "cpu"
