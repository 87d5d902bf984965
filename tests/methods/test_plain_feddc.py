"""FedDC against a plain implementation, and what it is when a part of it is left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from plain import (
    Federation,
    Loss,
    Params,
    assert_same_model,
    assert_unlike_fedavg,
    average,
    ce,
    direction,
    drive,
    largest_gap,
    minus,
    plus,
    ready_for,
    run_of,
    scaled,
    squared_distance,
    weighted_mean,
    zeros,
)
from torch import Tensor, nn

from fedstill.core.records import Payload, State, World
from fedstill.methods.feddc import FedDC

WITHOUT_MOMENTUM = {"momentum": 0.0, "clip_norm": 0.0}
EVEN = {"partition": "iid", "plan": WITHOUT_MOMENTUM}
"""All clients have the same number of examples."""


def drift_corrected(anchor: Params, linear: Params, alpha: float) -> Loss:
    """Cross-entropy near a model, with a linear term."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        slope = sum((linear[name] * value).sum() for name, value in model.named_parameters())
        return ce(model, x, y) + alpha / 2 * squared_distance(model, anchor) + slope

    return loss


@pytest.mark.parametrize("aggregation", ["uniform", "examples"])
def test_three_rounds_are_those_of_a_plain_implementation(aggregation: str) -> None:
    """A client stays near the global model less its drift, and goes along the difference of the
    global gradient and its own.
    """
    alpha = 0.3
    method = {"name": "feddc", "alpha": alpha, "aggregation": aggregation}
    ready = ready_for(method, rounds=3, plan=WITHOUT_MOMENTUM)
    fed = Federation(ready).with_plan(momentum=0.0)
    sizes = [fed.size(client) for client in fed.clients]
    relative_sizes = [6 * size / sum(sizes) for size in sizes]
    params = fed.start
    gradient = zeros(params)
    drifts = [zeros(params) for _ in fed.clients]
    gradients = [zeros(params) for _ in fed.clients]
    for round_index in (1, 2, 3):
        results = []
        gradient_change = zeros(params)
        for client in fed.cohort(round_index):
            v = relative_sizes[client]
            linear = minus(scaled(1 / v, gradient), gradients[client])
            anchor = minus(params, drifts[client])
            loss = drift_corrected(anchor, linear, alpha / v)
            result = fed.fit(params, loss, round_index, client)

            mean_gradient = direction(params, result.params, fed.lr(round_index), result.steps)
            new_gradient = minus(mean_gradient, linear)
            change = minus(new_gradient, gradients[client])
            gradient_change = plus(gradient_change, scaled(v / 6, change))
            gradients[client] = new_gradient
            drifts[client] = plus(drifts[client], minus(result.params, params))
            results.append(result)
        mean = average(results, uniform=aggregation == "uniform")
        params = plus(mean, scaled(1 / 6, plus(*drifts)))
        gradient = plus(gradient, gradient_change)

    run = drive(ready)

    assert_same_model(run.params, params)
    assert_same_model(run.final.extra.tensors("gradient"), gradient)
    assert_unlike_fedavg(run.params, ready, rounds=3)
    for client in fed.participants(3):
        memory = run.remembered(client)
        assert_same_model(memory.tensors("drift"), drifts[client])
        assert_same_model(memory.tensors("gradient"), gradients[client])


@dataclass(frozen=True)
class WithoutGradients(FedDC):
    """FedDC that never learns a direction: the gradients of server and clients stay 0."""

    def aggregate(self, state: State, replies: list, stage: object, world: World) -> State:  # type: ignore[override]
        next_state = super().aggregate(state, replies, stage, world)  # type: ignore[arg-type]
        return next_state.next(gradient=state.extra.tensors("gradient"))

    def work(self, stage: object) -> object:  # type: ignore[override]
        return forgetful(super().work(stage))  # type: ignore[arg-type]


def forgetful(work: object) -> object:
    """The same work of a client, which forgets its gradient."""

    class Forgetful(type(work)):  # type: ignore[misc]
        def end(self, params, start, result, view, world):  # type: ignore[no-untyped-def]
            reply, memory = super().end(params, start, result, view, world)
            return reply, Payload(memory, gradient=start["gradient"])

    return Forgetful(work.method)  # type: ignore[attr-defined]


def test_without_gradients_it_is_feddyn() -> None:
    """Its linear term is that of the drift, and the server's h the sum of drifts."""
    ready = ready_for({"name": "feddc", "alpha": 0.3}, rounds=3, **EVEN)
    assert {len(part) for part in ready.sites.split.tensors()} == {25}
    schedule = replace(ready.settings.schedule, method=WithoutGradients(alpha=0.3))
    without_gradients = replace(ready, settings=replace(ready.settings, schedule=schedule))

    ours = drive(without_gradients).final
    feddyn = run_of({"name": "feddyn", "alpha": 0.3}, rounds=3, **EVEN).final
    feddc = drive(ready).final

    assert_same_model(ours.params, feddyn.params)
    h = scaled(-0.3, ours.extra.tensors("drift"))
    assert_same_model(h, feddyn.extra.tensors("h"))
    assert largest_gap(feddyn.params, feddc.params) > 1e-3


def test_the_first_round_is_fedprox_and_a_step_along_the_mean_drift() -> None:
    """Four of six clients have a drift."""
    ready = ready_for({"name": "feddc", "alpha": 0.3}, rounds=1, **EVEN)
    fedprox = {"name": "fedprox", "mu": 0.3, "aggregation": "uniform"}

    ours = drive(ready).params
    mean = run_of(fedprox, rounds=1, **EVEN).params

    drift = minus(mean, ready.world.initial(0))
    assert_same_model(ours, plus(mean, scaled(4 / 6, drift)))


def test_the_servers_gradient_is_the_mean_of_the_clients_when_all_take_part() -> None:
    """And its drift is the mean of theirs."""
    run = run_of("feddc", rounds=3, topology={"clients": 6}, **EVEN)

    for group in ("gradient", "drift"):
        values = [run.remembered(client).tensors(group) for client in range(6)]
        mean = weighted_mean(values, [1] * 6)
        assert_same_model(run.final.extra.tensors(group), mean)
        assert any(bool(value.any()) for value in mean.values())
