"""Changes as whole numbers: sums that are exact, means within what is stated, and what has no
room.
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
    changes = [
        {"b": most * (2 * torch.rand(7, dtype=torch.float64) - 1), "a": torch.rand(2, 3).double()}
        for _ in weights
    ]
    total = sum(
        (fixed.encoded(c, w) for c, w in zip(changes, weights, strict=True)),
        np.zeros(14, dtype=np.uint64),
    )
    mean, weight = fixed.decoded(total, changes[0])
    assert weight == sum(weights)
    for name in ("a", "b"):
        plain = sum(w * c[name] for c, w in zip(changes, weights, strict=True)) / sum(weights)
        assert float((mean[name] - plain).abs().max()) <= fixed.error * (1 + 1e-6) + 1e-15
        assert mean[name].shape == plain.shape


def test_the_largest_changes_of_the_heaviest_clients_leave_no_room_unused() -> None:
    fixed = FixedPoint(2.0, 32, 5)
    change = {"a": torch.tensor([2.0, -2.0])}
    total = sum(
        (fixed.encoded(change, fixed.heaviest) for _ in range(5)), np.zeros(3, dtype=np.uint64)
    )
    mean, weight = fixed.decoded(total, change)
    assert mean["a"].tolist() == [2.0, -2.0]
    assert weight == 5 * fixed.heaviest
    assert 5 * fixed.heaviest * fixed.levels < 2**63


def test_integers_are_summed_as_they_are_and_their_mean_is_rounded() -> None:
    fixed, start = FixedPoint(1.0, 32, 2), {"n": torch.tensor(100)}
    total = fixed.encoded({"n": torch.tensor(7)}, 1) + fixed.encoded({"n": torch.tensor(8)}, 2)
    mean, _ = fixed.decoded(total, start)
    assert moved_by(start, mean)["n"].item() == 108
    assert moved_by(start, mean)["n"].dtype == torch.int64


def test_without_any_weight_nothing_moves() -> None:
    fixed, change = FixedPoint(1.0, 32, 2), {"a": torch.tensor([0.5])}
    mean, weight = fixed.decoded(fixed.encoded(change, 0) + fixed.encoded(change, 0), change)
    assert weight == 0
    assert mean["a"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("value", "weight", "said"),
    [
        (1.01, 1, "the change of a .* privacy.secure_range = 1;"),
        (math.nan, 1, "the change of a .* not finite"),
        (math.inf, 1, "not finite"),
        (0.5, 2**40, "2147483649 examples"),
    ],
)
def test_what_has_no_room_is_refused_at_the_client_by_name(
    value: float, weight: int, said: str
) -> None:
    with pytest.raises(BadPayload, match=said) as refused:
        FixedPoint(1.0, 32, 2).encoded({"a": torch.tensor([0.0, value])}, weight)
    assert not {str(weight), str(value)} & set(str(refused.value).replace(",", "").split()), (
        "the server reads this"
    )


def test_a_sum_in_which_a_mask_is_left_is_noticed() -> None:
    fixed, like = FixedPoint(1.0, 32, 2), {"a": torch.zeros(3)}
    with pytest.raises(BadPayload, match="mask"):
        fixed.decoded(np.array([1, 2, 3, 2**63], dtype=np.uint64), like)
    with pytest.raises(BadPayload, match="a of a secure sum is out of range"):
        fixed.decoded(np.array([1, 2**62, 3, 5], dtype=np.uint64), like)


def test_models_of_other_entries_are_not_summed() -> None:
    start = {"a": torch.zeros(2)}
    for other in ({"a": torch.zeros(3)}, {"b": torch.zeros(2)}):
        with pytest.raises(BadPayload, match="entries"):
            change_of(other, start)
