"""Two rounds of every method of the parallel family, against the same algorithm written out plainly
with torch.optim.

Only the clients' batches and the sampling are taken from the library (they are draws); the rest is
derived here anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain import PLAN, Federation, check, drive, experiment, ready_for
from torch import Tensor, nn

import toys
from double import in_double
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.keys import generator, seed_for
from fedstill.core.topology import sample
from fedstill.models import contract
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run

Loss = Callable[[nn.Module, nn.Module, Tensor, Tensor], Tensor]
Plan = dict[str, float]


def ce(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.nll_loss(student(x).log_softmax(1), y)


def others(z: Tensor, y: Tensor) -> Tensor:
    rows = [torch.cat([row[:c], row[c + 1 :]]) for row, c in zip(z, y.tolist(), strict=True)]
    return torch.stack(rows)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    return nn.functional.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")


def prox(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    far = sum(
        ((a - b.detach()) ** 2).sum()
        for a, b in zip(student.parameters(), teacher.parameters(), strict=True)
    )
    return ce(student, teacher, x, y) + 0.3 / 2 * far


def ntd(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    t, s = others(teacher(x), y) / 2.0, others(student(x), y) / 2.0
    return ce(student, teacher, x, y) + 0.5 * 4.0 * divergence(t, s)


def squared(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (
        ce(student, teacher, x, y)
        + 0.05 * ((others(student(x), y) - others(teacher(x), y)) ** 2).sum(1).mean()
    )


def mixed(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z, t = student(x), teacher(x)
    return (
        ce(student, teacher, x, y)
        + 0.7 * divergence(t, z)
        + 0.3 * divergence(others(t, y), others(z, y))
    )


def distilled(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(student, teacher, x, y) + divergence(teacher(x), student(x))


PLAIN: dict[str, tuple[dict[str, object], Loss]] = {
    "fedavg": ({"name": "fedavg"}, ce),
    "fedprox": ({"name": "fedprox", "mu": 0.3}, prox),
    "fedntd": ({"name": "fedntd", "beta": 0.5, "temperature": 2.0}, ntd),
    "fedntd_mse": ({"name": "fedntd_mse", "beta": 0.05}, squared),
    "kd_ntd": ({"name": "kd_ntd", "mix": 0.3}, mixed),
    "kd": ({"name": "kd"}, distilled),
}


def plain_client(
    ready: Prepared,
    model: nn.Module,
    start: dict[str, Tensor],
    loss: Loss,
    round: int,
    client: int,
    plan: Plan,
):
    teacher = contract.build(ready.world.model(client)).double().eval()
    model.load_state_dict(start)
    teacher.load_state_dict(start)
    lr = plan["lr"] * plan["lr_decay"] ** (round - 1)
    sgd = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=plan["momentum"], weight_decay=plan["weight_decay"]
    )
    x, y = Federation(ready).data(client)
    order = generator(seed_for(7, round, 0, client, "order"))
    for _ in range(plan["epochs"]):
        for index in torch.randperm(len(y), generator=order).split(plan["batch"]):
            sgd.zero_grad()
            loss(model, teacher, x[index], y[index]).backward()
            sgd.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}, len(y)


def plain_run(
    ready: Prepared, loss: Loss, uniform: bool = False, sampled: int = 4, plan: Plan = PLAN
) -> dict[str, Tensor]:
    model = contract.build(ready.world.model(0)).double()
    state = dict(ready.world.initial(0))
    for round in (1, 2):
        sent = [
            plain_client(ready, model, state, loss, round, c, plan)
            for c in sorted(sample(ready.world, round, sampled))
        ]
        total = sum(1 if uniform else n for _, n in sent)
        state = {k: sum((1 if uniform else n) / total * p[k] for p, n in sent) for k in state}
    return state


@pytest.mark.parametrize("name", PLAIN)
def test_two_rounds_are_those_of_a_plain_implementation(name: str) -> None:
    method, loss = PLAIN[name]
    ready = ready_for(method)
    check(drive(ready)[0][-1].params, plain_run(ready, loss))


def test_what_is_compared_here_is_what_a_run_does(tmp_path: Path) -> None:
    """In float32, to the bit: the other tests drive the rounds by themselves, in float64."""
    toy = experiment("fedntd")
    ours, driven = (
        run(toy, tmp_path / "run", data=toys.blobs()).model,
        drive(prepare(resolve(toy), toys.blobs()))[0],
    )
    assert ours.keys() == driven[-1].params.keys()
    assert all(torch.equal(ours[k], v) for k, v in driven[-1].params.items())


@pytest.mark.slow
@pytest.mark.skipif(
    not Path(os.environ.get("FEDSTILL_DATA", "."), "cifar10").is_dir(),
    reason="FEDSTILL_DATA has no cifar10",
)
@pytest.mark.parametrize("name", ["fedavg", "fedntd"])
def test_cifar10_with_the_papers_network(name: str) -> None:
    """100 clients of two shards each, three a round: the model of the plain implementation."""
    method, loss = PLAIN[name]
    plan = {**PLAN, "epochs": 2, "batch": 50, "lr": 0.01, "weight_decay": 1e-5}
    paper = Experiment(
        seed=7,
        rounds=2,
        measure=(),
        data="cifar10",
        method=method,
        partition={"kind": "sharding", "shards": 2},
        topology={"clients": 100, "sampled": 3},
        plan=plan,
    )
    ready = in_double(prepare(resolve(paper)))
    check(drive(ready)[0][-1].params, plain_run(ready, loss, sampled=3, plan=plan))


def test_uniform_aggregation() -> None:
    ready = ready_for({"name": "fedavg", "aggregation": "uniform"})
    check(drive(ready)[0][-1].params, plain_run(ready, ce, uniform=True))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "fedprox", "mu": 0.0}, {"name": "fedavg"}),
        ({"name": "fedntd", "beta": 0.0}, {"name": "fedavg"}),
        ({"name": "kd_ntd", "mix": 1.0}, {"name": "fedntd"}),
        ({"name": "kd_ntd", "mix": 0.0}, {"name": "kd"}),
    ],
)
def test_a_method_at_its_edge_is_another(one: dict[str, object], other: dict[str, object]) -> None:
    check(*(drive(ready_for(m, rounds=2))[0][-1].params for m in (one, other)))


def test_one_client_is_plain_training() -> None:
    """Averaging one client's model changes nothing: without momentum the run is one run of SGD."""
    changes = {
        "partition": "iid",
        "topology": {"clients": 1},
        "plan": {"momentum": 0.0, "lr_decay": 1.0},
    }
    ready = ready_for("fedavg", **changes)
    model = contract.build(ready.world.model(0)).double()
    model.load_state_dict(dict(ready.world.initial(0)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=PLAN["weight_decay"])
    x, y = Federation(ready).data(0)
    for round in (1, 2):
        order = generator(seed_for(7, round, 0, 0, "order"))
        for _ in range(2):
            for index in torch.randperm(len(y), generator=order).split(10):
                sgd.zero_grad()
                nn.functional.cross_entropy(model(x[index]), y[index]).backward()
                sgd.step()
    check(drive(ready)[0][-1].params, model.state_dict())
