"""Membership inference: scores, curve and intervals against numbers by hand, pairs and SciPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedstill.metrics.membership import (
    GRID,
    MANY_OUT,
    attack,
    auc_interval,
    confidences,
    hits,
    likelihood_ratios,
    rate_interval,
)

Array = np.ndarray[Any, Any]
Z_95 = 1.959963984540054
"""The quantile of the normal distribution for an interval of 95 %."""


@dataclass(frozen=True)
class AttackScores:
    """Scores of an attack; those of members are higher on average."""

    members: Array
    others: Array

    def rounded(self) -> AttackScores:
        """Scores with many ties."""
        return AttackScores(np.round(self.members, 1), np.round(self.others, 1))

    def pairs_won(self) -> Array:
        """For each member and other, 1 if the member's score is higher; a tie is one half."""
        members = self.members[:, None]
        return (members > self.others) + 0.5 * (members == self.others)


def random_scores(seed: int, members: int, others: int) -> AttackScores:
    """Normal scores with means 0.4 apart."""
    generator = np.random.default_rng(seed)
    return AttackScores(
        members=generator.normal(0.4, 1, members), others=generator.normal(0, 1, others)
    )


def scores_with_ties(seed: int, members: int, others: int, ties: bool) -> AttackScores:
    """Normal scores, rounded if there are to be ties."""
    scores = random_scores(seed, members, others)
    if ties:
        return scores.rounded()
    return scores


def test_confidence_is_the_log_odds_of_the_true_class_and_orders_as_the_loss_does() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 7, generator=generator, dtype=torch.float64)
    labels = torch.arange(50) % 7
    p = logits.softmax(1)[torch.arange(50), labels]
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none").numpy()

    log_odds = confidences(logits, labels)

    np.testing.assert_allclose(log_odds, (p / (1 - p)).log(), rtol=1e-9)
    np.testing.assert_allclose(loss, np.log1p(np.exp(-log_odds)), rtol=1e-12)
    assert np.array_equal(np.argsort(-loss), np.argsort(log_odds))


def test_confidences_differ_where_the_loss_is_rounded_to_zero() -> None:
    """Logits that are not finite have no confidence."""
    certain = torch.tensor([[900.0, 0.0, 0.0], [800.0, 0.0, 0.0]])
    broken = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [3.0, 1.0]])
    zeros = torch.zeros(3, dtype=torch.int64)

    log_odds = confidences(certain, zeros[:2])

    np.testing.assert_allclose(log_odds, [900 - np.log(2), 800 - np.log(2)])
    assert confidences(broken, zeros).tolist() == [0.0, 0.0, 2.0]


def test_likelihood_ratio_by_hand() -> None:
    """Means 2 and 0; variances 1 and 4, so one variance of 2.5 for both while there are few
    models.
    """
    without_example = [[1.0, -2.0], [2.0, 0.0], [3.0, 2.0]]

    ratios = likelihood_ratios([4.0, -1.0], without_example)

    np.testing.assert_allclose(ratios, np.array([2.0, -1.0]) / np.sqrt(2.5))


def test_with_many_models_each_example_has_its_own_variance() -> None:
    """The offline ratio is 1 minus the tail of a normal distribution, which orders examples in the
    same way. Models that all agree have no variance.
    """
    generator = np.random.default_rng(1)
    without_example = generator.normal(0, [[1.0, 5.0, 0.2]], (MANY_OUT, 3))
    log_odds = np.ones(3)
    mean = without_example.mean(0)
    deviation = without_example.std(0, ddof=1)

    ratios = likelihood_ratios(log_odds, without_example)
    ratios_of_equal_models = likelihood_ratios(log_odds, np.ones((3, 3)))

    np.testing.assert_allclose(ratios, (log_odds - mean) / deviation)
    tails = stats.norm.cdf(log_odds, mean, deviation)
    assert np.array_equal(np.argsort(tails), np.argsort(ratios))
    assert np.array_equal(ratios_of_equal_models, [0.0, 0.0, 0.0])


@pytest.mark.parametrize("ties", [False, True])
def test_area_is_the_share_of_pairs_won(ties: bool) -> None:
    scores = scores_with_ties(2, 37, 53, ties)

    area, low, high = auc_interval(scores.members, scores.others)
    swapped_area, _, _ = auc_interval(scores.others, scores.members)

    mann_whitney = stats.mannwhitneyu(scores.members, scores.others).statistic
    assert area == pytest.approx(scores.pairs_won().mean(), abs=1e-12)
    assert area == pytest.approx(mann_whitney / (37 * 53))
    assert swapped_area == pytest.approx(1 - area, abs=1e-12)
    assert low < area < high


