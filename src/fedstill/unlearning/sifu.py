"""SIFU: back to the last global model that the leaving clients had hardly influenced, with noise;
from there on without them. The noise gives a bound, under assumptions.

Source: Fraboni, Van Waerebeke, Scaman, Vidal, Kameni and Lorenzi, "SIFU: Sequential Informed
Federated Unlearning for Efficient and Provable Client Unlearning in Federated Optimization" (2024):
the bound of the sensitivity of FedAvg, the theorem on the noise, and the choice of the round to go
back to; official code, branch SIFU of Accenture/Labs-Federated-Learning. The defaults of epsilon
and sigma are those of its example, and that of delta is one by the number of its clients, 100.
Symbols: theta^n = the global model after round n; Delta(n, i) = the distance between the model that
the server makes in round n + 1 from theta^n, and the one that it makes without client i; Psi(n, i)
= the sum over s < n of B^(n - s - 1) Delta(s, i), which bounds the distance of theta^n from the
model of a run that never had client i; sigma = the standard deviation of the noise.
The noise gives (epsilon, delta) unlearning if Psi <= sigma epsilon / sqrt(2 (ln 1.25 - ln delta)).
The new run starts at the last round n for which this holds.
Keeps: the global models (``keep_checkpoints_every``), and every client's update (``keep_updates``).
Reading: of several clients, the paper takes the largest Psi of any one; we take the distances
without all of them, since they leave together. A later request is not a new branch of the history:
name all clients for the original run.
Reading: a round in which the client was not sampled has Delta = 0.
Reading: only kept checkpoints can be started from; the last one that fulfils the bound is taken,
and the initial model, for which Psi = 0, if there is none.
Reading: the paper's B is a factor of a local step, here one of a round, its power K for K steps:
1 holds for convex losses and a learning rate of at most 1 / L, less for strongly convex ones, which
we do not use. B of other losses is above 1 and unknown; the certificate names the assumption.
Reading: noise is added to trained tensors. It is drawn by key, so the bound holds against those who
do not know the run's seed.
Reading: training ends in the last round of the original run, after at least one new round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Interval

from fedstill.core.errors import IncompatibleMethod
from fedstill.core.fields import Positive
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, State
from fedstill.core.rounds import ANSWERED
from fedstill.models.contract import trainable_names
from fedstill.running.checkpoint import Restored
from fedstill.running.preparation import Prepared
from fedstill.running.world import first_state
from fedstill.unlearning.gradient_ascent import distance
from fedstill.unlearning.request import UnlearningRequest
from fedstill.unlearning.strategy import (
    NewRounds,
    OriginalRun,
    StartPoint,
    Strategy,
    check_averages,
    events_through,
    model_of,
    repeated_stages,
    replies_without,
)

Probability = Annotated[float, Interval(gt=0, lt=1)]
AtLeastOne = Annotated[float, Interval(ge=1, le=1e9)]


@dataclass(frozen=True)
class Sifu(Strategy):
    """Go back to a round that the client had hardly influenced, add noise, and train on."""

    epsilon: Positive = 10.0
    """The budget epsilon of the bound."""
    delta: Probability = 0.01
    """The probability delta of the bound."""
    sigma: Positive = 0.05
    """The standard deviation of the noise."""
    growth: AtLeastOne = 1.0
    """The factor B by which a difference of two models can grow in a round; 1: convex losses."""

    def check(self, original: OriginalRun, request: UnlearningRequest) -> None:
        """Raise IncompatibleMethod or ConfigError unless clients' models are averaged and kept, and
        the noise covers everything that depends on the forgotten data.
        """
        check_averages(original, "sifu")
        if original.last_checkpoint.state_files:
            raise IncompatibleMethod(
                "sifu adds noise to the server's model only, and the clients of this run keep "
                "states from round to round; use another --strategy"
            )
        trained = trainable_names(original.prepared.world.model(SERVER))
        initial = first_state(original.settings.method, original.prepared.world).params
        for name, value in original.final_state.params.items():
            if name not in trained and not torch.equal(value, initial[name]):
                raise IncompatibleMethod(
                    f"sifu adds noise to trained entries only, and {name} depends on the data, "
                    "too; use another --strategy"
                )

    def rounds(self, original: OriginalRun, request: UnlearningRequest) -> NewRounds:
        """From the round to which the run goes back to its last round; at least one."""
        number = self.rollback(original, request).round
        return NewRounds(first=number + 1, last=max(original.last_round, number + 1))

    def start(
        self, original: OriginalRun, request: UnlearningRequest, prepared: Prepared
    ) -> StartPoint:
        """The model of an early round, with noise."""
        number = self.rollback(original, request).round
        state = noised(_state_after(original, number), prepared, self.sigma)
        return StartPoint(
            state=replace(state.without(ANSWERED), round=number + 1, stage=0),
            state_files={},
            events=events_through(original, number),
        )

    def statement(self, original: OriginalRun, request: UnlearningRequest) -> Mapping[str, Any]:
        """The bound of the certificate, and on what it depends."""
        rollback = self.rollback(original, request)
        return {
            "bound": {
                "epsilon": self.epsilon,
                "delta": self.delta,
                "sigma": self.sigma,
                "influence": rollback.influence,
                "largest_influence": largest_influence(self.epsilon, self.delta, self.sigma),
                "from_round": rollback.round,
                "assumption": f"two models grow apart by at most a factor {self.growth:g} a round "
                "(1: convex losses with a small learning rate), and the seed of the run is secret",
            }
        }

    def rollback(self, original: OriginalRun, request: UnlearningRequest) -> Rollback:
        """The last round whose model can be started from."""
        most = largest_influence(self.epsilon, self.delta, self.sigma)
        latest = Rollback(0, 0.0)
        influences = influences_by_round(original, request, self.growth)
        for number, influence in enumerate(influences, start=1):
            if influence > most:
                break
            if _checkpoint_after(original, number) is not None:
                latest = Rollback(number, influence)
        return latest


@dataclass(frozen=True)
class Rollback:
    """The round to which a run goes back, and the clients' influence Psi on its model."""

    round: int
    influence: float


