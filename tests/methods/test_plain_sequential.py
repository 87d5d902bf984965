"""Two rounds of the sequential family, and of other objectives on a chain, against a plain
implementation of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
import torch
from plain import (
    MANY_EXAMPLES,
    PLAN,
    SEED,
    ClientResult,
    Federation,
    Loss,
    Params,
    assert_same_model,
    assert_unlike_fedavg,
    at_labels,
    average,
    ce,
    direction,
    drive,
    kl,
    minus,
    norm,
    plus,
    ready_for,
    scaled,
    squared_distance,
    zeros,
)
from plain_distillation import (
    Decoupled,
    binary,
    distil_along_chains,
    not_true,
    phi_by_gini,
)
from torch import Tensor, nn

from fedstill.core.keys import generator, seed_for

CHAIN = {"kind": "sequential", "clients": 6, "sampled": 4}
PARALLEL = {"kind": "parallel", "clients": 6, "sampled": 4}
SKEWED = {"kind": "dirichlet", "alpha": 0.3, "min_size": 4}
ON_BOTH_TOPOLOGIES = pytest.mark.parametrize(
    "topology", [CHAIN, PARALLEL], ids=["chain", "parallel"]
)


@dataclass(frozen=True)
class Teacher:
    """A model of the last round, as its client left it."""

    client: int
    network: nn.Module


Objective = Callable[[Federation, list[Teacher], int], Loss]
"""The loss of a client with its teachers."""

Choice = Callable[[Federation, list[int], int], Sequence[int]]
"""The teachers of a round, of the clients of the last one."""


def train(
    fed: Federation,
    topology: dict[str, object],
    objective: Objective,
    choice: Choice,
    rounds: int = 2,
) -> Params:
    """The model after rounds in which clients distil from models of the last round."""
    params = fed.start
    last: dict[int, Params] = {}
    for round_index in range(1, rounds + 1):
        teachers = []
        if last:
            chosen = sorted(choice(fed, list(last), round_index))
            teachers = [Teacher(client, fed.net(last[client]).eval()) for client in chosen]

        if topology is CHAIN:
            results = train_chain(fed, params, objective, teachers, round_index)
            params = results[-1].params
        else:
            results = []
            for client in fed.cohort(round_index):
                loss = objective(fed, teachers, client)
                results.append(fed.fit(params, loss, round_index, client))
            params = average(results)
        last = {result.client: result.params for result in results}
    return params


def train_chain(
    fed: Federation,
    start: Params,
    objective: Objective,
    teachers: list[Teacher],
    round_index: int,
) -> list[ClientResult]:
    """One round of a chain: each client starts from the model of its predecessor."""
    results: list[ClientResult] = []
    for link, client in enumerate(fed.chain(round_index)):
        loss = objective(fed, teachers, client)
        results.append(fed.fit(start, loss, round_index, client, stage=link))
        start = results[-1].params
    return results


def fedseq(fed: Federation, teachers: list[Teacher], client: int) -> Loss:
    """Cross-entropy alone."""
    return ce


def assert_unlike(ours: Params, other: Params) -> None:
    """The two models differ by more than a thousandth of the model."""
    assert norm(minus(other, ours)) > 1e-3 * norm(other)


# Choices of teachers.


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """The Kullback–Leibler divergence of two distributions."""
    terms = [a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0]
    return float(sum(terms))


def distance_to_uniform(fed: Federation, clients: list[int]) -> float:
    """How far the sum of the clients' label shares is from the uniform distribution."""
    total = sum(fed.shares(client) for client in clients)
    return divergence(total / total.sum(), np.full(len(total), 1 / len(total)))


def greedy(k: int) -> Choice:
    """Algorithm 1 with KL: add the model that brings the sum of label shares nearest to uniform."""

    def choice(fed: Federation, candidates: list[int], round_index: int) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < min(k, len(candidates)):
            distances = {}
            for client in candidates:
                if client not in chosen:
                    distances[client] = distance_to_uniform(fed, [*chosen, client])
            chosen.append(min(distances, key=distances.__getitem__))
        return chosen

    return choice


