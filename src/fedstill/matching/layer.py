"""One layer of PFNM: which units of several networks are the same, and what they are together.

Source: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (2019),
section 3 and its code.
Symbols: J = the networks; v = the vector of a unit, p its precision, both (D,); S, P = what is
known of a global unit: the sum of its members' p v and the prior's, the sum of their p and the
prior's; m = how many members it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Places = np.ndarray[Any, np.dtype[np.int64]]

POPULAR = 10
"""More members than these do not make a global unit more attractive."""


@dataclass(frozen=True)
class MatchingSettings:
    """What PFNM assumes: variances above 0, ``gamma`` above 0, ``most`` >= 1, ``passes`` >= 0.

    ``variance``: sigma^2, of a network's weights about the global ones; ``prior_variance``:
    sigma_0^2, of the global ones about their prior mean; ``gamma``: how readily a unit becomes a
    new global one. ``most``: where a layer has so many global units, a network adds no more than
    one. ``grow``: whether it may add any.
    """

    variance: float = 1.0
    prior_variance: float = 1.0
    gamma: float = 1.0
    most: int = 700
    passes: int = 5
    grow: bool = True


@dataclass(frozen=True)
class Matched:
    """A matched layer: for each network its units' global ones (L_j,), and the global units'
    vectors (L, D).
    """

    places: list[Places]
    units: Array


def match(
    units: Sequence[Array],
    precisions: Sequence[Array],
    prior_mean: Array,
    setting: MatchingSettings,
    draw: np.random.Generator,
) -> Matched:
    """The global units of a layer, and which unit of each network is a member of which.

    units: (L_j, D) of each of J networks; precisions: (D,) of each, >= 0; prior_mean: (D,). The
    network with most units begins, each of the others joins, and in every pass each is taken out
    and matched again, in an order from ``draw``.

    Reading: in the code a network alone adds no more than ``most`` units either, and loses the
    others; here it keeps them.
    """
    prior = np.full_like(prior_mean, 1 / setting.prior_variance)
    weighted = [u * p for u, p in zip(units, precisions, strict=True)]
    known = _Known(weighted, list(precisions), prior_mean * prior, prior)
    for j in sorted(range(len(units)), key=lambda j: -len(units[j])):
        known.join(j, setting)
    for _ in range(setting.passes):
        for j in draw.permutation(len(units)):
            known.leave(int(j))
            known.join(int(j), setting)
    return Matched(known.places, known.sums / known.weights)


@dataclass
class _Known:
    """What is known of the global units while networks join and leave: S, P (L, D) each, and m
    (L,).
    """

    weighted: list[Array]  # p v of each network's units
    precisions: list[Array]
    prior_sum: Array
    prior: Array

    def __post_init__(self) -> None:
        self.sums = np.zeros((0, len(self.prior)))
        self.weights = np.zeros((0, len(self.prior)))
        self.members = np.zeros(0, dtype=np.int64)
        self.places = [np.zeros(0, dtype=np.int64) for _ in self.weighted]

    def join(self, j: int, setting: MatchingSettings) -> None:
        """Match a network's units with the global ones, or make them new ones, so that the scores'
        sum is greatest.
        """
        from scipy.optimize import linear_sum_assignment

        own, precision, old = self.weighted[j], self.precisions[j], len(self.members)
        if old == 0:
            chosen = np.arange(len(own))
        else:
            _, chosen = linear_sum_assignment(self.scores(own, precision, setting), maximize=True)
        fresh = chosen >= old
        self.places[j] = np.where(fresh, old + np.cumsum(fresh) - 1, chosen)
        grown = (int(fresh.sum()), 1)
        self.sums = np.vstack([self.sums, np.tile(self.prior_sum, grown)])
        self.weights = np.vstack([self.weights, np.tile(self.prior, grown)])
        self.members = np.append(self.members, np.zeros(grown[0], dtype=np.int64))
        self.sums[self.places[j]] += own
        self.weights[self.places[j]] += precision
        self.members[self.places[j]] += 1

    def leave(self, j: int) -> None:
        """Take a network's units out; a global unit without members is removed."""
        mine = self.places[j]
        self.sums[mine] -= self.weighted[j]
        self.weights[mine] -= self.precisions[j]
        self.members[mine] -= 1
        stays = self.members > 0
        moved = np.cumsum(stays) - 1
        self.sums, self.weights, self.members = (
            self.sums[stays],
            self.weights[stays],
            self.members[stays],
        )
        self.places = [moved[p] if k != j else p[:0] for k, p in enumerate(self.places)]

    def scores(self, own: Array, precision: Array, setting: MatchingSettings) -> Array:
        """The score of each unit (L_j) with each global one (L), and with each place of a new
        one.
        """
        popular = np.minimum(self.members, POPULAR)
        with_old = _gain(own, precision, self.sums, self.weights) + np.log(
            popular / (len(self.weighted) - popular)
        )
        alone = _gain(own, precision, self.prior_sum[None], self.prior[None])  # (L_j, 1)
        k = np.arange(1, self.places_for_new(len(own), setting) + 1)
        return np.hstack(
            [with_old, alone - 2 * np.log(k) + 2 * np.log(setting.gamma / len(self.weighted))]
        )

    def places_for_new(self, count: int, setting: MatchingSettings) -> int:
        """How many of a network's units may become new global ones."""
        least = max(count - len(self.members), 0)
        return (
            max(least, min(count, max(setting.most - len(self.members), 1)))
            if setting.grow
            else least
        )


def _gain(own: Array, precision: Array, sums: Array, weights: Array) -> Array:
    """sum_d (p v + S)^2 / (p + P) - S^2 / P for every unit and every global one, (L_j, L)."""
    inverse = 1 / (precision + weights)
    squares = own**2 @ inverse.T + 2 * own @ (sums * inverse).T
    out: Array = squares + (sums**2 * inverse - sums**2 / weights).sum(1)
    return out
