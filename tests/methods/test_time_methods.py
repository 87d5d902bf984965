"""Methods that do something at a task's end: every stage is resumed from, and every engine
agrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import stacking
import torch
from torch import Tensor

import toys
from double import in_double
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.errors import Interrupted
from fedstill.data.dataset import Dataset
from fedstill.running.journal import read_journal, without_times
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from flowers import needs_flower
from run_bits import StopAfter, assert_same_bits, bits, stopped

pytestmark = pytest.mark.usefixtures("with_threads")

METHODS: dict[str, dict[str, Any]] = {
    "replay": {"name": "replay", "size": 8, "beta": 0.5, "nearest_mean": True},
    "der++": {"name": "replay", "size": 8, "beta": 0.5, "alpha": 0.5, "balance": "class"},
    "fedewc": {"name": "fedewc", "weight": 0.5, "samples": 20},
    "analytic": {"name": "analytic", "width": 20},
    "analytic by groups": {"name": "analytic", "width": 20, "groups": 3},
    "prototypes": {"name": "replay", "size": 0, "answers": "nearest_mean"},
    "fot": {"name": "fot", "keeps": 0.8, "grows": 0.05},
    "glfc": {"name": "glfc_local", "size": 8},
    "herding": {"name": "replay", "size": 8, "choose": "herding"},
}
"""Each with what it does beside its training."""

STREAM = {"kind": "classes", "tasks": 3, "head": "task", "join": 0.6, "lag": 1}


def experiment(label: str, engine: str) -> Experiment:
    """Six rounds over three tasks, with clients that join late."""
    return toys.toy(
        METHODS[label],
        engine=engine,
        rounds=6,
        partition={"kind": "iid"},
        stream=STREAM,
        plan={"epochs": 1, "batch": 10, "lr": 0.05},
        topology={"clients": 6, "sampled": 4},
        clients=toys.TOLERANT,
    )


def data() -> Dataset:
    """Several batches of ten for most clients."""
    return toys.blobs(size=150)


@dataclass(frozen=True)
class FinishedRun:
    """An uninterrupted run of a method by the serial engine."""

    label: str
    folder: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        """Its journal."""
        return read_journal(self.folder / "journal.jsonl")


@pytest.fixture(scope="module", params=METHODS)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    """A run of each method."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(experiment(request.param, "serial"), folder, data())
    return FinishedRun(request.param, folder)


def test_a_run_completes_all_tasks_and_refuses_nothing(finished: FinishedRun) -> None:
    events = finished.events

    assert [event["task"] for event in events if event["event"] == "task"] == [0, 1, 2, 3]
    assert not [event for event in events if event["event"] == "client" and "refused" in event]


def test_a_run_resumed_after_every_stage_has_the_same_bits(
    finished: FinishedRun, tmp_path: Path
) -> None:
    """With the bits of the uninterrupted run."""
    folder = stopped(experiment(finished.label, "serial"), tmp_path / "run", 1, data())
    while True:
        try:
            resume(folder, data(), watch=StopAfter(1))
            break
        except Interrupted:
            pass

    assert_same_bits(bits(folder), bits(finished.folder))


@pytest.mark.parametrize("engine", ["pooled", pytest.param("flower", marks=needs_flower)])
def test_other_engines_give_the_same_bits(
    finished: FinishedRun, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSTILL_WORKERS", "2")
    folder = tmp_path / "run"

    run(experiment(finished.label, engine), folder, data())

    model = (folder / "model.safetensors").read_bytes()
    assert model == (finished.folder / "model.safetensors").read_bytes()
    events = read_journal(folder / "journal.jsonl")
    assert without_times(events) == without_times(finished.events)


def final_tensors(label: str, engine: str) -> dict[str, Tensor]:
    """Everything in the state after the last round, in float64."""
    ready = in_double(prepare(resolve(experiment(label, engine)), data()))
    return stacking.tensors(stacking.rounds(ready, 6).state)


@pytest.mark.parametrize("label", METHODS)
def test_a_stack_of_clients_gives_the_same_up_to_rounding(label: str) -> None:
    serial = final_tensors(label, "serial")
    stacked = final_tensors(label, "vectorised")

    assert list(serial) == list(stacked)
    for name, value in serial.items():
        torch.testing.assert_close(stacked[name], value, rtol=0, atol=1e-7)
