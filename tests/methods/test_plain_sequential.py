"""Two rounds of the sequential family, and of other objectives on a chain, against a plain
implementation of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import pytest
import torch
from plain import (
    MORE,
    Federation,
    Loss,
    Params,
    Sent,
    average,
    ce,
    check,
    check_matters,
    drive,
    minus,
    norm,
    ready_for,
)
from test_plain_distilling import at, binary, decoupled, gini, kl, removed
from torch import Tensor, nn

from double import NEAR
from fedstill.core.keys import generator, seed_for
from fedstill.running.preparation import Prepared

CHAIN = {"kind": "sequential", "clients": 6, "sampled": 4}
SIDE_BY_SIDE = {"kind": "parallel", "clients": 6, "sampled": 4}
SKEWED = {"kind": "dirichlet", "alpha": 0.3, "min_size": 4}
Teachers = list[tuple[int, nn.Module]]
Objective = Callable[[Federation, Teachers, int], Loss]
Choose = Callable[[Federation, list[int], int], list[int]]


def plainly(
    fed: Federation, objective: Objective, choose: Choose, chain: bool = True, rounds: int = 2
) -> Params:
    """Teachers are the last round's models, as each client left them."""
    params, last = fed.start, {}
    for round in range(1, rounds + 1):
        picked = sorted(choose(fed, list(last), round)) if last else []
        teachers = [(c, fed.net(last[c]).eval()) for c in picked]
        sent: list[Sent] = []
        for link, client in enumerate(fed.chain(round) if chain else fed.cohort(round)):
            stage = link if chain else 0
            sent.append(
                fed.fit(params, objective(fed, teachers, client), round, client, stage=stage)
            )
            params = sent[-1].params if chain else params
        params = params if chain else average(sent)
        last = {s.client: s.params for s in sent}
    return params


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    return float(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))


def greedy(k: int) -> Choose:
    """Algorithm 1 with KL: add the model that brings the sum of label shares nearest to uniform."""

    def choose(fed: Federation, candidates: list[int], round: int) -> list[int]:
        chosen: list[int] = []
        left = list(candidates)
        while left and len(chosen) < k:

            def far(c: int, chosen: list[int] = chosen) -> float:
                total = sum(fed.shares(i) for i in [*chosen, c])
                return divergence(total / total.sum(), np.full(len(total), 1 / len(total)))

            best = min(left, key=far)
            chosen.append(best)
            left.remove(best)
        return chosen

    return choose


def at_random(k: int) -> Choose:
    def choose(fed: Federation, candidates: list[int], round: int) -> list[int]:
        draw = generator(seed_for(7, round, 0, -1, "teachers"))
        return [candidates[i] for i in torch.randperm(len(candidates), generator=draw).tolist()[:k]]

    return choose


def weights(
    fed: Federation, teachers: Sequence[int], client: int, s: float = 1e-4
) -> tuple[list[float], list[float]]:
    smooth = lambda p: (p + s) / (1 + len(p) * s)  # noqa: E731
    d = [divergence(smooth(fed.shares(t)), smooth(fed.shares(client))) for t in teachers]
    near = [1 / (x + 1e-4) for x in d]
    return [x / sum(d) for x in d], [x / sum(near) for x in near]


def sfedkd(
    gamma: float, beta: float, tau: float, scale: float, g_on: bool, h_on: bool, s: float = 1e-4
) -> Objective:
    def objective(fed: Federation, teachers: Teachers, client: int) -> Loss:
        if not teachers:
            return ce
        k = len(teachers)
        g, h = weights(fed, [c for c, _ in teachers], client, s)
        g, h = g if g_on else [1 / k] * k, h if h_on else [1 / k] * k

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z, total = model(x) / tau, ce(model, x, y)
            for (_, net), gk, hk in zip(teachers, g, h, strict=True):
                t = net(x).detach() / tau
                total = total + scale * gamma * gk * removed(z, t, y).mean()
                total = total + scale * beta * hk * binary(z, t, y).mean()
            return total

        return loss

    return objective