@pytest.mark.parametrize("ties", [False, True])
def test_delongs_interval_from_pairs(ties: bool) -> None:
    scores = scores_with_ties(3, 20, 31, ties)
    won = scores.pairs_won()
    variance = won.mean(1).var(ddof=1) / 20 + won.mean(0).var(ddof=1) / 31

    area, low, high = auc_interval(scores.members, scores.others)

    half_width = Z_95 * np.sqrt(variance)
    assert (high - low) / 2 == pytest.approx(half_width)
    assert low == pytest.approx(area - half_width)


def test_the_areas_interval_contains_the_truth_in_95_of_100_cases() -> None:
    """Normal scores 0.4 apart: the area is Phi(0.4 / sqrt 2). 400 draws; 95 % within three standard
    errors.
    """
    true_area = stats.norm.cdf(0.4 / np.sqrt(2))
    is_inside = []
    for seed in range(400):
        scores = random_scores(seed, 60, 60)
        _, low, high = auc_interval(scores.members, scores.others)
        is_inside.append(low <= true_area <= high)

    standard_error = np.sqrt(0.95 * 0.05 / 400)
    assert abs(np.mean(is_inside) - 0.95) < 3 * standard_error


def test_areas_of_extreme_scores() -> None:
    """Nothing is known of the spread of one score."""
    assert auc_interval([1.0, 1.0], [1.0, 1.0])[0] == 0.5
    assert auc_interval([2.0, 3.0], [0.0, 1.0]) == (1.0, 1.0, 1.0)
    assert auc_interval([2.0], [0.0, 1.0]) == (1.0, 0.0, 1.0)


def test_hits_are_those_of_the_best_of_all_thresholds() -> None:
    scores = random_scores(4, 80, 60).rounded()
    thresholds = [np.inf, *scores.members, *scores.others]
    rates = [0.0, 1 / 60, 0.05, 0.5, 1.0]

    for rate, count in zip(rates, hits(scores.members, scores.others, rates), strict=True):
        possible = [
            (scores.members >= threshold).sum()
            for threshold in thresholds
            if (scores.others >= threshold).mean() <= rate
        ]
        assert count == max(possible)


def test_a_group_of_ties_is_counted_as_a_whole_or_not_at_all() -> None:
    """With fewer others than 1 / rate, none of them may be counted."""
    assert hits([1.0] * 9, [1.0] + [0.0] * 99, [0.001, 0.01]) == [0, 9]
    assert hits([5.0, 3.0, 1.0], [2.0], [0.001]) == [2]


@pytest.mark.parametrize(("count", "total"), [(0, 20), (3, 20), (20, 20), (2, 2000)])
def test_interval_of_a_share_is_the_exact_one(count: int, total: int) -> None:
    exact = stats.binomtest(count, total).proportion_ci(0.95, method="exact")

    assert rate_interval(count, total) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_an_attack_in_numbers() -> None:
    scores = random_scores(5, 2000, 2000)

    numbers = attack(scores.members, scores.others)

    area, _, _ = auc_interval(scores.members, scores.others)
    assert numbers["auc"] == pytest.approx(area, abs=1e-5)
    descending = np.sort(scores.others)[::-1]
    for rate in (0.001, 0.01):
        threshold = descending[int(2000 * rate)]
        low, high = numbers[f"tpr_at_{rate}_interval"]
        assert low <= numbers[f"tpr_at_{rate}"] <= high
        assert numbers[f"tpr_at_{rate}"] == pytest.approx((scores.members > threshold).mean())

    curve = numbers["roc"]
    assert len(curve) == len(GRID)
    assert GRID[0] == 0.001
    assert GRID[-1] == 1
    assert curve == sorted(curve)
    assert curve[-1] == 1
    assert curve[0] == numbers["tpr_at_0.001"]
    assert curve[8] == numbers["tpr_at_0.01"]


def test_scores_without_information_give_the_diagonal() -> None:
    generator = np.random.default_rng(6)

    numbers = attack(generator.normal(size=4000), generator.normal(size=4000))

    assert abs(numbers["auc"] - 0.5) < 0.03
    low, high = numbers["tpr_at_0.01_interval"]
    assert low - 0.005 < 0.01 < high + 0.005
