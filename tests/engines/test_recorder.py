"""When a step is recorded and replayed, with a recording that is imitated on the CPU; on a card:
test_recorded.py.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
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


def nothing_further(x: Tensor) -> float:
    """The further descent of a step that has none."""
    return 0.0


class Training:
    """One weight that goes down by the mean of the inputs.

    further_descent: computes by how much the weight goes down in addition; a replay may not repeat
    it.
    reads_epoch: whether the weight also goes down by the number of the epoch.
    late: the number of steps after which the state has a second tensor; 0 for never.
    """

    def __init__(
        self,
        further_descent: Callable[[Tensor], float] = nothing_further,
        reads_epoch: bool = False,
        late: int = 0,
    ) -> None:
        self.weight = torch.zeros(1)
        self.late_tensor = torch.zeros(1)
        self.further_descent = further_descent
        self.reads_epoch = reads_epoch
        self.has_read_epoch = False
        self.late = late
        self.calls = 0

    def execute(self, inputs: StepInputs, running: Tensor | None = None) -> dict[str, Tensor]:
        self.calls += 1
        mean = inputs.x.mean()
        self.weight.sub_(mean)
        self.weight.sub_(self.further_descent(inputs.x))
        if self.reads_epoch:
            self.has_read_epoch = True
            self.weight.sub_(inputs.epoch)
        return {"mean": mean}

    def state(self) -> list[Tensor]:
        if self.late and self.calls > self.late:
            return [self.weight, self.late_tensor]
        return [self.weight]

    def recorder(self, steps: int = MIN_STEPS) -> StepRecorder:
        return StepRecorder(
            execute=self.execute,
            state=lambda: self.state(),
            reads_epoch=lambda: self.has_read_epoch,
            batches=WholeBatches(total=steps, per_epoch=steps),
            kind="here",
        )


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches whose steps are replayed, also on trial."""
    record_on_cpu(monkeypatch)
    sizes: list[int] = []
    real_replay = Recording.replay

    def replay(self: Recording, arguments: StepArguments) -> Any:
        sizes.append(len(arguments.inputs.y))
        return real_replay(self, arguments)

    monkeypatch.setattr(Recording, "replay", replay)
    return sizes


def batches(count: int, size: int = BATCH, epochs: int = 1) -> list[StepInputs]:
    """Random inputs of steps, in as many equal epochs."""
    draw = torch.Generator().manual_seed(0)
    inputs = []
    for i in range(count):
        index = torch.arange(size)
        inputs.append(
            StepInputs(
                x=torch.rand(size, 3, generator=draw),
                y=index,
                positions=index,
                rows=index,
                mask=None,
                epoch=i * epochs // count,
            )
        )
    return inputs


def results(
    training: Training, step: Callable[[Any], dict[str, Tensor]], inputs: list[StepInputs]
) -> list[float]:
    """What the steps return, and the weight after them."""
    means = [float(step(batch)["mean"]) for batch in inputs]
    return [*means, float(training.weight)]


def equal_plain_results(training: Training, plain: Training, inputs: list[StepInputs]) -> bool:
    """Whether a training with a recorder has the results of an equal one without; two NaN are
    equal.
    """
    recorded = results(training, training.recorder(), inputs)
    return str(recorded) == str(results(plain, plain.execute, inputs))


@pytest.mark.parametrize(("reads_epoch", "epochs"), [(False, 1), (False, 3), (True, 3)])
def test_replayed_steps_are_the_steps(reads_epoch: bool, epochs: int, replays: list[int]) -> None:
    training = Training(reads_epoch=reads_epoch)
    plain = Training(reads_epoch=reads_epoch)
    inputs = batches(30, epochs=epochs)
    recorder = training.recorder()

    assert results(training, recorder, inputs) == results(plain, plain.execute, inputs)
    assert len(recorder.recordings) == 1, "recordings of earlier epochs are deleted"
    executed = WARM_UP
    if reads_epoch:
        # The first step alone shows that steps read their epoch, so it counts for no recording.
        executed = epochs * WARM_UP + 1
    assert len(replays) == 30 - executed


