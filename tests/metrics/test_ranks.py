"""Differences paired by seed, against values computed by hand and an independent implementation."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from scipy import stats

from fedstill.metrics.ranks import Difference, paired_difference

ACCURACIES = {1: 0.5, 2: 0.75, 3: 0.9}
"""Accuracies by seed."""


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference:
    """The paired difference of runs that have a seed in common."""
    paired = paired_difference(first, second)
    assert paired is not None
    return paired


def test_the_interval_of_one_to_five() -> None:
    """The variance is 2.5; the quantile is that of Student's t with 4 degrees of freedom."""
    one_to_five = {seed: float(seed) for seed in range(1, 6)}
    zeros = dict.fromkeys(range(1, 6), 0.0)

    paired = difference(one_to_five, zeros)

    half_width = 2.7764451051977987 * math.sqrt(2.5) / math.sqrt(5)
    assert paired.mean == 3.0
    assert paired.pairs == 5
    assert paired.low == pytest.approx(3 - half_width, abs=1e-12)
    assert paired.high == pytest.approx(3 + half_width, abs=1e-12)


def test_the_difference_is_that_of_scipys_paired_test() -> None:
    generator = np.random.default_rng(0)
    first = generator.random(7)
    second = generator.random(7)

    paired = difference(dict(enumerate(first)), dict(enumerate(second)))

    expected = stats.ttest_rel(first, second)
    low, high = expected.confidence_interval(0.95)
    assert paired.low == pytest.approx(low, abs=1e-12)
    assert paired.high == pytest.approx(high, abs=1e-12)
    assert paired.p == pytest.approx(expected.pvalue, rel=1e-12)
    assert paired.told_apart == (expected.pvalue < 0.05)


def test_only_common_seeds_count() -> None:
    paired = difference(ACCURACIES, {2: 0.25, 3: 0.4, 9: 1.0})

    assert paired.pairs == 2
    assert paired.mean == pytest.approx(0.5)
    assert paired_difference(ACCURACIES, {4: 1.0}) is None


def test_one_pair_shows_no_difference() -> None:
    paired = difference({1: 1.0}, {1: 0.0})

    assert paired.mean == 1.0
    assert paired.pairs == 1
    assert not paired.told_apart
    assert math.isnan(paired.low)
    assert math.isnan(paired.high)


def test_equal_runs_do_not_differ_and_a_swap_changes_the_sign() -> None:
    other_accuracies = {1: 0.1, 2: 0.1, 3: 0.2}

    same = difference(ACCURACIES, ACCURACIES)
    paired = difference(ACCURACIES, other_accuracies)
    swapped = difference(other_accuracies, ACCURACIES)

    assert same == Difference(mean=0.0, low=0.0, high=0.0, p=1.0, pairs=3)
    assert not same.told_apart
    assert paired.mean == pytest.approx(-swapped.mean)
    assert paired.low == pytest.approx(-swapped.high)
    assert paired.high == -swapped.low
