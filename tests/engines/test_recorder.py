"""When a step is recorded and replayed, with a recording that is imitated on the CPU; on a card: test_recorded.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedstill.engines import recorded
from fedstill.engines.recorded import FIRST, PAYS, Recorder

BATCH = 4


class Training:
    """One weight that goes down by the mean of what it sees; ``drawn``: something that no replay would do."""

    def __init__(self, drawn: Callable[[], float] = lambda: 0.0, asks: bool = False, late: int = 0) -> None:
        self.weight, self.extra, self.drawn, self.late = torch.zeros(1), torch.zeros(1), drawn, late
        self.asks, self.asked, self.calls = asks, set[str](), 0

    def act(self, of: Any) -> dict[str, Tensor]:
        self.calls += 1
        if self.asks:
            self.asked.add("epoch")
        self.weight -= of[0].mean() + self.drawn() + (of[5] if self.asks else 0)
        return {"seen": of[0].mean()}

    def moves(self) -> list[Tensor]:
        return [self.weight, *[self.extra] * (self.calls > self.late > 0)]


class Graph:
    """What a card does: while it records nothing is computed; a replay does the step on the recorded tensors."""

    training: Training
    replays = 0

    def capture_begin(self, capture_error_mode: str) -> None:
        act, self.given = self.training.act, {}

        def noted(of: Any) -> dict[str, Tensor]:
            self.of = of
            self.given["seen"] = torch.zeros(())
            return self.given

        self.act, self.noted = act, noted
        self.recorder.act = noted  # type: ignore[attr-defined]

    def capture_end(self) -> None:
        self.recorder.act = self.act  # type: ignore[attr-defined]

    def replay(self) -> None:
        type(self).replays += 1
        self.given["seen"].copy_(self.act(self.of)["seen"])


def recorder(training: Training, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, int] = (PAYS, PAYS)) -> Recorder:
    one = Recorder(training.act, training.moves, training.asked, BATCH, steps)
    kind = type("Imitated", (Graph,), {"training": training, "recorder": one, "replays": 0})
    state = SimpleNamespace(CUDAGraph=kind, get_rng_state=lambda: None, set_rng_state=lambda state: None)
    monkeypatch.setattr(recorded, "torch", SimpleNamespace(**{**vars(torch), "cuda": state}))
    monkeypatch.setattr(recorded, "OnHost", lambda: nullcontext(SimpleNamespace(seen=False)))
    one.kind = kind  # type: ignore[attr-defined]
    return one


def batches(count: int, size: int = BATCH, epochs: int = 1) -> list[tuple[Any, ...]]:
    draw = torch.Generator().manual_seed(0)
    each = []
    for i in range(count):
        index = torch.arange(size)
        each.append((torch.rand(size, 3, generator=draw), index, index, index, None, i * epochs // count))
    return each


def ends(training: Training, one: Callable[[Any], dict[str, Tensor]], some: list[tuple[Any, ...]]) -> list[float]:
    seen = [float(one(of)["seen"]) for of in some]
    return [*seen, float(training.weight)]


@pytest.mark.parametrize(("asks", "epochs"), [(False, 1), (False, 3), (True, 3)])
def test_replayed_steps_are_the_steps(asks: bool, epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    training, other, some = Training(asks=asks), Training(asks=asks), batches(30, epochs=epochs)
    one = recorder(training, monkeypatch)
    assert ends(training, one, some) == ends(other, other.act, some)
    recordings = epochs if asks else 1
    assert len(one.recordings) == recordings
    asked = 1 if asks else 0  # before the first step it is not known that it asks for its epoch
    assert one.kind.replays == 30 - recordings * FIRST - asked  # type: ignore[attr-defined]


def test_a_short_batch_is_a_step_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    training, other = Training(), Training()
    some = [*batches(8), *batches(1, size=3), *batches(5)]
    one = recorder(training, monkeypatch)
    assert ends(training, one, some) == ends(other, other.act, some)
    assert one.kind.replays == 13 - FIRST  # type: ignore[attr-defined]


def test_few_steps_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    one = recorder(training, monkeypatch, (PAYS - 1, PAYS - 1))
    for of in batches(PAYS - 1):
        one(of)
    assert not one.recordings
    assert training.calls == PAYS - 1


def test_a_step_that_a_replay_does_not_repeat_is_never_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws numbers of its own: one more in the step that is tried, and none is lost."""
    draw = iter(range(1000))
    training = Training(drawn=lambda: float(next(draw)))
    one = recorder(training, monkeypatch)
    for of in batches(20):
        one(of)
    assert one.never
    assert not one.recordings
    moved = float(training.weight) + sum(float(of[0].mean()) for of in batches(20))
    used = [i for i in range(21) if i != FIRST + 1]  # the replay's own draw is undone
    assert moved == pytest.approx(-sum(used), abs=1e-4)


def test_momentum_that_begins_late_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(late=FIRST)
    one = recorder(training, monkeypatch)
    for of in batches(20):
        one(of)
    assert one.never
    assert training.calls == 20


def test_without_a_card_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not recorded.is_wanted(torch.device("cpu"))
    assert recorded.is_wanted(torch.device("cuda"))
    monkeypatch.setenv(recorded.REPLAY, "0")
    assert not recorded.is_wanted(torch.device("cuda"))
