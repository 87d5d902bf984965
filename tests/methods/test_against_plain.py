"""Two rounds of every method of the parallel family, against the same algorithm written out plainly with torch.optim.

Only the clients' batches and the sampling are taken from the library (they are draws); the rest is derived here anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import toys
from fedstill.experiment.prepare import Prepared, prepare
from fedstill.experiment.runner import run
from fedstill.experiment.settings import settle
from fedstill.keys import generator, seed_for
from fedstill.models import contract
from fedstill.topology import sample

Loss = Callable[[nn.Module, nn.Module, Tensor, Tensor], Tensor]
PLAN = {"epochs": 2, "batch": 10, "lr": 0.1, "lr_decay": 0.9, "momentum": 0.9, "weight_decay": 1e-3}


def ce(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.nll_loss(student(x).log_softmax(1), y)


def others(z: Tensor, y: Tensor) -> Tensor:
    rows = [torch.cat([row[:c], row[c + 1 :]]) for row, c in zip(z, y.tolist(), strict=True)]
    return torch.stack(rows)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    return nn.functional.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")


def prox(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    far = sum(((a - b.detach()) ** 2).sum() for a, b in zip(student.parameters(), teacher.parameters(), strict=True))
    return ce(student, teacher, x, y) + 0.3 / 2 * far


def ntd(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    t, s = others(teacher(x), y) / 2.0, others(student(x), y) / 2.0
    return ce(student, teacher, x, y) + 0.5 * 4.0 * divergence(t, s)


def squared(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(student, teacher, x, y) + 0.05 * ((others(student(x), y) - others(teacher(x), y)) ** 2).sum(1).mean()


def mixed(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z, t = student(x), teacher(x)
    return ce(student, teacher, x, y) + 0.7 * divergence(t, z) + 0.3 * divergence(others(t, y), others(z, y))


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


def plain_client(ready: Prepared, model: nn.Module, start: dict[str, Tensor], loss: Loss, round: int, client: int):
    teacher = contract.build(ready.world.model(client)).eval()
    model.load_state_dict(start)
    teacher.load_state_dict(start)
    lr = PLAN["lr"] * PLAN["lr_decay"] ** (round - 1)
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=PLAN["momentum"], weight_decay=PLAN["weight_decay"])
    part = ready.sites.parts[client]
    x, y = (ready.sites.train.images[part].float() / 255 - 0.5) / 0.5, ready.sites.train.labels[part]
    order = generator(seed_for(7, round, 0, client, "order"))
    for _ in range(PLAN["epochs"]):
        for index in torch.randperm(len(y), generator=order).split(PLAN["batch"]):
            sgd.zero_grad()
            loss(model, teacher, x[index], y[index]).backward()
            sgd.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}, len(y)


def plain_run(ready: Prepared, loss: Loss, uniform: bool = False) -> dict[str, Tensor]:
    model = contract.build(ready.world.model(0))
    state = dict(ready.world.initial(0))
    for round in (1, 2):
        sent = [plain_client(ready, model, state, loss, round, c) for c in sorted(sample(ready.world, round, 4))]
        total = sum(1 if uniform else n for _, n in sent)
        state = {k: sum((1 if uniform else n) / total * p[k] for p, n in sent) for k in state}
    return state


@pytest.mark.parametrize("name", PLAIN)
def test_two_rounds_are_those_of_a_plain_implementation(name: str, tmp_path: Path) -> None:
    method, loss = PLAIN[name]
    experiment = toys.toy(method, rounds=2, plan=PLAN)
    ours = run(experiment, tmp_path / "run", data=toys.blobs()).model
    theirs = plain_run(prepare(settle(experiment), toys.blobs()), loss)
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=2e-6)


def test_uniform_aggregation(tmp_path: Path) -> None:
    experiment = toys.toy({"name": "fedavg", "aggregation": "uniform"}, rounds=2, plan=PLAN)
    ours = run(experiment, tmp_path / "run", data=toys.blobs()).model
    theirs = plain_run(prepare(settle(experiment), toys.blobs()), ce, uniform=True)
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "fedprox", "mu": 0.0}, {"name": "fedavg"}),
        ({"name": "fedntd", "beta": 0.0}, {"name": "fedavg"}),
        ({"name": "kd_ntd", "mix": 1.0}, {"name": "fedntd"}),
        ({"name": "kd_ntd", "mix": 0.0}, {"name": "kd"}),
    ],
)
def test_a_method_at_its_edge_is_another(one: dict[str, object], other: dict[str, object], tmp_path: Path) -> None:
    a, b = (run(toys.toy(m, rounds=2), tmp_path / str(i), data=toys.blobs()).model for i, m in enumerate((one, other)))
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-5, atol=1e-6)


def test_one_client_is_plain_training(tmp_path: Path) -> None:
    """Averaging a single client's model changes nothing: momentum starts anew each round, the rest is one run of SGD."""
    lone = toys.toy(partition="iid", topology={"clients": 1}, rounds=2, plan={**PLAN, "momentum": 0.0, "lr_decay": 1.0})
    ours = run(lone, tmp_path / "run", data=toys.blobs()).model
    assert all(math.isfinite(float(v.sum())) for v in ours.values())
    ready = prepare(settle(lone), toys.blobs())
    model = contract.build(ready.world.model(0))
    model.load_state_dict(dict(ready.world.initial(0)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=PLAN["weight_decay"])
    part = ready.sites.parts[0]
    x, y = (ready.sites.train.images[part].float() / 255 - 0.5) / 0.5, ready.sites.train.labels[part]
    for round in (1, 2):
        order = generator(seed_for(7, round, 0, 0, "order"))
        for _ in range(2):
            for index in torch.randperm(len(y), generator=order).split(10):
                sgd.zero_grad()
                nn.functional.cross_entropy(model(x[index]), y[index]).backward()
                sgd.step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=2e-6)
