"""Rules that divide a change of a value among the players of a game, such as the change of class
accuracies in a round among clients.

A value maps a coalition (the positions of its players) to a number for each class, (C,) float64. A
rule returns contributions (m, C). They sum to value(all) - value(none), up to a gap that the rule
reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Protocol

import torch
from torch import Tensor

Value = Callable[[tuple[int, ...]], Tensor]
"""Maps a coalition, the ascending positions of its players, to its value for each class (C,)."""

MOST_EXACT = 10
"""The largest number of players for which all coalitions (up to 1,024) are evaluated."""

TOLERANCE = 0.01
"""A segment of the path with a larger error is halved."""

HALVINGS = 4
"""The maximum number of times that a segment of the path is halved."""

_ROOT = math.sqrt(3 / 5)
NODES = ((0.5 - _ROOT / 2, 5 / 18), (0.5, 8 / 18), (0.5 + _ROOT / 2, 5 / 18))
"""The nodes of the three-point Gauss–Legendre rule on [0, 1], and their weights."""


@dataclass(frozen=True, eq=False)
class ContributionTable:
    """Contributions (m, C), and their gap (C,): the error of their sums."""

    values: Tensor
    gap: Tensor


def soft_accuracy(logits: Tensor, labels: Tensor, temperature: float = 0.25) -> Tensor:
    """The probability (n,) of each example's label at a temperature: a differentiable accuracy.

    logits: (n, C); labels: (n,) int64; temperature: above 0. For low temperatures, it approaches 0
    or 1.
    """
    return (logits / temperature).softmax(1).gather(1, labels[:, None]).squeeze(1)


@dataclass(frozen=True)
class AccuracyChange:
    """The change of class accuracies (C,) in a round: by local training and by averaging."""

    training: Tensor
    averaging: Tensor


def by_local_training_and_averaging(
    received: Tensor, local: Tensor, aggregated: Tensor, weights: Tensor
) -> AccuracyChange:
    """The change of class accuracies in two parts, whose sum is exactly ``aggregated - received``.

    received, aggregated: class accuracies (C,) of the global model before and after the round;
    local: class accuracies (m, C) of the local models; weights: (m,), with sum 1. NaN for classes
    without test examples.
    """
    mean = weights @ local
    return AccuracyChange(training=mean - received, averaging=aggregated - mean)


def exact(value: Value, players: int) -> ContributionTable:
    """The Shapley value: a player's mean marginal contribution over all orders of the players.

    It evaluates 2^m coalitions. Raises ValueError for more than ``MOST_EXACT`` players. Source:
    Shapley (1953).
    """
    if players > MOST_EXACT:
        raise ValueError(
            f"{players} players have {2**players:,} coalitions, too many for an exact value; the "
            f"limit is {MOST_EXACT} players"
        )
    positions = range(players)
    coalitions = [combinations(positions, size) for size in range(players + 1)]
    coalition_values = {c: value(c) for c in chain.from_iterable(coalitions)}
    rows = [_exact_contribution(coalition_values, k, players) for k in positions]
    values = _rows(rows, like=coalition_values[()])
    change = coalition_values[tuple(positions)] - coalition_values[()]
    return ContributionTable(values, _gap(values, change))


def _exact_contribution(
    coalition_values: Mapping[tuple[int, ...], Tensor], player: int, players: int
) -> Tensor:
    """A player's Shapley value (C,) from the values of all coalitions."""
    other_players = [p for p in range(players) if p != player]
    parts = []
    for size in range(players):
        orders_with_size = players * math.comb(players - 1, size)
        for coalition in combinations(other_players, size):
            extended = tuple(sorted((*coalition, player)))
            change = coalition_values[extended] - coalition_values[coalition]
            parts.append(change / orders_with_size)
    return torch.stack(parts).sum(0)


def two_ends(value: Value, players: int) -> ContributionTable:
    """The mean of a player's contributions to the empty coalition and to all other players.

    It evaluates 2m + 2 coalitions.
    """
    all_players = tuple(range(players))
    empty_value = value(())
    full_value = value(all_players)
    rows = []
    for k in all_players:
        single_value = value((k,))
        value_without = value(tuple(p for p in all_players if p != k))
        rows.append((single_value - empty_value + full_value - value_without) / 2)
    values = _rows(rows, like=empty_value)
    return ContributionTable(values, _gap(values, full_value - empty_value))


