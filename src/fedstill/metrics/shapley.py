"""Who contributed to a change: rules that divide the change of a value among players, and what a
round's change is of.

A value is a function of a coalition, the positions of the players that act, to a number for each
class (C,) float64. A rule gives contributions (m, C); they sum to value(all) - value(none), within
a gap that is given where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Value = Callable[[tuple[int, ...]], Tensor]
"""The positions of the players that act, ascending -> what the coalition is worth to each class
(C,).
"""

MOST_EXACT = 10
"""Players up to which all coalitions are asked: 1,024."""

MISS = 0.01
"""How far a piece of the path may miss its change before it is halved."""

HALVINGS = 4
"""How often a piece of the path is halved at most."""

_ROOT = math.sqrt(3 / 5)
NODES = ((0.5 - _ROOT / 2, 5 / 18), (0.5, 8 / 18), (0.5 + _ROOT / 2, 5 / 18))
"""Gauss–Legendre's three places in [0, 1], and their weights."""


class Divided(NamedTuple):
    """Contributions (m, C), and how far they may be off: the gap (C,) of their sums, or standard
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


def by_local_training_and_averaging(
    before: Tensor, local: Tensor, after: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """What each class gained by local training and by averaging, (C,) each; together exactly
    ``after - before``.

    before, after: class accuracies (C,) of the global model; local: of the local models (m,
    C); weights: (m,) shares of the mean, which sum to 1. NaN where a class has no test examples.
    """
    mean = weights @ local
    return mean - before, after - mean


def exact(value: Value, players: int) -> Divided:
    """Shapley's value: the mean over all orders of what a player adds when it comes; 2^m
    coalitions.

    Raises ValueError above ``MOST_EXACT`` players. Source: Shapley (1953).
    """
    if players > MOST_EXACT:
        raise ValueError(
            f"{players} players have {2**players:,} coalitions; at most {MOST_EXACT} are asked "
            "exactly"
        )
    worth = {s: value(s) for size in range(players + 1) for s in combinations(range(players), size)}
    shares = []
    for k in range(players):
        others = [p for p in range(players) if p != k]
        parts = [
            (worth[tuple(sorted((*s, k)))] - worth[s]) / (players * math.comb(players - 1, size))
            for size in range(players)
            for s in combinations(others, size)
        ]
        shares.append(torch.stack(parts).sum(0))
    values = torch.stack(shares) if shares else worth[()].new_zeros(0, len(worth[()]))
    return Divided(values, _gap(values, worth[tuple(range(players))] - worth[()]))


def orders(value: Value, players: int, count: int, draw: torch.Generator) -> Divided:
    """The mean over ``count`` orders, drawn, of what a player adds when it comes, and its standard
    error (m, C).

    Source: Castro et al. (2009). Coalitions that several orders share are asked once.
    """
    worth: dict[tuple[int, ...], Tensor] = {}

    def asked(coalition: tuple[int, ...]) -> Tensor:
        if coalition not in worth:
            worth[coalition] = value(coalition)
        return worth[coalition]

    rows = []
    for _ in range(count):
        came: tuple[int, ...] = ()
        added = [asked(())] * players
        for k in torch.randperm(players, generator=draw).tolist():
            after = tuple(sorted((*came, k)))
            added[k] = asked(after) - asked(came)
            came = after
        rows.append(torch.stack(added))
    every = torch.stack(rows)
    error = every.std(0) / math.sqrt(count) if count > 1 else torch.full_like(every[0], math.inf)
    return Divided(every.mean(0), error)


def two_ends(value: Value, players: int) -> Divided:
    """The mean of what a player does alone and of what is lost without it: 2m + 2 coalitions."""
    everyone = tuple(range(players))
    none, all_ = value(()), value(everyone)
    rows = [
        (value((k,)) - none + all_ - value(tuple(p for p in everyone if p != k))) / 2
        for k in everyone
    ]
    values = torch.stack(rows) if rows else none.new_zeros(0, len(none))
    return Divided(values, _gap(values, all_ - none))


class Line(Protocol):
    """A value along a straight line from nobody's change, s = 0, to everybody's, s = 1."""

    def values(self, s: float, classes: Sequence[int]) -> Tensor:
        """The value of these classes (c,) there."""

    def slopes(self, s: float, classes: Sequence[int]) -> Tensor:
        """How fast it moves there along each player's own change: (m, c)."""


def along_path(line: Line, players: int, classes: Sequence[int]) -> Divided:
    """Aumann's and Shapley's value: each player's slope, integrated along the line; (m, c) for
    these classes.

    Three nodes of Gauss and Legendre on each piece; where a class's sum misses the change over the
    piece by more than ``MISS``, the piece is halved for that class, at most ``HALVINGS`` times.

    Source: Aumann and Shapley (1974).
    """
    total = torch.zeros(players, len(classes), dtype=torch.float64)
    start, end = line.values(0.0, classes), line.values(1.0, classes)
    _piece(line, (0.0, 1.0), (start, end), list(range(len(classes))), classes, total, HALVINGS)
    return Divided(total, _gap(total, end - start))


def _piece(
    line: Line,
    ends: tuple[float, float],
    worth: tuple[Tensor, Tensor],
    places: list[int],
    classes: Sequence[int],
    total: Tensor,
    halvings: int,
) -> None:
    """Add a piece of the path, with its values at both ends, to the classes in these places."""
    low, high = ends
    asked = [classes[p] for p in places]
    parts = sum(
        (w * (high - low) * line.slopes(low + x * (high - low), asked) for x, w in NODES),
        start=torch.zeros(()),
    )
    miss = (parts.sum(0) - (worth[1] - worth[0])).abs()
    rough = [i for i in range(len(places)) if halvings and float(miss[i]) > MISS]
    good = [i for i in range(len(places)) if i not in rough]
    total[:, [places[i] for i in good]] += parts[:, good]
    if not rough:
        return
    rest, middle = [places[i] for i in rough], (low + high) / 2
    between = line.values(middle, [classes[p] for p in rest])
    _piece(line, (low, middle), (worth[0][rough], between), rest, classes, total, halvings - 1)
    _piece(line, (middle, high), (between, worth[1][rough]), rest, classes, total, halvings - 1)


def moved_classes(
    before: Sequence[float | None], after: Sequence[float | None], least: float, most: int
) -> list[int]:
    """The classes whose accuracy moved by ``least`` or more, at most so many, in order; those that
    moved most.

    >>> moved_classes([0.5, 0.2, None, 0.9], [0.1, 0.21, None, 1.0], 0.05, 2)
    [0, 3]
    """
    moves = {
        c: abs(a - b)
        for c, (b, a) in enumerate(zip(before, after, strict=True))
        if a is not None and b is not None
    }
    enough = sorted((c for c, move in moves.items() if move >= least), key=lambda c: (-moves[c], c))
    return sorted(enough[:most])


def culprits(contributions: Mapping[int, float], error: float) -> list[int]:
    """Clients from the one that took most to the one that gave most, without those below the error.

    >>> culprits({3: -0.2, 5: 0.004, 7: -0.3}, 0.01)
    [7, 3]
    """
    known = {client: value for client, value in contributions.items() if abs(value) > error}
    return sorted(known, key=lambda client: (known[client], client))


def _gap(values: Tensor, change: Tensor) -> Tensor:
    return (values.sum(0) - change).abs()
