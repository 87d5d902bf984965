"""Ranks and tests over settings, against values computed by hand and independent
implementations.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from fedstill.metrics import ranks


def test_signs_of_one_to_five_and_of_its_negative() -> None:
    """Of 32 ways to give signs only two reach the sum 15 in size: all plus, all minus."""
    assert ranks.sign_flips([1, 2, 3, 4, 5]) == 2 / 32
    assert ranks.sign_flips([-1, -2, -3, -4, -5]) == 2 / 32
    assert ranks.sign_flips([1, -1]) == 1
    assert ranks.sign_flips([0.0, 0.0, 0.0]) == 1
    assert math.isnan(ranks.sign_flips([]))


def test_exact_signs_are_scipys() -> None:
    apart = np.random.default_rng(3).normal(0.4, 1, size=9)
    theirs = stats.permutation_test(
        (apart,), np.sum, permutation_type="samples", n_resamples=np.inf
    )
    assert ranks.sign_flips(apart) == pytest.approx(theirs.pvalue, abs=1e-12)


def test_drawn_signs_come_near_the_exact_ones_and_are_the_same_again() -> None:
    apart = np.random.default_rng(5).normal(0.5, 1, size=(4, 5))
    flat = apart.ravel()
    signs = np.array(list(itertools.product([-1, 1], repeat=20)), dtype=np.int8)
    exact = float((np.abs(signs @ flat) >= abs(flat.sum()) - 1e-12).mean())
    drawn = ranks.sign_flips(apart, seed=7)
    assert drawn == ranks.sign_flips(apart, seed=7)
    assert abs(drawn - exact) < 4 * math.sqrt(exact * (1 - exact) / ranks.DRAWS)


def test_holm_by_hand() -> None:
    assert ranks.holm([0.01, 0.04, 0.03, 0.005]) == [0.03, 0.06, 0.06, 0.02]
    assert ranks.holm([0.9, 0.8]) == [1.0, 1.0]
    assert ranks.holm([]) == []


def test_ranks_of_three_methods_with_ties_by_hand() -> None:
    """Blocks: 9 7 8 gives 1 3 2; 5 5 6 gives 2.5 2.5 1; 4 4 4 gives 2 2 2."""
    got = ranks.ranks([[9, 5, 4], [7, 5, 4], [8, 6, 4]])
    assert got.tolist() == [[1, 2.5, 2], [3, 2.5, 2], [2, 1, 2]]
    assert got.sum(axis=0).tolist() == [6, 6, 6]


def test_a_win_rate_and_its_opposite_add_up_to_one() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.integers(0, 3, (2, 5)), draw.integers(0, 3, (2, 5))
    assert ranks.win_rate(a, b) + ranks.win_rate(b, a) == 1
    assert ranks.win_rate([1, 1, 0, 2], [0, 1, 1, 1]) == 0.625


def test_resampling_keeps_columns_apart_and_pairs_together() -> None:
    """A column of zeros and one of ones: every resampled mean is one half; a difference is drawn as
    its parts are.
    """
    assert set(ranks.resampled_means([[0.0] * 5, [1.0] * 5], draws=50).tolist()) == {0.5}
    two = np.random.default_rng(1).normal(size=(2, 3, 5))
    both = ranks.resampled_means(two, draws=100)
    assert both.shape == (100, 2)
    apart = ranks.resampled_means(two[0] - two[1], draws=100)
    assert np.allclose(both[:, 0] - both[:, 1], apart, atol=1e-12)


def test_resampled_means_have_the_spread_of_theory() -> None:
    """The variance of a mean of S columns: the sum of the columns' population variances over n,
    over S squared.
    """
    own = np.random.default_rng(2).normal(size=(3, 5))
    drawn = ranks.resampled_means(own, draws=20_000)
    assert drawn.mean() == pytest.approx(own.mean(), abs=0.01)
    assert drawn.var() == pytest.approx(own.var(axis=1).sum() / 5 / 9, rel=0.05)


def test_intervals_of_five_seeds_hold_the_truth_as_often_as_they_say() -> None:
    """Plain percentiles of five seeds in one column hold it in 83 of 100 cases; ours in more
    than 88.
    """
    draw = np.random.default_rng(4)
    ours = plain = 0
    for number in range(300):
        own = draw.normal(size=(1, 5))
        low, high = ranks.interval(own, 1000, seed=number)
        ours += low <= 0 <= high
        ends = np.quantile(ranks.resampled_means(own, 1000, seed=number), [0.025, 0.975])
        plain += ends[0] <= 0 <= ends[1]
    assert plain / 300 < 0.88 < ours / 300


def test_equal_differences_have_no_width_and_one_seed_no_interval() -> None:
    assert ranks.interval([[0.25] * 5, [0.25] * 5]) == (0.25, 0.25)
    assert all(math.isnan(end) for end in ranks.interval([[1.0], [2.0]]))


def test_two_methods_share_a_bar_only_if_they_cannot_be_told_apart() -> None:
    """A chain 0 - 1 - 2 - 3 of which only neighbours are alike, and one beside it that is like the
    two ends.
    """
    alike = {(0, 1), (1, 2), (2, 3), (0, 4), (3, 4)}
    apart = [[i != j and (min(i, j), max(i, j)) not in alike for j in range(5)] for i in range(5)]
    assert ranks.bars(apart) == [[0, 1], [0, 4], [1, 2], [2, 3], [3, 4]]
    assert ranks.bars([[False] * 4 for _ in range(4)]) == [[0, 1, 2, 3]]
    assert ranks.bars([[False, True], [True, False]]) == []


def test_every_pair_is_joined_or_told_apart_whatever_the_relation() -> None:
    draw = np.random.default_rng(6)
    for _ in range(20):
        upper = np.triu(draw.random((7, 7)) < 0.5, 1)
        apart = (upper | upper.T).tolist()
        joined = {pair for group in ranks.bars(apart) for pair in itertools.combinations(group, 2)}
        assert joined == {(i, j) for i, j in itertools.combinations(range(7), 2) if not apart[i][j]}


def test_nemenyis_width_is_that_of_demsars_table() -> None:
    """Demsar 2006, table 5: q is 2.343 for 3 methods, 3.164 for 10; width = q sqrt(k (k + 1) / (6
    N)).
    """
    assert ranks.nemenyi_width(3, 24) == pytest.approx(2.343 * math.sqrt(12 / 144), rel=1e-3)
    assert ranks.nemenyi_width(10, 30) == pytest.approx(3.164 * math.sqrt(110 / 180), rel=1e-3)
    assert round(ranks.nemenyi_width(14, 25), 2) == 3.97


def test_a_share_of_the_gap_may_be_outside_of_it() -> None:
    assert ranks.share_of_gap(0.25, 0.5, 1.0) == -0.5
    assert ranks.share_of_gap(0.5, 0.5, 1.0) == 0
    assert math.isnan(ranks.share_of_gap(0.5, 0.5, 0.5))
    assert math.isnan(ranks.share_of_gap(0.3, 0.5, 0.4)), "a ceiling below the floor bounds nothing"
