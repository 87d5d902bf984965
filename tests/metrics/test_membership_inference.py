"""Membership inference: scores, curve and intervals against numbers by hand, pairs one by one, and
scipy's own.
"""

from __future__ import annotations

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


def draws(seed: int, *sizes: int, ties: bool = False) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    made = [rng.normal(0.4 * (i == 0), 1, n) for i, n in enumerate(sizes)]
    return [np.round(x, 1) if ties else x for x in made]


def test_confidence_is_the_log_odds_of_the_true_class_and_orders_as_the_loss_does() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    labels = torch.arange(50) % 7
    p = logits.softmax(1)[torch.arange(50), labels]
    phi = confidences(logits, labels)
    np.testing.assert_allclose(phi, (p / (1 - p)).log(), rtol=1e-9)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none").numpy()
    np.testing.assert_allclose(loss, np.log1p(np.exp(-phi)), rtol=1e-12)
    assert np.array_equal(np.argsort(-loss), np.argsort(phi))


def test_confidences_differ_where_the_loss_is_rounded_to_nothing() -> None:
    sure = confidences(torch.tensor([[900.0, 0.0, 0.0], [800.0, 0.0, 0.0]]), torch.tensor([0, 0]))
    np.testing.assert_allclose(sure, [900 - np.log(2), 800 - np.log(2)])
    broken = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [3.0, 1.0]])
    assert confidences(broken, torch.tensor([0, 0, 0])).tolist() == [0.0, 0.0, 2.0]


def test_likelihood_ratio_by_hand() -> None:
    """Means 2 and 0; variances 1 and 4, so one variance of 2.5 for both while there are few
    models.
    """
    out = [[1.0, -2.0], [2.0, 0.0], [3.0, 2.0]]
    np.testing.assert_allclose(
        likelihood_ratios([4.0, -1.0], out), np.array([2.0, -1.0]) / np.sqrt(2.5)
    )


def test_with_many_models_each_example_has_its_own_variance() -> None:
    rng = np.random.default_rng(1)
    out = rng.normal(0, [[1.0, 5.0, 0.2]], (MANY_OUT, 3))
    phi = np.array([1.0, 1.0, 1.0])
    expected = (phi - out.mean(0)) / out.std(0, ddof=1)
    np.testing.assert_allclose(likelihood_ratios(phi, out), expected)
    # the offline ratio is 1 minus this tail
    shares = stats.norm.cdf(phi, out.mean(0), out.std(0, ddof=1))
    assert np.array_equal(np.argsort(shares), np.argsort(expected))
    same = likelihood_ratios(phi, np.ones((3, 3)))
    assert np.array_equal(same, [0.0, 0.0, 0.0]), "models that all agree have no variance"


@pytest.mark.parametrize("ties", [False, True])
def test_area_is_the_share_of_pairs_won(ties: bool) -> None:
    members, others = draws(2, 37, 53, ties=ties)
    pairs = [(a > b) + 0.5 * (a == b) for a in members for b in others]
    area, low, high = auc_interval(members, others)
    assert area == pytest.approx(np.mean(pairs), abs=1e-12)
    assert auc_interval(others, members)[0] == pytest.approx(1 - area, abs=1e-12)
    assert area == pytest.approx(stats.mannwhitneyu(members, others).statistic / (37 * 53))
    assert low < area < high


@pytest.mark.parametrize("ties", [False, True])
def test_delongs_interval_from_pairs(ties: bool) -> None:
    members, others = draws(3, 20, 31, ties=ties)
    won = np.array([[(a > b) + 0.5 * (a == b) for b in others] for a in members])
    deviation = np.sqrt(won.mean(1).var(ddof=1) / 20 + won.mean(0).var(ddof=1) / 31)
    area, low, high = auc_interval(members, others)
    assert (high - low) / 2 == pytest.approx(1.959963984540054 * deviation)
    assert low == pytest.approx(area - 1.959963984540054 * deviation)


def test_the_areas_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Normal scores 0.4 apart: the area is Phi(0.4 / sqrt 2). 400 draws; 95 % within three standard
    errors.
    """
    truth = stats.norm.cdf(0.4 / np.sqrt(2))
    inside = [
        low <= truth <= high
        for _, low, high in (auc_interval(*draws(s, 60, 60)) for s in range(400))
    ]
    assert abs(np.mean(inside) - 0.95) < 3 * np.sqrt(0.95 * 0.05 / 400)


def test_extremes() -> None:
    assert auc_interval([1.0, 1.0], [1.0, 1.0])[0] == 0.5
    assert auc_interval([2.0, 3.0], [0.0, 1.0]) == (1.0, 1.0, 1.0)
    assert auc_interval([2.0], [0.0, 1.0]) == (1.0, 0.0, 1.0), (
        "nothing is known of the spread of one score"
    )


def test_members_found_by_trying_every_threshold() -> None:
    members, others = draws(4, 80, 60, ties=True)
    rates = [0.0, 1 / 60, 0.05, 0.5, 1.0]
    thresholds = [np.inf, *members, *others]
    for rate, count in zip(rates, hits(members, others, rates), strict=True):
        allowed = [t for t in thresholds if (others >= t).mean() <= rate]
        assert count == max(int((members >= t).sum()) for t in allowed)


def test_a_group_of_ties_is_taken_in_whole_or_not_at_all() -> None:
    assert hits([1.0] * 9, [1.0] + [0.0] * 99, [0.001, 0.01]) == [0, 9]
    assert hits([5.0, 3.0, 1.0], [2.0], [0.001]) == [2], (
        "below 1 / rate others, none may be taken in"
    )


@pytest.mark.parametrize(("count", "of"), [(0, 20), (3, 20), (20, 20), (2, 2000)])
def test_interval_of_a_share_is_the_exact_one(count: int, of: int) -> None:
    exact = stats.binomtest(count, of).proportion_ci(0.95, method="exact")
    assert rate_interval(count, of) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_an_attack_in_numbers() -> None:
    members, others = draws(5, 2000, 2000)
    made = attack(members, others)
    assert made["auc"] == pytest.approx(auc_interval(members, others)[0], abs=1e-5)
    for rate in (0.001, 0.01):
        low, high = made[f"tpr_at_{rate}_interval"]
        assert low <= made[f"tpr_at_{rate}"] <= high
        assert made[f"tpr_at_{rate}"] == pytest.approx(
            (members > np.sort(others)[-1 - int(2000 * rate)]).mean()
        )
    assert len(made["roc"]) == len(GRID)
    assert GRID[0] == 0.001
    assert made["roc"] == sorted(made["roc"])
    assert made["roc"][-1] == GRID[-1] == 1
    assert made["roc"][0] == made["tpr_at_0.001"]
    assert made["roc"][8] == made["tpr_at_0.01"]


def test_scores_that_say_nothing_give_the_diagonal() -> None:
    rng = np.random.default_rng(6)
    made = attack(rng.normal(size=4000), rng.normal(size=4000))
    assert abs(made["auc"] - 0.5) < 0.03
    low, high = made["tpr_at_0.01_interval"]
    assert low - 0.005 < 0.01 < high + 0.005