def _rows(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """Rows (C,) as one tensor (m, C), also without players."""
    if not rows:
        return like.new_zeros(0, len(like))
    return torch.stack(list(rows))


class Line(Protocol):
    """A value along the straight line from no player's change (s = 0) to all players' changes
    (s = 1).
    """

    def values(self, s: float, classes: Sequence[int]) -> Tensor:
        """The value at s for some classes: (c,)."""

    def slopes(self, s: float, classes: Sequence[int]) -> Tensor:
        """The derivative at s in the direction of each player's change: (m, c)."""


def along_path(line: Line, players: int, classes: Sequence[int]) -> ContributionTable:
    """The Aumann–Shapley value (m, c) for some classes: the integral of each player's slope along
    the line.

    The integral uses the three-point Gauss–Legendre rule on each segment. If the contributions of a
    class miss its change on a segment by more than ``TOLERANCE``, the segment is halved for that
    class, at most ``HALVINGS`` times.

    Source: Aumann and Shapley (1974).
    """
    start = line.values(0.0, classes)
    end = line.values(1.0, classes)
    integral = _PathIntegral(line, classes, torch.zeros(players, len(classes), dtype=torch.float64))
    integral.add(_Segment(0.0, 1.0, start, end, list(range(len(classes)))), HALVINGS)
    return ContributionTable(integral.total, _gap(integral.total, end - start))


@dataclass(frozen=True)
class _Segment:
    """A segment of the path from ``low`` to ``high``, and the values (p,) at both ends for the
    classes at some positions.
    """

    low: float
    high: float
    low_values: Tensor
    high_values: Tensor
    positions: list[int]

    def halves(
        self, indices: list[int], line: Line, classes: Sequence[int]
    ) -> tuple[_Segment, _Segment]:
        """The two halves of the segment, for some of its classes."""
        middle = (self.low + self.high) / 2
        positions = [self.positions[i] for i in indices]
        values = line.values(middle, [classes[p] for p in positions])
        first = _Segment(self.low, middle, self.low_values[indices], values, positions)
        second = _Segment(middle, self.high, values, self.high_values[indices], positions)
        return first, second


@dataclass(frozen=True)
class _PathIntegral:
    """The integral of the slopes along a line, summed over segments."""

    line: Line
    classes: Sequence[int]
    total: Tensor

    def add(self, segment: _Segment, halvings: int) -> None:
        """Add a segment. For classes with a large error, add its halves instead."""
        length = segment.high - segment.low
        classes = [self.classes[p] for p in segment.positions]
        parts = torch.zeros(())
        for node, weight in NODES:
            slopes = self.line.slopes(segment.low + node * length, classes)
            parts = parts + weight * length * slopes  # (m, p)

        errors = (parts.sum(0) - (segment.high_values - segment.low_values)).abs()
        indices = range(len(segment.positions))
        inexact = [i for i in indices if halvings and float(errors[i]) > TOLERANCE]
        exact = [i for i in indices if i not in inexact]
        self.total[:, [segment.positions[i] for i in exact]] += parts[:, exact]
        if inexact:
            for half in segment.halves(inexact, self.line, self.classes):
                self.add(half, halvings - 1)


def moved_classes(
    previous: Sequence[float | None], current: Sequence[float | None], least: float, most: int
) -> list[int]:
    """The classes whose accuracy changed by at least ``least``, in ascending order; at most
    ``most`` classes, those with the largest changes.

    >>> moved_classes([0.5, 0.2, None, 0.9], [0.1, 0.21, None, 1.0], 0.05, 2)
    [0, 3]
    """
    moves = {
        c: abs(new - old)
        for c, (old, new) in enumerate(zip(previous, current, strict=True))
        if old is not None and new is not None
    }
    large_moves = [c for c, move in moves.items() if move >= least]
    furthest_first = sorted(large_moves, key=lambda c: (-moves[c], c))
    return sorted(furthest_first[:most])


def culprits(contributions: Mapping[int, float], error: float) -> list[int]:
    """Clients in ascending order of their contributions, without those of at most the error.

    >>> culprits({3: -0.2, 5: 0.004, 7: -0.3}, 0.01)
    [7, 3]
    """
    clients = [client for client, value in contributions.items() if abs(value) > error]
    return sorted(clients, key=lambda client: (contributions[client], client))


def _gap(values: Tensor, change: Tensor) -> Tensor:
    return (values.sum(0) - change).abs()