def at_random(k: int) -> Choice:
    """So many clients, drawn from all alike."""

    def choice(fed: Federation, candidates: list[int], round_index: int) -> list[int]:
        draw = generator(seed_for(SEED, round_index, 0, -1, "teachers"))
        order = torch.randperm(len(candidates), generator=draw)
        return [candidates[i] for i in order.tolist()[:k]]

    return choice


def all_clients(fed: Federation, candidates: list[int], round_index: int) -> list[int]:
    """Every client of the last round is a teacher."""
    return candidates


def no_client(fed: Federation, candidates: list[int], round_index: int) -> list[int]:
    """There are no teachers."""
    return []


# SFedKD.


@dataclass(frozen=True)
class SFedKD:
    """An objective: each teacher's two losses have weights of their own."""

    g: bool = True
    """Whether teachers with other classes weigh more in the loss on not-true classes."""
    h: bool = True
    """Whether teachers with the same classes weigh more in the loss on the label."""
    scale: float = 1.0
    smoothing: float = 1e-4
    gamma: float = 0.7
    beta: float = 1.3
    temperature: float = 2.0

    def __call__(self, fed: Federation, teachers: list[Teacher], client: int) -> Loss:
        if not teachers:
            return ce
        distances = self.distances(fed, teachers, client)
        uniform = [1 / len(teachers)] * len(teachers)
        not_true_weights = uniform
        if self.g:
            not_true_weights = [d / sum(distances) for d in distances]
        label_weights = uniform
        if self.h:
            closeness = [1 / (d + 1e-4) for d in distances]
            label_weights = [c / sum(closeness) for c in closeness]

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = model(x) / self.temperature
            total = ce(model, x, y)
            for teacher, g, h in zip(teachers, not_true_weights, label_weights, strict=True):
                t = teacher.network(x).detach() / self.temperature
                total = total + self.scale * self.gamma * g * not_true(z, t, y).mean()
                total = total + self.scale * self.beta * h * binary(z, t, y).mean()
            return total

        return loss

    def distances(self, fed: Federation, teachers: list[Teacher], client: int) -> list[float]:
        """How far the label shares of each teacher are from the client's."""
        shares = self.smoothed(fed.shares(client))
        return [
            divergence(self.smoothed(fed.shares(teacher.client)), shares) for teacher in teachers
        ]

    def smoothed(self, shares: np.ndarray) -> np.ndarray:
        """Shares of which none is 0."""
        return (shares + self.smoothing) / (1 + len(shares) * self.smoothing)


SFEDKD = {"name": "sfedkd", "k": 2, "gamma": 0.7, "beta": 1.3, "temperature": 2.0}


@pytest.mark.parametrize(
    ("fields", "objective"),
    [
        ({}, SFedKD()),
        ({"g": False}, SFedKD(g=False)),
        ({"h": False}, SFedKD(h=False)),
        ({"g": False, "h": False}, SFedKD(g=False, h=False)),
        ({"tau2_scale": True}, SFedKD(scale=4.0)),
        ({"smoothing": 0.01}, SFedKD(smoothing=0.01)),
    ],
)
@ON_BOTH_TOPOLOGIES
def test_sfedkd(
    fields: dict[str, object], objective: Objective, topology: dict[str, object]
) -> None:
    """Clients distil from two models of the last round, whose labels complete each other."""
    ready = ready_for({**SFEDKD, **fields}, topology=topology, partition=SKEWED)
    fed = Federation(ready)

    ours = drive(ready).params

    assert_same_model(ours, train(fed, topology, objective, greedy(2)))
    assert_unlike(ours, train(fed, topology, fedseq, no_client))


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({"teacher_choice": "random"}, at_random(2)),
        ({"teacher_choice": "all"}, all_clients),
        ({"k": 9}, all_clients),
    ],
)
def test_the_choice_of_teachers(fields: dict[str, object], choice: Choice) -> None:
    ready = ready_for({**SFEDKD, **fields}, partition=SKEWED, rounds=3)

    ours = drive(ready).params

    expected = train(Federation(ready), CHAIN, SFedKD(), choice, rounds=3)
    assert_same_model(ours, expected)


