"""FedBE against a plain implementation: what is drawn, what the ensemble says, and the weights
averaged on the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from plain import (
    SEED,
    ClientResult,
    Federation,
    Params,
    all_finite,
    assert_same_model,
    assert_unlike_fedavg,
    average,
    batches,
    ce,
    drive,
    kl,
    largest_gap,
    ready_for,
    run_of,
    weighted_mean,
    weights_of,
)
from torch import Tensor

import toys
from fedstill.core.keys import generator, numpy_generator, seed_for
from fedstill.core.records import SERVER, Stage, State, World
from fedstill.core.trees import floats, only, same_bits
from fedstill.methods.fedbe import FedBE

TEACH = {
    "epochs": 5,
    "batch": 16,
    "lr": 0.05,
    "lr_decay": 1.0,
    "momentum": 0.9,
    "weight_decay": 1e-3,
}
PUBLIC = {"data": {"public": toys.PUBLIC}}
WITH_TEACHING = {**PUBLIC, "plan": {"teach_server": TEACH}}
DRAWN = 3
"""The number of drawn models."""


@dataclass(frozen=True)
class Ensemble:
    """How the members of the ensemble are drawn and weighed."""

    spread: float = 1.0
    uniform: bool = False
    concentration: float | None = None
    """That of a Dirichlet distribution; None for a Gaussian."""
    temperature: float = 1.0

    def drawn(
        self, results: Sequence[ClientResult], mean: Params, round_index: int
    ) -> list[Params]:
        """The drawn models of a round."""
        seed = seed_for(SEED, round_index, 1, SERVER, "models")
        if self.concentration is not None:
            return dirichlet_models(results, self.concentration, seed)
        weights = [result.examples for result in results]
        if self.uniform:
            weights = [1] * len(results)
        shares = np.array(weights) / sum(weights)
        return gaussian_models(results, mean, shares, self.spread, seed)

    def sharpened(self, members: Sequence[Tensor]) -> Tensor:
        """The mean of the members' probabilities, at the temperature."""
        probabilities = (sum(members) / len(members)) ** (1 / self.temperature)
        return probabilities / probabilities.sum(1, keepdim=True)


def gaussian_models(
    results: Sequence[ClientResult], mean: Params, shares: np.ndarray, spread: float, seed: int
) -> list[Params]:
    """Independent entries around the mean, as far apart as the clients' are, times the spread."""
    draw = generator(seed)
    models = []
    for _ in range(DRAWN):
        model = {}
        for name in sorted(mean):
            deviations = np.stack(
                [(result.params[name] - mean[name]).numpy() for result in results]
            )
            std = spread * np.sqrt(np.tensordot(shares, deviations**2, axes=1))
            noise = torch.randn(std.shape, dtype=torch.float64, generator=draw)
            model[name] = mean[name] + torch.from_numpy(std) * noise
        models.append(model)
    return models


def dirichlet_models(
    results: Sequence[ClientResult], concentration: float, seed: int
) -> list[Params]:
    """Weighted means of the clients' models, whose weights are drawn."""
    draw = numpy_generator(seed)
    shares = draw.dirichlet([concentration] * len(results), DRAWN)
    models = [result.params for result in results]
    return [weighted_mean(models, row) for row in shares]


