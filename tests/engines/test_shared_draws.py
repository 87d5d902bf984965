"""What draws from torch's global generator: the same seed gives the same bits, in each engine and
after a resume.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import toys
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError
from fedstill.core.extensions import StageResult
from fedstill.core.method import ClientWork
from fedstill.core.records import (
    NOTHING,
    ModelSpec,
    Payload,
    Reply,
    Stage,
    State,
    Step,
    Tensors,
    TrainingResult,
    TrainingStart,
    View,
    World,
)
from fedstill.core.registry import method, register
from fedstill.engines import pooled
from fedstill.engines import pooled as shared_draws
from fedstill.losses import cross_entropy
from fedstill.measures.base import EvaluationContext, Measure, Numbers
from fedstill.methods.fedavg import FedAvg
from fedstill.models import contract
from fedstill.models.contract import draws_random_numbers
from fedstill.running.preparation import prepare
from fedstill.running.runner import resume, run
from run_bits import assert_same_bits, bits, stopped

pytestmark = pytest.mark.usefixtures("with_threads")


@pytest.fixture(autouse=True)
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the networks, and whatever the machine, two clients at once."""
    monkeypatch.setattr(pooled, "LIGHT_FLOPS", 0.0)
    monkeypatch.setenv("FEDSTILL_WORKERS", "2")
    shared_draws.warn_of_draws.cache_clear()


@register("model", "toy_functional_dropout")
class Dropping(nn.Module):
    """Dropout that is no layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.first(x.flatten(1)).relu()
        features = functional.dropout(features, 0.5, self.training)
        logits: Tensor = self.last(features)
        return logits


@register("model", "toy_gru")
class Recurrent(nn.Module):
    """Dropout within a layer of another kind."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.last = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.rnn(x.squeeze(1))
        logits: Tensor = self.last(outputs.mean(1))
        return logits


@register("model", "toy_noisy")
class Noisy(nn.Module):
    """Noise on its inputs, also where it is looked at."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        noisy = x + torch.randn_like(x)
        logits: Tensor = self.last(noisy.flatten(1))
        return logits


def shaken(params: Tensors) -> Tensors:
    """Parameters with noise."""
    return {name: entry + 0.1 * torch.randn_like(entry) for name, entry in params.items()}


@dataclass(frozen=True)
class Shaken(ClientWork):
    """A client's part that draws noise in one of its functions."""

    place: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        if self.place == "begin":
            return TrainingStart(shaken(payload.params))
        return TrainingStart(payload.params)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        logits = step.logits()
        if self.place == "terms":
            logits = logits + torch.randn_like(logits)
        return {"ce": cross_entropy(logits, step.y)}

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        if self.place == "end":
            params = shaken(params)
        return Payload(params=params), NOTHING


@method("toy_shaken")
@dataclass(frozen=True)
class Shaking(FedAvg):
    """Averaging with noise from torch's global generator.

    place: begin, terms, end, fold or setup.
    """

    place: str = "terms"

    def work(self, stage: Stage) -> ClientWork:
        return Shaken(self.place)

    def initial_state(self, world: World) -> State:
        state = super().initial_state(world)
        if self.place == "setup":
            return state.next(shaken(state.params))
        return state

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        state = super().aggregate(state, replies, stage, world)
        if self.place == "fold":
            return state.next(shaken(state.params))
        return state


@register("measure", "toy_drawing")
class Drawing(Measure):
    """A number that is drawn."""

    def look(self, result: StageResult, context: EvaluationContext) -> Numbers:
        return {"drawn": torch.rand(()).item()}


