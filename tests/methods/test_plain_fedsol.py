"""FedSAM and FedSOL against plain implementations in two passes, and what each is at its edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from plain import PLAN, Federation, Params, ce, check, check_matters, drive, experiment, ready_for
from torch import Tensor, nn

import toys
from fedstill.config.resolve import resolve
from fedstill.core.capabilities import Need
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import Stage, TrainingStart
from fedstill.core.trees import same_bits
from fedstill.methods.fedsam import FedSAM
from fedstill.methods.fedsol import FedSOL
from fedstill.running.preparation import prepare

First = Callable[[nn.Module, nn.Module, Tensor, Tensor], Tensor]
STAGE = Stage(1, 0, "train", (0,))


def unsure(model: nn.Module, received: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    p, q = (received(x) / 3).softmax(1).detach(), (model(x) / 3).softmax(1)
    return (p * (p / q).log()).sum(1).mean()


def wrong(model: nn.Module, received: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(model, x, y)


def two_passes(
    fed: Federation,
    start: Params,
    round: int,
    client: int,
    first: First,
    rho: float,
    adaptive: bool,
    part: str = "",
):
    """One client: up the first objective, the gradient of the cross-entropy there, back, and a
    step.
    """
    model, received, (x, y) = fed.net(start), fed.net(start), fed.data(client)
    sgd = torch.optim.SGD(
        model.parameters(),
        lr=fed.lr(round),
        momentum=PLAN["momentum"],
        weight_decay=PLAN["weight_decay"],
    )
    order = generator(seed_for(7, round, 0, client, "order"))
    for _ in range(fed.epochs):
        for index in torch.randperm(len(y), generator=order).split(PLAN["batch"]):
            named = dict(model.named_parameters())
            up = torch.autograd.grad(
                first(model, received, x[index], y[index]), list(named.values())
            )
            length = sum((g**2).sum() for g in up) ** 0.5 + 1e-12
            before = {k: p.detach().clone() for k, p in named.items()}
            with torch.no_grad():
                for (name, p), g in zip(named.items(), up, strict=True):
                    left = (
                        any(not torch.equal(p, start[k]) for k, p in before.items())
                        or first is wrong
                    )
                    if name.startswith(part) and left:
                        p += rho * (moved(p - start[name]) if adaptive else 1) * g / length
            sgd.zero_grad()
            ce(model, x[index], y[index]).backward()
            with torch.no_grad():
                for name, p in named.items():
                    p.copy_(before[name])
            sgd.step()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def moved(change: Tensor) -> Tensor:
    """How far each entry has moved, in units of its column's, or of a whole bias's; zero where
    nothing has.
    """
    far = (change**2).sum(0, keepdim=True) ** 0.5
    return torch.where(far > 0, change.abs() / torch.where(far > 0, far, 1), 0)


@pytest.mark.parametrize(
    ("method", "first", "rho", "adaptive", "part"),
    [
        ({"name": "fedsam"}, wrong, 0.5, False, ""),
        ({"name": "fedsol"}, unsure, 1.0, True, ""),
        ({"name": "fedsol", "scale": "fixed", "rho": 0.4}, unsure, 0.4, False, ""),
        ({"name": "fedsol", "part": "head", "rho": 2.0}, unsure, 2.0, True, "head"),
        ({"name": "fedsol", "part": "body", "scale": "fixed"}, unsure, 1.0, False, "body"),
    ],
    ids=["fedsam", "adaptive", "fixed", "head", "body"],
)
def test_two_rounds_are_those_of_two_passes_written_out(
    method: dict[str, object], first: First, rho: float, adaptive: bool, part: str
) -> None:
    ready = ready_for(method)
    fed = Federation(ready)
    server = fed.start
    for round in (1, 2):
        sent = {
            c: two_passes(fed, server, round, c, first, rho, adaptive, part)
            for c in fed.cohort(round)
        }
        sizes = {c: len(fed.data(c)[1]) for c in sent}
        server = {
            k: sum(n * sent[c][k] for c, n in sizes.items()) / sum(sizes.values()) for k in server
        }
    ours = drive(ready)[0][-1].params
    check(ours, server)
    check_matters(ours, ready)


@pytest.mark.parametrize("name", ["fedsam", "fedsol"])
def test_at_rho_0_it_is_federated_averaging_to_the_bit(name: str) -> None:
    ours, theirs = (
        drive(ready_for(m))[0][-1].params for m in ({"name": name, "rho": 0.0}, "fedavg")
    )
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("scale", ["adaptive", "fixed"])
def test_the_first_step_of_a_client_is_fedavgs(scale: str) -> None:
    """There the divergence from the model received is zero, in float32 but for rounding."""
    once = experiment({"name": "fedsol", "scale": scale}, rounds=1, plan={"steps": 1, "epochs": 0})
    ours, theirs = (
        drive(prepare(resolve(e), toys.blobs()))[0][-1].params
        for e in (once, replace(once, method="fedavg"))
    )
    assert same_bits(ours, theirs)


def far(method: FedSAM | FedSOL, grads: Params, start: Params, now: Params) -> float:
    there = method.work(STAGE).perturb(
        now, grads, TrainingStart(start, constants={"received": start})
    )
    return float(sum(((there[k] - now[k]) ** 2).sum() for k in now) ** 0.5)


def test_the_point_is_as_far_away_as_rho_says() -> None:
    start = {k: v.double() for k, v in Federation(ready_for("fedavg")).start.items()}
    draw = torch.Generator().manual_seed(0)
    now, grads = (
        {
            k: v + scale * torch.randn(v.shape, generator=draw, dtype=v.dtype)
            for k, v in start.items()
        }
        for scale in (0.1, 1.0)
    )
    for rho in (0.3, 2.0):
        assert far(FedSAM(rho=rho), grads, start, now) == pytest.approx(rho)
        assert far(FedSOL(rho=rho, scale="fixed"), grads, start, now) == pytest.approx(rho)
        assert 0 < far(FedSOL(rho=rho), grads, start, now) < rho
    still = {k: torch.zeros_like(v) for k, v in grads.items()}
    for method in (FedSAM(), FedSOL(), FedSOL(scale="fixed")):
        assert far(method, still, start, start) == 0.0


def test_statistics_of_normalisation_stay_finite_and_are_averaged() -> None:
    ready = ready_for("fedsol", model="toy_batchnorm", plan={"lr": 0.02})
    assert all(bool(v.isfinite().all()) for v in drive(ready)[0][-1].params.values())


def test_a_part_needs_a_model_that_has_it() -> None:
    assert Need.HEAD not in FedSOL().requires()
    assert Need.HEAD in FedSOL(part="head").requires()
