"""Given times of two trees: their ratio, its interval, and the verdict on it."""

import math

import pytest
from benchmarks.beside.ratios import Pair, Verdict, ratio_of


def pairs_with(ratios):
    return [Pair(rev=seconds, working=seconds * ratio) for seconds, ratio in enumerate(ratios, 1)]


def test_a_ratio_is_the_working_tree_over_rev_pair_by_pair():
    result = ratio_of([Pair(rev=1, working=2), Pair(rev=10, working=11), Pair(rev=4, working=6)])
    assert (result.rev, result.working, result.median) == (4, 6, 1.5)


@pytest.mark.parametrize("count", [6, 7, 8, 9, 10, 20])
def test_the_interval_has_the_confidence_and_a_rank_less_at_both_ends_has_not(count):
    ratios = [1 + index / 100 for index in range(count)]
    result = ratio_of(pairs_with(reversed(ratios)))
    low = min(range(count), key=lambda rank: abs(ratios[rank] - result.low))
    high = min(range(count), key=lambda rank: abs(ratios[rank] - result.high))
    coverage = sum(math.comb(count, below) for below in range(low + 1, high + 1)) / 2**count
    narrower = sum(math.comb(count, below) for below in range(low + 2, high)) / 2**count
    assert result.low == pytest.approx(ratios[low])
    assert result.high == pytest.approx(ratios[high])
    assert coverage >= 0.95 > narrower


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
