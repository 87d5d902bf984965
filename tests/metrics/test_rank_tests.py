"""Ranks and tests over settings, against values computed by hand and independent
implementations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

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
    differences = np.random.default_rng(3).normal(0.4, 1, size=9)
    expected = stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=np.inf
    )

    assert ranks.sign_flips(differences) == pytest.approx(expected.pvalue, abs=1e-12)


def test_drawn_signs_approximate_the_exact_ones_and_are_repeatable() -> None:
    """Within four standard errors of a share."""
    differences = np.random.default_rng(5).normal(0.5, 1, size=(4, 5))
    signs = np.array(list(itertools.product([-1, 1], repeat=20)), dtype=np.int8)
    sums = np.abs(signs @ differences.ravel())
    exact = float((sums >= abs(differences.sum()) - 1e-12).mean())

    p = ranks.sign_flips(differences, seed=7)

    assert p == ranks.sign_flips(differences, seed=7)
    standard_error = math.sqrt(exact * (1 - exact) / ranks.DRAWS)
    assert abs(p - exact) < 4 * standard_error


def test_holm_by_hand() -> None:
    assert ranks.holm([0.01, 0.04, 0.03, 0.005]) == [0.03, 0.06, 0.06, 0.02]
    assert ranks.holm([0.9, 0.8]) == [1.0, 1.0]
    assert ranks.holm([]) == []


def test_ranks_of_three_methods_with_ties_by_hand() -> None:
    """Blocks: 9 7 8 gives 1 3 2; 5 5 6 gives 2.5 2.5 1; 4 4 4 gives 2 2 2."""
    by_method = ranks.ranks([[9, 5, 4], [7, 5, 4], [8, 6, 4]])

    assert by_method.tolist() == [[1, 2.5, 2], [3, 2.5, 2], [2, 1, 2]]
    assert by_method.sum(axis=0).tolist() == [6, 6, 6]


def test_a_win_rate_and_its_opposite_add_up_to_one() -> None:
    """A tie is half a win."""
    generator = np.random.default_rng(0)
    first = generator.integers(0, 3, (2, 5))
    second = generator.integers(0, 3, (2, 5))

    assert ranks.win_rate(first, second) + ranks.win_rate(second, first) == 1
    assert ranks.win_rate([1, 1, 0, 2], [0, 1, 1, 1]) == 0.625


def test_resampling_keeps_columns_apart_and_pairs_together() -> None:
    """A column of zeros and one of ones: every resampled mean is one half. A difference is drawn
    like its parts.
    """
    constant_columns = ranks.resampled_means([[0.0] * 5, [1.0] * 5], draws=50)
    methods = np.random.default_rng(1).normal(size=(2, 3, 5))
    means = ranks.resampled_means(methods, draws=100)
    mean_differences = ranks.resampled_means(methods[0] - methods[1], draws=100)

    assert set(constant_columns.tolist()) == {0.5}
    assert means.shape == (100, 2)
    assert np.allclose(means[:, 0] - means[:, 1], mean_differences, atol=1e-12)


def test_resampled_means_have_the_spread_of_theory() -> None:
    """The variance of a mean of S columns: the sum of the columns' population variances over n,
    over S squared.
    """
    values = np.random.default_rng(2).normal(size=(3, 5))

    means = ranks.resampled_means(values, draws=20_000)

    assert means.mean() == pytest.approx(values.mean(), abs=0.01)
    assert means.var() == pytest.approx(values.var(axis=1).sum() / 5 / 9, rel=0.05)


def test_intervals_of_five_seeds_contain_the_truth_more_often_than_percentiles() -> None:
    """Plain percentiles of five seeds in one column contain it in 83 of 100 cases; these intervals
    in more than 88.
    """
    generator = np.random.default_rng(4)
    correct_intervals = 0
    correct_percentiles = 0
    for number in range(300):
        values = generator.normal(size=(1, 5))
        low, high = ranks.interval(values, 1000, seed=number)
        correct_intervals += low <= 0 <= high
        means = ranks.resampled_means(values, 1000, seed=number)
        low, high = np.quantile(means, [0.025, 0.975])
        correct_percentiles += low <= 0 <= high

    assert correct_percentiles / 300 < 0.88 < correct_intervals / 300


def test_equal_differences_have_no_width_and_one_seed_no_interval() -> None:
    assert ranks.interval([[0.25] * 5, [0.25] * 5]) == (0.25, 0.25)

    low, high = ranks.interval([[1.0], [2.0]])
    assert math.isnan(low)
    assert math.isnan(high)


def distinct_matrix(methods: int, similar: Collection[tuple[int, int]]) -> list[list[bool]]:
    """Which methods differ: all pairs but the similar ones."""
    distinct = ~np.eye(methods, dtype=bool)
    for first, second in similar:
        distinct[first, second] = False
        distinct[second, first] = False
    return distinct.tolist()


def test_two_methods_share_a_bar_only_if_they_do_not_differ() -> None:
    """A chain 0 - 1 - 2 - 3 of which only neighbours are similar, and method 4, which is similar to
    both ends.
    """
    chain = distinct_matrix(5, {(0, 1), (1, 2), (2, 3), (0, 4), (3, 4)})
    all_similar = [[False] * 4 for _ in range(4)]

    assert ranks.bars(chain) == [[0, 1], [0, 4], [1, 2], [2, 3], [3, 4]]
    assert ranks.bars(all_similar) == [[0, 1, 2, 3]]
    assert ranks.bars(distinct_matrix(2, set())) == []


def test_bars_join_exactly_the_pairs_that_do_not_differ() -> None:
    generator = np.random.default_rng(6)
    pairs = list(itertools.combinations(range(7), 2))
    for _ in range(20):
        is_similar = generator.random(len(pairs)) < 0.5
        similar = {pair for pair, chosen in zip(pairs, is_similar, strict=True) if chosen}

        bars = ranks.bars(distinct_matrix(7, similar))

        joined = set()
        for bar in bars:
            joined |= set(itertools.combinations(bar, 2))
        assert joined == similar


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
