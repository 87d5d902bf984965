"""Contributions where running means and variances move with the weights, and where a fold makes
another network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstill
import toys
from fedstill.cli import call
from fedstill.core.records import Examples
from fedstill.core.registry import register
from fedstill.data.inputs import Inputs
from fedstill.measures.contributions import ModelLine, SoftAccuracy, ThroughNorms
from fedstill.metrics.shapley import TOLERANCE, along_path
from fedstill.models import contract


@register("model", "toy_smooth_norm")
class SmoothNorm(nn.Module):
    """A network without kinks, so that its values along a line are integrated to many digits."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten()
        )
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


SPEC = contract.spec_for("toy_smooth_norm", (1, 4, 4), 3)
CLASSES = (0, 1, 2)


class Doubled(Inputs):
    """Inputs in float64."""

    def plain(self, images: Tensor) -> Tensor:
        return super().plain(images).double()


def line() -> ModelLine:
    """Three players whose changes move every entry, the running mean and variance far enough to
    count.
    """
    draw = torch.Generator().manual_seed(0)
    start = {
        k: v.double() if v.is_floating_point() else v for k, v in contract.initial(SPEC, 0).items()
    }
    moving = {k: v for k, v in start.items() if v.is_floating_point()}
    changes = [
        {
            k: (0.05 + 0.2 * ("running" in k)) * torch.rand(v.shape, generator=draw).double()
            for k, v in moving.items()
        }
        for _ in range(3)
    ]
    images = torch.randint(256, (30, 1, 4, 4), dtype=torch.uint8, generator=draw)
    data = Examples(images, torch.arange(30) % 3)
    by_class = {c: data.take((data.labels == c).nonzero().flatten()) for c in CLASSES}
    return ModelLine(SPEC, start, changes, SoftAccuracy(by_class, Doubled((0.5,), (0.3,)), 0.25))


def test_slopes_are_those_of_the_value_along_each_players_change_statistics_included() -> None:
    whole, near = line(), 1e-5
    assert {"body.1.running_mean", "body.1.running_var"} <= whole.changes[0].keys()
    slopes = whole.slopes(0.4, CLASSES)
    for k, own in enumerate(whole.changes):
        there = {
            n: v + 0.4 * whole._total_change[n] if n in whole._total_change else v
            for n, v in whole.start.items()
        }
        beside = ModelLine(SPEC, there, [own], whole.soft_accuracy)
        slope = (beside.values(near, CLASSES) - beside.values(-near, CLASSES)) / (2 * near)
        torch.testing.assert_close(slopes[k], slope, rtol=1e-6, atol=1e-8)
    statistics = {k: v for k, v in whole.changes[0].items() if "running" in k}
    rest = {k: torch.zeros_like(v) for k, v in whole.changes[0].items() if k not in statistics}
    only = ModelLine(SPEC, whole.start, [{**statistics, **rest}], whole.soft_accuracy)
    assert only.slopes(0.4, CLASSES).abs().max() > 1e-2, "they have a part of their own"


def test_parts_sum_to_the_whole_where_statistics_move() -> None:
    whole = line()
    change = whole.values(1.0, CLASSES) - whole.values(0.0, CLASSES)
    assert change.abs().max() > 0.02
    nodes = zip(*np.polynomial.legendre.leggauss(20), strict=True)
    parts = torch.stack([w / 2 * whole.slopes((1 + x) / 2, CLASSES) for x, w in nodes]).sum(0)
    torch.testing.assert_close(parts.sum(0), change, rtol=0, atol=1e-9)
    divided = along_path(whole, 3, CLASSES)
    torch.testing.assert_close(divided.values, parts, rtol=0, atol=TOLERANCE)
    assert divided.gap.max() < TOLERANCE


class Several(nn.Module):
    """All kinds of normalisation, with and without running statistics, with and without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Sequential(
            nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.LayerNorm(4)
        )
        self.wide = nn.Sequential(
            nn.BatchNorm2d(4, eps=1e-3),
            nn.BatchNorm2d(4, track_running_stats=False),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            nn.InstanceNorm2d(4),
            nn.GroupNorm(2, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.flat(self.wide(x).mean((2, 3)))
        return out


def test_the_formula_is_the_layers_and_only_where_statistics_run() -> None:
    draw = torch.Generator().manual_seed(1)
    m = Several().double().eval()
    moved = {
        k: v + torch.rand(v.shape, generator=draw).double()
        for k, v in m.state_dict().items()
        if v.dim()
    }
    m.load_state_dict(moved, strict=False)
    x = torch.randn(5, 4, 3, 3, generator=draw).double()
    with ThroughNorms():
        ours = m(x)
    torch.testing.assert_close(ours, m(x), rtol=0, atol=1e-12)
    m.train()
    with ThroughNorms():
        m(x)
    assert any(not torch.equal(v, moved[k]) for k, v in m.state_dict().items() if "running" in k), (
        "training is torch's"
    )


@pytest.fixture(scope="module")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a network with running statistics, which has measured contributions in its last
    round.
    """
    folder = tmp_path_factory.mktemp("normed")
    data = {"name": "digits", "train_size": 120, "test_size": 60}
    plan = {"epochs": 2, "batch": 20, "lr": 0.1}
    values: Mapping[str, object] = {
        "data": data,
        "plan": plan,
        "topology": {"clients": 3},
        "rounds": 2,
    }
    what = toys.toy("fedavg", model="toy_batchnorm", measure=("contributions",), **values)
    fedstill.run(what, folder / "run")
    return folder / "run"


@pytest.mark.uses("attribution")
def test_a_network_with_running_statistics_is_measured_in_a_run_and_later(
    normed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.loads(line) for line in (normed / "journal.jsonl").read_text().splitlines()]
    (look,) = [e for e in lines if e["event"] == "measure"]
    assert look["rule"] == "path"
    assert len(look["values"]) == len(look["classes"]) > 0
    assert max(look["gap"]) < 0.05
    assert call(["why", str(normed), "--round", "1"]) == 0, (
        "nothing is in the journal of round 1: it is looked at again"
    )
    assert "client" in capsys.readouterr().out


@pytest.mark.uses("attribution")
def test_a_measure_that_fails_later_is_named_with_its_place(
    normed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("nothing to divide by")

    monkeypatch.setattr("fedstill.measures.contributions.at_most", fails)
    (normed / "why.jsonl").unlink(missing_ok=True)
    assert call(["why", str(normed), "--round", "1"]) != 0
    said = capsys.readouterr().err
    assert "round 1, stage 'train': measure contributions failed: ZeroDivisionError" in said
    assert "Traceback" not in said


def test_a_fold_that_makes_another_network_is_asked_at_two_ends(tmp_path: Path) -> None:
    changes: Mapping[str, object] = {"rounds": 1, "plan": {"epochs": 1, "batch": 20, "lr": 0.2}}
    what = toys.toy({"name": "analytic", "width": 20}, measure=("contributions",), **changes)
    fedstill.run(what, tmp_path / "run", data=toys.blobs())
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()
    ]
    sums = next(e for e in lines if e["event"] == "measure" and e["name"] == "sums")
    assert (sums["rule"], sums["game"]) == ("two ends", "absent")
    change = torch.tensor(sums["after"]) - torch.tensor(sums["before"])
    assert torch.allclose(torch.tensor(sums["parts"]["sums"]), change, atol=5e-6)
