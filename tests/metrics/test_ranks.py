"""Differences paired by seed, against values computed by hand and an independent implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedstill.metrics.ranks import Difference, paired_difference

ONE = {1: 0.5, 2: 0.75, 3: 0.9}


def test_the_interval_of_one_to_five() -> None:
    got = paired_difference({s: float(s) for s in range(1, 6)}, dict.fromkeys(range(1, 6), 0.0))
    assert got is not None
    # t of 4 degrees of freedom; variance 2.5
    half = 2.7764451051977987 * math.sqrt(2.5) / math.sqrt(5)
    assert (got.mean, got.pairs) == (3.0, 5)
    assert (got.low, got.high) == (
        pytest.approx(3 - half, abs=1e-12),
        pytest.approx(3 + half, abs=1e-12),
    )


def test_it_is_that_of_scipys_paired_test() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.random(7), draw.random(7)
    got = paired_difference(dict(enumerate(a)), dict(enumerate(b)))
    assert got is not None
    low, high = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (got.low, got.high) == (pytest.approx(low, abs=1e-12), pytest.approx(high, abs=1e-12))
    assert got.p == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-12)
    assert got.told_apart == (stats.ttest_rel(a, b).pvalue < 0.05)


def test_only_seeds_that_both_have_count() -> None:
    got = paired_difference(ONE, {2: 0.25, 3: 0.4, 9: 1.0})
    assert got is not None
    assert (got.pairs, got.mean) == (2, pytest.approx(0.5))
    assert paired_difference(ONE, {4: 1.0}) is None


def test_one_pair_tells_nothing_apart() -> None:
    got = paired_difference({1: 1.0}, {1: 0.0})
    assert got is not None
    assert (got.mean, got.pairs, got.told_apart) == (1.0, 1, False)
    assert [math.isnan(end) for end in (got.low, got.high)] == [True, True]


def test_equal_runs_are_not_told_apart_and_swapping_turns_the_sign() -> None:
    same = paired_difference(ONE, ONE)
    assert same == Difference(0.0, 0.0, 0.0, 1.0, 3)
    assert not same.told_apart
    there, back = (
        paired_difference(ONE, {1: 0.1, 2: 0.1, 3: 0.2}),
        paired_difference({1: 0.1, 2: 0.1, 3: 0.2}, ONE),
    )
    assert there is not None
    assert back is not None
    assert (there.mean, there.low, there.high) == (
        pytest.approx(-back.mean),
        pytest.approx(-back.high),
        -back.low,
    )
