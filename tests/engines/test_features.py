"""Features outside of training: what a method gets of them, on every engine; and how many a network
has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.capabilities import Need
from fedstill.core.errors import IncompatibleMethod
from fedstill.core.method import ClientWork, Method
from fedstill.core.records import (
    SERVER,
    Payload,
    Reply,
    Stage,
    State,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.registry import method, register
from fedstill.core.trees import dtype_of
from fedstill.models import contract
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

pytestmark = pytest.mark.usefixtures("with_threads")


def blank(world: World, client: int) -> torch.Tensor:
    """Two means of features, in the network's type."""
    return torch.zeros(
        2, contract.width(world.model(client)), dtype=dtype_of(world.initial(client))
    )


@method("toy_features")
@dataclass(frozen=True)
class MeanFeatures(Method):
    """The model is averaged, and with it the mean features of clients' data and of the public
    images.
    """

    needs: ClassVar[Need] = Need.SAME_FEATURES | Need.PUBLIC_DATA

    def initial_state(self, world: World) -> State:
        return super().initial_state(world).next(mean=blank(world, SERVER))

    def work(self, stage: Stage) -> ClientWork:
        return SendFeatures()

    def expected_reply(self, client: int, stage: Stage, world: World) -> Payload:
        return Payload(params=world.initial(client), mean=blank(world, client))

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        mean = torch.stack([r.content.tensor("mean") for r in replies]).mean(0)
        return super().aggregate(state, replies, stage, world).next(mean=mean)


class SendFeatures(ClientWork):
    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        first = view.features(payload.params, only=torch.tensor([1]))
        torch.testing.assert_close(first, view.features(payload.params)[1:2], rtol=1e-4, atol=1e-4)
        return TrainingStart(payload.params)

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        private_mean = view.features(params, "data").mean(0)
        public_mean = view.features(params, "public").mean(0)
        return Payload(params=params, mean=torch.stack([private_mean, public_mean])), Payload()

    def report(
        self, params: Tensors, start: TrainingStart, view: View, world: World
    ) -> dict[str, Any]:
        features = view.features(params)
        logits = contract.head(contract.module(view.model).eval(), params, features)
        difference = (logits - view.logits(params)).abs().max()
        no_features = view.features(params, only=torch.zeros(0, dtype=torch.int64))
        return {
            "mean": [round(value, 5) for value in features.double().mean(0).tolist()],
            "apart": float(difference > 1e-5),
            "none": list(no_features.shape),
        }


@register("model", "toy_unflat")
class Unflat(nn.Module):
    """Its body gives maps, not features."""

    def __init__(self, input_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(input_shape[0], 2, 3)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def means(engine: str, folder: Path, **changes: Any) -> dict[tuple[int, int], Any]:
    """The mean features of a run, by round and client."""
    experiment = toys.toy("toy_features", engine=engine, data={"public": 20}, **changes)
    run(experiment, folder, toys.blobs())

    journal = read_journal(folder / "journal.jsonl")
    events = [event for event in journal if event["event"] == "client"]
    assert events
    for event in events:
        assert "refused" not in event
        assert not event["apart"]
        assert event["none"] == [0, len(event["mean"])]
    return {(event["round"], event["client"]): event["mean"] for event in events}


@pytest.mark.parametrize(
    "engine", ["pooled", pytest.param("flower", marks=pytest.mark.needs_flower)]
)
def test_features_are_the_serial_engines(engine: str, tmp_path: Path) -> None:
    assert means(engine, tmp_path / engine) == means("serial", tmp_path / "serial")


def test_features_of_a_stack_are_the_serial_engines_up_to_rounding(tmp_path: Path) -> None:
    serial = means("serial", tmp_path / "serial")
    stacked = means("vectorised", tmp_path / "stacked")
    for key, mean in serial.items():
        assert stacked[key] == pytest.approx(mean, abs=1e-3)


def test_features_are_of_evaluation_mode(tmp_path: Path) -> None:
    """``means`` compares them with the logits of evaluation mode."""
    assert means("serial", tmp_path / "run", model="toy_batchnorm")


def test_width_is_what_the_head_takes() -> None:
    two_hidden_layers = contract.spec_for("mlp", (1, 4, 4), 5, {"hidden": (8, 3)})
    assert contract.width(two_hidden_layers) == 3
    assert contract.width(contract.spec_for("toy_batchnorm", (1, 4, 4), 5)) == 64
    with pytest.raises(IncompatibleMethod, match=r"toy_unflat .*\(2, 2, 2, 2\)"):
        contract.width(contract.spec_for("toy_unflat", (1, 4, 4), 5))


def test_networks_with_other_numbers_of_features_are_refused() -> None:
    different = toys.toy(
        "toy_features", data={"public": 20}, clients={"models": ["logistic", "mlp"]}
    )
    with pytest.raises(IncompatibleMethod, match=r"mlp.* 8, logistic.* 16"):
        prepare(resolve(different), toys.blobs())
    with pytest.raises(IncompatibleMethod, match="features"):
        prepare(resolve(toys.toy("toy_features", data={"public": 20}, model=bare)), toys.blobs())


def bare(input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A network without body and head."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes))