@dataclass(frozen=True)
class CyclicTraining:
    """SGD whose rate falls in cycles, and the mean of the weights at the ends of cycles."""

    cycle: int
    """The number of steps of a cycle."""
    low: float
    """The rate at the end of a cycle, as a share of the initial one."""
    after: float
    """The share of all steps before the first cycle."""

    def fit(
        self, fed: Federation, start: Params, teacher: Tensor, images: Tensor, round_index: int
    ) -> Params:
        """Distil into the server's model."""
        student = fed.net(start)
        sgd = torch.optim.SGD(
            student.parameters(),
            lr=TEACH["lr"],
            momentum=TEACH["momentum"],
            weight_decay=TEACH["weight_decay"],
            foreach=False,
        )
        all_steps = TEACH["epochs"] * math.ceil(len(images) / TEACH["batch"])
        first_steps = int(self.after * all_steps)
        snapshots = []
        order = batches(len(images), TEACH, round_index, 1, SERVER)
        for step, index in enumerate(order, 1):
            step_of_cycle = (step - first_steps - 1) % self.cycle + 1
            if step > first_steps:
                phase = step_of_cycle / self.cycle
                sgd.param_groups[0]["lr"] = TEACH["lr"] * (1 - phase + phase * self.low)
            sgd.zero_grad()
            kl(teacher[index], student(images[index]).softmax(1)).mean().backward()
            sgd.step()
            ends_cycle = step > first_steps and step_of_cycle == self.cycle
            if ends_cycle or step == all_steps:
                snapshots.append(weights_of(student))

        assert step == all_steps
        assert len(snapshots) > 1
        return weighted_mean(snapshots, [1] * len(snapshots))


@pytest.mark.parametrize(
    ("fields", "ensemble", "training"),
    [
        (
            {"spread": 0.7, "temperature": 0.5},
            Ensemble(spread=0.7, temperature=0.5),
            CyclicTraining(cycle=3, low=0.4, after=0.3),
        ),
        (
            {"spread": 2.0, "aggregation": "uniform"},
            Ensemble(spread=2.0, uniform=True),
            CyclicTraining(cycle=4, low=1.0, after=0.0),
        ),
        (
            {"distribution": "dirichlet", "concentration": 0.5, "temperature": 2.0},
            Ensemble(concentration=0.5, temperature=2.0),
            CyclicTraining(cycle=2, low=0.1, after=0.5),
        ),
    ],
    ids=["gaussian", "uniform", "dirichlet"],
)
def test_fedbe(fields: dict[str, object], ensemble: Ensemble, training: CyclicTraining) -> None:
    """The server distils from the clients' models, their average and drawn models."""
    method = {
        "name": "fedbe",
        "samples": DRAWN,
        "cycle": training.cycle,
        "low": training.low,
        "after": training.after,
        **fields,
    }
    ready = ready_for(method, **WITH_TEACHING)
    fed = Federation(ready)
    assert ready.sites.public is not None
    images = fed.inputs(ready.sites.public.values)
    params = fed.start
    for round_index in (1, 2):
        results = fed.fit_cohort(params, ce, round_index)
        mean = average(results, ensemble.uniform)
        members = [mean, *(result.params for result in results)]
        members += ensemble.drawn(results, mean, round_index)
        with torch.no_grad():
            answers = [fed.net(member)(images).softmax(1) for member in members]
        params = training.fit(fed, mean, ensemble.sharpened(answers), images, round_index)

    ours = drive(ready)

    assert_same_model(ours.params, params)
    assert_unlike_fedavg(ours.params, ready)
    assert not set(ours.final.extra), "clients' models are dropped after the server's stage"
    assert not any(ours.remembered(client) for client in fed.clients)


@dataclass(frozen=True)
class AfterTraining:
    """A run between the clients' stage and the server's."""

    method: FedBE
    state: State
    stage: Stage
    """The server's."""
    world: World

    @property
    def client_models(self) -> list[Mapping[str, Tensor]]:
        """What the clients sent."""
        return list(self.state.extra.many("model").values())

    def drawn(self) -> list[Mapping[str, Tensor]]:
        """The drawn models of the server's stage."""
        return list(self.method.drawn(self.state, self.stage, self.world))

    def members(self, stage: Stage | None = None) -> dict[int, Params]:
        """The ensemble that the server receives, in its stage or another one."""
        payload = self.method.payload_for_client(
            self.state, SERVER, stage or self.stage, self.world
        )
        return payload.many("model")


