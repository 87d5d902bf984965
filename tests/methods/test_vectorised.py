"""The vectorised engine: equal to the serial one for every registered method, and what it refuses
by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import stacking
import torch
from stacking import Rounds
from torch import Tensor

import toys
from double import NEAR, in_double
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.errors import ConfigError
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.data.sources import from_tensors
from fedstill.engines.vectorised import VectorisedEngine
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

METHODS = registry.names("method")


def assert_same(name: str, **changes: object) -> None:
    runs = [
        in_double(stacking.ready(name, engine, **changes)) for engine in ("serial", "vectorised")
    ]
    assert_equal(*map(stacking.rounds, runs))


def assert_equal(serial: Rounds, stacked: Rounds) -> None:
    (one, ours, no), (many, theirs, none) = serial, stacked
    assert [(r.client, r.reason) for r in no] == [(r.client, r.reason) for r in none]
    expected, got = stacking.tensors(one), stacking.tensors(many)
    assert expected.keys() == got.keys()
    for key in expected:
        torch.testing.assert_close(
            got[key], expected[key], rtol=0, atol=NEAR, msg=lambda m, k=key: f"{k}: {m}"
        )
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert (a.client, a.examples, a.metrics.get("steps"), a.metrics.get("epochs")) == (
            b.client,
            b.examples,
            b.metrics.get("steps"),
            b.metrics.get("epochs"),
        )
        assert a.metrics.get("loss", {}) == pytest.approx(b.metrics.get("loss", {}), abs=NEAR)


ON_A_CHAIN_ONLY = {"fedseq", "cwc", "metafed", "toy_chain"}
"""Nothing is side by side there."""
DRAWS_MODELS = {"toy_clustered"}
"""Its server draws models itself, in float32, and the inputs here are in float64."""


def stackable(name: str) -> bool:
    return name not in ON_A_CHAIN_ONLY | DRAWS_MODELS


@pytest.mark.parametrize("name", [n for n in METHODS if stackable(n)])
def test_every_method_is_the_serial_engines_in_float64(name: str) -> None:
    assert_same(name)


@pytest.mark.parametrize(
    "plan",
    [
        {"clip_norm": 0.5},
        {"optimiser": "adam", "lr": 0.01, "momentum": 0.0},
        {"steps": 7},
        {"epochs": 0},
        {"shuffle": False, "batch": 1000},
        {"batch": 1, "epochs": 1},
    ],
)
def test_every_plan_is_the_serial_engines(plan: dict[str, object]) -> None:
    assert_same("fedntd_asd", plan={**stacking.PLAN, **plan})


def test_an_objective_that_changes_with_the_epoch_is_the_serial_engines() -> None:
    """Clients of a stack are in different epochs at one time."""
    assert_same("camkd", method={"name": "camkd", "feature_weight": 1.0})


@pytest.mark.parametrize(
    "own", [{"name": "naive_kd"}, {"name": "qkt", "frozen": 0.3, "importance": "objective"}]
)
@pytest.mark.parametrize("over", ["sum", "mean"])
def test_several_teachers_are_joined_as_by_the_serial_engine(
    own: dict[str, object], over: str
) -> None:
    assert_same(str(own["name"]), method={**own, "over_teachers": over})


def test_several_architectures_are_stacked_apart() -> None:
    models = {"clients": {"models": ("mlp", "logistic")}, "model": {"name": "mlp", "hidden": (8,)}}
    assert_same("toy_logits", **models)


def test_augmented_images_are_the_serial_engines() -> None:
    images = {
        "data": {"augment": ("crop", "flip")},
        "model": "digits_cnn",
        "topology": {"clients": 4},
    }
    runs = [
        resolve(stacking.experiment("fedntd", engine, **images))
        for engine in ("serial", "vectorised")
    ]
    assert_equal(*(stacking.rounds(in_double(prepare(r, toys.blobs_of(8)))) for r in runs))


@pytest.mark.parametrize(("most", "room"), [(2, 1e9), (3, 1e9), (50, 1.0)])
def test_stacks_of_any_size_agree(most: int, room: float) -> None:
    """A stack that holds one client is the serial engine's loop itself."""
    ready = in_double(stacking.ready("fedntd", "vectorised"))
    engine = ready.engine()
    assert isinstance(engine, VectorisedEngine)
    engine.max_clients, engine.stack_bytes = most, room
    stage = ready.settings.schedule(1, ready.world)[0]
    payloads = {c: Payload(params=ready.world.initial(c)) for c in stage.clients}
    work = ready.settings.method.work(stage)
    cohorts = engine._cohorts(stage.clients, ready.world.plans["train"])
    assert sorted(client for cohort in cohorts for client in cohort) == sorted(stage.clients)
    assert max(map(len, cohorts)) <= (most if room > 1 else 1)
    got = engine.run(work, stage, payloads, 7)
    expected = in_double(stacking.ready("fedntd", "serial")).engine().run(work, stage, payloads, 7)
    for a, b in zip(got, expected, strict=True):
        assert a.client == b.client
        for k in b.content.params:
            torch.testing.assert_close(a.content.params[k], b.content.params[k], rtol=0, atol=NEAR)
    engine.close()