def test_a_short_batch_is_a_step_of_its_own(replays: list[int]) -> None:
    training = Training()
    plain = Training()
    inputs = [*batches(8), *batches(1, size=3), *batches(5)]
    assert equal_plain_results(training, plain, inputs)
    assert len(replays) == 13 - WARM_UP


def test_few_steps_are_not_recorded() -> None:
    training = Training()
    recorder = training.recorder(MIN_STEPS - 1)
    for batch in batches(MIN_STEPS - 1):
        recorder(batch)
    assert not recorder.recordings
    assert training.calls == MIN_STEPS - 1


GENERATOR = random.Random(3)
GLOBAL_TENSOR = torch.zeros(1)
INPUTS_OF_CALLS: list[Tensor] = []
"""All inputs, or the last one, that the functions below store."""


def calls_of_it(x: Tensor) -> float:
    INPUTS_OF_CALLS.append(x)
    return float(len(INPUTS_OF_CALLS))


def largest_of_the_last_call(x: Tensor) -> Tensor:
    last = x
    if INPUTS_OF_CALLS:
        last = INPUTS_OF_CALLS.pop()
    INPUTS_OF_CALLS.append(x * 2)
    return last.max()


def count_of_small_values(x: Tensor) -> Tensor:
    return torch.bincount((x > 0.5).long().flatten(), minlength=2)[0]


NOT_REPEATABLE: dict[str, Callable[[Tensor], Any]] = {
    "counts": calls_of_it,
    "draws by a generator of its own": lambda x: float(GENERATOR.random() < 0.5),
    "looks": lambda x: x.max().item(),
    "picks": lambda x: x[x > 0.5].sum(),
    "counts values": count_of_small_values,
    "Python's coin": lambda x: float(random.random() < 0.5),
    "NumPy's coin": lambda x: float(np.random.rand() < 0.5),
    "writes elsewhere": lambda x: GLOBAL_TENSOR.add_(1.0),
    "keeps the last": largest_of_the_last_call,
}


def training_from_the_start(name: str) -> Training:
    """A training with one of the functions above, after all state outside of it is reset."""
    INPUTS_OF_CALLS.clear()
    GLOBAL_TENSOR.zero_()
    GENERATOR.seed(3)
    random.seed(1)
    np.random.seed(1)
    return Training(NOT_REPEATABLE[name])


@pytest.mark.parametrize("name", NOT_REPEATABLE)
def test_a_step_that_a_replay_does_not_repeat_is_never_replayed(
    name: str, replays: list[int]
) -> None:
    """The attempt to record it changes no result: nothing is drawn or written once more."""
    inputs = batches(20)
    plain = training_from_the_start(name)
    expected = results(plain, plain.execute, inputs)

    training = training_from_the_start(name)
    assert results(training, training.recorder(), inputs) == expected
    assert not replays


def test_a_step_that_ends_elsewhere_when_it_is_replayed_is_tried_once_in_a_process(
    replays: list[int],
) -> None:
    for _ in range(3):
        training = Training()
        calls = itertools.count()

        def later_calls(x: Tensor, calls: Iterator[int] = calls) -> float:
            return float(next(calls) > WARM_UP)

        training.further_descent = later_calls
        recorder = training.recorder()
        for batch in batches(20):
            recorder(batch)
        assert not recorder.recordings
    assert replays == [BATCH]


def test_what_was_kept_of_the_batch_that_was_recorded_shows_on_the_next(replays: list[int]) -> None:
    """As a teacher's logits for a batch, which are computed once however often they are asked
    for.
    """

    class Teacher:
        batch: Any = None

        def logits(self, x: Tensor) -> Any:
            if self.batch is not x:
                self.batch = x
                self.batch_logits = x.max() * 2
            return self.batch_logits

    training = Training(Teacher().logits)
    plain = Training(Teacher().logits)
    assert equal_plain_results(training, plain, batches(20))
    assert len(replays) == 20 - WARM_UP, "it is recorded, since a recording has tensors of its own"