def largest_influence(epsilon: float, delta: float, sigma: float) -> float:
    """The largest Psi for which noise gives (epsilon, delta) unlearning."""
    return sigma * epsilon / math.sqrt(2 * (math.log(1.25) - math.log(delta)))


def influences_by_round(
    original: OriginalRun, request: UnlearningRequest, growth: float
) -> Iterator[float]:
    """Psi(n) after the rounds n = 1, 2, …"""
    names = sorted(trainable_names(original.prepared.world.model(SERVER)))
    influence = 0.0
    step = 0.0
    for result in repeated_stages(original):
        others = replies_without(result, request.clients)
        if len(others) < len(result.accepted):
            without = model_of(original.prepared, result, others)
            step += float(distance(result.after.params, without, names))
        if result.ends_round:
            influence = growth * influence + step
            step = 0.0
            yield influence


def noised(state: State, prepared: Prepared, sigma: float) -> State:
    """The state with Gaussian noise on all trained tensors, drawn by key."""
    names = sorted(trainable_names(prepared.world.model(SERVER)))
    seed = seed_for(prepared.world.seed, state.round, state.stage, SERVER, "unlearning noise")
    draws = generator(seed)
    params = dict(state.params)
    for name in names:
        tensor = params[name]
        noise = torch.randn(tensor.shape, generator=draws, dtype=torch.float64)
        params[name] = tensor + (sigma * noise).to(tensor)
    return replace(state, params=params)


def _checkpoint_after(original: OriginalRun, round: int) -> Restored | None:
    """The checkpoint after all stages of a round, if the run kept it."""
    stages = original.settings.schedule(round, original.prepared.world)
    for position in original.checkpoints.positions():
        if position.round == round and position.stage > stages[-1].index:
            return original.checkpoints.at(position)
    return None


def _state_after(original: OriginalRun, round: int) -> State:
    """The state after a round; 0: the initial one."""
    if round > 0:
        restored = _checkpoint_after(original, round)
        if restored is not None:
            return restored.state
    return first_state(original.settings.method, original.prepared.world)
