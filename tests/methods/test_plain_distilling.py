"""Two rounds of the methods that distil from the global model, against a plain implementation of
each.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain import (
    MANY_EXAMPLES,
    PLAN,
    Federation,
    Loss,
    all_finite,
    assert_same_model,
    assert_unlike_fedavg,
    ce,
    drive,
    kl,
    largest_gap,
    ready_for,
    run_of,
    without_labels,
)
from plain_distillation import (
    Decoupled,
    Objective,
    Term,
    binary,
    distil_in_parallel,
    full,
    not_true,
    phi_by_gini,
    target,
)
from torch import Tensor, nn

import toys


def pushed_down(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """The published DKD formula: 1000 off the label's logit before the softmax over all classes."""
    down = 1000 * nn.functional.one_hot(y, z.shape[1])
    student = (z - down).log_softmax(1)
    teacher = (t - down).softmax(1)
    return nn.functional.kl_div(student, teacher, reduction="none").sum(1)


def zeroed(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """The divergence after the label's logit is set to 0."""
    mask = 1 - nn.functional.one_hot(y, z.shape[1])
    return kl((t * mask).softmax(1), (z * mask).softmax(1))


def sliced(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """The divergence of the other classes' probabilities, which do not sum to 1."""
    return kl(without_labels(t.softmax(1), y), without_labels(z.softmax(1), y))


@pytest.mark.parametrize(
    ("fields", "on_label", "on_other_classes"),
    [
        ({}, binary, not_true),
        ({"tckd": "target"}, target, not_true),
        ({"nckd_mode": "mask1000"}, binary, pushed_down),
        ({"nckd_mode": "zero"}, binary, zeroed),
        ({"nckd_mode": "slice"}, binary, sliced),
    ],
)
def test_feddkd(fields: dict[str, str], on_label: Term, on_other_classes: Term) -> None:
    """Each form of the two losses has the weights and the temperature of the method."""
    method = {"name": "feddkd", "alpha": 0.7, "beta": 0.6, "temperature": 2.0}
    ready = ready_for({**method, **fields})
    objective = Decoupled(on_label, on_other_classes, alpha=0.7, beta=0.6, temperature=2.0)

    ours = drive(ready).params

    assert_same_model(ours, distil_in_parallel(Federation(ready), objective))
    assert_unlike_fedavg(ours, ready)


def test_feddkd_of_two_groups() -> None:
    """Of six clients the first three have another alpha."""
    method = {
        "name": "feddkd_groups",
        "alpha": 0.4,
        "alpha_first": 2.0,
        "first": 0.5,
        "beta": 0.6,
    }
    ready = ready_for(method)
    fed = Federation(ready)

    def phi_of_groups(
        fed: Federation, cohort: list[int], reported: dict[int, float]
    ) -> dict[int, float]:
        phi = dict.fromkeys(cohort, 1.0)
        for client in {0, 1, 2} & set(cohort):
            phi[client] = 2.0 / 0.4
        return phi

    ours = drive(ready).params

    objective = Decoupled(target, not_true, alpha=0.4, beta=0.6)
    assert_same_model(ours, distil_in_parallel(fed, objective, phi_of_groups))
    assert_unlike_fedavg(ours, ready)
    for alpha in (0.4, 2.0):
        objective = Decoupled(target, not_true, alpha=alpha, beta=0.6)
        of_one_group = distil_in_parallel(fed, objective)
        assert largest_gap(ours, of_one_group) > 1e-4


@pytest.mark.parametrize("timing", ["stale", "exact"])
@pytest.mark.parametrize("source", ["f", "G"])
@pytest.mark.parametrize(
    ("tckd", "on_label"), [("target", target), ("binary", binary), ("full", full)]
)
def test_fedadkd(timing: str, source: str, tckd: str, on_label: Term) -> None:
    """Clients with more varied labels distil more on the label."""
    method = {
        "name": "fedadkd",
        "alpha": 0.8,
        "beta": 0.5,
        "delta": 3.0,
        "phi_timing": timing,
        "phi_source": source,
        "tckd": tckd,
    }
    ready = ready_for(method, partition={"kind": "dirichlet", "alpha": 0.3, "min_size": 4})
    fed = Federation(ready)
    objective = Decoupled(on_label, not_true, alpha=0.8, beta=0.5)

    ours = drive(ready).params

    phis = phi_by_gini(timing, source, delta=3.0)
    assert_same_model(ours, distil_in_parallel(fed, objective, phis))
    assert_unlike_fedavg(ours, ready)
    without_phi = distil_in_parallel(fed, objective)
    assert largest_gap(ours, without_phi) > 1e-4


def self_distilled(part: Term, b1: float, b2: float) -> Objective:
    """An example counts more if its teacher is certain, and if its label is rare."""
    weight = 0.8
    tau = 2.0

    def objective(fed: Federation, teacher: nn.Module, client: int, phi: float) -> Loss:
        share = torch.tensor(fed.shares(client))

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = model(x)
            t = teacher(x).detach()
            p = t.softmax(1)
            entropy = -(p * p.log()).sum(1)
            certainty = (-entropy).exp() ** b1
            rarity = (b2 * -share[y].log()).exp()
            weights = certainty * rarity / (certainty * rarity).sum()
            return ce(model, x, y) + weight * (weights * part(z / tau, t / tau, y)).sum()

        return loss

    return objective


@pytest.mark.parametrize(("name", "part"), [("fedavg_asd", full), ("fedntd_asd", not_true)])
@pytest.mark.parametrize(("b1", "b2"), [(1.0, 1.0), (0.5, 2.0)])
def test_asd(name: str, part: Term, b1: float, b2: float) -> None:
    """Adaptive self-distillation weighs examples within a batch."""
    method = {"name": name, "weight": 0.8, "temperature": 2.0, "b1": b1, "b2": b2}
    ready = ready_for(method, MANY_EXAMPLES)

    ours = drive(ready).params

    objective = self_distilled(part, b1, b2)
    assert_same_model(ours, distil_in_parallel(Federation(ready), objective))
    assert_unlike_fedavg(ours, ready)


@pytest.mark.parametrize("powers", [{"b1": 1000.0}, {"b2": 1000.0}])
def test_asd_weights_stay_finite_at_any_power(powers: dict[str, float]) -> None:
    assert all_finite(run_of({"name": "fedntd_asd", **powers}).params)


def test_the_plan_of_the_plain_implementation_is_the_one_that_runs() -> None:
    """And the shares of classes, which objectives use, sum to 1."""
    ready = ready_for("fedavg")

    plan = ready.settings.plans["train"]
    assert {key: getattr(plan, key) for key in PLAN} == PLAN
    assert np.isclose(Federation(ready).shares(0).sum(), 1)
    assert toys.CLASSES == 5
