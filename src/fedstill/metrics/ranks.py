"""Comparisons of methods: differences paired by seed and ranks over settings, with intervals and
tests.

A block is a column (a setting) with a seed. Columns are a choice, not a random sample, so results
do not generalise to other settings.

Functions import scipy when they are called, because the import takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedstill.core.keys import numpy_generator, seed_for
from fedstill.core.label_counts import TensorLike
from fedstill.metrics.accuracy import Values

CONFIDENCE = 0.95

DRAWS = 10_000
"""The number of random samples if there are too many to enumerate."""

MAX_ENUMERATED = 16
"""The largest number of differences for which all 65,536 sign combinations are enumerated."""


@dataclass(frozen=True)
class Difference:
    """The mean difference over pairs of runs with the same seed, and its 95 % confidence interval.

    ``low``, ``high``: the ends of the interval. ``p``: the p value of the two-sided paired t test.
    These are NaN for fewer than two pairs. ``pairs``: the number of common seeds.
    """

    mean: float
    low: float
    high: float
    p: float
    pairs: int

    @property
    def told_apart(self) -> bool:
        """Whether the interval excludes 0; False for fewer than two pairs."""
        return self.low > 0 or self.high < 0


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """The mean of (ours - theirs) over common seeds, with Student's t interval; None without a
    common seed.

    ours, theirs: numbers by seed. The interval assumes that differences are normal and that seeds
    are independent. If all differences are equal, its width is 0.

    >>> d = paired_difference(
    ...     {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}, dict.fromkeys(range(9), 0.0)
    ... )
    >>> d.mean, round(d.high - d.mean, 2), d.pairs, d.told_apart
    (3.0, 1.96, 5, True)
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    differences = np.array([ours[seed] - theirs[seed] for seed in seeds], dtype=np.float64)
    count = len(differences)
    mean = float(differences.mean())
    if count < 2:
        nan = float("nan")
        return Difference(mean, low=nan, high=nan, p=nan, pairs=count)
    from scipy.special import stdtr, stdtrit

    error = float(differences.std(ddof=1) / np.sqrt(count))
    half_width = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error
    if error:
        p = float(2 * stdtr(count - 1, -abs(mean) / error))
    elif mean == 0:
        # All differences are 0.
        p = 1.0
    else:
        # All differences are the same number.
        p = 0.0
    return Difference(mean, low=mean - half_width, high=mean + half_width, p=p, pairs=count)


def sign_flips(differences: TensorLike, draws: int = DRAWS, seed: int = 0) -> float:
    """The p value of the two-sided sign-flip test: the share of random signs with a mean at least
    as far from 0 as the observed mean.

    differences: paired, of any shape. Up to 16 differences, all signs are enumerated; otherwise,
    ``draws`` signs are drawn by key, and the observed signs are added to them. Under the null
    hypothesis, both signs of a difference have equal probability.

    Source: Fisher 1935, section 21.

    >>> sign_flips([1, 2, 3, 4, 5]) == 2 / 32
    True
    """
    flat = np.asarray(differences, dtype=np.float64).ravel()
    if not len(flat):
        return float("nan")
    exact = len(flat) <= MAX_ENUMERATED
    if exact:
        signs = 1.0 - 2.0 * ((np.arange(2 ** len(flat))[:, None] >> np.arange(len(flat))) & 1)
    else:
        draw = numpy_generator(seed_for(seed, 0, 0, 0, "sign flips"))
        signs = draw.choice([-1.0, 1.0], size=(draws, len(flat)))
    mean = abs(flat.sum())
    extreme = int((np.abs(signs @ flat) >= mean * (1 - 1e-12)).sum())
    if exact:
        return extreme / len(signs)
    return (extreme + 1) / (draws + 1)


