"""The vectorised engine: equal to the serial one for every registered method, and what it refuses
by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import stacking
import torch
from all_methods import ON_A_CHAIN_ONLY
from plain import all_finite
from torch import Tensor

import toys
from double import NEAR, in_double
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.errors import ConfigError
from fedstill.core.method import ClientWork
from fedstill.core.records import Payload, Stage, Step, TrainingStart, View, World
from fedstill.core.registry import method
from fedstill.data.sources import from_tensors
from fedstill.engines.vectorised import VectorisedEngine
from fedstill.methods.fedavg import FedAvg
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

NOT_STACKED = ON_A_CHAIN_ONLY | {"toy_chain"}
"""On a chain there is nothing to stack."""

DRAWS_MODELS = {"toy_clustered"}
"""Its server draws models itself, in float32, and the inputs here are in float64."""

STACKED = [name for name in registry.names("method") if name not in NOT_STACKED | DRAWS_MODELS]


def assert_engines_agree(name: str, **changes: object) -> None:
    """Two rounds of the serial and the vectorised engine in float64 are the same."""
    serial = in_double(stacking.ready(name, "serial", **changes))
    stacked = in_double(stacking.ready(name, "vectorised", **changes))

    assert_same_rounds(stacking.rounds(serial), stacking.rounds(stacked))


def assert_same_rounds(serial: stacking.Rounds, stacked: stacking.Rounds) -> None:
    """States and losses are the same up to rounding; sizes, steps and refusals are equal."""
    expected = stacking.tensors(serial.state)
    got = stacking.tensors(stacked.state)
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            got[key], value, rtol=0, atol=NEAR, msg=lambda m, key=key: f"{key}: {m}"
        )

    assert len(serial.replies) > 0
    for expected_reply, reply in zip(serial.replies, stacked.replies, strict=True):
        assert (reply.client, reply.examples) == (expected_reply.client, expected_reply.examples)
        for metric in ("steps", "epochs"):
            assert reply.metrics.get(metric) == expected_reply.metrics.get(metric)
        expected_losses = expected_reply.metrics.get("loss", {})
        assert reply.metrics.get("loss", {}) == pytest.approx(expected_losses, abs=NEAR)

    refused = [(refusal.client, refusal.reason) for refusal in stacked.refused]
    assert refused == [(refusal.client, refusal.reason) for refusal in serial.refused]


@pytest.mark.parametrize("name", STACKED)
def test_every_method_gives_the_serial_engines_results_in_float64(name: str) -> None:
    assert_engines_agree(name)


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
def test_every_plan_gives_the_serial_engines_results(plan: dict[str, object]) -> None:
    assert_engines_agree("fedntd_asd", plan={**stacking.PLAN, **plan})


def test_an_objective_that_changes_with_the_epoch_gives_the_serial_engines_results() -> None:
    """Clients of a stack are in different epochs at one time."""
    assert_engines_agree("camkd", method={"name": "camkd", "feature_weight": 1.0})


@pytest.mark.parametrize(
    "method", [{"name": "naive_kd"}, {"name": "qkt", "frozen": 0.3, "importance": "objective"}]
)
@pytest.mark.parametrize("over_teachers", ["sum", "mean"])
def test_several_teachers_are_joined_as_by_the_serial_engine(
    method: dict[str, object], over_teachers: str
) -> None:
    assert_engines_agree(str(method["name"]), method={**method, "over_teachers": over_teachers})


def test_several_architectures_are_stacked_apart() -> None:
    models = {"clients": {"models": ("mlp", "logistic")}, "model": {"name": "mlp", "hidden": (8,)}}
    assert_engines_agree("toy_logits", **models)


def test_augmented_images_give_the_serial_engines_results() -> None:
    images = {
        "data": {"augment": ("crop", "flip")},
        "model": "digits_cnn",
        "topology": {"clients": 4},
    }

    def rounds_under(engine: str) -> stacking.Rounds:
        settings = resolve(stacking.experiment("fedntd", engine, **images))
        return stacking.rounds(in_double(prepare(settings, toys.blobs_of(8))))

    assert_same_rounds(rounds_under("serial"), rounds_under("vectorised"))


@pytest.mark.parametrize(
    ("max_clients", "stack_bytes", "largest_stack"), [(2, 1e9, 2), (3, 1e9, 3), (50, 1.0, 1)]
)
def test_stacks_of_any_size_agree(max_clients: int, stack_bytes: float, largest_stack: int) -> None:
    """A stack that holds one client is the serial engine's loop itself."""
    ready = in_double(stacking.ready("fedntd", "vectorised"))
    engine = ready.engine()
    assert isinstance(engine, VectorisedEngine)
    engine.max_clients = max_clients
    engine.stack_bytes = stack_bytes
    stage = ready.settings.schedule(1, ready.world)[0]
    payloads = {client: Payload(params=ready.world.initial(client)) for client in stage.clients}
    work = ready.settings.method.work(stage)

    cohorts = engine._cohorts(stage.clients, ready.world.plans["train"])
    replies = engine.run(work, stage, payloads, 7)
    engine.close()
    serial_engine = in_double(stacking.ready("fedntd", "serial")).engine()
    serial_replies = serial_engine.run(work, stage, payloads, 7)

    clients = [client for cohort in cohorts for client in cohort]
    assert sorted(clients) == sorted(stage.clients)
    assert max(len(cohort) for cohort in cohorts) <= largest_stack
    for reply, expected in zip(replies, serial_replies, strict=True):
        assert reply.client == expected.client
        for name, value in expected.content.params.items():
            torch.testing.assert_close(reply.content.params[name], value, rtol=0, atol=NEAR)