def test_the_bits_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstill.engines.vectorised.MAX_STACK", 2)
    for workers in ("1", "3"):
        monkeypatch.setenv("FEDSTILL_WORKERS", workers)
        asked = stacking.experiment("fedntd", "vectorised", rounds=2)
        run(asked, tmp_path / workers, data=stacking.few_blobs())
    one, three = ((tmp_path / w / "model.safetensors").read_bytes() for w in ("1", "3"))
    assert one == three


@dataclass(frozen=True)
class Choosy(ClientWork):
    """Training that fails for one client before it begins, or for all that are stacked."""

    when: str

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        if self.when == "begin" and view.client == 2:
            raise RuntimeError("the disk of this site is gone")
        return super().begin(payload, client_state, view, world)

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        if self.when == "terms" and bool(step.logits().sum() > 0):
            raise RuntimeError("a branch on values")
        return super().terms(step, start)


@pytest.mark.parametrize("when", ["begin", "terms"])
def test_a_client_that_fails_is_a_reply(when: str) -> None:
    ready = stacking.ready("fedavg", "vectorised")
    stage = Stage(1, 0, "train", (0, 1, 2, 3))
    payloads = {c: Payload(params=ready.world.initial(c)) for c in stage.clients}
    replies = ready.engine().run(Choosy(when), stage, payloads, 7)
    assert [r.client for r in replies] == [0, 1, 2, 3]
    failed = {r.client for r in replies if r.failure}
    assert failed == ({2} if when == "begin" else {0, 1, 2, 3})


@dataclass(frozen=True)
class Interrupted(ClientWork):
    """Training in which Ctrl-C comes, and torch fails while it clears up."""

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("!dynamicLayerStack.empty() INTERNAL ASSERT FAILED")


@pytest.mark.parametrize("failures", ["stop", "tolerate"])
@pytest.mark.parametrize("engine", ["serial", "pooled", "vectorised"])
def test_ctrl_c_in_a_stack_is_no_clients_failure(engine: str, failures: str) -> None:
    ready = stacking.ready("fedavg", engine, clients={"failures": failures})
    stage = Stage(1, 0, "train", (0, 1, 2, 3))
    payloads = {c: Payload(params=ready.world.initial(c)) for c in stage.clients}
    with pytest.raises(KeyboardInterrupt):
        ready.engine().run(Interrupted(), stage, payloads, 7)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "toy_batchnorm"}, "BatchNorm2d"),
        ({"model": {"name": "resnet10", "norm": "batch_stats"}}, "BatchNorm2d"),
        ({"model": "simple_cnn"}, "dropout"),
        ({"plan": {"validation": 0.3, "patience": 2}}, "plan.patience"),
        ({"method": "toy_chain"}, "sequential"),
    ],
)
def test_what_cannot_be_stacked_is_refused_before_round_1(
    changes: dict[str, object], says: str
) -> None:
    experiment = toys.toy(**{"engine": "vectorised", "topology": {"clients": 4}, **changes})
    with pytest.raises(ConfigError, match=says):
        prepare(resolve(experiment), toys.blobs_of(16))


def test_frozen_running_statistics_can_be_stacked() -> None:
    frozen = {**stacking.PLAN, "norm": "frozen"}
    assert_same("fedavg", model="toy_batchnorm", plan=frozen)


def test_one_image_a_client() -> None:
    """The smallest stack there is."""
    images, labels = torch.randint(256, (6, 1, 4, 4), dtype=torch.uint8), torch.arange(6) % 5
    data = from_tensors("six", (images, labels), (images, labels), classes=list("abcde"))
    changes = {"partition": "iid", "topology": {"clients": 6}}
    experiment = stacking.experiment("fedntd", "vectorised", **changes)
    state, replies, refused = stacking.rounds(prepare(resolve(experiment), data))
    assert not refused
    assert {r.examples for r in replies} == {1}
    assert all(bool(v.isfinite().all()) for v in state.params.values())