SFEDKD = {"name": "sfedkd", "k": 2, "gamma": 0.7, "beta": 1.3, "temperature": 2.0}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, sfedkd(0.7, 1.3, 2.0, 1.0, True, True)),
        ({"g": False}, sfedkd(0.7, 1.3, 2.0, 1.0, False, True)),
        ({"h": False}, sfedkd(0.7, 1.3, 2.0, 1.0, True, False)),
        ({"g": False, "h": False}, sfedkd(0.7, 1.3, 2.0, 1.0, False, False)),
        ({"tau2_scale": True}, sfedkd(0.7, 1.3, 2.0, 4.0, True, True)),
        ({"smoothing": 0.01}, sfedkd(0.7, 1.3, 2.0, 1.0, True, True, 0.01)),
    ],
)
@pytest.mark.parametrize("chain", [True, False])
def test_sfedkd(fields: dict[str, object], expected: Objective, chain: bool) -> None:
    ready = ready_for(
        {**SFEDKD, **fields}, topology=CHAIN if chain else SIDE_BY_SIDE, partition=SKEWED
    )
    fed = Federation(ready)
    ours = drive(ready)[0][-1].params
    check(ours, plainly(fed, expected, greedy(2), chain))
    check_differs(ours, plainly(fed, lambda *_: ce, greedy(2), chain))


def check_differs(ours: Params, other: Params) -> None:
    assert norm(minus({k: ours[k] for k in other}, other)) > 1e-3 * norm(other)


@pytest.mark.parametrize(
    ("fields", "choose"),
    [
        ({"teacher_choice": "random"}, at_random(2)),
        ({"teacher_choice": "all"}, lambda fed, candidates, round: candidates),
        ({"k": 9}, lambda fed, candidates, round: candidates),
    ],
)
def test_the_choice_of_teachers(fields: dict[str, object], choose: Choose) -> None:
    ready = ready_for({**SFEDKD, **fields}, partition=SKEWED, rounds=3)
    fed = Federation(ready)
    check(
        drive(ready)[0][-1].params,
        plainly(fed, sfedkd(0.7, 1.3, 2.0, 1.0, True, True), choose, rounds=3),
    )


def full(z: Tensor, t: Tensor) -> Tensor:
    return kl(t.softmax(1), z.softmax(1))


def several(name: str, a: float, tau: float, b: float = 0.0) -> Objective:
    def objective(fed: Federation, teachers: Teachers, client: int) -> Loss:
        if not teachers:
            return ce
        nets, k, batch = [n for _, n in teachers], len(teachers), count()
        batches = math.ceil(len(fed.data(client)[1]) / 10)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            epoch, logits = next(batch) // batches, [n(x).detach() for n in nets]
            far = torch.stack([tau**2 * full(model(x) / tau, t / tau) for t in logits])  # (K, B)
            if name == "aver":
                return ce(model, x, y) + a * far.mean()
            if name == "ebkd":
                h = torch.stack([-(t.softmax(1) * t.softmax(1).log()).sum(1) for t in logits])
                w = torch.ones_like(h) if k == 1 else 1 - h / h.sum(0)
                return ce(model, x, y) + a * (w * far).sum() / (len(y) * k)
            total = ce(model, x, y) + a * (confident(logits, y) * far).sum() / (len(y) * k)
            if b and epoch > 0:
                z = model.body(x)
                w = confident([n.head(z) for n in nets], y)
                apart = torch.stack([((z - n.body(x).detach()) ** 2).mean(1) for n in nets])
                total = total + b * (w * apart).sum() / (len(y) * k)
            return total

        return loss

    return objective


def confident(logits: list[Tensor], y: Tensor) -> Tensor:
    if len(logits) == 1:
        return torch.ones(1, len(y)).double()
    cost = torch.stack([-at(t.softmax(1), y).log() for t in logits])
    return (1 - cost.softmax(0)) / (len(logits) - 1)


