"""Contributions where running means and variances move with the weights, and where an aggregation
makes another network.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstill
import toys
from double import widened
from fedstill.cli import call
from fedstill.core import trees
from fedstill.core.records import Examples, Tensors
from fedstill.core.registry import register
from fedstill.data.inputs import Inputs
from fedstill.measures.contributions import ModelLine, SoftAccuracy, ThroughNorms
from fedstill.metrics.shapley import TOLERANCE, along_path
from fedstill.models import contract
from journals import journal_events


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


def random_changes(params: Tensors, generator: torch.Generator) -> dict[str, Tensor]:
    """Changes of all parameters; those of running statistics are larger, so that they count."""
    changes = {}
    for name, value in params.items():
        size = 0.05
        if "running" in name:
            size = 0.25
        changes[name] = size * torch.rand(value.shape, generator=generator).double()
    return changes


def model_line() -> ModelLine:
    """Three players, each of which changes every entry of the model."""
    generator = torch.Generator().manual_seed(0)
    start = widened(contract.initial(SPEC, 0))
    params = trees.floats(start)
    changes = [random_changes(params, generator) for _ in range(3)]
    images = torch.randint(256, (30, 1, 4, 4), dtype=torch.uint8, generator=generator)
    examples = Examples(images, torch.arange(30) % 3)
    by_class = {
        label: examples.take((examples.labels == label).nonzero().flatten()) for label in CLASSES
    }
    accuracy = SoftAccuracy(by_class, Doubled((0.5,), (0.3,)), 0.25)
    return ModelLine(SPEC, start, changes, accuracy)


def test_slopes_are_those_of_the_value_along_each_players_change_statistics_included() -> None:
    """A player's slope at 0.4 is a central difference along its change alone, from the model of the
    line at 0.4. The changes of statistics have a part of their own.
    """
    line = model_line()
    assert {"body.1.running_mean", "body.1.running_var"} <= line.changes[0].keys()
    model = dict(line.start)
    for name, change in line._total_change.items():
        model[name] = model[name] + 0.4 * change
    step = 1e-5

    slopes = line.slopes(0.4, CLASSES)

    for player, changes in enumerate(line.changes):
        alone = ModelLine(SPEC, model, [changes], line.soft_accuracy)
        difference = alone.values(step, CLASSES) - alone.values(-step, CLASSES)
        torch.testing.assert_close(slopes[player], difference / (2 * step), rtol=1e-6, atol=1e-8)

    statistics_only = {
        name: change * float("running" in name) for name, change in line.changes[0].items()
    }
    of_statistics = ModelLine(SPEC, line.start, [statistics_only], line.soft_accuracy)
    assert of_statistics.slopes(0.4, CLASSES).abs().max() > 1e-2


def test_parts_sum_to_the_change_where_statistics_move() -> None:
    """A quadrature of high order is the reference."""
    line = model_line()
    change = line.values(1.0, CLASSES) - line.values(0.0, CLASSES)
    assert change.abs().max() > 0.02
    expected = torch.zeros(3, len(CLASSES)).double()
    for node, weight in zip(*np.polynomial.legendre.leggauss(20), strict=True):
        expected += weight / 2 * line.slopes((1 + node) / 2, CLASSES)
    torch.testing.assert_close(expected.sum(0), change, rtol=0, atol=1e-9)

    table = along_path(line, 3, CLASSES)

    torch.testing.assert_close(table.values, expected, rtol=0, atol=TOLERANCE)
    assert table.gap.max() < TOLERANCE


class AllNorms(nn.Module):
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


def test_the_formula_is_the_layers_and_used_only_in_evaluation() -> None:
    """In training, torch updates the running statistics."""
    generator = torch.Generator().manual_seed(1)
    network = AllNorms().double().eval()
    state = {name: value for name, value in network.state_dict().items() if value.dim()}
    for name, value in state.items():
        state[name] = value + torch.rand(value.shape, generator=generator).double()
    network.load_state_dict(state, strict=False)
    x = torch.randn(5, 4, 3, 3, generator=generator).double()

    with ThroughNorms():
        output = network(x)
    torch.testing.assert_close(output, network(x), rtol=0, atol=1e-12)

    network.train()
    with ThroughNorms():
        network(x)
    running = {name for name in state if "running" in name}
    trained_state = network.state_dict()
    assert any(not torch.equal(trained_state[name], state[name]) for name in running)


@pytest.fixture(scope="module")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a network with running statistics, which has measured contributions in its last
    round.
    """
    folder = tmp_path_factory.mktemp("normed") / "run"
    experiment = toys.toy(
        "fedavg",
        model="toy_batchnorm",
        measure=("contributions",),
        data={"name": "digits", "train_size": 120, "test_size": 60},
        plan={"epochs": 2, "batch": 20, "lr": 0.1},
        topology={"clients": 3},
        rounds=2,
    )
    fedstill.run(experiment, folder)
    return folder


@pytest.mark.uses("attribution")
def test_a_network_with_running_statistics_is_measured_in_a_run_and_later(
    normed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal has nothing about round 1, so ``fedstill why`` measures it."""
    (event,) = journal_events(normed, event="measure")
    assert event["rule"] == "path"
    assert len(event["values"]) == len(event["classes"]) > 0
    assert max(event["gap"]) < 0.05

    assert call(["why", str(normed), "--round", "1"]) == 0
    assert "client" in capsys.readouterr().out


@pytest.mark.uses("attribution")
def test_a_measure_that_fails_later_is_named_with_its_place(
    normed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("nothing to divide by")

    monkeypatch.setattr("fedstill.measures.contributions.at_most", fail)
    (normed / "why.jsonl").unlink(missing_ok=True)

    assert call(["why", str(normed), "--round", "1"]) != 0

    message = capsys.readouterr().err
    assert "round 1, stage 'train': measure contributions failed: ZeroDivisionError" in message
    assert "Traceback" not in message


def test_an_aggregation_that_makes_another_network_is_evaluated_at_two_ends(tmp_path: Path) -> None:
    experiment = toys.toy(
        {"name": "analytic", "width": 20},
        measure=("contributions",),
        rounds=1,
        plan={"epochs": 1, "batch": 20, "lr": 0.2},
    )

    fedstill.run(experiment, tmp_path / "run", data=toys.blobs())

    event = journal_events(tmp_path / "run", event="measure", name="sums")[0]
    assert event["rule"] == "two ends"
    assert event["game"] == "absent"
    change = torch.tensor(event["after"]) - torch.tensor(event["before"])
    assert torch.allclose(torch.tensor(event["parts"]["sums"]), change, atol=5e-6)
