"""What must hold between methods, and of each at its edges, whatever the data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from all_methods import METHODS, needs
from plain import (
    all_finite,
    assert_same_model,
    drive,
    largest_gap,
    ready_for,
    run_of,
    weighted_mean,
)

import toys
from double import NEAR
from fedstill.cli.explain import run_estimate
from fedstill.core.capabilities import Need, Permit
from fedstill.core.records import Payload, Stage, TrainingStart
from fedstill.methods.fedadkd import FedADKD
from fedstill.methods.fedcurv import Curved, FedCurv
from fedstill.running.preparation import Prepared

EVEN = {"partition": "iid"}
ONE_CLASS_EACH = {"partition": {"kind": "sharding", "shards": 1}, "topology": {"clients": 5}}
ALL_CLIENTS = {"topology": {"clients": 6}}


@pytest.mark.parametrize(
    ("at_its_edge", "equivalent"),
    [
        ({"name": "fedadkd", "alpha": 0.0, "beta": 0.7}, {"name": "fedntd", "beta": 0.7}),
        (
            {"name": "fedadkd", "alpha": 0.0, "phi_timing": "exact", "temperature": 3.0},
            {"name": "fedntd", "temperature": 3.0},
        ),
        ({"name": "feddkd", "alpha": 0.0, "beta": 0.7}, {"name": "fedntd", "beta": 0.7}),
        ({"name": "feddkd", "nckd_mode": "mask1000"}, {"name": "feddkd", "nckd_mode": "removed"}),
        ({"name": "feddkd", "tckd": "target", "nckd_mode": "slice"}, {"name": "kd"}),
        ({"name": "feddkd", "alpha": 0.0, "beta": 0.0}, {"name": "fedavg"}),
        (
            {"name": "feddkd_groups", "alpha": 0.7, "alpha_first": 0.7},
            {"name": "feddkd", "alpha": 0.7, "tckd": "target"},
        ),
        ({"name": "feddkd_groups", "first": 1.0, "alpha_first": 0.0}, {"name": "fedntd"}),
        ({"name": "fedntd_asd", "weight": 0.0}, {"name": "fedavg"}),
        ({"name": "fedntd_asd", "b1": 0.0, "b2": 0.0}, {"name": "fedntd"}),
        ({"name": "fedavg_asd", "b1": 0.0, "b2": 0.0}, {"name": "kd"}),
        ({"name": "fedavgm", "momentum": 0.0}, {"name": "fedavg"}),
        ({"name": "fedcurv", "weight": 0.0}, {"name": "fedavg"}),
        ({"name": "moon", "mu": 0.0}, {"name": "fedavg"}),
    ],
    ids=str,
)
def test_a_method_at_its_edge_is_another(
    at_its_edge: dict[str, object], equivalent: dict[str, object]
) -> None:
    assert_same_model(run_of(at_its_edge).params, run_of(equivalent).params)


@pytest.mark.parametrize(
    ("method", "equivalent"),
    [
        ("scaffold", "fedavg"),
        ("fedcurv", "fedavg"),
        ("moon", "fedavg"),
        ({"name": "fednova", "ccvr": "full"}, {"name": "fednova"}),
        # every Gini index is 1 before a client has sent its value
        ("fedadkd", {"name": "feddkd", "alpha": 3.0, "tckd": "target"}),
    ],
    ids=str,
)
def test_the_first_round_is_that_of_another_method(method: object, equivalent: object) -> None:
    """And the second is not."""
    ours = run_of(method).states
    expected = run_of(equivalent).states

    assert_same_model(ours[1].params, expected[1].params)
    assert largest_gap(ours[2].params, expected[2].params) > 1e-4


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_with_equal_steps_and_sizes_is_fedavg(momentum: float) -> None:
    changes = {**EVEN, "plan": {"momentum": momentum}}
    ready = ready_for("fednova", **changes)
    assert {len(part) for part in ready.sites.split.tensors()} == {25}

    assert_same_model(drive(ready).params, run_of("fedavg", **changes).params)


@pytest.mark.parametrize(
    ("name", "server_group", "client_group"),
    [("scaffold", "control", "control"), ("feddyn", "h", "gradient")],
)
def test_the_servers_control_is_the_mean_of_the_clients_when_all_take_part(
    name: str, server_group: str, client_group: str
) -> None:
    run = run_of(name, rounds=3, **ALL_CLIENTS, plan={"lr": 0.02})

    control = run.final.extra.tensors(server_group)
    client_controls = [run.remembered(client).tensors(client_group) for client in range(6)]
    assert_same_model(control, weighted_mean(client_controls, [1] * 6))
    assert all(value.any() for value in control.values())


def test_fedcurvs_pull_has_the_gradient_of_its_quadratics() -> None:
    """The sum over the others of 2 lambda u_j (w - w_j)."""
    draw = torch.Generator().manual_seed(0)
    u = torch.rand(3, 3, 2, generator=draw).double()
    w_others = torch.randn(3, 3, 2, generator=draw).double()
    w = torch.randn(3, 2, generator=draw).double().requires_grad_()
    sums = {
        "fisher": {"w": u.sum(0)},
        "fisher_params": {"w": (u * w_others).sum(0)},
    }
    step = SimpleNamespace(
        params={"w": w},
        y=torch.zeros(1, dtype=torch.int64),
        logits=lambda: torch.zeros(1, 2),
        weighted=lambda losses: losses,
    )
    work = Curved(FedCurv(weight=0.3), Stage(1, 0, "train", (0,)))
    start = TrainingStart({}, constants={"other_sums": sums})

    terms = work.terms(step, start)  # type: ignore[arg-type]

    (gradient,) = torch.autograd.grad(terms["pull"], w)
    expected = (2 * 0.3 * u * (w - w_others)).sum(0)
    torch.testing.assert_close(gradient, expected)


def test_moons_contrast_is_log_two_while_global_and_previous_model_coincide() -> None:
    ready = ready_for({"name": "moon", "mu": 1.0})
    first = first_stage(ready)

    replies = ready.engine().run(first.work, first.stage, first.payloads, 7)

    for reply in replies:
        contrast = reply.metrics["loss"]["contrast"]
        assert contrast == pytest.approx(math.log(2), abs=NEAR)


@pytest.mark.parametrize("source", ["f", "G"])
@pytest.mark.parametrize("delta", [1e-6, 1.0, 10.0, 1e6])
def test_phi_has_mean_one_and_leaves_single_class_clients_out(source: str, delta: float) -> None:
    """Of equal clients, each has phi one."""
    method = FedADKD(delta=delta, phi_source=source)  # type: ignore[arg-type]
    gini = torch.tensor([0.0, 0.5, 0.0, 0.9, 0.3], dtype=torch.float64)

    phi = method.phi(gini)

    assert float(phi.mean()) == pytest.approx(1)
    assert torch.equal(phi == 0, gini == 0)
    assert phi[4] < phi[1] < phi[3]
    single_class = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(method.phi(single_class), torch.ones(3, dtype=torch.float64))
    equal = torch.full((4,), 0.3, dtype=torch.float64)
    torch.testing.assert_close(method.phi(equal), torch.ones(4, dtype=torch.float64))


def test_a_small_delta_weighs_by_the_gini_index_itself() -> None:
    """log(1 + delta G) is delta G, but for a share of delta G / 2."""
    gini = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    delta = 1e-6

    by_logarithm = FedADKD(delta=delta).phi(gini)

    torch.testing.assert_close(by_logarithm, FedADKD(phi_source="G").phi(gini), rtol=delta, atol=0)


@pytest.mark.parametrize("timing", ["stale", "exact"])
def test_a_federation_of_single_class_clients_is_distilled_with_phi_one(timing: str) -> None:
    ready = ready_for({"name": "fedadkd", "phi_timing": timing}, rounds=3, **ONE_CLASS_EACH)
    for part in ready.sites.split.tensors():
        assert len(ready.sites.train.labels[part].unique()) == 1
    feddkd = {"name": "feddkd", "alpha": 3.0, "tckd": "target"}

    ours = drive(ready)

    assert_same_model(ours.params, run_of(feddkd, rounds=3, **ONE_CLASS_EACH).params)
    assert all(all_finite(state.params) for state in ours.states)


def test_feddf_of_one_client_has_nothing_to_learn() -> None:
    """The mean of one model's logits is its own: the server's stage leaves it where it is."""
    changes = {"topology": {"clients": 6, "sampled": 1}, "data": {"public": toys.PUBLIC}}
    plain_sgd = {"teach_server": {"optimiser": "sgd", "weight_decay": 0.0, "momentum": 0.0}}

    ours = run_of("feddf", plan=plain_sgd, **changes).params

    assert_same_model(ours, run_of("fedavg", **changes).params)


# Traffic.


@dataclass(frozen=True)
class Message:
    """The size of a message: models of the network's size, and numbers of 8 bytes."""

    models: int
    numbers: int = 0

    def bytes(self, model_bytes: int) -> int:
        """Its size in bytes."""
        return self.models * model_bytes + 8 * self.numbers