def test_the_bits_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstill.engines.vectorised.MAX_STACK", 2)
    models = []
    for workers in ("1", "3"):
        monkeypatch.setenv("FEDSTILL_WORKERS", workers)
        experiment = stacking.experiment("fedntd", "vectorised", rounds=2)
        run(experiment, tmp_path / workers, data=stacking.few_blobs())
        models.append((tmp_path / workers / "model.safetensors").read_bytes())

    assert models[0] == models[1]


# Clients that fail.


@dataclass(frozen=True)
class FailingInABatch(ClientWork):
    """Training that fails for all clients that are stacked."""

    def terms(self, step: Step, start: TrainingStart) -> dict[str, Tensor]:
        if bool(step.logits().sum() > 0):
            raise RuntimeError("a branch on values")
        return super().terms(step, start)


@dataclass(frozen=True)
class FailingAtTheStart(ClientWork):
    """Training that fails for client 2 before it begins."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        if view.client == 2:
            raise RuntimeError("the disk of this site is gone")
        return super().begin(payload, client_state, view, world)


@pytest.mark.parametrize(
    ("work", "failing_clients"),
    [(FailingAtTheStart(), {2}), (FailingInABatch(), {0, 1, 2, 3})],
    ids=["begin", "terms"],
)
def test_a_client_that_fails_is_a_reply(work: ClientWork, failing_clients: set[int]) -> None:
    ready = stacking.ready("fedavg", "vectorised")
    stage = Stage(1, 0, "train", (0, 1, 2, 3))
    payloads = {client: Payload(params=ready.world.initial(client)) for client in stage.clients}

    replies = ready.engine().run(work, stage, payloads, 7)

    assert [reply.client for reply in replies] == [0, 1, 2, 3]
    assert {reply.client for reply in replies if reply.failure} == failing_clients


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
    payloads = {client: Payload(params=ready.world.initial(client)) for client in stage.clients}

    with pytest.raises(KeyboardInterrupt):
        ready.engine().run(Interrupted(), stage, payloads, 7)


# What can be stacked.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "toy_batchnorm"}, "BatchNorm2d"),
        ({"model": {"name": "resnet10", "norm": "batch_stats"}}, "BatchNorm2d"),
        ({"model": "simple_cnn"}, "dropout"),
        ({"plan": {"validation": 0.3, "patience": 2}}, "plan.patience"),
        ({"method": "toy_chain"}, "sequential"),
    ],
)
def test_what_cannot_be_stacked_is_refused_before_round_1(
    changes: dict[str, object], reason: str
) -> None:
    experiment = toys.toy(**{"engine": "vectorised", "topology": {"clients": 4}, **changes})
    with pytest.raises(ConfigError, match=reason):
        prepare(resolve(experiment), toys.blobs_of(16))


def test_frozen_running_statistics_can_be_stacked() -> None:
    plan = {**stacking.PLAN, "norm": "frozen"}
    assert_engines_agree("fedavg", model="toy_batchnorm", plan=plan)


class OfTheLastClass(ClientWork):
    """Training on the client's examples of the last class."""

    def begin(
        self, payload: Payload, client_state: Payload, view: View, world: World
    ) -> TrainingStart:
        is_chosen = view.data.labels == world.classes - 1
        return TrainingStart(payload.params, only=is_chosen.nonzero().flatten())


@method("toy_of_the_last_class")
@dataclass(frozen=True)
class TrainsOnTheLastClass(FedAvg):
    """FedAvg on one class."""

    def work(self, stage: Stage) -> ClientWork:
        return OfTheLastClass()


def test_clients_that_select_no_example_give_the_serial_engines_results() -> None:
    partition = {"kind": "dirichlet", "alpha": 0.05, "min_size": 4}
    assert_engines_agree("toy_of_the_last_class", partition=partition)


def test_one_image_a_client() -> None:
    """The smallest stack there is."""
    images = torch.randint(256, (6, 1, 4, 4), dtype=torch.uint8)
    labels = torch.arange(6) % 5
    data = from_tensors("six", (images, labels), (images, labels), classes=list("abcde"))
    experiment = stacking.experiment(
        "fedntd", "vectorised", partition="iid", topology={"clients": 6}
    )

    rounds = stacking.rounds(prepare(resolve(experiment), data))

    assert not rounds.refused
    assert {reply.examples for reply in rounds.replies} == {1}
    assert all_finite(rounds.state.params)
