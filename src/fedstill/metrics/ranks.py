"""Whether one method is above another: differences paired by seed, ranks over settings, and how
sure both are.

A block is one column (a setting) and one seed. Columns are chosen, not drawn: nothing here reaches
beyond them.

Functions import scipy when they are called. It takes a second, and commands that only name this
module need none of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedstill.core.keys import numpy_generator, seed_for
from fedstill.core.labels import TensorLike
from fedstill.metrics.values import Values

CONFIDENCE = 0.95

DRAWS = 10_000
"""How many samples are drawn where not all can be gone through."""

EXACTLY = 16
"""Of so many differences all signs are gone through: 65,536 of them."""


@dataclass(frozen=True)
class Difference:
    """A mean difference over pairs of runs of one seed, and the interval that holds the true one in
    95 of 100 cases.

    ``low``, ``high``: its ends; ``p``: how often a difference as large comes by chance alone (the
    paired t test, both sides); NaN for fewer than two pairs. ``pairs``: how many seeds both had.
    """

    mean: float
    low: float
    high: float
    p: float
    pairs: int

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves 0 out; never for fewer than two pairs."""
        return self.low > 0 or self.high < 0


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """The mean of (ours - theirs) over the seeds that both have, with Student's t interval; None
    without such a seed.

    ours, theirs: a number by seed. The interval assumes that differences are normal, and that seeds
    are independent. If all differences are equal it is that number alone.

    >>> d = paired_difference(
    ...     {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}, dict.fromkeys(range(9), 0.0)
    ... )
    >>> d.mean, round(d.high - d.mean, 2), d.pairs, d.told_apart
    (3.0, 1.96, 5, True)
    """
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return None
    apart = np.array([ours[seed] - theirs[seed] for seed in both], dtype=np.float64)
    mean, count = float(apart.mean()), len(apart)
    if count < 2:
        return Difference(mean, float("nan"), float("nan"), float("nan"), count)
    from scipy.special import stdtr, stdtrit

    error = float(apart.std(ddof=1) / np.sqrt(count))
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error
    p = float(2 * stdtr(count - 1, -abs(mean) / error)) if error else float(mean == 0)
    return Difference(mean, mean - half, mean + half, p, count)


def sign_flips(apart: TensorLike, draws: int = DRAWS, seed: int = 0) -> float:
    """How often signs drawn at random give a mean at least as far from 0: the sign-flip test, both
    sides.

    apart: paired differences, any shape. All signs are gone through where there are at most 16
    differences; else ``draws`` are drawn by key, and the signs that were seen count as one of them.
    It assumes that, were the two alike, a difference would as well have the other sign.

    Source: Fisher 1935, section 21.

    >>> sign_flips([1, 2, 3, 4, 5]) == 2 / 32
    True
    """
    flat = np.asarray(apart, dtype=np.float64).ravel()
    if not len(flat):
        return float("nan")
    exact = len(flat) <= EXACTLY
    if exact:
        signs = 1.0 - 2.0 * ((np.arange(2 ** len(flat))[:, None] >> np.arange(len(flat))) & 1)
    else:
        draw = numpy_generator(seed_for(seed, 0, 0, 0, "sign flips"))
        signs = draw.choice([-1.0, 1.0], size=(draws, len(flat)))
    mean = abs(flat.sum())
    as_far = int((np.abs(signs @ flat) >= mean * (1 - 1e-12)).sum())
    return as_far / len(signs) if exact else (as_far + 1) / (draws + 1)


