"""Whether one method is above another: differences paired by seed, with an interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """A mean difference over pairs of runs of one seed, and the interval that holds the true one in 95 of 100 cases.

    ``low``, ``high``: its ends; ``p``: how often a difference as large comes by chance alone (the paired t test, both
    sides); NaN for fewer than two pairs. ``pairs``: how many seeds both had.
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
    """The mean of (ours - theirs) over the seeds that both have, with Student's t interval; None without such a seed.

    ours, theirs: a number by seed. The interval assumes that differences are normal, and that seeds are independent.
    If all differences are equal it is that number alone.

    >>> d = paired_difference({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}, dict.fromkeys(range(9), 0.0))
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
    error = float(apart.std(ddof=1) / np.sqrt(count))
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error
    p = float(2 * stdtr(count - 1, -abs(mean) / error)) if error else float(mean == 0)
    return Difference(mean, mean - half, mean + half, p, count)