def after_training(method: object, **changes: object) -> AfterTraining:
    """Have the library train the clients of round 1."""
    ready = ready_for(method, **WITH_TEACHING, **changes)
    fedbe = ready.settings.method
    world = ready.world
    assert isinstance(fedbe, FedBE)
    train, teach = ready.settings.schedule(1, world)
    state = fedbe.initial_state(world)
    payloads = {}
    for client in train.clients:
        payloads[client] = fedbe.payload_for_client(state, client, train, world)
    replies = ready.engine().run(fedbe.work(train), train, payloads, world.seed)
    return AfterTraining(fedbe, fedbe.aggregate(state, replies, train, world), teach, world)


def test_the_ensemble_is_the_clients_the_average_and_what_was_drawn() -> None:
    """Models are drawn anew for each round, and are the same whenever they are drawn for it."""
    run = after_training({"name": "fedbe", "samples": 5})

    members = run.members()

    assert len(members) == 4 + 1 + 5
    assert members[run.world.clients] == run.state.params
    sums = {float(member["head.weight"].sum()) for member in members.values()}
    assert len(sums) == 10, "no two are the same"
    drawn_again = run.members()
    assert all(same_bits(member, drawn_again[number]) for number, member in members.items())
    next_stage = Stage(2, 1, run.stage.name, (SERVER,), "public")
    first_drawn = run.world.clients + 1
    in_round_2 = run.members(next_stage)[first_drawn]
    assert not torch.equal(in_round_2["head.weight"], members[first_drawn]["head.weight"])


def test_what_is_drawn_has_the_mean_and_the_spread_of_the_clients_models() -> None:
    """Of 4,000 draws, within five standard errors."""
    run = after_training({"name": "fedbe", "samples": 4000, "spread": 0.5})
    mean = run.state.params["head.weight"]
    sizes = run.state.extra.tensor("sizes").double()
    shares = (sizes / sizes.sum()).view(-1, 1, 1)
    clients = torch.stack([model["head.weight"] for model in run.client_models])
    std = (shares * (clients - mean).square()).sum(0).sqrt()

    drawn = torch.stack([model["head.weight"] for model in run.drawn()])

    torch.testing.assert_close(drawn.std(0), 0.5 * std, rtol=0.06, atol=0)
    errors = (drawn.mean(0) - mean) / std
    assert float(errors.abs().max()) < 5 * 0.5 / math.sqrt(4000)


@pytest.mark.parametrize(
    ("concentration", "is_mean"), [(1e-3, False), (1e6, True)], ids=["a client's", "the mean"]
)
def test_at_its_edges_the_dirichlet_distribution_gives_the_clients_or_their_plain_mean(
    concentration: float, is_mean: bool
) -> None:
    method = {
        "name": "fedbe",
        "distribution": "dirichlet",
        "concentration": concentration,
        "samples": 5,
    }
    run = after_training(method)
    expected = run.client_models
    if is_mean:
        expected = [weighted_mean(expected, [1] * len(expected))]

    for model in run.drawn():
        assert min(largest_gap(model, candidate) for candidate in expected) < 5e-3


def test_an_ensemble_of_one_client_teaches_nothing() -> None:
    """One model's spread is 0: all members agree, and the server's stage leaves the model where it
    is.
    """
    changes = {"topology": {"clients": 6, "sampled": 1}, **PUBLIC}
    without_decay = {"teach_server": {**TEACH, "weight_decay": 0.0}}

    ours = run_of("fedbe", plan=without_decay, **changes).params

    assert_same_model(ours, run_of("fedavg", **changes).params)


def test_without_epochs_of_the_server_the_average_stays() -> None:
    plan = {"teach_server": {**TEACH, "epochs": 0}}

    ours = run_of("fedbe", plan=plan, **PUBLIC).params

    assert_same_model(ours, run_of("fedavg", **PUBLIC).params)


def test_drawn_models_have_the_buffers_of_the_average() -> None:
    """And the server learns from them."""
    params = run_of("fedbe", model="toy_batchnorm", **WITH_TEACHING).params
    assert all_finite(floats(params))
    statistics = [name for name in params if "running" in name]
    assert statistics

    run = after_training("fedbe", model="toy_batchnorm")

    for model in run.drawn():
        assert same_bits(only(model, statistics), only(run.state.params, statistics))