@pytest.mark.parametrize(
    ("fields", "expected", "k"),
    [
        ({"name": "aver"}, several("aver", 0.8, 3.0), 3),
        ({"name": "ebkd"}, several("ebkd", 0.8, 3.0), 3),
        ({"name": "ebkd"}, several("ebkd", 0.8, 3.0), 1),
        ({"name": "camkd"}, several("camkd", 0.8, 3.0), 3),
        ({"name": "camkd"}, several("camkd", 0.8, 3.0), 1),
        ({"name": "camkd", "feature_weight": 0.5}, several("camkd", 0.8, 3.0, 0.5), 3),
        ({"name": "camkd", "feature_weight": 0.5}, several("camkd", 0.8, 3.0, 0.5), 1),
    ],
)
@pytest.mark.parametrize("chain", [True, False])
def test_several_teachers(
    fields: dict[str, object], expected: Objective, k: int, chain: bool
) -> None:
    ready = ready_for(
        {"weight": 0.8, "temperature": 3.0, "k": k, **fields},
        topology=CHAIN if chain else SIDE_BY_SIDE,
    )
    ours = drive(ready)[0][-1].params
    check(ours, plainly(Federation(ready), expected, greedy(k), chain))
    check_differs(ours, plainly(Federation(ready), lambda *_: ce, greedy(k), chain))


@pytest.mark.parametrize("name", ["fedseq", "fedavg"])
def test_fedseq(name: str) -> None:
    ready = ready_for(name, topology=CHAIN)
    ours = drive(ready)[0][-1].params
    check(ours, plainly(Federation(ready), lambda *_: ce, greedy(0)))
    check_matters(ours, ready)


class Consolidation:
    """The code's own bookkeeping: a queue of omegas, a shadow that is folded when a cycle is
    full.
    """

    def __init__(self, mode: str, a: float, cycle: int) -> None:
        self.mode, self.a, self.cycle = mode, a, cycle
        self.queue: list[Params] = []
        self.shadow: Params | None = None

    def add(self, omega: Params) -> None:
        self.queue.append(omega)
        if self.mode == "sliding":
            self.queue = self.queue[-self.cycle :]
        elif self.mode == "ema" and len(self.queue) == self.cycle:
            self.shadow, self.queue = {k: self.a * v for k, v in self.total(omega).items()}, []

    def total(self, like: Params) -> Params:
        kept = [*self.queue, *([self.shadow] if self.shadow else [])]
        return {k: sum((o[k] for o in kept), torch.zeros_like(like[k])) for k in like}


@pytest.mark.parametrize(
    "fields",
    [{}, {"lseg": True}, {"clamp": True}, {"memory": "sliding"}, {"memory": "sum"}, {"decay": 0.0}],
    ids=str,
)
def test_cwc(fields: dict[str, object]) -> None:
    values = {"name": "cwc", "weight": 0.05, "decay": 0.4, "epsilon": 0.02, **fields}
    ready = ready_for(values, MORE, rounds=3, plan={"lr": 0.02})
    fed = Federation(ready)
    fed.lr = lambda round: 0.02 * 0.9 ** (round - 1)  # type: ignore[method-assign]
    store = Consolidation(str(values.get("memory", "ema")), float(values["decay"]), 4)  # type: ignore[arg-type]
    params = fed.start
    for round in (1, 2, 3):
        for link, client in enumerate(fed.chain(round)):
            start, omega = params, store.total(params)
            path = {k: torch.zeros_like(v) for k, v in start.items()}

            def penalty(now: Params, start: Params = start, omega: Params = omega) -> Tensor:
                return 0.05 * sum((omega[k] * (now[k] - start[k]) ** 2).sum() for k in omega)

            def loss(model: nn.Module, x: Tensor, y: Tensor, penalty=penalty) -> Tensor:
                return ce(model, x, y) + penalty(dict(model.named_parameters()))

            def watch(
                before: Params, grads: Params, after: Params, path: Params = path, penalty=penalty
            ) -> None:
                if fields.get("lseg"):
                    at_before = {k: v.clone().requires_grad_() for k, v in before.items()}
                    extra = torch.autograd.grad(
                        penalty(at_before), list(at_before.values()), allow_unused=True
                    )
                    grads = {k: grads[k] - e for k, e in zip(at_before, extra, strict=True)}
                for k in path:
                    path[k] += -grads[k] * (after[k] - before[k])

            params = fed.fit(params, loss, round, client, stage=link, watch=watch).params
            found = {k: path[k] / ((params[k] - start[k]) ** 2 + 0.02) for k in path}
            store.add(
                {k: v.clamp(min=0) for k, v in found.items()} if fields.get("clamp") else found
            )
    states = drive(ready)[0]
    check(states[-1].params, params)
    check_differs(params, plainly(fed, lambda *_: ce, greedy(0), rounds=3))
    if values.get("memory", "ema") == "ema":  # the library decays when the next round opens
        theirs = store.total(params)
        ours = {
            k: float(values["decay"]) * v for k, v in states[-1].extra.tensors("importance").items()
        }  # type: ignore[arg-type]
        for k in theirs:
            torch.testing.assert_close(ours[k], theirs[k], rtol=NEAR, atol=NEAR)


