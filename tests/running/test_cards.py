"""How a run names, records and selects CUDA cards. The cards are imitated;
``FEDSTILL_TEST_DEVICE`` selects a real one.
"""

from __future__ import annotations

import contextlib
import json
import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError
from fedstill.core.process_settings import process_settings
from fedstill.core.records import State
from fedstill.engines.devices import card_named, make_deterministic
from fedstill.running import same_run
from fedstill.running.journal import VERSIONS, Journal

CARD = "NVIDIA A100 (CUDA 12.4, cuDNN 90100)"
OTHER_CARD = "NVIDIA H100 (CUDA 13.0, cuDNN 91900)"


def test_the_card_is_recorded_if_a_run_trains_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_run, "card_named", lambda device: CARD)
    assert same_run.software("cuda")["card"] == CARD
    assert same_run.software("cuda").keys() == set(VERSIONS)
    assert "card" not in same_run.software("cpu")
    assert card_named("cpu") == ""


def test_a_resume_on_another_card_is_logged_and_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(same_run, "card_named", lambda device: OTHER_CARD)
    start = {"event": "start", **same_run.software("cuda"), "card": CARD}
    with caplog.at_level(logging.WARNING), closing(Journal(tmp_path / "journal.jsonl")) as journal:
        same_run.note_versions(journal, [start], State(params={}, round=2), "cuda")

    assert f"was run with card {CARD} and goes on with card {OTHER_CARD}" in caplog.text
    event = json.loads((tmp_path / "journal.jsonl").read_text())
    assert event["versions"] == {"card": OTHER_CARD}


def with_cards(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let torch see this many CUDA devices; nothing can be computed on them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"Card {device}")


def test_a_config_names_one_of_several_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, 2)
    assert resolve(toys.toy("fedavg", device="cuda:1")).device == "cuda:1"
    with pytest.raises(ConfigError, match=r"cuda:2.*cuda:0 \(Card 0\), cuda:1 \(Card 1\)"):
        resolve(toys.toy("fedavg", device="cuda:2"))
    assert resolve(toys.toy("fedavg", device="cuda:2"), check_device=False).device == "cuda:2"

    with_cards(monkeypatch, 0)
    with pytest.raises(ConfigError, match="cuda:1"):
        resolve(toys.toy("fedavg", device="cuda:1"))


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:01", "cpu:0", ""])
def test_an_unknown_device_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        resolve(toys.toy("fedavg", device=name))


def test_mps_needs_a_device_and_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="mps"):
        resolve(toys.toy("fedavg", device="mps"))

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve(toys.toy("fedavg", device="mps")).device == "mps"

    for precision in ("bf16", "tf32"):
        with pytest.raises(ConfigError, match="precision"):
            resolve(toys.toy("fedavg", device="mps", precision=precision))


def test_precisions_of_numbered_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, 2)
    emulation_flags = []

    def is_supported(including_emulation: bool = True) -> bool:
        emulation_flags.append(including_emulation)
        return False

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    assert resolve(toys.toy("fedavg", device="cuda:1", precision="tf32")).device == "cuda:1"
    with pytest.raises(ConfigError, match="precision = 'bf16'"):
        resolve(toys.toy("fedavg", device="cuda:1", precision="bf16"))
    assert emulation_flags == [False]


def test_a_numbered_card_is_the_current_one_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, 2)
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 1)
    with process_settings():
        make_deterministic("cuda")
        assert current == [0]
        make_deterministic("cuda:1")
        assert current == [0, 1]
        assert "Card cuda:1" in same_run.software("cuda:1")["card"]

    assert current == [0, 1, 0]


def test_ray_distributes_clients_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, 2)
    over_ray = {"engine": "flower", "flower": {"grid": "ray"}}
    with pytest.raises(ConfigError, match="device"):
        resolve(toys.toy("fedavg", device="cuda:1", **over_ray))
    assert resolve(toys.toy("fedavg", device="cuda", **over_ray)).device == "cuda"


def test_no_server_chooses_the_device_of_its_sites() -> None:
    deployed = {"engine": "flower", "flower": {"federation": "f"}}
    with pytest.raises(ConfigError, match="'cpu' or 'cuda'"):
        resolve(toys.toy("fedavg", device="auto", **deployed))
    assert resolve(toys.toy("fedavg", device="cpu", **deployed)).device == "cpu"


def test_auto_chooses_the_processor_for_partly_trained_networks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    experiment = toys.toy("fedavg", device="auto")
    assert resolve(experiment, check_device=False).device == "cuda"
    partly_trained = toys.toy("fedavg", device="auto", start_from=__file__, train_only=["head"])
    assert resolve(partly_trained, check_device=False).device == "cpu"
