"""Two rounds of the methods that distil from the global model, against a plain implementation of
each.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from plain import (
    MORE,
    PLAN,
    Federation,
    Params,
    average,
    ce,
    check,
    check_matters,
    drive,
    ready_for,
)
from torch import Tensor, nn

import toys

Term = Callable[[Tensor, Tensor, Tensor], Tensor]


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Per example, from probabilities."""
    return (p * (p / q).log()).sum(1)


def at(z: Tensor, y: Tensor) -> Tensor:
    return z[torch.arange(len(y)), y]


def others(z: Tensor, y: Tensor) -> Tensor:
    return torch.stack(
        [torch.cat([row[:c], row[c + 1 :]]) for row, c in zip(z, y.tolist(), strict=True)]
    )


def target(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    q, p = at(z.softmax(1), y), at(t.softmax(1), y)
    return p * (p / q).log()


def binary(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    q, p = (torch.stack([at(v.softmax(1), y), 1 - at(v.softmax(1), y)], 1) for v in (z, t))
    return kl(p, q)


def full(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    return kl(t.softmax(1), z.softmax(1))


def removed(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    return kl(others(t, y).softmax(1), others(z, y).softmax(1))


def pushed_down(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """The published DKD formula: 1000 off the label's logit before the softmax over all classes."""
    down = 1000 * nn.functional.one_hot(y, z.shape[1])
    return nn.functional.kl_div(
        (z - down).log_softmax(1), (t - down).softmax(1), reduction="none"
    ).sum(1)


def zeroed(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    keep = 1 - nn.functional.one_hot(y, z.shape[1])
    return kl((t * keep).softmax(1), (z * keep).softmax(1))


def sliced(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    p, q = others(t.softmax(1), y), others(z.softmax(1), y)
    return kl(p, q)


def decoupled(first: Term, second: Term, alpha: float, beta: float, tau: float):
    def loss(teacher: nn.Module, fed: Federation, client: int, phi: float):
        def value(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z, t = model(x) / tau, teacher(x).detach() / tau
            true, rest = first(z, t, y).mean(), second(z, t, y).mean()
            return ce(model, x, y) + phi * alpha * tau**2 * true + beta * tau**2 * rest

        return value

    return loss


def self_distilled(part: str, weight: float, tau: float, b1: float, b2: float):
    def loss(teacher: nn.Module, fed: Federation, client: int, phi: float):
        share = torch.tensor(fed.shares(client))

        def value(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z, t = model(x), teacher(x).detach()
            certain = t.softmax(1)
            entropy = -(certain * certain.log()).sum(1)
            raw = (-entropy).exp() ** b1 * (b2 * -share[y].log()).exp()
            each = (
                removed(z / tau, t / tau, y)
                if part == "not_true"
                else kl((t / tau).softmax(1), (z / tau).softmax(1))
            )
            return ce(model, x, y) + weight * (raw / raw.sum() * each).sum()

        return value

    return loss


def run_plainly(
    fed: Federation, loss, phis=lambda fed, cohort, known: dict.fromkeys(cohort, 1.0)
) -> Params:
    params, known = fed.start, {}
    for round in (1, 2):
        cohort = fed.cohort(round)
        phi, teacher = phis(fed, cohort, known), fed.net(params)
        params = average([fed.fit(params, loss(teacher, fed, c, phi[c]), round, c) for c in cohort])
        known |= {c: gini(fed, c) for c in cohort}
    return params


DKD = {"name": "feddkd", "alpha": 0.7, "beta": 0.6, "temperature": 2.0}


@pytest.mark.parametrize(
    ("fields", "first", "second"),
    [
        ({}, binary, removed),
        ({"tckd": "target"}, target, removed),
        ({"nckd_mode": "mask1000"}, binary, pushed_down),
        ({"nckd_mode": "zero"}, binary, zeroed),
        ({"nckd_mode": "slice"}, binary, sliced),
    ],
)
def test_feddkd(fields: dict[str, str], first: Term, second: Term) -> None:
    ready = ready_for({**DKD, **fields})
    ours = drive(ready)[0][-1].params
    tau = 2.0
    check(ours, run_plainly(Federation(ready), decoupled(first, second, 0.7, 0.6, tau)))
    check_matters(ours, ready)


def test_feddkd_of_two_groups() -> None:
    """Of six clients the first three have an alpha of their own."""
    ready = ready_for(
        {"name": "feddkd_groups", "alpha": 0.4, "alpha_first": 2.0, "first": 0.5, "beta": 0.6}
    )
    ours, fed = drive(ready)[0][-1].params, Federation(ready)

    def of_group(fed: Federation, cohort: list[int], known: dict[int, float]) -> dict[int, float]:
        return {c: 2.0 / 0.4 if c in (0, 1, 2) else 1.0 for c in cohort}

    loss = decoupled(target, removed, 0.4, 0.6, 1.0)
    check(ours, run_plainly(fed, loss, of_group))
    check_matters(ours, ready)
    for alpha in (0.4, 2.0):
        same = run_plainly(fed, decoupled(target, removed, alpha, 0.6, 1.0))
        assert max(float((ours[k] - same[k]).abs().max()) for k in ours) > 1e-4


def gini(fed: Federation, client: int) -> float:
    return float(1 - (fed.shares(client) ** 2).sum())


def phis(timing: str, source: str, delta: float):
    """phi of a cohort: of what each has said of itself so far (1 at first), or of all from the
    start.
    """

    def of(fed: Federation, cohort: list[int], known: dict[int, float]) -> dict[int, float]:
        g = {c: gini(fed, c) if timing == "exact" else known.get(c, 1.0) for c in cohort}
        f = {c: math.log(1 + delta * v) if source == "f" else v for c, v in g.items()}
        return {c: len(cohort) * v / sum(f.values()) for c, v in f.items()}

    return of


@pytest.mark.parametrize("timing", ["stale", "exact"])
@pytest.mark.parametrize("source", ["f", "G"])
@pytest.mark.parametrize(
    ("tckd", "first"), [("target", target), ("binary", binary), ("full", full)]
)
def test_fedadkd(timing: str, source: str, tckd: str, first: Term) -> None:
    fields = {
        "alpha": 0.8,
        "beta": 0.5,
        "delta": 3.0,
        "phi_timing": timing,
        "phi_source": source,
        "tckd": tckd,
    }
    ready = ready_for(
        {"name": "fedadkd", **fields}, partition={"kind": "dirichlet", "alpha": 0.3, "min_size": 4}
    )
    ours = drive(ready)[0][-1].params
    fed, loss = Federation(ready), decoupled(first, removed, 0.8, 0.5, 1.0)
    check(ours, run_plainly(fed, loss, phis(timing, source, 3.0)))
    check_matters(ours, ready)
    without_phi = run_plainly(fed, loss)
    assert max(float((ours[k] - without_phi[k]).abs().max()) for k in ours) > 1e-4


@pytest.mark.parametrize(("name", "part"), [("fedavg_asd", "all"), ("fedntd_asd", "not_true")])
@pytest.mark.parametrize("powers", [(1.0, 1.0), (0.5, 2.0)])
def test_asd(name: str, part: str, powers: tuple[float, float]) -> None:
    b1, b2 = powers
    method = {"name": name, "weight": 0.8, "temperature": 2.0, "b1": b1, "b2": b2}
    ready = ready_for(method, MORE)
    ours = drive(ready)[0][-1].params
    check(ours, run_plainly(Federation(ready), self_distilled(part, 0.8, 2.0, b1, b2)))
    check_matters(ours, ready)


@pytest.mark.parametrize("powers", [{"b1": 1000.0}, {"b2": 1000.0}])
def test_asd_weights_stay_finite_at_any_power(powers: dict[str, float]) -> None:
    ready = ready_for({"name": "fedntd_asd", **powers})
    assert all(bool(v.isfinite().all()) for v in drive(ready)[0][-1].params.values())


def test_the_plain_plan_is_the_one_that_runs() -> None:
    plan = ready_for("fedavg").settings.plans["train"]
    assert {k: getattr(plan, k) for k in PLAN} == PLAN
    assert np.isclose(Federation(ready_for("fedavg")).shares(0).sum(), 1)
    assert toys.CLASSES == 5