ONE_MODEL = Message(1)

# papers.md 14: to a client, and from it
TRAFFIC = {
    "fedavg": (ONE_MODEL, ONE_MODEL),
    "fedprox": (ONE_MODEL, ONE_MODEL),
    "fedntd": (ONE_MODEL, ONE_MODEL),
    "feddkd": (ONE_MODEL, ONE_MODEL),
    "fedntd_asd": (ONE_MODEL, ONE_MODEL),
    "moon": (ONE_MODEL, ONE_MODEL),
    "fedlc": (ONE_MODEL, ONE_MODEL),
    "fedgkd": (ONE_MODEL, ONE_MODEL),
    "fedrs": (ONE_MODEL, ONE_MODEL),
    "fedlmd": (ONE_MODEL, ONE_MODEL),
    "fedlwf": (ONE_MODEL, ONE_MODEL),
    "fedmlb": (ONE_MODEL, ONE_MODEL),
    "fedsam": (ONE_MODEL, ONE_MODEL),
    "fedsol": (ONE_MODEL, ONE_MODEL),
    "feddyn": (ONE_MODEL, ONE_MODEL),
    "fedavgm": (ONE_MODEL, ONE_MODEL),
    "fedadkd": (Message(1, 1), Message(1, 1)),
    "fednova": (ONE_MODEL, Message(1, 1)),
    "scaffold": (Message(2), Message(2)),
    "feddc": (Message(2, 1), Message(2)),
    "fedcurv": (Message(3, 1), Message(3)),
}


