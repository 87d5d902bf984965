"""Objectives that distil from the model that a client receives, and rounds with them, written out
plainly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from plain import (
    Federation,
    Loss,
    Params,
    at_labels,
    average,
    ce,
    kl,
    without_labels,
)
from torch import Tensor, nn, stack

Term = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A loss per example, of the student's logits, the teacher's logits and the labels."""

Objective = Callable[[Federation, nn.Module, int, float], Loss]
"""The loss of a client with its teacher; the number is the client's factor phi."""

Phis = Callable[[Federation, list[int], dict[int, float]], dict[int, float]]
"""The factors phi of a round's clients; the last argument has the Gini impurities that clients have
reported in earlier rounds.
"""


def target(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """The label's term of the divergence over all classes."""
    p = at_labels(t.softmax(1), y)
    q = at_labels(z.softmax(1), y)
    return p * (p / q).log()


def binary(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """The divergence over two cases: the label, and any other class."""
    return kl(_label_or_not(t, y), _label_or_not(z, y))


def _label_or_not(z: Tensor, y: Tensor) -> Tensor:
    p = at_labels(z.softmax(1), y)
    return stack([p, 1 - p], 1)


def full(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """The divergence over all classes."""
    return kl(t.softmax(1), z.softmax(1))


def not_true(z: Tensor, t: Tensor, y: Tensor) -> Tensor:
    """The divergence over all classes but the label."""
    return kl(without_labels(t, y).softmax(1), without_labels(z, y).softmax(1))


@dataclass(frozen=True)
class Decoupled:
    """An objective: cross-entropy, a loss on the label and a loss on the other classes."""

    on_label: Term
    on_other_classes: Term
    alpha: float
    beta: float
    temperature: float = 1.0

    def __call__(self, fed: Federation, teacher: nn.Module, client: int, phi: float) -> Loss:
        tau = self.temperature

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = model(x) / tau
            t = teacher(x).detach() / tau
            label_loss = self.on_label(z, t, y).mean()
            other_loss = self.on_other_classes(z, t, y).mean()
            distillation = phi * self.alpha * label_loss + self.beta * other_loss
            return ce(model, x, y) + tau**2 * distillation

        return loss


def gini(fed: Federation, client: int) -> float:
    """The Gini impurity of a client's labels."""
    return float(1 - (fed.shares(client) ** 2).sum())


def constant_phi(
    fed: Federation, clients: list[int], reported: dict[int, float]
) -> dict[int, float]:
    """Every client has the same factor."""
    return dict.fromkeys(clients, 1.0)


def phi_by_gini(timing: str, source: str, delta: float) -> Phis:
    """FedADKD's factors: proportional to the Gini impurity or a function of it, with a mean of 1.

    timing: ``exact`` uses the impurities of the round's clients, ``stale`` those that they reported
    in earlier rounds (1 for a client that has reported none).
    """

    def phis(fed: Federation, clients: list[int], reported: dict[int, float]) -> dict[int, float]:
        factors = {}
        for client in clients:
            impurity = reported.get(client, 1.0)
            if timing == "exact":
                impurity = gini(fed, client)
            factors[client] = impurity
            if source == "f":
                factors[client] = math.log(1 + delta * impurity)
        total = sum(factors.values())
        return {client: len(clients) * factor / total for client, factor in factors.items()}

    return phis


def distil_in_parallel(fed: Federation, objective: Objective, phis: Phis = constant_phi) -> Params:
    """The model after two rounds in which clients distil from the global model."""
    params = fed.start
    reported: dict[int, float] = {}
    for round_index in (1, 2):
        cohort = fed.cohort(round_index)
        phi = phis(fed, cohort, reported)
        teacher = fed.net(params)
        results = []
        for client in cohort:
            loss = objective(fed, teacher, client, phi[client])
            results.append(fed.fit(params, loss, round_index, client))
        params = average(results)
        reported |= {client: gini(fed, client) for client in cohort}
    return params


def distil_along_chains(fed: Federation, objective: Objective, phis: Phis = constant_phi) -> Params:
    """The model after two rounds in which each client distils from the model handed over."""
    params = fed.start
    reported: dict[int, float] = {}
    for round_index in (1, 2):
        chain = fed.chain(round_index)
        phi = phis(fed, chain, reported)
        for link, client in enumerate(chain):
            loss = objective(fed, fed.net(params).eval(), client, phi[client])
            params = fed.fit(params, loss, round_index, client, stage=link).params
        reported |= {client: gini(fed, client) for client in chain}
    return params
