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
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(
            functional.dropout(self.first(x.flatten(1)).relu(), 0.5, self.training)
        )
        return y


@register("model", "toy_gru")
class Recurrent(nn.Module):
    """Dropout within a layer of another kind."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.last = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.rnn(x.squeeze(1))[0].mean(1))
        return y


@register("model", "toy_noisy")
class Noisy(nn.Module):
    """Noise on its inputs, also where it is looked at."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last((x + torch.randn_like(x)).flatten(1))
        return y


@dataclass(frozen=True)
class Shaken(ClientWork):
    """Noise where a method asks for it."""

    where: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        return TrainingStart(
            {k: v + 0.1 * torch.randn_like(v) for k, v in payload.params.items()}
            if self.where == "begin"
            else payload.params
        )

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        logits = step.logits()
        return {
            "ce": cross_entropy(
                logits + torch.randn_like(logits) if self.where == "terms" else logits, step.y
            )
        }

    def end(
        self,
        params: Tensors,
        start: TrainingStart,
        result: TrainingResult,
        view: View,
        world: World,
    ) -> tuple[Payload, Payload]:
        if self.where == "end":
            params = {k: v + 0.1 * torch.randn_like(v) for k, v in params.items()}
        return Payload(params=params), NOTHING


@method("toy_shaken")
@dataclass(frozen=True)
class Shaking(FedAvg):
    """Averaging with noise from torch's global generator.

    where: begin, terms, end, fold or setup.
    """

    where: str = "terms"

    def work(self, stage: Stage) -> ClientWork:
        return Shaken(self.where)

    def initial_state(self, world: World) -> State:
        state = super().initial_state(world)
        return self._shaken(state) if self.where == "setup" else state

    def aggregate(
        self, state: State, replies: Sequence[Reply], stage: Stage, world: World
    ) -> State:
        state = super().aggregate(state, replies, stage, world)
        return self._shaken(state) if self.where == "fold" else state

    def _shaken(self, state: State) -> State:
        return state.next({k: v + 0.1 * torch.randn_like(v) for k, v in state.params.items()})


@register("measure", "toy_drawing")
class Drawing(Measure):
    """A number that is drawn."""

    def look(self, seen: StageResult, context: EvaluationContext) -> Numbers:
        return {"drawn": torch.rand(()).item()}


def twice_and_resumed(folder: Path, **changes: object) -> dict[str, Any]:
    """The bits of a run; they are those of the same run again, and of one that was stopped and
    resumed.
    """
    experiment = toys.toy(**{"measure": ("toy_drawing",), "rounds": 2, **changes})
    run(experiment, folder / "one", data=toys.blobs())
    torch.rand(7)
    run(experiment, folder / "two", data=toys.blobs())
    one = bits(folder / "one")
    assert_same_bits(bits(folder / "two"), one)
    half = stopped(experiment, folder / "half", stages=1)
    torch.rand(7)
    resume(half, data=toys.blobs())
    assert_same_bits(bits(half), one)
    return one


@pytest.mark.parametrize("model", ["toy_functional_dropout", "toy_gru"])
def test_a_network_may_draw_in_its_forward_pass(model: str, tmp_path: Path) -> None:
    each = [
        twice_and_resumed(tmp_path / name, model=model, engine=name)
        for name in ("serial", "pooled")
    ]
    assert each[0]["model.safetensors"] == each[1]["model.safetensors"]


@pytest.mark.parametrize("where", ["begin", "terms", "end", "fold", "setup"])
def test_a_method_may_draw(where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shaken = {"name": "toy_shaken", "where": where}
    each = {
        n: twice_and_resumed(tmp_path / n, method=shaken, engine=n)
        for n in ("serial", "pooled", "vectorised")
    }
    assert each["serial"]["model.safetensors"] == each["pooled"]["model.safetensors"]
    if where in ("fold", "setup"):
        assert not caplog.messages
    else:
        assert each["serial"]["model.safetensors"] == each["vectorised"]["model.safetensors"]
        (line,) = caplog.messages
        assert line.startswith("Shaken draws random numbers from torch's global generator")


def test_what_draws_is_told_by_a_pass_that_leaves_no_trace() -> None:
    def spec(name: str) -> ModelSpec:
        return contract.spec_for(name, (1, 4, 4), 5)

    before = torch.get_rng_state()
    assert all(
        draws_random_numbers(spec(name))
        for name in ("toy_functional_dropout", "toy_gru", "toy_noisy")
    )
    assert not any(
        draws_random_numbers(spec(name), training=False)
        for name in ("toy_functional_dropout", "toy_gru")
    )
    assert not draws_random_numbers(spec("mlp"))
    assert not draws_random_numbers(spec("toy_batchnorm"))
    assert torch.equal(torch.get_rng_state(), before)
    m = contract.module(spec("toy_batchnorm"), "frozen")
    assert int(m.get_buffer("body.1.num_batches_tracked")) == 0
    assert not m.training


def test_a_network_that_draws_where_it_is_looked_at_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"toy_noisy .*self\.training",
    ):
        prepare(resolve(toys.toy(model="toy_noisy")), toys.blobs())


def test_a_stage_is_done_again_only_when_no_client_of_it_acts_any_more(tmp_path: Path) -> None:
    acting, most = set[int](), [0]

    @dataclass(frozen=True)
    class Watched(Shaken):
        def begin(
            self, payload: Payload, client_state: Payload, view: View, world: World
        ) -> TrainingStart:
            if threading.current_thread() is threading.main_thread():
                most.append(len(acting))
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
    payloads = {c: Payload(params=ready.world.initial(c)) for c in stage.clients}
    replies = engine.run(Watched("terms"), stage, payloads, 7)
    engine.close()
    assert len(most) == 1 + len(stage.clients)
    assert set(most) == {0}
    assert not any(reply.failure for reply in replies)
