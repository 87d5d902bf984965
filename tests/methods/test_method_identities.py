"""What must hold between methods, and of each at its edges, whatever the data."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from plain import check, drive, ready_for
from torch import Tensor

import toys
from double import NEAR
from fedstill.cli.explain import run_estimate
from fedstill.core import registry
from fedstill.core.capabilities import Need, Permit
from fedstill.core.records import Payload, Stage, TrainingStart
from fedstill.methods.fedadkd import FedADKD
from fedstill.methods.fedcurv import Curved, FedCurv

EVEN = {"partition": "iid"}
ONE_CLASS_EACH = {"partition": {"kind": "sharding", "shards": 1}, "topology": {"clients": 5}}


def close(ready_one, ready_two, rounds: int | None = None) -> None:
    one, two = (drive(r)[0] for r in (ready_one, ready_two))
    last = rounds if rounds is not None else len(one) - 1
    check(one[last].params, two[last].params)


@pytest.mark.parametrize(
    ("one", "other"),
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
def test_a_method_at_its_edge_is_another(one: dict[str, object], other: dict[str, object]) -> None:
    close(ready_for(one), ready_for(other))


@pytest.mark.parametrize(
    ("method", "like"),
    [
        ("scaffold", "fedavg"),
        ("fedcurv", "fedavg"),
        ("moon", "fedavg"),
        ({"name": "fednova", "ccvr": "full"}, {"name": "fednova"}),
        # every G is 1 before a client has sent its own
        ("fedadkd", {"name": "feddkd", "alpha": 3.0, "tckd": "target"}),
    ],
    ids=str,
)
def test_the_first_round_is_another_methods(method: object, like: object) -> None:
    close(ready_for(method), ready_for(like), rounds=1)
    states = [drive(ready_for(m))[0][2].params for m in (method, like)]
    assert max(float((states[0][k] - states[1][k]).abs().max()) for k in states[0]) > 1e-4, (
        "and the second is not"
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_with_equal_steps_and_sizes_is_fedavg(momentum: float) -> None:
    changes = {**EVEN, "plan": {"momentum": momentum}}
    ready = ready_for("fednova", **changes)
    assert {len(p) for p in ready.sites.split.tensors()} == {25}
    close(ready, ready_for("fedavg", **changes))


@pytest.mark.parametrize(
    ("name", "group", "own"), [("scaffold", "control", "control"), ("feddyn", "h", "gradient")]
)
def test_the_servers_control_is_the_mean_of_the_clients_when_all_take_part(
    name: str, group: str, own: str
) -> None:
    states, memory = drive(ready_for(name, rounds=3, topology={"clients": 6}, plan={"lr": 0.02}))
    for key, value in states[-1].extra.tensors(group).items():
        mean = torch.stack([memory.load(c).tensors(own)[key] for c in range(6)]).mean(0)
        assert float(value.abs().max()) > 0
        torch.testing.assert_close(value, mean, rtol=NEAR, atol=NEAR)


def test_fedcurvs_pull_has_the_gradient_of_its_quadratics() -> None:
    """Sum over the others of 2 lambda u_j (w - w_j)."""
    draw = torch.Generator().manual_seed(0)
    us = [{"w": torch.rand(3, 2, generator=draw).double()} for _ in range(3)]
    ws = [{"w": torch.randn(3, 2, generator=draw).double()} for _ in range(3)]
    w = torch.randn(3, 2, generator=draw).double().requires_grad_()
    others = {
        "fisher": {"w": sum(u["w"] for u in us)},
        "fisher_params": {"w": sum(u["w"] * v["w"] for u, v in zip(us, ws, strict=True))},
    }
    step = SimpleNamespace(
        params={"w": w},
        y=torch.zeros(1, dtype=torch.int64),
        logits=lambda: torch.zeros(1, 2),
        weighted=lambda losses: losses,
    )
    terms = Curved(FedCurv(weight=0.3), Stage(1, 0, "train", (0,))).terms(
        step, TrainingStart({}, constants={"other_sums": others})
    )  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(terms["pull"], w)
    expected = sum(2 * 0.3 * u["w"] * (w - v["w"]) for u, v in zip(us, ws, strict=True))
    torch.testing.assert_close(slope, expected)


def test_moons_contrast_is_log_two_while_global_and_previous_model_coincide() -> None:
    ready = ready_for({"name": "moon", "mu": 1.0})
    method, stage = ready.settings.method, ready.settings.schedule(1, ready.world)[0]
    state = method.initial_state(ready.world)
    payloads = {c: method.payload_for_client(state, c, stage, ready.world) for c in stage.clients}
    for reply in ready.engine().run(method.work(stage), stage, payloads, 7):  # type: ignore[arg-type]
        assert reply.metrics["loss"]["contrast"] == pytest.approx(math.log(2), abs=NEAR)


@pytest.mark.parametrize("source", ["f", "G"])
@pytest.mark.parametrize("delta", [1e-6, 1.0, 10.0, 1e6])
def test_phi_has_mean_one_and_leaves_single_class_clients_out(source: str, delta: float) -> None:
    method = FedADKD(delta=delta, phi_source=source)  # type: ignore[arg-type]
    gini = torch.tensor([0.0, 0.5, 0.0, 0.9, 0.3], dtype=torch.float64)
    phi = method.phi(gini)
    assert float(phi.mean()) == pytest.approx(1)
    assert torch.equal(phi == 0, gini == 0)
    assert phi[4] < phi[1] < phi[3]
    assert torch.equal(
        method.phi(torch.zeros(3, dtype=torch.float64)), torch.ones(3, dtype=torch.float64)
    )
    torch.testing.assert_close(
        method.phi(torch.full((4,), 0.3, dtype=torch.float64)), torch.ones(4).double()
    )


def test_a_small_delta_weighs_by_the_gini_index_itself() -> None:
    """log(1 + delta G) is delta G, but for a share of delta G / 2."""
    gini, delta = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), 1e-6
    torch.testing.assert_close(
        FedADKD(delta=delta).phi(gini), FedADKD(phi_source="G").phi(gini), rtol=delta, atol=0
    )


@pytest.mark.parametrize("timing", ["stale", "exact"])
def test_a_federation_of_single_class_clients_is_distilled_with_phi_one(timing: str) -> None:
    ready = ready_for({"name": "fedadkd", "phi_timing": timing}, rounds=3, **ONE_CLASS_EACH)
    assert all(
        len(set(ready.sites.train.labels[p].tolist())) == 1 for p in ready.sites.split.tensors()
    )
    close(
        ready,
        ready_for({"name": "feddkd", "alpha": 3.0, "tckd": "target"}, rounds=3, **ONE_CLASS_EACH),
    )
    for state in drive(ready)[0]:
        assert all(bool(v.isfinite().all()) for v in state.params.values())


def test_feddf_of_one_client_has_nothing_to_learn() -> None:
    """The mean of one model's logits is its own: the server's stage leaves it where it is."""
    changes = {"topology": {"clients": 6, "sampled": 1}, "data": {"public": toys.PUBLIC}}
    still = {"teach_server": {"optimiser": "sgd", "weight_decay": 0.0, "momentum": 0.0}}
    close(ready_for("feddf", plan=still, **changes), ready_for("fedavg", **changes))


# papers.md 14, in multiples of the model's size W and numbers of 8 bytes, for one client
TRAFFIC = {
    "fedavg": ((1, 0), (1, 0)),
    "fedprox": ((1, 0), (1, 0)),
    "fedntd": ((1, 0), (1, 0)),
    "feddkd": ((1, 0), (1, 0)),
    "fedntd_asd": ((1, 0), (1, 0)),
    "moon": ((1, 0), (1, 0)),
    "fedlc": ((1, 0), (1, 0)),
    "fedgkd": ((1, 0), (1, 0)),
    "fedrs": ((1, 0), (1, 0)),
    "fedlmd": ((1, 0), (1, 0)),
    "fedlwf": ((1, 0), (1, 0)),
    "fedmlb": ((1, 0), (1, 0)),
    "fedsam": ((1, 0), (1, 0)),
    "fedsol": ((1, 0), (1, 0)),
    "feddyn": ((1, 0), (1, 0)),
    "fedavgm": ((1, 0), (1, 0)),
    "fedadkd": ((1, 1), (1, 1)),
    "fednova": ((1, 0), (1, 1)),
    "scaffold": ((2, 0), (2, 0)),
    "feddc": ((2, 1), (2, 0)),
    "fedcurv": ((3, 1), (3, 0)),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_a_round_sends_as_much_as_the_method_says(name: str) -> None:
    ready = ready_for(name)
    size = sum(v.numel() * v.element_size() for v in ready.world.initial(0).values())
    sums = run_estimate(ready)
    (w_down, n_down), (w_up, n_up) = TRAFFIC[name]
    assert (sums.work.bytes_down, sums.work.bytes_up) == (
        4 * (w_down * size + 8 * n_down),
        4 * (w_up * size + 8 * n_up),
    )


@pytest.mark.parametrize(
    "method",
    [{"name": "fedadkd", "phi_timing": "exact"}, {"name": "fednova", "ccvr": "full"}],
    ids=str,
)
def test_a_round_can_be_explained_before_the_census(method: dict[str, str]) -> None:
    assert run_estimate(ready_for(method)).work.bytes_down > 0


def _sent_later(ready) -> set[str]:
    stages = ready.settings.schedule(1, ready.world)
    return {
        g
        for s in stages
        for g in ready.settings.method.expected_reply(s.clients[0], s, ready.world)
    }


@pytest.mark.parametrize("name", [n for n in registry.names("method") if not n.startswith("toy_")])
def test_only_a_method_that_sends_its_model_and_no_more_may_be_summed_in_secret(name: str) -> None:
    model = (
        "toy_slim"
        if Need.SLIM in registry.lookup("method", name).build().requires()
        else "logistic"
    )
    ready = ready_for(name, **{"model": model, **toys.suited(name)})
    method, stage = ready.settings.method, ready.settings.schedule(1, ready.world)[0]
    sends = set(method.expected_reply(stage.clients[0], stage, ready.world))
    assert not method.permits & (Permit.LINEAR_AGGREGATE | Permit.CENTRAL_NOISE) or sends == set(
        Payload(params={})
    )
    assert Permit.NOISY_LOGITS not in method.permits or "logits" in sends | _sent_later(ready)


def test_a_lie_about_the_gini_index_cannot_leave_its_range() -> None:
    ready = ready_for("fedadkd")
    method, stage = ready.settings.method, ready.settings.schedule(1, ready.world)[0]
    state: Tensor = method.initial_state(ready.world)  # type: ignore[assignment]
    replies = [
        SimpleNamespace(
            client=c, examples=5, content=Payload(params=ready.world.initial(c), gini=g)
        )
        for c, g in zip(stage.clients, (-7.0, 1e9, 0.4), strict=False)
    ]
    gini = method.aggregate(state, replies, stage, ready.world).extra.tensor("gini")  # type: ignore[arg-type]
    assert gini[list(stage.clients[:3])].tolist() == [0.0, 1.0, 0.4]
