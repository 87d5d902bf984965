"""Methods put together: one's head, another's loss, networks that differ, over Flower."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import fedstill
import toys
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.methods.fedlc import Calibrated, FedLC
from fedstill.methods.sfedkd import Discrepant, SFedKD
from fedstill.running.journal import read_journal, without_times
from fedstill.running.runs import read_run


def events_of(folder: Path) -> list[dict[str, Any]]:
    """A run's journal."""
    return read_journal(folder / "journal.jsonl")


def client_losses(folder: Path) -> list[dict[str, float]]:
    """The terms of the clients' objectives, in the order of their training."""
    client_events = [event for event in events_of(folder) if event["event"] == "client"]
    return [event["loss"] for event in client_events if "loss" in event]


def test_fedntd_trains_a_body_below_fedetfs_head(tmp_path: Path) -> None:
    """By cross-entropy and the distillation of the other classes."""
    toy = toys.toy("fedntd", model=toys.on_simplex(), measure=())

    fedstill.run(toy, tmp_path / "run", data=toys.blobs())

    losses = client_losses(tmp_path / "run")
    assert len(losses[0]) == 2
    assert sum(losses[-1].values()) < sum(losses[0].values())
    model = fedstill.load_model(tmp_path / "run")
    assert "etf" in model.about["network"]


@dataclass(frozen=True)
class CalibratedSFedKD(SFedKD):
    """SFedKD's teachers beside FedLC's cross-entropy."""

    margin: float = 1.0

    def work(self, stage: Stage) -> ClientWork:
        return CalibratedByTeachers(self)


@dataclass(frozen=True)
class CalibratedByTeachers(Discrepant):
    """The terms of both, FedLC's in place of plain cross-entropy."""

    method: CalibratedSFedKD

    @property
    def calibrated(self) -> Calibrated:
        """FedLC's work."""
        return Calibrated(FedLC(margin=self.method.margin))

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        start = super().begin(payload, client_state, view, world)
        calibrated_start = self.calibrated.begin(payload, client_state, view, world)
        return replace(start, constants={**start.constants, "shift": calibrated_start["shift"]})

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = super().terms(step, start)
        for name in ClientWork().terms(step, start):
            del terms[name]
        return {**terms, **self.calibrated.terms(step, start)}


def test_fedlcs_loss_in_sfedkds_chain(tmp_path: Path) -> None:
    """In round 1 there are no teachers."""
    topology = {"kind": "sequential", "clients": 6, "sampled": 3}
    toy = toys.toy(CalibratedSFedKD(), topology=topology, rounds=3, measure=())

    fedstill.run(toy, tmp_path / "run", data=toys.blobs())

    losses = client_losses(tmp_path / "run")
    assert set(losses[0]) == {"calibrated"}
    assert set(losses[-1]) == {"calibrated", "other_classes", "true_class"}


def test_fedproto_with_networks_that_differ_over_flower(tmp_path: Path) -> None:
    """The journal is that of the serial engine."""
    pytest.importorskip("flwr")
    networks = ({"name": "mlp", "hidden": (8,)}, {"name": "mlp", "hidden": (6, 8)})
    toy = toys.toy(
        "fedproto", clients={"models": networks}, topology={"clients": 6, "sampled": 4}, measure=()
    )

    for engine in ("serial", "flower"):
        fedstill.run(replace(toy, engine=engine), tmp_path / engine, data=toys.blobs())

    serial_events = without_times(events_of(tmp_path / "serial"))
    assert without_times(events_of(tmp_path / "flower")) == serial_events
    assert len(set(read_run(tmp_path / "flower").networks)) == 2


def test_fedlc_runs_over_a_stream_of_tasks(tmp_path: Path) -> None:
    toy = toys.toy("fedlc", stream={"kind": "classes", "tasks": 2}, rounds=4, measure=())

    result = fedstill.run(toy, tmp_path / "run", data=toys.blobs())

    assert result.summary["final_accuracy"] is not None
