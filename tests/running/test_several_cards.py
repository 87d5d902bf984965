"""Runs of a comparison over several CUDA cards, with cards that are imitated."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import fedstill
import toys
from fedstill.cli import call
from fedstill.core.errors import ConfigError
from fedstill.engines import devices
from fedstill.engines.devices import BYTES_ON_CARD, VISIBLE_CARDS, Slots, jobs_that_fit, slots_for
from fedstill.running.compare import carry_out_runs, variants
from fedstill.running.runner import run
from run_bits import assert_same_bits, bits

GIGABYTE = 1e9

FAILING = 3
"""The seed of the run that fails."""

NOTES_ITS_CARD = f"""
from pathlib import Path

from fedstill.core.registry import method
from fedstill.methods.fedavg import FedAvg


@method("noting")
class Noting(FedAvg):
    def initial_state(self, world):
        if world.seed == {FAILING}:
            raise RuntimeError("this seed fails")
        variables = Path("/proc/self/environ").read_bytes().decode().split("\\0")
        cards = [text for text in variables if text.startswith("CUDA_VISIBLE_DEVICES=")]
        Path(FOLDER, f"card{{world.seed}}").write_text("".join(cards).partition("=")[2])
        return super().initial_state(world)
"""
"""A method that notes the card with which its process began, as Linux remembers it."""


def with_cards(monkeypatch: pytest.MonkeyPatch, *free: float, cores: int = 16) -> None:
    """Let torch see cards with so much free memory, on a machine with many cores."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: len(free) > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"Card {device}")

    def memory(device: int | str) -> tuple[float, float]:
        number = int(str(device).removeprefix("cuda").removeprefix(":") or 0)
        return free[number], 80 * GIGABYTE

    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(devices, "cores", lambda: cores)
    monkeypatch.setattr(os, "sysconf", lambda name: 2**20)
    monkeypatch.delenv(VISIBLE_CARDS, raising=False)


def test_one_card_takes_as_many_runs_as_its_memory_and_the_cores_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for free_bytes, jobs in [(0.0, 1), (1.5 * BYTES_ON_CARD, 1), (1e15, 16)]:
        with_cards(monkeypatch, free_bytes)
        assert jobs_that_fit("cuda") == jobs
        assert slots_for({"cuda"}, None) == Slots(jobs)
        assert jobs_that_fit() == 16


def test_runs_are_distributed_turn_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, *[80 * GIGABYTE] * 4)
    assert slots_for({"cuda"}, 6) == Slots(6, ("0", "1", "2", "3", "0", "1"))
    assert slots_for({"cuda"}, 3, [3, 1]) == Slots(3, ("3", "1", "3"))
    assert slots_for({"cuda", "cpu"}, 1) == Slots(1, ("0",))


def test_memory_limits_the_slots_of_each_card(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, 24 * GIGABYTE, 7 * GIGABYTE, 0.0)
    slots = slots_for({"cuda"}, None)
    assert Counter(slots.cards) == {"0": 8, "1": 2, "2": 1}
    assert slots.jobs == 11
    assert slots_for({"cuda"}, None, [2]) == Slots(1, ("2",))


def test_cores_limit_the_slots_but_every_card_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, *[80 * GIGABYTE] * 4, cores=2)
    assert slots_for({"cuda"}, None).cards == ("0", "1", "2", "3")
    with_cards(monkeypatch, *[80 * GIGABYTE] * 2, cores=3)
    assert slots_for({"cuda"}, None).cards == ("0", "1", "0")


def test_cards_have_the_names_that_this_process_sees_them_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_cards(monkeypatch, 80 * GIGABYTE, 80 * GIGABYTE)
    monkeypatch.setenv(VISIBLE_CARDS, "5, GPU-7a")
    assert slots_for({"cuda"}, 2).cards == ("5", "GPU-7a")
    assert slots_for({"cuda"}, 1, [1]).cards == ("GPU-7a",)


def test_runs_elsewhere_are_not_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, 80 * GIGABYTE, 7 * GIGABYTE)
    assert slots_for({"cpu"}, None) == Slots(16)
    assert slots_for({"cuda:1"}, None) == Slots(2)
    assert slots_for({"cuda:1"}, 5) == Slots(5)
    with_cards(monkeypatch)
    assert slots_for({"cuda"}, None) == Slots(16)


@pytest.mark.parametrize(
    ("devices", "numbers"),
    [({"cuda"}, [2]), ({"cuda"}, [-1]), ({"cuda"}, [0, 0]), ({"cpu"}, [0]), ({"cuda:1"}, [1])],
)
def test_devices_that_no_run_can_use_are_an_error(
    devices: set[str], numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cards(monkeypatch, 80 * GIGABYTE, 80 * GIGABYTE)
    with pytest.raises(ConfigError, match="--devices"):
        slots_for(devices, None, numbers)


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "--seeds", "1,2"],
        ["tune", "--space", "plan.lr=0.1,0.2", "--trials", "1"],
        pytest.param(["reproduce", "hiper/table1"], marks=pytest.mark.uses("benchmark")),
    ],
)
def test_devices_without_a_card_are_an_error(
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_cards(monkeypatch)
    out = tmp_path / "out"
    assert call([*command, "--devices", "0", "--out", str(out), "--quiet"]) == 2
    assert "--devices" in capsys.readouterr().err
    assert not out.exists()


def test_devices_in_python_are_those_of_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_cards(monkeypatch)
    with pytest.raises(ConfigError, match="--devices"):
        fedstill.compare(toys.toy("fedavg"), devices=[0], out=tmp_path / "out", quiet=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_see_one_card_each_a_failure_stops_no_other_and_bits_stay_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # One test, because each process needs seconds to start.
    monkeypatch.setenv(VISIBLE_CARDS, "7,8")
    file = tmp_path / "noting.py"
    file.write_text(NOTES_ITS_CARD.replace("FOLDER", repr(str(tmp_path))))
    data = {"name": "digits", "train_size": 120, "test_size": 60}
    experiment = toys.toy(f"{file}:Noting", rounds=1, data=data)
    runs = variants(experiment, tmp_path / "runs", seeds=[1, 2, FAILING])

    outcomes = carry_out_runs(runs, 2, lambda outcomes: None, cards=("7", "8"))
    assert [outcome.state for outcome in outcomes] == ["finished", "finished", "failed"]
    assert "this seed fails" in outcomes[-1].problem
    assert (tmp_path / "card1").read_text() == "7"
    assert (tmp_path / "card2").read_text() == "8"
    assert os.environ[VISIBLE_CARDS] == "7,8"
    for distributed in runs[:2]:
        alone = tmp_path / "alone" / distributed.folder.name
        run(distributed.experiment, alone)
        assert_same_bits(bits(distributed.folder), bits(alone))