def holm(ps: Sequence[float]) -> list[float]:
    """p values of several tests, adjusted so that any of them is wrongly below 0.05 in 5 of 100
    cases at most.

    Source: Holm 1979.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    adjusted, least = [0.0] * len(ps), 0.0
    for place, i in enumerate(order):
        least = max(least, min(1.0, (len(ps) - place) * ps[i]))
        adjusted[i] = least
    return adjusted


def resampled_means(values: TensorLike, draws: int = DRAWS, seed: int = 0) -> Values:
    """Means over columns of means over seeds, the seeds of each column drawn anew by key
    with replacement: (draws, …).

    values: (…, columns, seeds). All that stands before the last two axes is drawn alike, so that
    differences of two results stay paired.
    """
    own = np.asarray(values, dtype=np.float64)
    columns, seeds = own.shape[-2:]
    draw = numpy_generator(seed_for(seed, 0, 0, 0, "seeds within columns"))
    picked = draw.integers(seeds, size=(draws, columns, seeds))
    means = [own[..., c, :][..., picked[:, c]].mean(axis=-1) for c in range(columns)]
    return np.moveaxis(np.mean(means, axis=0), -1, 0)


def interval(values: TensorLike, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """The interval that holds the mean over columns of means over seeds in about 95 of 100 cases,
    by resampling.

    values: (columns, seeds). (NaN, NaN) for a single seed. It says nothing of columns that are not
    there.

    Source: Hesterberg 2015, expanded percentiles: plain ones are too narrow for few seeds (five in
    one column: 83 of 100), so that those of a wider share are taken, that of Student's t with
    columns x (seeds - 1) degrees of freedom.
    """
    own = np.asarray(values, dtype=np.float64)
    columns, seeds = own.shape
    if seeds < 2:
        return float("nan"), float("nan")
    return _ends(resampled_means(own, draws, seed), columns, seeds)


def told_apart(values: TensorLike, draws: int = DRAWS, seed: int = 0) -> list[list[bool]]:
    """Of which two methods the interval of the mean difference leaves 0 out, both drawn alike:
    (methods, methods).

    values: (methods, columns, seeds): scores, or ranks of them.
    """
    own = np.asarray(values, dtype=np.float64)
    many, columns, seeds = own.shape
    apart = [[False] * many for _ in range(many)]
    drawn = resampled_means(own, draws, seed)
    for i, j in itertools.combinations(range(many), 2):
        low, high = _ends(drawn[:, i] - drawn[:, j], columns, seeds) if seeds > 1 else (0.0, 0.0)
        apart[i][j] = apart[j][i] = bool(low > 0 or high < 0)
    return apart


def _ends(drawn: Values, columns: int, seeds: int) -> tuple[float, float]:
    """The ends of the interval, given resampled means."""
    from scipy.special import ndtr, stdtrit

    wide = float(np.sqrt(seeds / (seeds - 1))) * float(
        stdtrit(columns * (seeds - 1), (1 + CONFIDENCE) / 2)
    )
    tail = float(ndtr(-wide))
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)


def ranks(scores: TensorLike) -> Values:
    """The rank of each method in each block, 1 the best; those that are alike share the mean of
    their ranks.

    scores: (methods, …), more is better. Gives the same shape.

    >>> ranks([[0.9, 0.5], [0.7, 0.5], [0.8, 0.6]]).tolist()
    [[1.0, 2.5], [3.0, 2.5], [2.0, 1.0]]
    """
    from scipy.stats import rankdata

    ranked: Values = rankdata(-np.asarray(scores, dtype=np.float64), method="average", axis=0)
    return ranked


def win_rate(ours: TensorLike, theirs: TensorLike) -> float:
    """In which share of the blocks we are above them; where both are alike, it is half a win.

    >>> win_rate([3, 2, 1, 5], [1, 2, 3, 4])
    0.625
    """
    one, other = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    return float(np.mean((one > other) + 0.5 * (one == other)))


def bars(apart: Sequence[Sequence[bool]]) -> list[list[int]]:
    """Groups of methods of which no two can be told apart, each as large as can be: two share a bar
    only then.

    apart: (methods, methods), whether two can be told apart. Groups of one are left out. They need
    not be neighbours in rank: a bar has a mark at each method in it.

    Source: Bron & Kerbosch 1973.

    >>> bars([[False, False, True], [False, False, False], [True, False, False]])
    [[0, 1], [1, 2]]
    """
    alike = [
        {j for j, told in enumerate(row) if not told and j != i} for i, row in enumerate(apart)
    ]
    out: list[list[int]] = []

    def grow(group: set[int], may: set[int], had: set[int]) -> None:
        if not may and not had:
            out.append(sorted(group))
        for one in sorted(may):
            grow(group | {one}, may & alike[one], had & alike[one])
            may, had = may - {one}, had | {one}

    grow(set(), set(range(len(alike))), set())
    return sorted(group for group in out if len(group) > 1)


def nemenyi_width(methods: int, blocks: int) -> float:
    """By how much two mean ranks must differ in Nemenyi's test at 0.05, which takes blocks as
    independent.

    Source: Demsar 2006.

    >>> round(nemenyi_width(14, 25), 2)
    3.97
    """
    from scipy.stats import studentized_range

    quantile = float(studentized_range.ppf(CONFIDENCE, methods, np.inf)) / np.sqrt(2)
    return float(quantile * np.sqrt(methods * (methods + 1) / (6 * blocks)))


def share_of_gap(score: float, floor: float, ceiling: float) -> float:
    """Where a score is between two bounds: 0 at the floor, 1 at the ceiling; NaN where these are
    alike.

    >>> share_of_gap(0.625, 0.5, 1.0)
    0.25
    """
    gap = ceiling - floor
    return (score - floor) / gap if gap else float("nan")
