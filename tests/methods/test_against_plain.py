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
from plain import (
    PLAN,
    Federation,
    Loss,
    Params,
    assert_same_model,
    average,
    batches,
    ce,
    drive,
    experiment,
    kl,
    ready_for,
    run_of,
    squared_distance,
    without_labels,
)
from torch import Tensor, nn

import toys
from double import in_double
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.trees import same_bits
from fedstill.models import contract
from fedstill.running.preparation import prepare
from fedstill.running.runner import run

Objective = Callable[[nn.Module], Loss]
"""A client's loss; it knows the model received."""


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """From the teacher's logits to the student's, the mean over examples."""
    return kl(teacher.softmax(1), student.softmax(1)).mean()


def plain(received: nn.Module) -> Loss:
    """FedAvg: cross-entropy alone."""
    return ce


def proximal(received: nn.Module) -> Loss:
    """FedProx: the model stays near the one received."""
    anchor = {name: value.detach() for name, value in received.named_parameters()}

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return ce(model, x, y) + 0.3 / 2 * squared_distance(model, anchor)

    return loss


def not_true_distillation(received: nn.Module) -> Loss:
    """FedNTD: distillation of all classes but the label, at temperature 2."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        t = without_labels(received(x).detach(), y) / 2.0
        z = without_labels(model(x), y) / 2.0
        return ce(model, x, y) + 0.5 * 2.0**2 * divergence(t, z)

    return loss


def squared_not_true(received: nn.Module) -> Loss:
    """FedNTD with the squared distance of logits."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        gap = without_labels(model(x), y) - without_labels(received(x).detach(), y)
        return ce(model, x, y) + 0.05 * (gap**2).sum(1).mean()

    return loss


def mixed_distillation(received: nn.Module) -> Loss:
    """Distillation of all classes, and of all but the label."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        t = received(x).detach()
        of_others = divergence(without_labels(t, y), without_labels(z, y))
        return ce(model, x, y) + 0.7 * divergence(t, z) + 0.3 * of_others

    return loss


def distillation(received: nn.Module) -> Loss:
    """Distillation of all classes."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return ce(model, x, y) + divergence(received(x).detach(), model(x))

    return loss


OBJECTIVES: dict[str, tuple[dict[str, object], Objective]] = {
    "fedavg": ({"name": "fedavg"}, plain),
    "fedprox": ({"name": "fedprox", "mu": 0.3}, proximal),
    "fedntd": ({"name": "fedntd", "beta": 0.5, "temperature": 2.0}, not_true_distillation),
    "fedntd_mse": ({"name": "fedntd_mse", "beta": 0.05}, squared_not_true),
    "kd_ntd": ({"name": "kd_ntd", "mix": 0.3}, mixed_distillation),
    "kd": ({"name": "kd"}, distillation),
}


def two_rounds(fed: Federation, objective: Objective, uniform: bool = False) -> Params:
    """The global model after two rounds."""
    params = fed.start
    for round_index in (1, 2):
        loss = objective(fed.net(params).eval())
        params = average(fed.fit_cohort(params, loss, round_index), uniform)
    return params


@pytest.mark.parametrize(("method", "objective"), list(OBJECTIVES.values()), ids=list(OBJECTIVES))
def test_two_rounds_are_those_of_a_plain_implementation(
    method: dict[str, object], objective: Objective
) -> None:
    ready = ready_for(method)

    assert_same_model(drive(ready).params, two_rounds(Federation(ready), objective))


def test_driven_rounds_give_the_model_of_a_run(tmp_path: Path) -> None:
    """In float32, to the bit: the other tests drive the rounds by themselves, in float64."""
    toy = experiment("fedntd")

    model = run(toy, tmp_path / "run", data=toys.blobs()).model
    driven = drive(prepare(resolve(toy), toys.blobs())).params

    assert same_bits(model, driven)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path(os.environ.get("FEDSTILL_DATA", "."), "cifar10").is_dir(),
    reason="FEDSTILL_DATA has no cifar10",
)
@pytest.mark.parametrize("name", ["fedavg", "fedntd"])
def test_cifar10_with_the_papers_network(name: str) -> None:
    """100 clients of two shards each, three a round: the model of the plain implementation."""
    method, objective = OBJECTIVES[name]
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
    fed = Federation(ready, sampled=3, plan=plan)

    assert_same_model(drive(ready).params, two_rounds(fed, objective))


def test_uniform_aggregation() -> None:
    """Clients weigh the same, whatever their numbers of examples."""
    ready = ready_for({"name": "fedavg", "aggregation": "uniform"})

    assert_same_model(drive(ready).params, two_rounds(Federation(ready), plain, uniform=True))


@pytest.mark.parametrize(
    ("at_its_edge", "equivalent"),
    [
        ({"name": "fedprox", "mu": 0.0}, "fedavg"),
        ({"name": "fedntd", "beta": 0.0}, "fedavg"),
        ({"name": "kd_ntd", "mix": 1.0}, "fedntd"),
        ({"name": "kd_ntd", "mix": 0.0}, "kd"),
    ],
)
def test_a_method_at_its_edge_is_another(at_its_edge: dict[str, object], equivalent: str) -> None:
    assert_same_model(run_of(at_its_edge).params, run_of(equivalent).params)


def test_a_federation_of_one_client_is_plain_training() -> None:
    """Averaging one client's model changes nothing: without momentum the run is one run of SGD."""
    ready = ready_for(
        "fedavg",
        partition="iid",
        topology={"clients": 1},
        plan={"momentum": 0.0, "lr_decay": 1.0},
    )
    model = contract.build(ready.world.model(0)).double()
    model.load_state_dict(dict(ready.world.initial(0)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=PLAN["weight_decay"])
    x, y = Federation(ready).data(0)
    for round_index in (1, 2):
        for index in batches(len(y), PLAN, round_index, 0, 0):
            sgd.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            sgd.step()

    assert_same_model(drive(ready).params, model.state_dict())
