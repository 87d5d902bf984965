"""Label statistics are their formulas in NumPy, and have the identities of distances."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedstill.core import label_counts
from fedstill.core.errors import DataError

METRICS: list[label_counts.Metric] = ["l1", "l2", "kl", "js"]


def shares(seed: int, *shape: int) -> np.ndarray:
    """Label shares (..., C) with zeros in them."""
    rng = np.random.default_rng(seed)
    is_present = rng.integers(0, 2, size=shape)
    counts = rng.integers(0, 6, size=shape) * is_present
    counts[..., 0] += 1
    return counts / counts.sum(-1, keepdims=True)


def test_counts_of_lists_arrays_and_tensors() -> None:
    array = np.array([2, 0, 2], dtype=np.uint8)
    for labels in ([2, 0, 2], array, torch.tensor([2, 0, 2])):
        counts = label_counts.counts(labels, 4)
        assert counts.dtype == torch.int64
        assert counts.tolist() == [1, 0, 2, 0]
    assert label_counts.counts([], 3).tolist() == [0, 0, 0]


def test_means_by_class_are_plain_means_and_zeros_where_there_is_no_example() -> None:
    values = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    y = torch.arange(50) % 3
    means, sizes = label_counts.means_by_class(values, y, 5)
    assert sizes.tolist() == [17, 17, 16, 0, 0]
    assert means.dtype == torch.float32
    for label in range(3):
        torch.testing.assert_close(means[label], values[y == label].mean(0))
    assert not means[3:].any()

    means, sizes = label_counts.means_by_class(values[:0], y[:0], 5)
    assert means.shape == (5, 4)
    assert sizes.sum() == 0


@pytest.mark.parametrize("bad", [[-1, 0], [0, 3], [0.5], [[0, 1]]])
def test_counts_refuses_what_is_no_label(bad: list[int]) -> None:
    with pytest.raises(DataError):
        label_counts.counts(bad, 3)


def test_proportions_sum_to_one_and_need_a_label() -> None:
    proportions = label_counts.proportions(torch.tensor([[3, 1], [0, 7]]))
    assert proportions.dtype == torch.float64
    assert proportions.tolist() == [[0.75, 0.25], [0.0, 1.0]]
    for bad in ([0, 0], [[1, 0], [0, 0]], [2, -1]):
        with pytest.raises(DataError, match="label"):
            label_counts.proportions(bad)


def test_floating_tensors_keep_their_dtype_and_all_else_is_float64() -> None:
    p = [[0.1, 0.9], [0.5, 0.5]]
    for dtype in (torch.float32, torch.float64):
        tensor = torch.tensor(p, dtype=dtype)
        assert label_counts.gini_index(tensor).dtype == dtype
        assert label_counts.distance(tensor, tensor[0], "kl").dtype == dtype

    gini = label_counts.gini_index(p)
    assert gini.dtype == torch.float64
    assert float(gini[0]) == 1 - (0.1**2 + 0.9**2)


def test_gini_is_its_formula_and_within_its_bounds() -> None:
    p = shares(0, 20, 10)
    np.testing.assert_allclose(label_counts.gini_index(p), 1 - (p**2).sum(1), rtol=1e-12)
    assert float(label_counts.gini_index(np.eye(10)[3])) == 0
    assert float(label_counts.gini_index(np.full(10, 0.1))) == pytest.approx(0.9)


# papers.md 13.3


def kl_divergence(p: np.ndarray, q: np.ndarray) -> float:
    """The sum of p log(p / q), where 0 log 0 is 0."""
    is_positive = p > 0
    ratios = p[is_positive] / q[is_positive]
    return (p[is_positive] * np.log(ratios)).sum()


def reference_distance(p: np.ndarray, q: np.ndarray, metric: str) -> float:
    """The distance of two label distributions by its formula."""
    match metric:
        case "l1":
            return np.abs(p - q).sum()
        case "l2":
            return math.sqrt(((p - q) ** 2).sum())
        case "kl":
            smoothing = 1e-4
            total = 1 + len(p) * smoothing
            return kl_divergence((p + smoothing) / total, (q + smoothing) / total)
        case "js":
            middle = (p + q) / 2
            return (kl_divergence(p, middle) + kl_divergence(q, middle)) / 2
    raise ValueError(metric)


@pytest.mark.parametrize("metric", METRICS)
def test_distances_are_their_formulas(metric: label_counts.Metric) -> None:
    p = shares(1, 30, 10)
    q = shares(2, 30, 10)
    expected = [reference_distance(a, b, metric) for a, b in zip(p, q, strict=True)]

    distances = label_counts.distance(p, q, metric)

    np.testing.assert_allclose(distances, expected, rtol=1e-9, atol=1e-12)
    to_first = label_counts.distance(p, q[0], metric)
    np.testing.assert_allclose(to_first[0], expected[0], rtol=1e-9)
    assert (label_counts.distance(p, p, metric) == 0).all()
    reversed_distances = label_counts.distance(q, p, metric)
    is_symmetric = torch.allclose(distances, reversed_distances, rtol=1e-7, atol=1e-7)
    assert is_symmetric == (metric != "kl")


def test_distances_at_their_far_end() -> None:
    a = [1.0, 0.0]
    b = [0.0, 1.0]
    assert float(label_counts.distance(a, b, "l2")) == pytest.approx(math.sqrt(2))
    assert float(label_counts.distance(a, b, "js")) == pytest.approx(math.log(2))
    assert math.isfinite(float(label_counts.distance(a, b, "kl")))
    assert float(label_counts.distance(a, b, "kl", smoothing=0.0)) == math.inf
