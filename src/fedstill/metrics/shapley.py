"""Rules that divide the change of a value among the players of a game, such as a round's change of
class accuracies among clients.

A value maps a coalition, the positions of the players that act, to a number for each class (C,)
float64. A rule gives contributions (m, C). They sum to value(all) - value(none), up to a gap that
is given where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Value = Callable[[tuple[int, ...]], Tensor]
"""The positions of the players that act, ascending -> the coalition's value for each class (C,)."""

MOST_EXACT = 10
"""The most players for which all coalitions are evaluated: 1,024."""

TOLERANCE = 0.01
"""The largest error of a piece of the path that is not halved."""

HALVINGS = 4
"""How often a piece of the path is halved at most."""

_ROOT = math.sqrt(3 / 5)
NODES = ((0.5 - _ROOT / 2, 5 / 18), (0.5, 8 / 18), (0.5 + _ROOT / 2, 5 / 18))
"""Gauss–Legendre's three places in [0, 1], and their weights."""


class Divided(NamedTuple):
    """Contributions (m, C), and their possible error: the gap (C,) of their sums, or standard
    errors (m, C).
    """

    values: Tensor
    gap: Tensor


def soft_accuracy(logits: Tensor, labels: Tensor, temperature: float = 0.25) -> Tensor:
    """The probability (n,) of each example's true class at a temperature: accuracy that has a
    gradient.

    logits: (n, C); labels: (n,) int64; temperature: above 0; the smaller it is, the nearer to right
    or wrong.
    """
    return (logits / temperature).softmax(1).gather(1, labels[:, None]).squeeze(1)


@dataclass(frozen=True)
class TwoParts:
    """The change of each class's accuracy in a round, (C,) each: by local training and by
    averaging.
    """

    training: Tensor
    averaging: Tensor


def by_local_training_and_averaging(
    received: Tensor, local: Tensor, aggregated: Tensor, weights: Tensor
) -> TwoParts:
    """The change of class accuracies in two parts, whose sum is exactly ``aggregated - received``.

    received, aggregated: class accuracies (C,) of the global model before and after the round;
    local: of the local models (m, C); weights: (m,) shares of the mean, which sum to 1. NaN where a
    class has no test examples.
    """
    mean = weights @ local
    return TwoParts(training=mean - received, averaging=aggregated - mean)


def exact(value: Value, players: int) -> Divided:
    """Shapley's value: the mean over all orders of the change when a player joins; 2^m coalitions.

    Raises ValueError above ``MOST_EXACT`` players. Source: Shapley (1953).
    """
    if players > MOST_EXACT:
        raise ValueError(
            f"{players} players have {2**players:,} coalitions; at most {MOST_EXACT} players have "
            "an exact value"
        )
    positions = range(players)
    sizes = [combinations(positions, size) for size in range(players + 1)]
    worth = {coalition: value(coalition) for coalition in chain.from_iterable(sizes)}
    rows = [_exact_contribution(worth, k, players) for k in positions]
    values = _rows(rows, like=worth[()])
    return Divided(values, _gap(values, worth[tuple(positions)] - worth[()]))


def _exact_contribution(
    worth: Mapping[tuple[int, ...], Tensor], player: int, players: int
) -> Tensor:
    """A player's Shapley value (C,) from the values of all coalitions."""
    other_players = [p for p in range(players) if p != player]
    parts = []
    for size in range(players):
        orders_with_size = players * math.comb(players - 1, size)
        for coalition in combinations(other_players, size):
            joined = tuple(sorted((*coalition, player)))
            parts.append((worth[joined] - worth[coalition]) / orders_with_size)
    return torch.stack(parts).sum(0)


def orders(value: Value, players: int, count: int, draw: torch.Generator) -> Divided:
    """The mean over ``count`` drawn orders of the change when a player joins, and its standard
    error (m, C).

    Source: Castro et al. (2009). Coalitions that several orders share are evaluated once.
    """
    worth: dict[tuple[int, ...], Tensor] = {}

    def cached_value(coalition: tuple[int, ...]) -> Tensor:
        if coalition not in worth:
            worth[coalition] = value(coalition)
        return worth[coalition]

    rows = []
    for _ in range(count):
        coalition: tuple[int, ...] = ()
        changes = [cached_value(())] * players
        for k in torch.randperm(players, generator=draw).tolist():
            joined = tuple(sorted((*coalition, k)))
            changes[k] = cached_value(joined) - cached_value(coalition)
            coalition = joined
        rows.append(torch.stack(changes))
    by_order = torch.stack(rows)  # (count, m, C)
    error = torch.full_like(by_order[0], math.inf)
    if count > 1:
        error = by_order.std(0) / math.sqrt(count)
    return Divided(by_order.mean(0), error)