def twice_and_resumed(folder: Path, **changes: object) -> dict[str, Any]:
    """The bits of a run, which a second run of it has, too, and one that is stopped and resumed."""
    data = toys.blobs(size=100)
    experiment = toys.toy(
        rounds=2,
        measure=("toy_drawing",),
        topology={"clients": 4, "sampled": 3},
        plan={"epochs": 1, "batch": 20, "lr": 0.2},
        **changes,
    )
    run(experiment, folder / "first", data=data)
    first_bits = bits(folder / "first")

    torch.rand(7)
    run(experiment, folder / "second", data=data)
    assert_same_bits(bits(folder / "second"), first_bits)

    half = stopped(experiment, folder / "half", stages=1, data=data)
    torch.rand(7)
    resume(half, data=data)
    assert_same_bits(bits(half), first_bits)
    return first_bits


@pytest.mark.parametrize("model", ["toy_functional_dropout", "toy_gru"])
def test_a_network_may_draw_in_its_forward_pass(model: str, tmp_path: Path) -> None:
    serial = twice_and_resumed(tmp_path / "serial", model=model, engine="serial")
    pooled = twice_and_resumed(tmp_path / "pooled", model=model, engine="pooled")
    assert serial["model.safetensors"] == pooled["model.safetensors"]


@pytest.mark.parametrize("place", ["begin", "terms", "end", "fold", "setup"])
def test_a_method_may_draw(place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = {}
    for engine in ("serial", "pooled", "vectorised"):
        method = {"name": "toy_shaken", "place": place}
        run_bits = twice_and_resumed(tmp_path / engine, method=method, engine=engine)
        models[engine] = run_bits["model.safetensors"]

    assert models["serial"] == models["pooled"]
    if place in ("fold", "setup"):
        assert not caplog.messages
    else:
        assert models["serial"] == models["vectorised"]
        (line,) = caplog.messages
        assert line.startswith("Shaken draws random numbers from torch's global generator")


def test_what_draws_is_told_by_a_pass_that_leaves_no_trace() -> None:
    def spec(name: str) -> ModelSpec:
        return contract.spec_for(name, (1, 4, 4), 5)

    state = torch.get_rng_state()
    for name in ("toy_functional_dropout", "toy_gru", "toy_noisy"):
        assert draws_random_numbers(spec(name))
    for name in ("toy_functional_dropout", "toy_gru"):
        assert not draws_random_numbers(spec(name), training=False)
    assert not draws_random_numbers(spec("mlp"))
    assert not draws_random_numbers(spec("toy_batchnorm"))
    assert torch.equal(torch.get_rng_state(), state)
    module = contract.module(spec("toy_batchnorm"), "frozen")
    assert int(module.get_buffer("body.1.num_batches_tracked")) == 0
    assert not module.training


def test_a_network_that_draws_where_it_is_looked_at_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"toy_noisy .*self\.training"):
        prepare(resolve(toys.toy(model="toy_noisy")), toys.blobs())


def test_a_stage_is_done_again_only_when_no_client_of_it_acts_any_more(tmp_path: Path) -> None:
    acting = set[int]()
    acting_at_begin: list[int] = []

    @dataclass(frozen=True)
    class Watched(Shaken):
        def begin(
            self, payload: Payload, client_state: Payload, view: View, world: World
        ) -> TrainingStart:
            if threading.current_thread() is threading.main_thread():
                acting_at_begin.append(len(acting))
            acting.add(view.client)
            return super().begin(payload, client_state, view, world)

        def end(
            self,
            params: Tensors,
            start: TrainingStart,
            result: TrainingResult,
            view: View,
            world: World,
        ) -> tuple[Payload, Payload]:
            acting.discard(view.client)
            return super().end(params, start, result, view, world)

    ready = prepare(resolve(toys.toy()), toys.blobs())
    engine = pooled.PooledEngine(ready.world, ready.sites)
    stage = Stage(1, 0, "train", (0, 1, 2, 3, 4, 5))
    payloads = {client: Payload(params=ready.world.initial(client)) for client in stage.clients}
    replies = engine.run(Watched("terms"), stage, payloads, 7)
    engine.close()
    assert acting_at_begin == [0] * len(stage.clients)
    assert not any(reply.failure for reply in replies)
