"""The methods that change directions or the server's step, against a plain implementation of
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from plain import (
    Federation,
    Params,
    Sent,
    average,
    ce,
    check,
    check_matters,
    drive,
    minus,
    ready_for,
)
from torch import Tensor, nn

from fedstill.core.records import Payload, Reply

MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.9])


def zeros(params: Params) -> Params:
    return {k: torch.zeros_like(v) for k, v in params.items()}


def plus(*terms: Mapping[str, Tensor]) -> Params:
    return {k: sum(t[k] for t in terms) for k in terms[0]}


def direction(start: Params, sent: Sent, lr: float, by: float) -> Params:
    return minus(start, sent.params, 1 / (lr * by))


def nova(fed: Federation, rounds: int, ccvr: str, momentum: float, uniform: bool) -> Params:
    params, everybody = fed.start, zeros(fed.start)
    own: dict[int, Params] = {}
    total = sum(len(fed.data(c)[1]) for c in range(6))
    for round in range(1, rounds + 1):
        sent = []
        for c in fed.cohort(round):
            shift = None if ccvr == "off" else minus(everybody, own.get(c, zeros(params)))
            sent.append(fed.fit(params, ce, round, c, shift, momentum))
        weights = [1 if uniform else s.examples for s in sent]
        p = [w / sum(weights) for w in weights]
        tau = sum(pi * s.reach for pi, s in zip(p, sent, strict=True))
        mean = plus(*(minus(params, s.params, pi / s.reach) for pi, s in zip(p, sent, strict=True)))
        for s in sent:
            own[s.client] = direction(params, s, fed.lr(round), s.reach)
        if ccvr == "full":
            keep = 1 - sum(s.examples for s in sent) / total
            each = [{k: s.examples / total * v for k, v in own[s.client].items()} for s in sent]
            everybody = plus({k: keep * v for k, v in everybody.items()}, *each)
        params = {k: params[k] - tau * mean[k] for k in params}
    return params


@MOMENTA
@pytest.mark.parametrize("ccvr", ["off", "repo", "full"])
def test_fednova(ccvr: str, momentum: float) -> None:
    ready = ready_for(
        {"name": "fednova", "ccvr": ccvr}, rounds=3, plan={"momentum": momentum, "lr": 0.1}
    )
    fed = Federation(ready)
    assert set(fed.cohort(1)) & set(fed.cohort(2)) & set(fed.cohort(3)), "a client must come back"
    ours = drive(ready)[0][-1].params
    check(ours, nova(fed, 3, ccvr, momentum, uniform=False))
    check_matters(ours, ready, rounds=3)


def test_fednovas_global_direction_is_the_mean_of_all_clients_that_take_part() -> None:
    """Also where clients hold examples out, which the census counts and their replies do not."""
    ready = ready_for(
        {"name": "fednova", "ccvr": "full"}, topology={"clients": 6}, plan={"validation": 0.3}
    )
    states, memory = drive(ready)
    counts = states[-1].extra.tensor("labels").sum(1).double()
    shares = (counts / counts.sum()).tolist()
    own = [memory.load(client).tensors("direction") for client in range(6)]
    each = [{k: p * v for k, v in d.items()} for p, d in zip(shares, own, strict=True)]
    check(states[-1].extra.tensors("direction"), plus(*each))


@pytest.mark.parametrize("answered", [0, 1, 5])
def test_fednovas_global_direction_without_the_census_of_some_clients(answered: int) -> None:
    ready = ready_for({"name": "fednova", "ccvr": "full"}, topology={"clients": 6})
    method, world = ready.settings.method, ready.world
    state = drive(ready)[0][-1]
    labels = state.extra.tensor("labels").clone()
    labels[answered:] = 0
    unmoved = Payload(params=state.params, steps=1.0)
    replies = [Reply(client, unmoved, 10) for client in range(6)]
    stage = ready.settings.schedule(2, world)[-1]

    after = method.aggregate(state.next(labels=labels), replies, stage, world)

    before = state.extra.tensors("direction")
    if answered:  # all counted clients report a direction of zero
        before = zeros(before)
    check(after.extra.tensors("direction"), before)


def test_fednova_uniform() -> None:
    ready = ready_for({"name": "fednova", "aggregation": "uniform"})
    check(drive(ready)[0][-1].params, nova(Federation(ready), 2, "off", 0.9, uniform=True))


def scaffold(
    fed: Federation, rounds: int, divide_by: str, momentum: float
) -> tuple[Params, Params, dict[int, Params]]:
    params, c = fed.start, zeros(fed.start)
    own: dict[int, Params] = {}
    for round in range(1, rounds + 1):
        sent, changes = [], []
        for k in fed.cohort(round):
            mine = own.get(k, zeros(params))
            done = fed.fit(params, ce, round, k, minus(c, mine), momentum)
            by = done.steps if divide_by == "steps" else done.reach
            own[k] = plus(minus(mine, c), direction(params, done, fed.lr(round), by))
            changes.append(minus(own[k], mine))
            sent.append(done)
        params = average(sent)
        c = {k: c[k] + sum(ch[k] for ch in changes) / 6 for k in c}
    return params, c, own


@MOMENTA
@pytest.mark.parametrize("divide_by", ["effective_steps", "steps"])
def test_scaffold(divide_by: str, momentum: float) -> None:
    fields = {"name": "scaffold", "divide_by": divide_by}
    ready = ready_for(fields, rounds=3, plan={"momentum": momentum, "lr": 0.02})
    fed = Federation(ready)
    fed.lr = lambda round: 0.02 * 0.9 ** (round - 1)  # type: ignore[method-assign]
    states, memory = drive(ready)
    params, c, own = scaffold(fed, 3, divide_by, momentum)
    check(states[-1].params, params)
    check(states[-1].extra.tensors("control"), c)
    for k, mine in own.items():
        check(memory.load(k).tensors("control"), mine)


def test_fedavgm() -> None:
    ready = ready_for({"name": "fedavgm", "momentum": 0.7, "server_lr": 0.8}, rounds=3)
    fed = Federation(ready)
    params, v = fed.start, zeros(fed.start)
    for round in (1, 2, 3):
        mean = average([fed.fit(params, ce, round, c) for c in fed.cohort(round)])
        v = {k: 0.7 * v[k] + (params[k] - mean[k]) for k in v}
        params = {k: params[k] - 0.8 * v[k] for k in v}
    ours = drive(ready)[0][-1].params
    check(ours, params)
    check_matters(ours, ready, rounds=3)


@pytest.mark.parametrize("aggregation", ["uniform", "examples"])
def test_feddyn(aggregation: str) -> None:
    alpha = 0.5
    ready = ready_for({"name": "feddyn", "alpha": alpha, "aggregation": aggregation}, rounds=3)
    fed = Federation(ready)
    params, h = fed.start, zeros(fed.start)
    own: dict[int, Params] = {}
    for round in (1, 2, 3):
        sent = []
        for c in fed.cohort(round):
            g, start = own.get(c, zeros(params)), params

            def loss(
                model: nn.Module, x: Tensor, y: Tensor, g: Params = g, start: Params = start
            ) -> Tensor:
                now = dict(model.named_parameters())
                linear = sum((g[k] * now[k]).sum() for k in now)
                far = sum(((now[k] - start[k]) ** 2).sum() for k in now)
                return ce(model, x, y) - linear + alpha / 2 * far

            done = fed.fit(params, loss, round, c)
            own[c] = {k: g[k] - alpha * (done.params[k] - params[k]) for k in g}
            sent.append(done)
        h = {k: h[k] - alpha / 6 * sum(s.params[k] - params[k] for s in sent) for k in h}
        mean = average(sent, uniform=aggregation == "uniform")
        params = {k: mean[k] - h[k] / alpha for k in mean}
    ours = drive(ready)[0][-1].params
    check(ours, params)
    check_matters(ours, ready, rounds=3)


@pytest.mark.parametrize(
    "method",
    [
        "fedavgm",
        {"name": "feddyn", "alpha": 0.5},
        "fednova",
        {"name": "fednova", "ccvr": "repo"},
        {"name": "fednova", "ccvr": "full"},
        "scaffold",
        {"name": "fedcurv", "weight": 0.1},
        "moon",
    ],
    ids=str,
)
def test_buffers_are_averaged_and_counters_stay_integers(method: object) -> None:
    """Of the sampled clients' running statistics the global ones are the mean, whatever becomes of
    the weights.
    """
    ready = ready_for(method, model="toy_batchnorm", plan={"lr": 0.02})
    states, _ = drive(ready)
    name = "body.1."
    for before, after in pairwise(states):
        assert after.params[name + "num_batches_tracked"].dtype == torch.int64
        assert (
            after.params[name + "num_batches_tracked"] > before.params[name + "num_batches_tracked"]
        )
        assert bool((after.params[name + "running_var"] > 0).all())


@pytest.mark.parametrize(
    "name", ["fedavg", "fedavgm", "feddyn", "fednova", "scaffold", "fedcurv", "moon", "fedadkd"]
)
def test_a_fold_averages_buffers_and_moves_them_no_further(name: str) -> None:
    """Three folds of the same replies: momentum on a running variance would have made it
    negative.
    """
    ready = ready_for(name, model="toy_batchnorm")
    method, world = ready.settings.method, ready.world
    stage = ready.settings.schedule(1, world)[0]
    state, key = method.initial_state(world), "body.1.running_var"
    replies = []
    for client, examples, value in ((stage.clients[0], 1, 0.1), (stage.clients[1], 3, 0.4)):
        expected = method.expected_reply(client, stage, world)
        params = {**expected.params, key: torch.full((4,), value).double()}
        up = Payload(
            {**expected, "params": params, **({"steps": 1.0} if name == "fednova" else {})}
        )
        replies.append(Reply(client, up, examples))
    for _ in range(3):
        state = method.aggregate(state, replies, stage, world)
    mean = 0.25 if name == "feddyn" else 0.325
    torch.testing.assert_close(state.params[key], torch.full((4,), mean).double())
