"""Steps that are recorded on a CUDA card and replayed: the bits of the steps themselves, for every
method and network.

Without a card, recordings are imitated on the CPU. On one: ``FEDSTILL_TEST_DEVICE=cuda pytest
tests/methods/test_recorded.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import all_methods
import pytest
import stacking
import torch
from all_methods import ON_A_CHAIN_ONLY, built, needs
from torch import Tensor

import toys
from fedstill.config.resolve import resolve
from fedstill.core.capabilities import Need
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart
from fedstill.core.trees import same_bits
from fedstill.engines import cuda_graphs, hardware
from fedstill.methods.fedavg import FedAvg
from fedstill.running.preparation import prepare
from imitated_card import record_on_cpu

DEVICE = "cpu"
if torch.cuda.is_available():
    DEVICE = toys.DEVICE

METHODS = [name for name in all_methods.METHODS if name not in ON_A_CHAIN_ONLY]
"""The steps of chains are those of other methods."""

REPLAYED = ("fedavg", "fedntd", "fedadkd", "fedprox", "moon", "sfedkd", "hiper_fedkd", "qkt")
"""Methods whose steps must be replayed; of the others it is enough that the bits are the same."""

MIN_STEPS = 6
"""Steps from which a recording pays in these tests: it is the same recording as after more."""

LONG = {**stacking.PLAN, "epochs": 2}
"""Enough whole batches for each of two clients that recording pays."""

TEN_STEPS = {**LONG, "epochs": 0, "steps": 10}

DEFAULTS = "as it is"
AUGMENTED = "augmented"
PARTLY_USED = "a part of the examples"
SETTINGS = (DEFAULTS, AUGMENTED, PARTLY_USED)
"""With the defaults, teachers' outputs are computed once for all examples; in the other settings
for each batch.
"""

SETTINGS_OF_ALL_METHODS = (AUGMENTED,)
FURTHER_NETWORKS: tuple[str, ...] = ()
if DEVICE != "cpu":
    SETTINGS_OF_ALL_METHODS = SETTINGS
    FURTHER_NETWORKS = ("cnn", "qkt_cnn_pooled")


def changes_of(setting: str, name: str, **plan: Any) -> dict[str, Any]:
    """The changes of a setting for a method with two clients."""
    changes: dict[str, Any] = {
        "plan": {**LONG, **plan},
        "data": {},
        "topology": {"clients": 2},
    }
    if setting == PARTLY_USED:
        changes["plan"] = {**TEN_STEPS, **plan}
    if setting == AUGMENTED:
        changes["data"] = {"augment": ["flip"]}
    if needs(name, Need.PUBLIC_DATA):
        changes["data"] = {**changes["data"], "public": toys.PUBLIC}
    if built(name).topology == "sequential":
        changes["topology"] = {"kind": "parallel", "clients": 2}
    return changes


@pytest.fixture(autouse=True)
def _recording(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        record_on_cpu(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "_refused", set())
    monkeypatch.setattr(cuda_graphs, "MIN_STEPS", MIN_STEPS)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch size of each step that is replayed."""
    batch_sizes: list[int] = []
    original = cuda_graphs.Recording.replay

    def counted_replay(
        recording: cuda_graphs.Recording, arguments: cuda_graphs.StepArguments
    ) -> dict[str, Tensor]:
        batch_sizes.append(len(arguments.inputs.y))
        return original(recording, arguments)

    monkeypatch.setattr(cuda_graphs.Recording, "replay", counted_replay)
    return batch_sizes


@dataclass(frozen=True)
class Comparison:
    """Runs a method without replays and with them."""

    replays: list[int]
    monkeypatch: pytest.MonkeyPatch

    def assert_same_bits(
        self, name: str, rounds: int = 2, engine: str = "serial", **changes: object
    ) -> None:
        """Replayed steps end at the bits of steps that are not."""
        self.monkeypatch.setenv(hardware.REPLAY, "0")
        ready = stacking.ready(name, engine, device=DEVICE, **changes)
        expected = stacking.rounds(ready, rounds)
        assert not self.replays

        self.monkeypatch.setenv(hardware.REPLAY, "1")
        ready = stacking.ready(name, engine, device=DEVICE, **changes)
        replayed = stacking.rounds(ready, rounds)

        assert same_bits(stacking.tensors(replayed.state), stacking.tensors(expected.state))
        losses = [reply.metrics.get("loss") for reply in replayed.replies]
        assert losses == [reply.metrics.get("loss") for reply in expected.replies]