# Several teachers.

WEIGHT = 0.8
TEMPERATURE = 3.0


def distances_to_teachers(z: Tensor, logits: list[Tensor]) -> Tensor:
    """The distillation loss of each teacher and example (K, B)."""
    tau = TEMPERATURE
    student = (z / tau).softmax(1)
    return torch.stack([tau**2 * kl((t / tau).softmax(1), student) for t in logits])


def logits_of(teachers: list[Teacher], x: Tensor) -> list[Tensor]:
    """The logits of each teacher."""
    return [teacher.network(x).detach() for teacher in teachers]


def averaged_teachers(fed: Federation, teachers: list[Teacher], client: int) -> Loss:
    """All teachers weigh the same."""
    if not teachers:
        return ce

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        distances = distances_to_teachers(model(x), logits_of(teachers, x))
        return ce(model, x, y) + WEIGHT * distances.mean()

    return loss


def certain_teachers(fed: Federation, teachers: list[Teacher], client: int) -> Loss:
    """EBKD: a teacher weighs more on examples on which its entropy is small."""
    if not teachers:
        return ce

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = logits_of(teachers, x)
        entropies = torch.stack([-(t.softmax(1) * t.log_softmax(1)).sum(1) for t in logits])
        weights = torch.ones_like(entropies)
        if len(teachers) > 1:
            weights = 1 - entropies / entropies.sum(0)
        weighted = weights * distances_to_teachers(model(x), logits)
        return ce(model, x, y) + WEIGHT * weighted.mean()

    return loss


def correct_teachers(feature_weight: float) -> Objective:
    """CAMKD: a teacher weighs more on examples whose label it finds likely.

    From the second epoch on, the client's features are drawn to those of the teachers.
    """

    def objective(fed: Federation, teachers: list[Teacher], client: int) -> Loss:
        if not teachers:
            return ce
        batches_per_epoch = math.ceil(fed.size(client) / PLAN["batch"])
        batch_numbers = count()

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            epoch = next(batch_numbers) // batches_per_epoch
            logits = logits_of(teachers, x)
            weighted = confidences(logits, y) * distances_to_teachers(model(x), logits)
            total = ce(model, x, y) + WEIGHT * weighted.mean()
            if epoch > 0:
                total = total + feature_weight * feature_loss(model, teachers, x, y)
            return total

        return loss

    return objective


def confidences(logits: list[Tensor], y: Tensor) -> Tensor:
    """The weight of each teacher and example (K, B)."""
    if len(logits) == 1:
        return torch.ones(1, len(y)).double()
    losses = torch.stack([-at_labels(t.softmax(1), y).log() for t in logits])
    return (1 - losses.softmax(0)) / (len(logits) - 1)


def feature_loss(model: nn.Module, teachers: list[Teacher], x: Tensor, y: Tensor) -> Tensor:
    """CAMKD's distance of features; teachers are judged by their heads on the client's features."""
    features = model.body(x)
    logits = [teacher.network.head(features) for teacher in teachers]
    distances = []
    for teacher in teachers:
        gap = features - teacher.network.body(x).detach()
        distances.append((gap**2).mean(1))
    return (confidences(logits, y) * torch.stack(distances)).mean()


