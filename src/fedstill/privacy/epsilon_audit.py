"""What a mechanism is seen to leak: a lower bound on epsilon, from its outputs with and without a
canary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.stats import beta

Array = np.ndarray[Any, np.dtype[np.float64]]


def epsilon_at_least(canary: Array, clean: Array, delta: float, confidence: float = 0.95) -> float:
    """An epsilon that the true one is above with this confidence; 0 where the outputs tell nothing.

    canary, clean: (n,) a score of each output of the mechanism on data with and without the canary,
    at least 8 of each. A threshold, and which side of it counts, is chosen by the first half of the
    scores; the second half says how often it tells. With the bounds of Clopper and Pearson on both
    rates, ``epsilon >= log((TPR - delta) / FPR)``.

    Source: Jagielski et al. (2020), "Auditing Differentially Private Machine Learning", section 3;
    Nasr et al. (2021).

    >>> epsilon_at_least(np.zeros(100), np.zeros(100), 1e-5)
    0.0
    >>> round(epsilon_at_least(np.ones(1000), np.zeros(1000), 1e-5), 2)
    4.91
    """
    half, other = len(canary) // 2, len(clean) // 2
    best, choice = -math.inf, (0.0, 1)
    for sign in (1, -1):
        high, low = np.sort(sign * canary[:half]), np.sort(sign * clean[:other])
        for at in np.unique(np.concatenate([high, low])):
            hits, false = half - np.searchsorted(high, at), other - np.searchsorted(low, at)
            if (bound := _bound(int(hits), half, int(false), other, delta, confidence)) > best:
                best, choice = bound, (float(at), sign)
    at, sign = choice
    hits, false = ((sign * some >= at).sum() for some in (canary[half:], clean[other:]))
    return max(
        0.0,
        _bound(int(hits), len(canary) - half, int(false), len(clean) - other, delta, confidence),
    )


def _bound(
    hits: int, canaries: int, false: int, others: int, delta: float, confidence: float
) -> float:
    """The bound of one threshold, as each of two rates errs with half of what confidence leaves."""
    tail = (1 - confidence) / 2
    least = float(beta.ppf(tail, hits, canaries - hits + 1)) if hits else 0.0
    most = float(beta.ppf(1 - tail, false + 1, others - false)) if false < others else 1.0
    return math.log((least - delta) / most) if least > delta else -math.inf