@pytest.fixture
def comparison(replays: list[int], monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """Compares runs; ``replays`` counts the replayed steps."""
    return Comparison(replays, monkeypatch)


@pytest.mark.parametrize("name", ["fedavg", "fedntd", "fedrs"])
def test_steps_with_class_weights_are_replayed(
    name: str, replays: list[int], comparison: Comparison
) -> None:
    comparison.assert_same_bits(name, **changes_of(DEFAULTS, name, class_weights="balanced"))

    assert replays


@pytest.mark.parametrize("setting", SETTINGS_OF_ALL_METHODS)
@pytest.mark.parametrize("name", [name for name in METHODS if name not in REPLAYED])
def test_every_method_ends_at_the_bits_of_its_steps(
    name: str, setting: str, comparison: Comparison
) -> None:
    comparison.assert_same_bits(name, **changes_of(setting, name))


@pytest.mark.parametrize(
    ("setting", "rounds"),
    # in the second round some have another teacher than in the first
    [(DEFAULTS, 1), (AUGMENTED, 2), (PARTLY_USED, 1)],
)
@pytest.mark.parametrize("name", REPLAYED)
def test_steps_are_replayed(
    name: str, setting: str, rounds: int, replays: list[int], comparison: Comparison
) -> None:
    comparison.assert_same_bits(name, rounds, **changes_of(setting, name, lr=0.01))

    assert len(replays) > 5


STACKED_CASES = [(name, DEFAULTS) for name in METHODS]
STACKED_CASES += [(name, AUGMENTED) for name in REPLAYED]
STACKED_CASES += [(name, PARTLY_USED) for name in REPLAYED]


@pytest.mark.parametrize(("name", "setting"), STACKED_CASES)
def test_steps_of_a_stack_end_at_the_bits_of_its_steps(
    name: str, setting: str, replays: list[int], comparison: Comparison
) -> None:
    """Clients of a stack have different numbers of examples, so some end before others."""
    plan = {"lr": 0.01, "validation": 0.0, "patience": 0, "keep": "last"}

    comparison.assert_same_bits(name, 1, "vectorised", **changes_of(setting, name, **plan))

    assert replays or name not in REPLAYED


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {**LONG, "optimiser": "adam", "lr": 0.01, "momentum": 0.0}},
        {"plan": {**LONG, "clip_norm": 0.5}},
        {"plan": {**LONG, "epochs": 1, "steps": 16}},
        {"plan": LONG, "precision": "bf16"},
        {"plan": LONG, "precision": "tf32"},
        {"plan": LONG, "model": "toy_batchnorm"},
    ],
    ids=["adam", "clipped", "steps", "bf16", "tf32", "batch norm"],
)
def test_every_plan_is_replayed(
    changes: dict[str, object], replays: list[int], comparison: Comparison
) -> None:
    if changes.get("precision") == "tf32" and DEVICE == "cpu":
        pytest.skip("a processor has no tf32")

    comparison.assert_same_bits("fedntd", topology={"clients": 2}, **changes)

    assert len(replays) > 5


@pytest.mark.parametrize("augment", [(), ("crop", "flip", "cutout")])
@pytest.mark.parametrize("model", ["simple_cnn", *FURTHER_NETWORKS])
def test_dropout_and_augmentation_are_drawn_as_they_are_without(
    model: str, augment: tuple[str, ...], replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = stacking.experiment(
        "fedavg",
        "serial",
        device=DEVICE,
        data={"augment": augment},
        model=model,
        topology={"clients": 2},
        plan=TEN_STEPS,
    )

    states = []
    for with_replays in ("0", "1"):
        monkeypatch.setenv(hardware.REPLAY, with_replays)
        ready = prepare(resolve(experiment), toys.blobs_of(32, size=80))
        states.append(stacking.tensors(stacking.rounds(ready, 1).state))

    assert replays
    assert same_bits(states[0], states[1])


# Objectives of which a replay would do something else.


@dataclass(frozen=True)
class ReadsANumber(ClientWork):
    """An objective that takes a number from the device."""

    numbers: list[float] = field(default_factory=list)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        self.numbers.append(step.x.mean().item())
        return super().terms(step, start)


@dataclass(frozen=True)
class CountsSteps(ClientWork):
    """An objective that changes with every step."""

    steps: list[int] = field(default_factory=list)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = super().terms(step, start)
        self.steps.append(0)
        return {**terms, "counted": terms["ce"].mean() * len(self.steps)}


@dataclass(frozen=True)
class DrawsANumber(ClientWork):
    """An objective that draws from a global generator."""

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        terms = super().terms(step, start)
        factor = torch.rand(()).to(step.x.device)
        return {**terms, "drawn": terms["ce"].mean() * factor}


NOT_REPLAYABLE: list[type[ClientWork]] = [ReadsANumber, CountsSteps]
if DEVICE != "cpu":
    NOT_REPLAYABLE.append(DrawsANumber)


@pytest.mark.parametrize("work", NOT_REPLAYABLE)
def test_steps_that_a_replay_would_change_are_not_recorded(
    work: type[ClientWork], replays: list[int]
) -> None:
    ready = stacking.ready("fedavg", "serial", device=DEVICE, plan=LONG)
    stage = Stage(1, 0, "train", (0,))
    assert isinstance(ready.settings.method, FedAvg)
    payloads = {0: Payload(params=ready.world.initial(0))}

    (reply,) = ready.engine().run(work(), stage, payloads, 7)

    assert not reply.failure
    assert not replays