@pytest.mark.parametrize(
    ("fields", "objective", "k"),
    [
        ({"name": "aver"}, averaged_teachers, 3),
        ({"name": "ebkd"}, certain_teachers, 3),
        ({"name": "ebkd"}, certain_teachers, 1),
        ({"name": "camkd"}, correct_teachers(0.0), 3),
        ({"name": "camkd"}, correct_teachers(0.0), 1),
        ({"name": "camkd", "feature_weight": 0.5}, correct_teachers(0.5), 3),
        ({"name": "camkd", "feature_weight": 0.5}, correct_teachers(0.5), 1),
    ],
)
@ON_BOTH_TOPOLOGIES
def test_several_teachers(
    fields: dict[str, object], objective: Objective, k: int, topology: dict[str, object]
) -> None:
    """Each way to weigh teachers does the same on a chain and in parallel rounds."""
    method = {"weight": WEIGHT, "temperature": TEMPERATURE, "k": k, **fields}
    ready = ready_for(method, topology=topology)
    fed = Federation(ready)

    ours = drive(ready).params

    assert_same_model(ours, train(fed, topology, objective, greedy(k)))
    assert_unlike(ours, train(fed, topology, fedseq, no_client))


@pytest.mark.parametrize("name", ["fedseq", "fedavg"])
def test_fedseq(name: str) -> None:
    """FedAvg on a chain is FedSeq."""
    ready = ready_for(name, topology=CHAIN)

    ours = drive(ready).params

    assert_same_model(ours, train(Federation(ready), CHAIN, fedseq, no_client))
    assert_unlike_fedavg(ours, ready)


# CWC.


class Consolidation:
    """The bookkeeping of the authors' code: a queue of importances, and a shadow into which it is
    folded when a cycle is full.
    """

    def __init__(self, mode: str, decay: float, cycle: int) -> None:
        self.mode = mode
        self.decay = decay
        self.cycle = cycle
        self.queue: list[Params] = []
        self.shadow: Params | None = None

    def add(self, importance: Params) -> None:
        """Remember one client's importance."""
        self.queue.append(importance)
        if self.mode == "sliding":
            self.queue = self.queue[-self.cycle :]
        elif self.mode == "ema" and len(self.queue) == self.cycle:
            self.shadow = scaled(self.decay, self.total(importance))
            self.queue = []

    def total(self, like: Params) -> Params:
        """The sum of all that is remembered."""
        terms = list(self.queue)
        if self.shadow is not None:
            terms.append(self.shadow)
        return plus(zeros(like), *terms)


