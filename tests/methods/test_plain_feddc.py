"""FedDC against a plain implementation, and what it is when a part of it is left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from plain import Federation, Params, average, ce, check, check_matters, drive, ready_for
from torch import Tensor, nn

from fedstill.core.records import Payload, State, World
from fedstill.methods.feddc import FedDC

PLAIN = {"momentum": 0.0, "clip_norm": 0.0}
EVEN = {"partition": "iid", "plan": PLAIN}


def zeros(like: Params) -> Params:
    return {k: torch.zeros_like(v) for k, v in like.items()}


@pytest.mark.parametrize("aggregation", ["uniform", "examples"])
def test_three_rounds_are_those_of_a_plain_implementation(aggregation: str) -> None:
    alpha, rate = 0.3, 0.1
    ready = ready_for(
        {"name": "feddc", "alpha": alpha, "aggregation": aggregation}, rounds=3, plan=PLAIN
    )
    fed = Federation(ready)
    sizes = [len(fed.data(c)[1]) for c in range(6)]
    v = [6 * n / sum(sizes) for n in sizes]
    w, g = fed.start, zeros(fed.start)
    drifts, gradients = ([zeros(w) for _ in range(6)] for _ in range(2))
    for round in (1, 2, 3):
        sent, change = [], zeros(w)
        for c in fed.cohort(round):

            def loss(
                model: nn.Module, x: Tensor, y: Tensor, c: int = c, w: Params = w, g: Params = g
            ) -> Tensor:
                now = dict(model.named_parameters())
                far = sum(((now[k] - (w[k] - drifts[c][k])) ** 2).sum() for k in now)
                slope = sum((now[k] * (g[k] / v[c] - gradients[c][k])).sum() for k in now)
                return ce(model, x, y) + alpha / v[c] / 2 * far + slope

            done = fed.fit(w, loss, round, c, momentum=0.0)
            way = done.steps * rate * 0.9 ** (round - 1)
            for k in w:
                new = gradients[c][k] - g[k] / v[c] + (w[k] - done.params[k]) / way
                change[k] += (new - gradients[c][k]) * v[c] / 6
                gradients[c][k] = new
                drifts[c][k] = drifts[c][k] + done.params[k] - w[k]
            sent.append(done)
        mean = average(sent, uniform=aggregation == "uniform")
        w = {k: mean[k] + sum(h[k] for h in drifts) / 6 for k in w}
        g = {k: g[k] + change[k] for k in g}
    states, memory = drive(ready)
    check(states[-1].params, w)
    check(states[-1].extra.tensors("gradient"), g)
    check_matters(states[-1].params, ready, rounds=3)
    for c in range(6):
        if memory.load(c):
            check(memory.load(c).tensors("drift"), drifts[c])
            check(memory.load(c).tensors("gradient"), gradients[c])


@dataclass(frozen=True)
class WithoutGradients(FedDC):
    """FedDC that never learns a direction: g and all g_k stay 0."""

    def aggregate(self, state: State, replies: list, stage: object, world: World) -> State:  # type: ignore[override]
        return (
            super()
            .aggregate(state, replies, stage, world)
            .next(gradient=state.extra.tensors("gradient"))
        )  # type: ignore[arg-type]

    def work(self, stage: object) -> object:  # type: ignore[override]
        return forgetful(super().work(stage))  # type: ignore[arg-type]


def forgetful(work: object) -> object:
    """The same work, of which the client forgets its gradient."""

    class Forgetful(type(work)):  # type: ignore[misc]
        def end(self, params, start, result, view, world):  # type: ignore[no-untyped-def]
            up, memory = super().end(params, start, result, view, world)
            return up, Payload(memory, gradient=start["gradient"])

    return Forgetful(work.method)  # type: ignore[attr-defined]


def test_without_gradients_it_is_feddyn() -> None:
    """Its linear term is that of the drift, and the server's h the sum of drifts."""
    ready = ready_for({"name": "feddc", "alpha": 0.3}, rounds=3, **EVEN)
    assert {len(p) for p in ready.sites.split.tensors()} == {25}
    method = WithoutGradients(alpha=0.3)
    schedule = replace(ready.settings.schedule, method=method)
    alone = replace(ready, settings=replace(ready.settings, schedule=schedule))
    ours, dyn = (
        drive(alone)[0],
        drive(ready_for({"name": "feddyn", "alpha": 0.3}, rounds=3, **EVEN))[0],
    )
    check(ours[-1].params, dyn[-1].params)
    h = {k: -0.3 * d for k, d in ours[-1].extra.tensors("drift").items()}
    check(h, dyn[-1].extra.tensors("h"))
    whole = drive(ready)[0][-1].params
    assert max(float((whole[k] - v).abs().max()) for k, v in dyn[-1].params.items()) > 1e-3


def test_the_first_round_is_fedprox_and_a_step_along_the_mean_drift() -> None:
    ready = ready_for({"name": "feddc", "alpha": 0.3}, rounds=1, **EVEN)
    prox = drive(
        ready_for({"name": "fedprox", "mu": 0.3, "aggregation": "uniform"}, rounds=1, **EVEN)
    )[0][-1].params
    start, sampled = ready.world.initial(0), 4
    check(
        drive(ready)[0][-1].params, {k: v + sampled / 6 * (v - start[k]) for k, v in prox.items()}
    )


def test_the_servers_gradient_is_the_mean_of_the_clients_when_all_take_part() -> None:
    ready = ready_for({"name": "feddc"}, rounds=3, topology={"clients": 6}, **EVEN)
    states, memory = drive(ready)
    for group in ("gradient", "drift"):
        means = {
            k: torch.stack([memory.load(c).tensors(group)[k] for c in range(6)]).mean(0)
            for k in states[-1].extra.tensors(group)
        }
        check(states[-1].extra.tensors(group), means)
        assert any(bool(v.any()) for v in means.values())
