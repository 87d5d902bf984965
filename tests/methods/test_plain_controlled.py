"""The methods that change directions or the server's step, against a plain implementation of
each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from plain import (
    PLAN,
    ClientResult,
    Federation,
    Loss,
    Params,
    assert_same_model,
    assert_unlike_fedavg,
    average,
    ce,
    direction,
    drive,
    minus,
    plus,
    ready_for,
    scaled,
    squared_distance,
    weighted_mean,
    zeros,
)
from torch import Tensor, nn

from fedstill.core.records import Payload, Reply

MOMENTA = pytest.mark.parametrize("momentum", [0.0, 0.9])


# FedNova.


def nova_step(
    params: Params, results: Sequence[ClientResult], weights: Sequence[float], lr: float
) -> Params:
    """The server's step: along the mean of the clients' mean gradients, as far as the mean number
    of their effective steps.
    """
    mean_gradients = [direction(params, r.params, lr, r.effective_steps) for r in results]
    shares = [weight / sum(weights) for weight in weights]
    steps = sum(
        share * result.effective_steps for share, result in zip(shares, results, strict=True)
    )
    return minus(params, scaled(lr * steps, weighted_mean(mean_gradients, shares)))


def nova(fed: Federation, rounds: int, ccvr: str, uniform: bool) -> Params:
    """FedNova, with the variance reduction of the authors' code (``repo``), of the paper (``full``)
    or without any (``off``).
    """
    params = fed.start
    global_direction = zeros(params)
    directions: dict[int, Params] = {}
    all_examples = sum(fed.size(client) for client in fed.clients)
    for round_index in range(1, rounds + 1):
        results = []
        for client in fed.cohort(round_index):
            correction = None
            if ccvr != "off":
                correction = minus(global_direction, directions.get(client, zeros(params)))
            results.append(fed.fit(params, ce, round_index, client, correction=correction))

        lr = fed.lr(round_index)
        for result in results:
            directions[result.client] = direction(params, result.params, lr, result.effective_steps)
        if ccvr == "full":
            shares = [result.examples / all_examples for result in results]
            terms = [scaled(1 - sum(shares), global_direction)]
            for share, result in zip(shares, results, strict=True):
                terms.append(scaled(share, directions[result.client]))
            global_direction = plus(*terms)

        weights = [result.examples for result in results]
        if uniform:
            weights = [1] * len(results)
        params = nova_step(params, results, weights, lr)
    return params


@MOMENTA
@pytest.mark.parametrize("ccvr", ["off", "repo", "full"])
def test_fednova(ccvr: str, momentum: float) -> None:
    """Clients that take more steps move the model no further."""
    ready = ready_for({"name": "fednova", "ccvr": ccvr}, rounds=3, plan={"momentum": momentum})
    fed = Federation(ready, plan={**PLAN, "momentum": momentum})
    cohorts = [set(fed.cohort(round_index)) for round_index in (1, 2, 3)]
    assert set.intersection(*cohorts), "a client must come back"

    ours = drive(ready).params

    assert_same_model(ours, nova(fed, 3, ccvr, uniform=False))
    assert_unlike_fedavg(ours, ready, rounds=3)


def test_fednovas_global_direction_is_the_mean_of_all_clients_that_take_part() -> None:
    """Also where clients hold examples out, which the census counts and their replies do not."""
    ready = ready_for(
        {"name": "fednova", "ccvr": "full"}, topology={"clients": 6}, plan={"validation": 0.3}
    )

    run = drive(ready)

    counts = run.final.extra.tensor("labels").sum(1).tolist()
    directions = [run.remembered(client).tensors("direction") for client in range(6)]
    expected = weighted_mean(directions, counts)
    assert_same_model(run.final.extra.tensors("direction"), expected)


@pytest.mark.parametrize("answered", [0, 1, 5])
def test_fednovas_global_direction_without_the_census_of_some_clients(answered: int) -> None:
    ready = ready_for({"name": "fednova", "ccvr": "full"}, topology={"clients": 6})
    method = ready.settings.method
    world = ready.world
    state = drive(ready).final
    labels = state.extra.tensor("labels").clone()
    labels[answered:] = 0
    unmoved = Payload(params=state.params, steps=1.0)
    replies = [Reply(client, unmoved, 10) for client in range(6)]
    stage = ready.settings.schedule(2, world)[-1]

    next_state = method.aggregate(state.next(labels=labels), replies, stage, world)

    expected = state.extra.tensors("direction")
    if answered:  # all counted clients report a direction of zero
        expected = zeros(expected)
    assert_same_model(next_state.extra.tensors("direction"), expected)


def test_fednova_uniform() -> None:
    ready = ready_for({"name": "fednova", "aggregation": "uniform"})

    ours = drive(ready).params

    assert_same_model(ours, nova(Federation(ready), 2, "off", uniform=True))


# SCAFFOLD.


@dataclass(frozen=True)
class Controlled:
    """What SCAFFOLD ends with."""

    params: Params
    control: Params
    client_controls: Mapping[int, Params]


def scaffold(fed: Federation, rounds: int, divide_by: str) -> Controlled:
    """SCAFFOLD; a client's control is its mean gradient over its steps or its effective steps."""
    params = fed.start
    control = zeros(params)
    client_controls: dict[int, Params] = {}
    for round_index in range(1, rounds + 1):
        results = []
        changes = []
        for client in fed.cohort(round_index):
            old = client_controls.get(client, zeros(params))
            correction = minus(control, old)
            result = fed.fit(params, ce, round_index, client, correction=correction)
            steps = result.effective_steps
            if divide_by == "steps":
                steps = result.steps
            gradient = direction(params, result.params, fed.lr(round_index), steps)
            client_controls[client] = minus(gradient, correction)
            changes.append(minus(client_controls[client], old))
            results.append(result)
        params = average(results)
        control = plus(control, scaled(1 / 6, plus(*changes)))
    return Controlled(params, control, client_controls)