class Penalised:
    """One client's training near the model handed over, and the importance of its entries: how much
    each lowered the loss on its path.
    """

    def __init__(self, start: Params, importance: Params, ignores_penalty: bool) -> None:
        self.start = start
        self.importance = importance
        self.ignores_penalty = ignores_penalty
        self.path = zeros(start)

    def penalty(self, params: Params) -> Tensor:
        """The distance from the start, in which important entries count more."""
        terms = []
        for name, importance in self.importance.items():
            terms.append((importance * (params[name] - self.start[name]) ** 2).sum())
        return 0.05 * sum(terms)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy and the penalty."""
        return ce(model, x, y) + self.penalty(dict(model.named_parameters()))

    def watch(self, before: Params, gradients: Params, after: Params) -> None:
        """Add one step to the path, along the gradient of the loss or of its cross-entropy."""
        if self.ignores_penalty:
            leaves = {name: value.clone().requires_grad_() for name, value in before.items()}
            of_penalty = torch.autograd.grad(self.penalty(leaves), list(leaves.values()))
            gradients = minus(gradients, dict(zip(leaves, of_penalty, strict=True)))
        for name, gradient in gradients.items():
            self.path[name] -= gradient * (after[name] - before[name])

    def path_importance(self, end: Params) -> Params:
        """The importance of each entry on the path to this model."""
        importance = {}
        for name, lowered in self.path.items():
            importance[name] = lowered / ((end[name] - self.start[name]) ** 2 + 0.02)
        return importance


@pytest.mark.parametrize(
    "fields",
    [{}, {"lseg": True}, {"clamp": True}, {"memory": "sliding"}, {"memory": "sum"}, {"decay": 0.0}],
    ids=str,
)
def test_cwc(fields: dict[str, object]) -> None:
    """Importances of all clients so far hold the next client near the model handed over."""
    method = {"name": "cwc", "weight": 0.05, "decay": 0.4, "epsilon": 0.02, **fields}
    ready = ready_for(method, MANY_EXAMPLES, rounds=3, plan={"lr": 0.02})
    fed = Federation(ready, plan={**PLAN, "lr": 0.02})
    memory_mode = str(method.get("memory", "ema"))
    decay = float(method["decay"])  # type: ignore[arg-type]
    consolidation = Consolidation(memory_mode, decay, cycle=4)
    params = fed.start
    for round_index in (1, 2, 3):
        for link, client in enumerate(fed.chain(round_index)):
            training = Penalised(params, consolidation.total(params), bool(fields.get("lseg")))
            params = fed.fit(
                params, training.loss, round_index, client, stage=link, watch=training.watch
            ).params
            importance = training.path_importance(params)
            if fields.get("clamp"):
                importance = {name: value.clamp(min=0) for name, value in importance.items()}
            consolidation.add(importance)

    final = drive(ready).final

    assert_same_model(final.params, params)
    assert_unlike(params, train(fed, CHAIN, fedseq, no_client, rounds=3))
    if memory_mode == "ema":  # the library decays when the next round opens
        importance = scaled(decay, final.extra.tensors("importance"))
        assert_same_model(importance, consolidation.total(params))


# Other methods on a chain.


@pytest.mark.parametrize("timing", ["stale", "exact"])
def test_fedadkd_on_a_chain_shares_phi_out_among_the_rounds_clients(timing: str) -> None:
    method = {
        "name": "fedadkd",
        "alpha": 0.8,
        "beta": 0.5,
        "delta": 3.0,
        "phi_timing": timing,
        "tckd": "binary",
    }
    ready = ready_for(method, topology=CHAIN, partition=SKEWED)
    fed = Federation(ready)
    objective = Decoupled(binary, not_true, alpha=0.8, beta=0.5)

    ours = drive(ready).params

    phis = phi_by_gini(timing, "f", delta=3.0)
    assert_same_model(ours, distil_along_chains(fed, objective, phis))
    assert_unlike(ours, distil_along_chains(fed, objective))


def test_fedntd_on_a_chain() -> None:
    """Clients distil from the model handed over."""
    ready = ready_for({"name": "fedntd", "beta": 0.6, "temperature": 2.0}, topology=CHAIN)

    ours = drive(ready).params

    objective = Decoupled(binary, not_true, alpha=0.0, beta=0.6, temperature=2.0)
    assert_same_model(ours, distil_along_chains(Federation(ready), objective))


def test_fedprox_on_a_chain_stays_near_the_model_handed_over() -> None:
    ready = ready_for({"name": "fedprox", "mu": 0.5}, topology=CHAIN)

    def objective(fed: Federation, received: nn.Module, client: int, phi: float) -> Loss:
        anchor = {name: value.detach() for name, value in received.named_parameters()}

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return ce(model, x, y) + 0.5 / 2 * squared_distance(model, anchor)

        return loss

    ours = drive(ready).params

    assert_same_model(ours, distil_along_chains(Federation(ready), objective))


def test_scaffold_on_a_chain() -> None:
    """The server's control moves after every client, by a sixth of the change of the client's."""
    ready = ready_for("scaffold", topology=CHAIN, rounds=3, plan={"lr": 0.02})
    fed = Federation(ready, plan={**PLAN, "lr": 0.02})
    params = fed.start
    control = zeros(params)
    client_controls: dict[int, Params] = {}
    for round_index in (1, 2, 3):
        for link, client in enumerate(fed.chain(round_index)):
            old = client_controls.get(client, zeros(params))
            correction = minus(control, old)
            result = fed.fit(params, ce, round_index, client, stage=link, correction=correction)
            gradient = direction(params, result.params, fed.lr(round_index), result.effective_steps)
            client_controls[client] = minus(gradient, correction)
            change = minus(client_controls[client], old)
            control = plus(control, scaled(1 / 6, change))
            params = result.params

    final = drive(ready).final

    assert_same_model(final.params, params)
    assert_same_model(final.extra.tensors("control"), control)