def holm(ps: Sequence[float]) -> list[float]:
    """The p values of several tests after Holm's adjustment, which controls the family-wise error
    rate.

    Source: Holm 1979.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    adjusted = [0.0] * len(ps)
    largest = 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(ps) - place) * ps[i]))
        adjusted[i] = largest
    return adjusted


def resampled_means(values: TensorLike, draws: int = DRAWS, seed: int = 0) -> Values:
    """Bootstrap means (draws, …): means over columns of means over seeds, where the seeds of each
    column are drawn by key with replacement.

    values: (…, columns, seeds). All leading axes share the draws, so that differences of two
    results stay paired.
    """
    array = np.asarray(values, dtype=np.float64)
    columns, seeds = array.shape[-2:]
    draw = numpy_generator(seed_for(seed, 0, 0, 0, "seeds within columns"))
    picked = draw.integers(seeds, size=(draws, columns, seeds))
    means = [array[..., c, :][..., picked[:, c]].mean(axis=-1) for c in range(columns)]
    return np.moveaxis(np.mean(means, axis=0), -1, 0)


def interval(values: TensorLike, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """A bootstrap interval of about 95 % for the mean over columns of means over seeds.

    values: (columns, seeds). (NaN, NaN) for a single seed. The interval only applies to these
    columns.

    Source: Hesterberg 2015, expanded percentiles. Plain percentiles are too narrow for few seeds
    (with five seeds in one column they cover 83 %). The expanded ones match Student's t with
    columns x (seeds - 1) degrees of freedom.
    """
    array = np.asarray(values, dtype=np.float64)
    columns, seeds = array.shape
    if seeds < 2:
        return float("nan"), float("nan")
    return _ends(resampled_means(array, draws, seed), columns, seeds)


def _ends(drawn: Values, columns: int, seeds: int) -> tuple[float, float]:
    """The ends of the interval, given resampled means."""
    from scipy.special import ndtr, stdtrit

    quantile = float(stdtrit(columns * (seeds - 1), (1 + CONFIDENCE) / 2))
    tail = float(ndtr(-float(np.sqrt(seeds / (seeds - 1))) * quantile))
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)


def ranks(scores: TensorLike) -> Values:
    """The rank of each method in each block; 1 is the best. Equal scores have the mean of their
    ranks.

    scores: (methods, …), higher is better. The ranks have the same shape.

    >>> ranks([[0.9, 0.5], [0.7, 0.5], [0.8, 0.6]]).tolist()
    [[1.0, 2.5], [3.0, 2.5], [2.0, 1.0]]
    """
    from scipy.stats import rankdata

    ranked: Values = rankdata(-np.asarray(scores, dtype=np.float64), method="average", axis=0)
    return ranked


def win_rate(ours: TensorLike, theirs: TensorLike) -> float:
    """The share of the blocks in which our score is higher; equal scores count half.

    >>> win_rate([3, 2, 1, 5], [1, 2, 3, 4])
    0.625
    """
    our_scores = np.asarray(ours, dtype=np.float64)
    their_scores = np.asarray(theirs, dtype=np.float64)
    wins = (our_scores > their_scores) + 0.5 * (our_scores == their_scores)
    return float(np.mean(wins))


def bars(differ: Sequence[Sequence[bool]]) -> list[list[int]]:
    """The bars of a critical-difference diagram: the maximal groups of methods of which no two
    differ.

    differ: (methods, methods), whether two methods differ. Groups of one method are omitted. The
    methods of a group need not have consecutive ranks, so a bar has a mark at each of its methods.

    Source: Bron & Kerbosch 1973.

    >>> bars([[False, False, True], [False, False, False], [True, False, False]])
    [[0, 1], [1, 2]]
    """
    neighbours = [
        {j for j, differs in enumerate(row) if not differs and j != i}
        for i, row in enumerate(differ)
    ]
    cliques: list[list[int]] = []

    def grow(clique: set[int], candidates: set[int], excluded: set[int]) -> None:
        if not candidates and not excluded:
            cliques.append(sorted(clique))
        for method in sorted(candidates):
            near = neighbours[method]
            grow(clique | {method}, candidates & near, excluded & near)
            candidates = candidates - {method}
            excluded = excluded | {method}

    grow(set(), set(range(len(neighbours))), set())
    return sorted(clique for clique in cliques if len(clique) > 1)


def nemenyi_width(methods: int, blocks: int) -> float:
    """The critical difference of two mean ranks in Nemenyi's test at 0.05, which assumes
    independent blocks.

    Source: Demsar 2006.

    >>> round(nemenyi_width(14, 25), 2)
    3.97
    """
    from scipy.stats import studentized_range

    quantile = float(studentized_range.ppf(CONFIDENCE, methods, np.inf)) / np.sqrt(2)
    return float(quantile * np.sqrt(methods * (methods + 1) / (6 * blocks)))


def share_of_gap(score: float, floor: float, ceiling: float) -> float:
    """The position of a score between two bounds: 0 at the floor, 1 at the ceiling; NaN unless the
    ceiling is above the floor.

    >>> share_of_gap(0.625, 0.5, 1.0)
    0.25
    """
    gap = ceiling - floor
    if gap <= 0:
        return float("nan")
    return (score - floor) / gap
