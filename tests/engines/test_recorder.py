"""When a step is recorded and replayed, with a recording that is imitated on the CPU; on a card:
test_recorded.py.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedstill.engines import cuda_graphs, hardware
from fedstill.engines.cuda_graphs import (
    MIN_STEPS,
    WARM_UP,
    Recording,
    StepArguments,
    StepRecorder,
    WholeBatches,
    watched,
)
from fedstill.engines.step import StepInputs
from imitated_card import Graph, record_on_cpu

BATCH = 4


class Training:
    """One weight that goes down by the mean of what it sees; ``more``: something that a replay
    would not do.
    """

    def __init__(
        self, more: Callable[[Tensor], float] = lambda x: 0.0, asks: bool = False, late: int = 0
    ) -> None:
        self.weight, self.extra, self.more, self.late = torch.zeros(1), torch.zeros(1), more, late
        self.asks, self.asked, self.calls = asks, False, 0

    def execute(self, inputs: StepInputs, running: Tensor | None = None) -> dict[str, Tensor]:
        self.calls += 1
        if self.asks:
            self.asked = True
        seen = inputs.x.mean()
        self.weight.sub_(seen).sub_(self.more(inputs.x)).sub_(inputs.epoch if self.asks else 0)
        return {"seen": seen}

    def moves(self) -> list[Tensor]:
        return [self.weight, *[self.extra] * (self.calls > self.late > 0)]

    def recorder(self, steps: int = MIN_STEPS) -> StepRecorder:
        return StepRecorder(
            execute=self.execute,
            state=lambda: self.moves(),
            reads_epoch=lambda: self.asked,
            batches=WholeBatches(total=steps, per_epoch=steps),
            kind="here",
        )


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each step that is replayed, the one that is tried, too."""
    record_on_cpu(monkeypatch)
    seen: list[int] = []
    plain = Recording.replay
    monkeypatch.setattr(
        Recording,
        "replay",
        lambda self, arguments: (
            seen.append(len(arguments.inputs.y)),
            plain(self, arguments),
        )[1],
    )
    return seen


def batches(count: int, size: int = BATCH, epochs: int = 1) -> list[StepInputs]:
    draw = torch.Generator().manual_seed(0)
    each = []
    for i in range(count):
        index = torch.arange(size)
        each.append(
            StepInputs(
                x=torch.rand(size, 3, generator=draw),
                y=index,
                positions=index,
                rows=index,
                mask=None,
                epoch=i * epochs // count,
            )
        )
    return each


def ends(
    training: Training, one: Callable[[Any], dict[str, Tensor]], some: list[StepInputs]
) -> list[float]:
    seen = [float(one(of)["seen"]) for of in some]
    return [*seen, float(training.weight)]


@pytest.mark.parametrize(("asks", "epochs"), [(False, 1), (False, 3), (True, 3)])
def test_replayed_steps_are_the_steps(asks: bool, epochs: int, replays: list[int]) -> None:
    training, other, some = Training(asks=asks), Training(asks=asks), batches(30, epochs=epochs)
    one = training.recorder()
    assert ends(training, one, some) == ends(other, other.execute, some)
    assert len(one.recordings) == 1, "those of epochs that have passed are let go"
    recordings = epochs if asks else 1
    asked = 1 if asks else 0  # before the first step it is not known that it asks for its epoch
    assert len(replays) == 30 - recordings * WARM_UP - asked


def test_a_short_batch_is_a_step_of_its_own(replays: list[int]) -> None:
    training, other = Training(), Training()
    some = [*batches(8), *batches(1, size=3), *batches(5)]
    assert ends(training, training.recorder(), some) == ends(other, other.execute, some)
    assert len(replays) == 13 - WARM_UP


def test_few_steps_are_not_recorded() -> None:
    training = Training()
    one = training.recorder(MIN_STEPS - 1)
    for of in batches(MIN_STEPS - 1):
        one(of)
    assert not one.recordings
    assert training.calls == MIN_STEPS - 1


OWN = random.Random(3)
ELSEWHERE = torch.zeros(1)
KEPT: dict[str, Tensor] = {}
SEEN: list[Tensor] = []
ODD: dict[str, Callable[[Tensor], Any]] = {
    "counts": lambda x: (SEEN.append(x), float(len(SEEN)))[1],
    "draws by a generator of its own": lambda x: float(OWN.random() < 0.5),
    "looks": lambda x: x.max().item(),
    "picks": lambda x: x[x > 0.5].sum(),
    "counts values": lambda x: torch.bincount((x > 0.5).long().flatten(), minlength=2)[0],
    "Python's coin": lambda x: float(random.random() < 0.5),
    "NumPy's coin": lambda x: float(np.random.rand() < 0.5),
    "writes elsewhere": lambda x: ELSEWHERE.add_(1.0),
    "keeps the last": lambda x: (KEPT.get("last", x).max(), KEPT.update(last=x * 2))[0],
}


@pytest.mark.parametrize("what", ODD)
def test_a_step_that_a_replay_does_not_repeat_is_never_replayed(
    what: str, replays: list[int]
) -> None:
    """It ends where it ends by itself: nothing is drawn or written once more."""
    some, ended = batches(20), []
    for on in (False, True):
        KEPT.clear()
        SEEN.clear()
        OWN.seed(3)
        ELSEWHERE.zero_()
        random.seed(1)
        np.random.seed(1)
        training = Training(ODD[what])
        ended.append(ends(training, training.recorder() if on else training.execute, some))
    assert not replays
    assert ended[0] == ended[1]


