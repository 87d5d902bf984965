"""A last batch of one example, where the network normalises by the batch: refused before round 1, where it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import toys
from fedstill.errors import ConfigError
from fedstill.experiment.config.experiment import Experiment
from fedstill.experiment.config.settle import settle
from fedstill.experiment.preparing.prepared import prepare
from fedstill.experiment.running.runner import run
from newcomer import mine

SIZES = [41, 40, 61]  # in batches of 20, the first and the last end with one example


class Normed(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 8))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(x)))


class NormedImages(nn.Module):
    """A value for each place of an image: one image is enough."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(1), nn.Linear(16, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x).flatten(1))


def uneven(labels: Any, clients: int) -> list[Any]:
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    return [list(range(end - size, end)) for end, size in zip(ends, SIZES, strict=True)][:clients]


def experiment(model: Any = Normed, **changes: Any) -> Experiment:
    what = {"topology": {"clients": 3}, "partition": uneven, "plan": {"epochs": 1, "batch": 20}, "measure": ()}
    return toys.toy(**{"model": model, "rounds": 2, **what, **changes})


def test_a_last_batch_of_one_is_refused_with_a_batch_that_fits() -> None:
    with pytest.raises(ConfigError) as said:
        prepare(settle(experiment()), toys.blobs())
    text = str(said.value)
    assert text.startswith(
        "round 1, stage 'train': client 0 has 41 examples, and batches of 20 leave one of them alone"
    )
    assert text.endswith("normalises by the batch and cannot be trained on one: set plan.batch = 21")
    prepare(settle(experiment(plan={"epochs": 1, "batch": 21})), toys.blobs())


def test_it_would_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstill.experiment.preparing.misfits.refuse_lone_examples", lambda *_: None)
    with pytest.raises(Exception, match="client 0 failed: ValueError: Expected more than 1 value per channel"):
        run(experiment(), tmp_path / "run", toys.blobs())


FINE: dict[str, dict[str, Any]] = {
    "one image is enough": {"model": NormedImages},
    "no statistics": {"model": "mlp"},
    "frozen statistics": {"plan": {"epochs": 1, "batch": 20, "norm": "frozen"}},
    "steps that end before": {"plan": {"steps": 2, "batch": 20}},
    "held out examples": {"plan": {"epochs": 1, "batch": 20, "validation": 0.1}},
    "nobody trains": {"plan": {"epochs": 0, "batch": 20}},
    "clients that may fail": {"clients": {"quorum": 0.3, **toys.TOLERANT}},
}


@pytest.mark.parametrize("why", FINE)
def test_what_works_is_not_refused(why: str, tmp_path: Path) -> None:
    run(experiment(**FINE[why]), tmp_path / "run", toys.blobs())


def test_only_who_is_drawn_counts() -> None:
    found = set()
    for seed in range(8):
        try:
            prepare(settle(experiment(seed=seed, rounds=1, topology={"clients": 3, "sampled": 1})), toys.blobs())
        except ConfigError as error:
            found.add(str(error)[: len("round 1, stage 'train': client 0")])
        else:
            found.add("none")
    assert found == {"none", "round 1, stage 'train': client 0", "round 1, stage 'train': client 2"}


def test_a_method_that_adds_examples_is_let_be(tmp_path: Path) -> None:
    client = """
    def begin(self, down, memory, view, world):
        return Carry(params=down.params, more=view.data)
    """
    changed = mine(tmp_path, client, topology={"clients": 3}, partition=uneven, model=Normed, plan={"batch": 20})[0]
    prepare(settle(changed), toys.blobs())
    (tmp_path / "other").mkdir()
    same = mine(tmp_path / "other", topology={"clients": 3}, partition=uneven, model=Normed, plan={"batch": 20})[0]
    with pytest.raises(ConfigError, match="leave one of them alone"):
        prepare(settle(same), toys.blobs())