@MOMENTA
@pytest.mark.parametrize("divide_by", ["effective_steps", "steps"])
def test_scaffold(divide_by: str, momentum: float) -> None:
    """Clients correct their gradients by the difference of the controls."""
    plan = {"momentum": momentum, "lr": 0.02}
    ready = ready_for({"name": "scaffold", "divide_by": divide_by}, rounds=3, plan=plan)

    run = drive(ready)

    expected = scaffold(Federation(ready, plan={**PLAN, **plan}), 3, divide_by)
    assert_same_model(run.params, expected.params)
    assert_same_model(run.final.extra.tensors("control"), expected.control)
    for client, control in expected.client_controls.items():
        assert_same_model(run.remembered(client).tensors("control"), control)


# FedAvgM and FedDyn.


def test_fedavgm() -> None:
    """The server's step has momentum."""
    ready = ready_for({"name": "fedavgm", "momentum": 0.7, "server_lr": 0.8}, rounds=3)
    fed = Federation(ready)
    params = fed.start
    velocity = zeros(params)
    for round_index in (1, 2, 3):
        mean = average(fed.fit_cohort(params, ce, round_index))
        velocity = plus(scaled(0.7, velocity), minus(params, mean))
        params = minus(params, scaled(0.8, velocity))

    ours = drive(ready).params

    assert_same_model(ours, params)
    assert_unlike_fedavg(ours, ready, rounds=3)


def dynamically_regularised(start: Params, gradient: Params, alpha: float) -> Loss:
    """FedDyn's objective: near the model received, along the client's gradient."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        linear = sum((gradient[name] * value).sum() for name, value in model.named_parameters())
        return ce(model, x, y) - linear + alpha / 2 * squared_distance(model, start)

    return loss


@pytest.mark.parametrize("aggregation", ["uniform", "examples"])
def test_feddyn(aggregation: str) -> None:
    alpha = 0.5
    ready = ready_for({"name": "feddyn", "alpha": alpha, "aggregation": aggregation}, rounds=3)
    fed = Federation(ready)
    params = fed.start
    h = zeros(params)
    gradients = {client: zeros(params) for client in fed.clients}
    for round_index in (1, 2, 3):
        results = []
        for client in fed.cohort(round_index):
            loss = dynamically_regularised(params, gradients[client], alpha)
            result = fed.fit(params, loss, round_index, client)
            change = minus(result.params, params)
            gradients[client] = minus(gradients[client], scaled(alpha, change))
            h = minus(h, scaled(alpha / 6, change))
            results.append(result)
        mean = average(results, uniform=aggregation == "uniform")
        params = minus(mean, scaled(1 / alpha, h))

    ours = drive(ready).params

    assert_same_model(ours, params)
    assert_unlike_fedavg(ours, ready, rounds=3)


# Running statistics of normalisation.


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
    """The global statistics are the mean of the sampled clients', whatever becomes of the
    weights.
    """
    counter = "body.1.num_batches_tracked"

    states = drive(ready_for(method, model="toy_batchnorm", plan={"lr": 0.02})).states

    for before, after in pairwise(states):
        assert after.params[counter].dtype == torch.int64
        assert after.params[counter] > before.params[counter]
        assert bool((after.params["body.1.running_var"] > 0).all())


@pytest.mark.parametrize(
    "name", ["fedavg", "fedavgm", "feddyn", "fednova", "scaffold", "fedcurv", "moon", "fedadkd"]
)
def test_a_fold_averages_buffers_and_moves_them_no_further(name: str) -> None:
    """Three folds of the same replies: momentum on a running variance would have made it
    negative.
    """
    ready = ready_for(name, model="toy_batchnorm")
    method = ready.settings.method
    world = ready.world
    stage = ready.settings.schedule(1, world)[0]
    variance = "body.1.running_var"

    def reply(client: int, examples: int, value: float) -> Reply:
        content = dict(method.expected_reply(client, stage, world))
        content["params"] = {
            **content["params"],
            variance: torch.full((4,), value, dtype=torch.float64),
        }
        if name == "fednova":
            content["steps"] = 1.0
        return Reply(client, Payload(content), examples)

    replies = [
        reply(stage.clients[0], examples=1, value=0.1),
        reply(stage.clients[1], examples=3, value=0.4),
    ]
    state = method.initial_state(world)
    for _ in range(3):
        state = method.aggregate(state, replies, stage, world)

    mean = 0.325
    if name == "feddyn":  # its mean is uniform
        mean = 0.25
    expected = torch.full((4,), mean, dtype=torch.float64)
    torch.testing.assert_close(state.params[variance], expected)