def on_a_chain(
    ready: Prepared, loss: Callable[[nn.Module, Federation, int, float], Loss], phis=None
) -> Params:
    """Every objective that distils from the model received: on a chain, from the model handed
    over.
    """
    fed = Federation(ready)
    params, known = fed.start, {}
    for round in (1, 2):
        order = fed.chain(round)
        phi = phis(fed, order, known) if phis else dict.fromkeys(order, 1.0)
        for link, c in enumerate(order):
            params = fed.fit(
                params, loss(fed.net(params).eval(), fed, c, phi[c]), round, c, stage=link
            ).params
        known |= {c: gini(fed, c) for c in order}
    return params


@pytest.mark.parametrize("timing", ["stale", "exact"])
def test_fedadkd_on_a_chain_shares_phi_out_among_the_rounds_clients(timing: str) -> None:
    fields = {"alpha": 0.8, "beta": 0.5, "delta": 3.0, "phi_timing": timing, "tckd": "binary"}
    ready = ready_for({"name": "fedadkd", **fields}, topology=CHAIN, partition=SKEWED)

    def phis(fed: Federation, cohort: list[int], known: dict[int, float]) -> dict[int, float]:
        g = {c: gini(fed, c) if timing == "exact" else known.get(c, 1.0) for c in cohort}
        f = {c: math.log(1 + 3.0 * v) for c, v in g.items()}
        return {c: len(cohort) * v / sum(f.values()) for c, v in f.items()}

    loss = decoupled(binary, removed, 0.8, 0.5, 1.0)
    ours = drive(ready)[0][-1].params
    check(ours, on_a_chain(ready, loss, phis))
    check_differs(ours, on_a_chain(ready, loss))


def test_fedntd_on_a_chain() -> None:
    ready = ready_for({"name": "fedntd", "beta": 0.6, "temperature": 2.0}, topology=CHAIN)
    check(drive(ready)[0][-1].params, on_a_chain(ready, decoupled(binary, removed, 0.0, 0.6, 2.0)))


def test_fedprox_on_a_chain_stays_near_the_model_handed_over() -> None:
    ready = ready_for({"name": "fedprox", "mu": 0.5}, topology=CHAIN)

    def loss(teacher: nn.Module, fed: Federation, client: int, phi: float) -> Loss:
        anchor = [p.detach().clone() for p in teacher.parameters()]

        def distance(model: nn.Module) -> Tensor:
            pairs = zip(model.parameters(), anchor, strict=True)
            return torch.stack([((p - a) ** 2).sum() for p, a in pairs]).sum()

        return lambda model, x, y: ce(model, x, y) + 0.5 / 2 * distance(model)

    check(drive(ready)[0][-1].params, on_a_chain(ready, loss))


def test_scaffold_on_a_chain() -> None:
    ready = ready_for("scaffold", topology=CHAIN, rounds=3, plan={"lr": 0.02})
    fed = Federation(ready)
    fed.lr = lambda round: 0.02 * 0.9 ** (round - 1)  # type: ignore[method-assign]
    params = fed.start
    c = {k: torch.zeros_like(v) for k, v in params.items()}
    own: dict[int, Params] = {}
    for round in (1, 2, 3):
        for link, client in enumerate(fed.chain(round)):
            mine = own.get(client, {k: torch.zeros_like(v) for k, v in c.items()})
            done = fed.fit(params, ce, round, client, minus(c, mine), stage=link)
            own[client] = {
                k: mine[k] - c[k] + (params[k] - done.params[k]) / (fed.lr(round) * done.reach)
                for k in c
            }
            c = {k: c[k] + (own[client][k] - mine[k]) / 6 for k in c}
            params = done.params
    states, _ = drive(ready)
    check(states[-1].params, params)
    check(states[-1].extra.tensors("control"), c)
