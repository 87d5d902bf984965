"""Methods put together: one's head, another's loss, networks that differ, over Flower."""

from __future__ import annotations

import json
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

CHAIN: dict[str, Any] = {
    "topology": {"kind": "sequential", "clients": 6, "sampled": 3},
    "rounds": 3,
}


def losses(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    return [e["loss"] for e in lines if e["event"] == "client" and "loss" in e]


def test_fedntd_trains_a_body_below_fedetfs_head(tmp_path: Path) -> None:
    fedstill.run(
        toys.toy("fedntd", model=toys.on_simplex(), measure=()), tmp_path / "run", data=toys.blobs()
    )
    one, *_, last = losses(tmp_path / "run")
    assert len(one) == 2, "cross-entropy and the distillation of the other classes"
    assert sum(last.values()) < sum(one.values())
    model = fedstill.load_model(tmp_path / "run")
    assert "etf" in model.about["network"]


@dataclass(frozen=True)
class Both(SFedKD):
    """SFedKD's teachers beside FedLC's cross-entropy."""

    margin: float = 1.0

    def work(self, stage: Stage) -> ClientWork:
        return CalibratedByTeachers(self)


@dataclass(frozen=True)
class CalibratedByTeachers(Discrepant):
    """The terms of both, FedLC's in place of plain cross-entropy."""

    method: Both

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        carry = super().begin(payload, client_state, view, world)
        shift = self._calibrated().begin(payload, client_state, view, world)["shift"]
        return replace(carry, constants={**carry.constants, "shift": shift})

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        taught = super().terms(step, start)
        plain = ClientWork().terms(step, start)
        return {
            **{k: v for k, v in taught.items() if k not in plain},
            **self._calibrated().terms(step, start),
        }

    def _calibrated(self) -> Calibrated:
        return Calibrated(FedLC(margin=self.method.margin))


def test_fedlcs_loss_in_sfedkds_chain(tmp_path: Path) -> None:
    fedstill.run(toys.toy(Both(), **CHAIN, measure=()), tmp_path / "run", data=toys.blobs())
    terms = losses(tmp_path / "run")
    assert set(terms[0]) == {"calibrated"}, "no teachers in round 1"
    assert set(terms[-1]) == {"calibrated", "other_classes", "true_class"}


def test_fedproto_with_networks_that_differ_over_flower(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    networks = ({"name": "mlp", "hidden": (8,)}, {"name": "mlp", "hidden": (6, 8)})
    toy = toys.toy(
        "fedproto", clients={"models": networks}, topology={"clients": 6, "sampled": 4}, measure=()
    )
    for name, engine in (("here", "serial"), ("there", "flower")):
        fedstill.run(replace(toy, engine=engine), tmp_path / name, data=toys.blobs())
    ours, theirs = (
        without_times(read_journal(tmp_path / n / "journal.jsonl")) for n in ("here", "there")
    )
    assert ours == theirs
    assert len(set(read_run(tmp_path / "there").networks)) == 2


def test_fedlc_goes_through_tasks_that_come_one_after_another(tmp_path: Path) -> None:
    toy = toys.toy("fedlc", stream={"kind": "classes", "tasks": 2}, rounds=4, measure=())
    result = fedstill.run(toy, tmp_path / "run", data=toys.blobs())
    assert result.summary["final_accuracy"] is not None