def test_momentum_that_begins_while_a_step_is_recorded_begins_at_0() -> None:
    """And what other parameters have gathered stays."""
    training = Training()
    first = torch.ones(1)
    late = torch.full((1,), 7.0)

    def state() -> list[Tensor]:
        if training.calls > WARM_UP:
            return [training.weight, late, first]
        return [training.weight, first]

    training.state = state  # type: ignore[method-assign]
    recorder = training.recorder()

    for batch in batches(WARM_UP):
        recorder(batch)

    assert float(first) == 1.0
    assert float(late) == 0.0
    assert not recorder.recordings


def test_a_client_that_diverged_is_no_reason_to_refuse_the_others(replays: list[int]) -> None:
    inputs = batches(20)
    for weight in (float("nan"), 0.0):
        training = Training()
        plain = Training()
        training.weight.fill_(weight)
        plain.weight.fill_(weight)
        assert equal_plain_results(training, plain, inputs)
    assert len(replays) == 2 * (20 - WARM_UP)


def arguments_of(x: Tensor) -> StepArguments:
    """Arguments of a step, all of which are one tensor."""
    return StepArguments(StepInputs(x=x, y=x, positions=x, rows=x, mask=None, epoch=0))


def test_zeros_without_memory_are_watched_as_others() -> None:
    """Forward-mode derivatives have them."""
    x = torch.ones(2)
    with watched(arguments_of(x), [x], set()):
        added = torch.add(x, torch._efficientzerotensor(2))
    assert added.tolist() == [1.0, 1.0]


def test_momentum_that_begins_late_is_left_alone() -> None:
    training = Training(late=WARM_UP + 1)
    recorder = training.recorder()
    for batch in batches(20):
        recorder(batch)
    assert not recorder.recordings
    assert training.calls == 20 + 1, "the step that was recorded computed nothing and ran again"


def end_recordings_by(
    capture_end: Callable[[Graph], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have the imitated card end its recordings in another way."""
    failing = type("Failing", (Graph,), {"capture_end": capture_end})
    monkeypatch.setattr(cuda_graphs.torch.cuda, "CUDAGraph", failing)


def test_a_recording_that_fails_is_tried_once_in_a_process(
    monkeypatch: pytest.MonkeyPatch, replays: list[int]
) -> None:
    graphs: list[Any] = []

    def refuse(self: Graph) -> None:
        Graph.capture_end(self)
        graphs.append(self)
        raise RuntimeError("operation not permitted when stream is capturing")

    end_recordings_by(refuse, monkeypatch)
    for _ in range(3):
        assert equal_plain_results(Training(), Training(), batches(20))
    assert len(graphs) == 1
    assert not replays


def test_ctrl_c_while_a_step_is_recorded_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Graph) -> None:
        Graph.capture_end(self)
        raise RuntimeError("the recording was broken off")

    end_recordings_by(failing, monkeypatch)
    training = Training()

    def stopped(x: Tensor) -> float:
        if training.calls == WARM_UP + 1:
            raise KeyboardInterrupt
        return 0.0

    training.further_descent = stopped
    with pytest.raises(KeyboardInterrupt):
        results(training, training.recorder(), batches(20))


def test_what_a_step_makes_itself_it_may_write_into() -> None:
    parameter = torch.ones(3)
    with watched(arguments_of(parameter), [parameter], set()) as watch:
        copy = parameter.clone()
        copy[:1].fill_(2.0)
        parameter.add_(copy)
    assert not watch.cannot_replay


def test_that_the_host_waited_for_a_card_is_heard_and_other_warnings_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes: list[Any] = [0]
    card = cuda_graphs.torch.cuda  # the imitated card, which has no such modes
    monkeypatch.setattr(card, "get_sync_debug_mode", lambda: modes[-1], raising=False)
    monkeypatch.setattr(card, "set_sync_debug_mode", modes.append, raising=False)
    with warnings.catch_warnings(record=True) as passed_on:
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
    assert [str(warning.message) for warning in passed_on] == ["another"]
    assert modes == [0, "warn", 0]


def test_without_a_card_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not hardware.may_record_steps(torch.device("cpu"))
    assert hardware.may_record_steps(torch.device("cuda"))
    monkeypatch.setenv(hardware.REPLAY, "0")
    assert not hardware.may_record_steps(torch.device("cuda"))
