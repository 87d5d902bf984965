"""Steps that are recorded on a CUDA card and replayed: the bits of the steps themselves, for every
method and network.

Without a card, recordings are imitated on the CPU. On one: ``FEDSTILL_TEST_DEVICE=cuda pytest
tests/methods/test_recorded.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import stacking
import torch
from torch import Tensor

import toys
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.capabilities import Need
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart
from fedstill.engines import cuda_graphs, hardware
from fedstill.methods.fedavg import FedAvg
from fedstill.running.preparation import prepare
from imitated_card import record_on_cpu

DEVICE = toys.DEVICE if torch.cuda.is_available() else "cpu"
METHODS = [
    n
    for n in registry.names("method")
    if not n.startswith("toy_") and n not in ("fedseq", "cwc", "metafed")
]
"""Those of chains have no other steps than others."""
MIN_STEPS = 6
"""Steps from which a recording pays in these tests: it is the same recording as after more."""
LONG = {**stacking.PLAN, "epochs": 2}
"""Enough whole batches for each of two clients that recording pays."""
SETTINGS = ("as it is", "augmented", "a part of the examples")
"""In the first, teachers' outputs are computed once for all examples; in the others for each
batch.
"""
SOME = ("fedavg", "fedntd", "fedadkd", "fedprox", "moon", "sfedkd", "hiper_fedkd", "qkt")
"""Methods whose steps must be replayed; of the others it is enough that the bits are the same."""


def changed(setting: str, name: str, **plan: Any) -> dict[str, Any]:
    """The changes of a setting for a method."""
    steps = {"epochs": 0, "steps": 10} if setting == SETTINGS[2] else {}
    public = (
        toys.PUBLIC if Need.PUBLIC_DATA in registry.lookup("method", name).build().requires() else 0
    )
    data = {"public": public, "augment": ["flip"] if setting == "augmented" else []}
    topology: dict[str, Any] = {"clients": 2}
    if registry.lookup("method", name).build().topology == "sequential":
        topology |= {"kind": "parallel"}
    return {"plan": {**LONG, **steps, **plan}, "data": data, "topology": topology}


@pytest.fixture(autouse=True)
def _recording(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        record_on_cpu(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "_refused", set())
    monkeypatch.setattr(cuda_graphs, "MIN_STEPS", MIN_STEPS)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each step that is replayed."""
    seen: list[int] = []
    plain = cuda_graphs.Recording.replay

    def replay(
        self: cuda_graphs.Recording, arguments: cuda_graphs.StepArguments
    ) -> dict[str, Tensor]:
        seen.append(len(arguments.inputs.y))
        return plain(self, arguments)

    monkeypatch.setattr(cuda_graphs.Recording, "replay", replay)
    return seen


def both(
    replays: list[int],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    rounds: int = 2,
    engine: str = "serial",
    **changes: object,
) -> int:
    """Assert that replayed steps end at the bits of steps that are not; how many were replayed."""
    monkeypatch.setenv(hardware.REPLAY, "0")
    ready = lambda: stacking.ready(name, engine, device=DEVICE, **changes)  # noqa: E731
    plain, said, _ = stacking.rounds(ready(), rounds)
    assert not replays
    monkeypatch.setenv(hardware.REPLAY, "1")
    state, told, _ = stacking.rounds(ready(), rounds)
    expected, got = stacking.tensors(plain), stacking.tensors(state)
    for key in expected:
        assert torch.equal(got[key], expected[key]), key
    assert [r.metrics.get("loss") for r in told] == [r.metrics.get("loss") for r in said]
    return len(replays)


@pytest.mark.parametrize("name", ["fedavg", "fedntd", "fedrs"])
def test_steps_with_class_weights_are_replayed(
    name: str, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert both(replays, monkeypatch, name, **changed("as it is", name, class_weights="balanced"))


@pytest.mark.parametrize("setting", SETTINGS if DEVICE != "cpu" else ["augmented"])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in SOME])
def test_every_method_ends_at_the_bits_of_its_steps(
    name: str, setting: str, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    both(replays, monkeypatch, name, **changed(setting, name))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", SOME)
def test_steps_are_replayed(
    name: str, setting: str, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # in the second round some have another teacher than in the first
    rounds = 2 if setting == "augmented" else 1
    assert both(replays, monkeypatch, name, rounds, **changed(setting, name, lr=0.01)) > 5


@pytest.mark.parametrize(
    ("name", "setting"),
    [(n, SETTINGS[0]) for n in METHODS] + [(n, s) for n in SOME for s in SETTINGS[1:]],
)
def test_steps_of_a_stack_end_at_the_bits_of_its_steps(
    name: str, setting: str, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of a stack have different numbers of examples, so some end before others."""
    plan = {"lr": 0.01, "validation": 0.0, "patience": 0, "keep": "last"}
    replayed = both(replays, monkeypatch, name, 1, "vectorised", **changed(setting, name, **plan))
    assert replayed or name not in SOME


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
    changes: dict[str, object], replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if changes.get("precision") == "tf32" and DEVICE == "cpu":
        pytest.skip("a processor has no tf32")
    assert both(replays, monkeypatch, "fedntd", topology={"clients": 2}, **changes) > 5


@pytest.mark.parametrize("augment", [(), ("crop", "flip", "cutout")])
@pytest.mark.parametrize(
    "model", ["simple_cnn", *(["cnn", "qkt_cnn_pooled"] if DEVICE != "cpu" else [])]
)
def test_dropout_and_augmentation_are_drawn_as_they_are_without(
    model: str, augment: tuple[str, ...], replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for on in "01":
        monkeypatch.setenv(hardware.REPLAY, on)
        plan = {**LONG, "epochs": 0, "steps": 10}
        changes = {
            "data": {"augment": augment},
            "model": model,
            "topology": {"clients": 2},
            "plan": plan,
        }
        ready = prepare(
            resolve(stacking.experiment("fedavg", "serial", device=DEVICE, **changes)),
            toys.blobs_of(32, size=80),
        )
        ends.append(stacking.tensors(stacking.rounds(ready, 1)[0]))
    assert replays
    for key in ends[0]:
        assert torch.equal(ends[0][key], ends[1][key]), key


@dataclass(frozen=True)
class Odd(ClientWork):
    """Objectives of which a replay would do something else."""

    what: str
    seen: list[float]

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        own = super().terms(step, start)
        if self.what == "looks":
            self.seen.append(step.x.mean().item())
        if self.what == "draws":
            own["drawn"] = own["ce"].mean() * torch.rand(()).to(step.x.device)
        if self.what == "counts":
            self.seen.append(0.0)
            own["counted"] = own["ce"].mean() * len(self.seen)
        return own


@pytest.mark.parametrize("what", ["looks", "counts", *(["draws"] if DEVICE != "cpu" else [])])
def test_what_a_replay_would_not_do_is_not_recorded(what: str, replays: list[int]) -> None:
    ready = stacking.ready("fedavg", "serial", device=DEVICE, plan=LONG)
    stage = Stage(1, 0, "train", (0,))
    assert isinstance(ready.settings.method, FedAvg)
    (reply,) = ready.engine().run(
        Odd(what, []), stage, {0: Payload(params=ready.world.initial(0))}, 7
    )
    assert not reply.failure
    assert not replays