def test_a_step_that_ends_elsewhere_when_it_is_replayed_is_tried_once_in_a_process(
    replays: list[int],
) -> None:
    for _ in range(3):
        training, count = Training(), iter(range(99))
        training.more = lambda x, count=count: float(next(count) > WARM_UP)  # type: ignore[misc]
        one = training.recorder()
        for of in batches(20):
            one(of)
        assert not one.recordings
    assert replays == [BATCH]


def test_what_was_kept_of_the_batch_that_was_recorded_shows_on_the_next(replays: list[int]) -> None:
    """As a teacher's logits for a batch, which are computed once however often they are asked
    for.
    """

    class Teacher:
        batch: Any = None

        def logits(self, x: Tensor) -> Any:
            if self.batch is not x:
                self.batch, self.known = x, x.max() * 2
            return self.known

    some = batches(20)
    training, other = Training(Teacher().logits), Training(Teacher().logits)
    assert ends(training, training.recorder(), some) == ends(other, other.execute, some)
    assert len(replays) == 20 - WARM_UP, (
        "it is recorded: the recording was given tensors of its own"
    )


def test_momentum_that_begins_while_a_step_is_recorded_begins_at_0() -> None:
    """And what other parameters have gathered stays."""
    training = Training()
    first, late = torch.ones(1), torch.full((1,), 7.0)
    training.moves = lambda: [training.weight, *[late] * (training.calls > WARM_UP), first]  # type: ignore[method-assign]
    one = training.recorder()
    for of in batches(WARM_UP):
        one(of)
    assert (float(first), float(late)) == (1.0, 0.0)
    assert not one.recordings


def test_a_client_that_diverged_is_no_reason_to_refuse_the_others(replays: list[int]) -> None:
    some = batches(20)
    for weight in (float("nan"), 0.0):
        training, other = Training(), Training()
        training.weight.fill_(weight)
        other.weight.fill_(weight)
        assert str(ends(training, training.recorder(), some)) == str(
            ends(other, other.execute, some)
        )
    assert len(replays) == 2 * (20 - WARM_UP)


def test_zeros_without_memory_are_watched_as_others() -> None:
    """Forward-mode derivatives have them."""
    x = torch.ones(2)
    with watched(StepArguments(StepInputs(x, x, x, x, None, 0)), [x], set()):
        added = torch.add(x, torch._efficientzerotensor(2))
    assert added.tolist() == [1.0, 1.0]


def test_momentum_that_begins_late_is_left_alone() -> None:
    training = Training(late=WARM_UP + 1)
    one = training.recorder()
    for of in batches(20):
        one(of)
    assert not one.recordings
    assert training.calls == 20 + 1, "and the step that was recorded, of which nothing was computed"


def test_a_recording_that_fails_is_tried_once_in_a_process(
    monkeypatch: pytest.MonkeyPatch, replays: list[int]
) -> None:
    begun: list[Any] = []

    def refuse(self: Graph) -> None:
        Graph.capture_end(self)
        begun.append(self)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(
        cuda_graphs.torch.cuda, "CUDAGraph", type("Failing", (Graph,), {"capture_end": refuse})
    )
    for _ in range(3):
        training, other = Training(), Training()
        assert ends(training, training.recorder(), batches(20)) == ends(
            other, other.execute, batches(20)
        )
    assert len(begun) == 1
    assert not replays


def test_ctrl_c_while_a_step_is_recorded_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Graph) -> None:
        Graph.capture_end(self)
        raise RuntimeError("the recording was broken off")

    monkeypatch.setattr(
        cuda_graphs.torch.cuda, "CUDAGraph", type("Failing", (Graph,), {"capture_end": failing})
    )
    training = Training()

    def stopped(x: Tensor) -> float:
        if training.calls == WARM_UP + 1:
            raise KeyboardInterrupt
        return 0.0

    training.more = stopped
    with pytest.raises(KeyboardInterrupt):
        ends(training, training.recorder(), batches(20))


def test_what_a_step_makes_itself_it_may_write_into() -> None:
    own = torch.ones(3)
    with watched(StepArguments(StepInputs(own, own, own, own, None, 0)), [own], set()) as watch:
        made = own.clone()
        made[:1].fill_(2.0)
        own.add_(made)
    assert not watch.cannot_replay


def test_that_the_host_waited_for_a_card_is_heard_and_other_warnings_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes: list[Any] = [0]
    card = cuda_graphs.torch.cuda  # the imitated card, which has no such modes
    monkeypatch.setattr(card, "get_sync_debug_mode", lambda: modes[-1], raising=False)
    monkeypatch.setattr(card, "set_sync_debug_mode", modes.append, raising=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with cuda_graphs._sync_warnings(torch.device("cuda")) as waits:
            assert modes[-1] == "warn"
            for text in (
                "called a synchronizing CUDA operation",
                "Synchronization debug mode is new",
                "another",
            ):
                warnings.warn(text, stacklevel=1)
    assert waits == ["called a synchronizing CUDA operation"]
    assert [str(one.message) for one in said] == ["another"]
    assert modes == [0, "warn", 0]


def test_without_a_card_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not hardware.may_record_steps(torch.device("cpu"))
    assert hardware.may_record_steps(torch.device("cuda"))
    monkeypatch.setenv(hardware.REPLAY, "0")
    assert not hardware.may_record_steps(torch.device("cuda"))