def two_ends(value: Value, players: int) -> Divided:
    """The mean of a player's change alone and of the change if it leaves: 2m + 2 coalitions."""
    all_players = tuple(range(players))
    nobody = value(())
    everybody = value(all_players)
    rows = []
    for k in all_players:
        alone = value((k,))
        without = value(tuple(p for p in all_players if p != k))
        rows.append((alone - nobody + everybody - without) / 2)
    values = _rows(rows, like=nobody)
    return Divided(values, _gap(values, everybody - nobody))


def _rows(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """Rows (C,) as one tensor (m, C), also for no players."""
    if not rows:
        return like.new_zeros(0, len(like))
    return torch.stack(list(rows))


class Line(Protocol):
    """A value along a straight line from nobody's change, s = 0, to everybody's, s = 1."""

    def values(self, s: float, classes: Sequence[int]) -> Tensor:
        """The value of these classes (c,) there."""

    def slopes(self, s: float, classes: Sequence[int]) -> Tensor:
        """Its derivative there along each player's change: (m, c)."""


def along_path(line: Line, players: int, classes: Sequence[int]) -> Divided:
    """Aumann's and Shapley's value: each player's slope, integrated along the line; (m, c) for
    these classes.

    Three nodes of Gauss and Legendre on each piece. If a class's sum misses the change over the
    piece by more than ``TOLERANCE``, the piece is halved for that class, at most ``HALVINGS``
    times.

    Source: Aumann and Shapley (1974).
    """
    start = line.values(0.0, classes)
    end = line.values(1.0, classes)
    integral = _PathIntegral(line, classes, torch.zeros(players, len(classes), dtype=torch.float64))
    integral.add(_Piece(0.0, 1.0, start, end, list(range(len(classes)))), HALVINGS)
    return Divided(integral.total, _gap(integral.total, end - start))


@dataclass(frozen=True)
class _Piece:
    """A piece of the path from ``low`` to ``high``, with the values (p,) at both ends of the
    classes in these positions.
    """

    low: float
    high: float
    low_values: Tensor
    high_values: Tensor
    positions: list[int]

    def halves(self, rough: list[int], line: Line, classes: Sequence[int]) -> tuple[_Piece, _Piece]:
        """The two halves of the piece, for some of its classes."""
        middle = (self.low + self.high) / 2
        positions = [self.positions[i] for i in rough]
        values = line.values(middle, [classes[p] for p in positions])
        first = _Piece(self.low, middle, self.low_values[rough], values, positions)
        second = _Piece(middle, self.high, values, self.high_values[rough], positions)
        return first, second


@dataclass(frozen=True)
class _PathIntegral:
    """The integral of the slopes along a line, to which pieces are added."""

    line: Line
    classes: Sequence[int]
    total: Tensor

    def add(self, piece: _Piece, halvings: int) -> None:
        """Add a piece; it is halved for classes where three nodes are not exact enough."""
        length = piece.high - piece.low
        classes = [self.classes[p] for p in piece.positions]
        parts = torch.zeros(())
        for node, weight in NODES:
            slopes = self.line.slopes(piece.low + node * length, classes)
            parts = parts + weight * length * slopes  # (m, p)

        errors = (parts.sum(0) - (piece.high_values - piece.low_values)).abs()
        indices = range(len(piece.positions))
        rough = [i for i in indices if halvings and float(errors[i]) > TOLERANCE]
        good = [i for i in indices if i not in rough]
        self.total[:, [piece.positions[i] for i in good]] += parts[:, good]
        if rough:
            for half in piece.halves(rough, self.line, self.classes):
                self.add(half, halvings - 1)


def moved_classes(
    previous: Sequence[float | None], current: Sequence[float | None], least: float, most: int
) -> list[int]:
    """The classes whose accuracy moved by ``least`` or more, in order; at most ``most``, which
    moved furthest.

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
    """Clients in ascending order of their contributions, without contributions below the error.

    >>> culprits({3: -0.2, 5: 0.004, 7: -0.3}, 0.01)
    [7, 3]
    """
    clients = [client for client, value in contributions.items() if abs(value) > error]
    return sorted(clients, key=lambda client: (contributions[client], client))


def _gap(values: Tensor, change: Tensor) -> Tensor:
    return (values.sum(0) - change).abs()
