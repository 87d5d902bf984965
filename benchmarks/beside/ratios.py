"""From pairs of times to a ratio, its interval, and a verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from scipy.stats import quantile_test

LIMIT = 1.03
"""The ratio, working tree to REV, above which the working tree counts as slower."""

CONFIDENCE = 0.95


class Verdict(StrEnum):
    """What the interval of a ratio says about the limit."""

    SLOWER = "slower"
    WITHIN = "within"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Pair:
    """Seconds for the same work, measured side by side in both trees."""

    rev: float
    working: float

    @property
    def ratio(self) -> float:
        """Above 1, the working tree took longer."""
        return self.working / self.rev


@dataclass(frozen=True)
class Ratio:
    """The median of the pairs' ratios with its confidence interval.

    ``low`` and ``high`` are nan for fewer than six pairs: their range contains the median with
    less than 95 % confidence.
    """

    rev: float
    working: float
    median: float
    low: float
    high: float

    def verdict(self, limit: float = LIMIT) -> Verdict:
        """SLOWER or WITHIN if the whole interval lies on one side of the limit."""
        if self.low > limit:
            return Verdict.SLOWER
        if self.high <= limit:
            return Verdict.WITHIN
        return Verdict.UNDECIDED


def ratio_of(pairs: Sequence[Pair]) -> Ratio:
    """Summarise at least one pair.

    The interval lies between two order statistics of the ratios (binomial quantile test), so it
    assumes nothing about how times are distributed. One disturbed pair hardly moves it.
    """
    ratios = [pair.ratio for pair in pairs]
    interval = quantile_test(ratios, p=0.5).confidence_interval(CONFIDENCE)
    return Ratio(
        rev=statistics.median(pair.rev for pair in pairs),
        working=statistics.median(pair.working for pair in pairs),
        median=statistics.median(ratios),
        low=_number(interval.low),
        high=_number(interval.high),
    )


def _number(bound: float | None) -> float:
    if bound is None:
        return math.nan
    return float(bound)
