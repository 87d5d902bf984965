"""Changes of parameters as integers: sums are exact, means are within the stated error, and changes
that are too large are refused.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedstill.core.errors import BadPayload
from fedstill.privacy.masking import FixedPoint, change_of, moved_by


@pytest.mark.parametrize(("most", "bits"), [(16.0, 32), (1.0, 8), (4.0, 48)])
def test_a_weighted_mean_is_within_the_stated_error(most: float, bits: int) -> None:
    torch.manual_seed(1)
    weights = [3, 0, 17, 250]
    fixed = FixedPoint(most, bits, len(weights))
    total = np.zeros(14, dtype=np.uint64)
    weighted_sum = {"a": torch.zeros(2, 3).double(), "b": torch.zeros(7).double()}
    for weight in weights:
        uniform = torch.rand(7, dtype=torch.float64)
        change = {"b": most * (2 * uniform - 1), "a": torch.rand(2, 3).double()}
        total += fixed.encoded(change, weight)
        for name in change:
            weighted_sum[name] += weight * change[name]

    mean, total_weight = fixed.decoded(total, change)
    assert total_weight == sum(weights)
    for name in ("a", "b"):
        expected = weighted_sum[name] / sum(weights)
        assert float((mean[name] - expected).abs().max()) <= fixed.error * (1 + 1e-6) + 1e-15
        assert mean[name].shape == expected.shape


def test_the_largest_changes_of_the_heaviest_clients_can_be_summed() -> None:
    fixed = FixedPoint(2.0, 32, 5)
    change = {"a": torch.tensor([2.0, -2.0])}
    total = np.zeros(3, dtype=np.uint64)
    for _ in range(5):
        total += fixed.encoded(change, fixed.heaviest)

    mean, weight = fixed.decoded(total, change)
    assert mean["a"].tolist() == [2.0, -2.0]
    assert weight == 5 * fixed.heaviest
    assert 5 * fixed.heaviest * fixed.levels < 2**63


def test_integers_are_summed_exactly_and_their_mean_is_rounded() -> None:
    fixed = FixedPoint(1.0, 32, 2)
    start = {"n": torch.tensor(100)}
    first = fixed.encoded({"n": torch.tensor(7)}, 1)
    second = fixed.encoded({"n": torch.tensor(8)}, 2)
    mean, _ = fixed.decoded(first + second, start)
    # The mean of the changes is (7 + 2 · 8) / 3 = 7.67.
    assert moved_by(start, mean)["n"].item() == 108
    assert moved_by(start, mean)["n"].dtype == torch.int64


def test_without_any_weight_the_mean_change_is_zero() -> None:
    fixed = FixedPoint(1.0, 32, 2)
    change = {"a": torch.tensor([0.5])}
    mean, weight = fixed.decoded(fixed.encoded(change, 0) + fixed.encoded(change, 0), change)
    assert weight == 0
    assert mean["a"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("value", "weight", "message"),
    [
        (1.01, 1, "the change of a .* privacy.secure_range = 1;"),
        (math.nan, 1, "the change of a .* not finite"),
        (math.inf, 1, "not finite"),
        (0.5, 2**40, "2147483649 examples"),
    ],
)
def test_a_change_or_weight_that_is_too_large_is_refused_at_the_client(
    value: float, weight: int, message: str
) -> None:
    """The error does not contain the value or the weight, because the server reads it."""
    with pytest.raises(BadPayload, match=message) as refused:
        FixedPoint(1.0, 32, 2).encoded({"a": torch.tensor([0.0, value])}, weight)
    words = str(refused.value).replace(",", "").split()
    assert str(weight) not in words
    assert str(value) not in words


def test_a_sum_that_still_contains_a_mask_is_refused() -> None:
    fixed = FixedPoint(1.0, 32, 2)
    like = {"a": torch.zeros(3)}
    with pytest.raises(BadPayload, match="mask"):
        fixed.decoded(np.array([1, 2, 3, 2**63], dtype=np.uint64), like)
    with pytest.raises(BadPayload, match="a of a secure sum is out of range"):
        fixed.decoded(np.array([1, 2**62, 3, 5], dtype=np.uint64), like)


def test_models_with_other_entries_are_not_summed() -> None:
    start = {"a": torch.zeros(2)}
    with pytest.raises(BadPayload, match="entries"):
        change_of({"a": torch.zeros(3)}, start)
    with pytest.raises(BadPayload, match="entries"):
        change_of({"b": torch.zeros(2)}, start)