@pytest.mark.parametrize(
    ("name", "down", "up"), [(name, *messages) for name, messages in TRAFFIC.items()]
)
def test_a_round_sends_as_much_as_the_method_says(name: str, down: Message, up: Message) -> None:
    """To and from four clients."""
    ready = ready_for(name)
    model_bytes = sum(v.numel() * v.element_size() for v in ready.world.initial(0).values())

    estimate = run_estimate(ready).work

    assert estimate.bytes_down == 4 * down.bytes(model_bytes)
    assert estimate.bytes_up == 4 * up.bytes(model_bytes)


@pytest.mark.parametrize(
    "method",
    [{"name": "fedadkd", "phi_timing": "exact"}, {"name": "fednova", "ccvr": "full"}],
    ids=str,
)
def test_a_round_can_be_explained_before_the_census(method: dict[str, str]) -> None:
    assert run_estimate(ready_for(method)).work.bytes_down > 0


def sent_groups(ready: Prepared, stage: Stage) -> set[str]:
    """What a client sends in a stage."""
    return set(ready.settings.method.expected_reply(stage.clients[0], stage, ready.world))


@pytest.mark.parametrize("name", METHODS)
def test_only_a_method_that_sends_nothing_but_its_model_permits_secure_sums(name: str) -> None:
    """And only one that sends logits may have noise on them."""
    model = "logistic"
    if needs(name, Need.SLIM):
        model = "toy_slim"
    ready = ready_for(name, **{"model": model, **toys.suited(name)})
    permits = ready.settings.method.permits
    stages = ready.settings.schedule(1, ready.world)

    if permits & (Permit.LINEAR_AGGREGATE | Permit.CENTRAL_NOISE):
        assert sent_groups(ready, stages[0]) == {"params"}
    if Permit.NOISY_LOGITS in permits:
        assert any("logits" in sent_groups(ready, stage) for stage in stages)


# Single stages.


@dataclass(frozen=True)
class FirstStage:
    """What an engine is given in the first stage of a run."""

    stage: Stage
    work: object
    payloads: dict[int, Payload]


def first_stage(ready: Prepared) -> FirstStage:
    """The first stage of round 1."""
    method = ready.settings.method
    stage = ready.settings.schedule(1, ready.world)[0]
    state = method.initial_state(ready.world)
    payloads = {}
    for client in stage.clients:
        payloads[client] = method.payload_for_client(state, client, stage, ready.world)
    return FirstStage(stage, method.work(stage), payloads)


def test_a_reported_gini_index_is_clamped_to_its_range() -> None:
    ready = ready_for("fedadkd")
    method = ready.settings.method
    stage = ready.settings.schedule(1, ready.world)[0]
    clients = stage.clients[:3]
    replies = []
    for client, gini in zip(clients, (-7.0, 1e9, 0.4), strict=True):
        content = Payload(params=ready.world.initial(client), gini=gini)
        replies.append(SimpleNamespace(client=client, examples=5, content=content))

    state = method.aggregate(method.initial_state(ready.world), replies, stage, ready.world)

    assert state.extra.tensor("gini")[list(clients)].tolist() == [0.0, 1.0, 0.4]
