"""From the times of two trees: their ratio, its confidence interval, and the verdict."""

import math

import pytest
from benchmarks.beside.ratios import Pair, Verdict, ratio_of


def pairs_with(ratios):
    """Pairs of times with these ratios, each pair of another length."""
    return [Pair(rev=seconds, working=seconds * ratio) for seconds, ratio in enumerate(ratios, 1)]


def test_a_ratio_is_the_working_tree_over_rev_pair_by_pair():
    """The ratios are 2, 1.1 and 1.5. Each number of the result is a median."""
    pairs = [Pair(rev=1, working=2), Pair(rev=10, working=11), Pair(rev=4, working=6)]
    result = ratio_of(pairs)
    assert result.rev == 4
    assert result.working == 6
    assert result.median == 1.5


def coverage(count, low, high):
    """The probability that the median is between the order statistics of these ranks, from 0: that
    of more than ``low`` and at most ``high`` of ``count`` values below it.
    """
    cases = [math.comb(count, below) for below in range(low + 1, high + 1)]
    return sum(cases) / 2**count


@pytest.mark.parametrize("count", [6, 7, 8, 9, 10, 20])
def test_the_interval_is_the_narrowest_with_the_confidence(count):
    ratios = [1 + index / 100 for index in range(count)]
    result = ratio_of(pairs_with(reversed(ratios)))

    low = round(100 * (result.low - 1))
    high = round(100 * (result.high - 1))
    assert result.low == pytest.approx(ratios[low])
    assert result.high == pytest.approx(ratios[high])
    assert coverage(count, low, high) >= 0.95
    assert coverage(count, low + 1, high - 1) < 0.95


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.05, 1.04, 1.06, 1.05, 1.07, 1.04], Verdict.SLOWER),
        ([0.98, 1.01, 1.02, 1.00, 0.99, 1.01], Verdict.WITHIN),
        ([0.98, 1.01, 1.02, 1.00, 0.99, 1.08], Verdict.UNDECIDED),
        ([1.05, 1.04, 1.06, 1.05, 1.07, 1.01], Verdict.UNDECIDED),
        ([2.0] * 5, Verdict.UNDECIDED),
        ([0.5] * 5, Verdict.UNDECIDED),
    ],
)
def test_only_an_interval_on_one_side_of_the_limit_decides(ratios, verdict):
    assert ratio_of(pairs_with(ratios)).verdict() == verdict


def test_another_limit_decides_otherwise():
    result = ratio_of(pairs_with([1.04, 1.045, 1.035, 1.04, 1.042, 1.045]))
    assert result.verdict() == Verdict.SLOWER
    assert result.verdict(1.05) == Verdict.WITHIN


def test_one_disturbed_pair_among_many_does_not_decide():
    calm = [1.00, 1.01, 0.99, 1.00, 1.02, 0.98, 1.01, 1.00]
    assert ratio_of(pairs_with([*calm, 9.0])).verdict() == Verdict.WITHIN
