"""Label statistics: formulas against NumPy, identities, and the temperatures that a paper's
notebook printed.
"""

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
    counts = rng.integers(0, 6, size=shape) * rng.integers(0, 2, size=shape)
    counts[..., 0] += 1
    return counts / counts.sum(-1, keepdims=True)


def test_counts_of_lists_arrays_and_tensors() -> None:
    for given_labels in ([2, 0, 2], np.array([2, 0, 2], dtype=np.uint8), torch.tensor([2, 0, 2])):
        found = label_counts.counts(given_labels, 4)
        assert found.dtype == torch.int64
        assert found.tolist() == [1, 0, 2, 0]
    assert label_counts.counts([], 3).tolist() == [0, 0, 0]


def test_means_by_class_are_plain_means_and_zeros_where_there_is_no_example() -> None:
    values, y = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)), torch.arange(50) % 3
    means, sizes = label_counts.means_by_class(values, y, 5)
    assert sizes.tolist() == [17, 17, 16, 0, 0]
    assert means.dtype == torch.float32
    for c in range(3):
        torch.testing.assert_close(means[c], values[y == c].mean(0))
    assert not means[3:].any()
    nothing, none = label_counts.means_by_class(values[:0], y[:0], 5)
    assert (nothing.shape, none.sum()) == ((5, 4), 0)


@pytest.mark.parametrize("bad", [[-1, 0], [0, 3], [0.5], [[0, 1]]])
def test_counts_refuses_what_is_no_label(bad: list[int]) -> None:
    with pytest.raises(DataError):
        label_counts.counts(bad, 3)


def test_proportions_sum_to_one_and_need_a_label() -> None:
    found = label_counts.proportions(torch.tensor([[3, 1], [0, 7]]))
    assert found.dtype == torch.float64
    assert found.tolist() == [[0.75, 0.25], [0.0, 1.0]]
    for bad in ([0, 0], [[1, 0], [0, 0]], [2, -1]):
        with pytest.raises(DataError, match="label"):
            label_counts.proportions(bad)


def test_floating_tensors_keep_their_dtype_and_all_else_is_float64() -> None:
    p = [[0.1, 0.9], [0.5, 0.5]]
    for dtype in (torch.float32, torch.float64):
        t = torch.tensor(p, dtype=dtype)
        found = [
            label_counts.gini_index(t),
            label_counts.distance(t, t[0], "kl"),
        ]
        assert {x.dtype for x in found} == {dtype}
    assert label_counts.gini_index(p).dtype == torch.float64
    assert float(label_counts.gini_index(p)[0]) == 1 - (0.1**2 + 0.9**2)


def test_gini_is_its_formula_and_within_its_bounds() -> None:
    p = shares(0, 20, 10)
    np.testing.assert_allclose(
        label_counts.gini_index(p), [1 - sum(x * x for x in row) for row in p], rtol=1e-12
    )
    assert float(label_counts.gini_index(np.eye(10)[3])) == 0
    assert float(label_counts.gini_index(np.full(10, 0.1))) == pytest.approx(0.9)


# papers.md 13.3


def reference_distance(p: np.ndarray, q: np.ndarray, metric: str) -> float:
    def kl(a: np.ndarray, b: np.ndarray) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    s, c, m = 1e-4, len(p), (p + q) / 2
    return {
        "l1": lambda: np.abs(p - q).sum(),
        "l2": lambda: math.sqrt(((p - q) ** 2).sum()),
        "kl": lambda: kl((p + s) / (1 + c * s), (q + s) / (1 + c * s)),
        "js": lambda: (kl(p, m) + kl(q, m)) / 2,
    }[metric]()


@pytest.mark.parametrize("metric", METRICS)
def test_distances_are_their_formulas(metric: label_counts.Metric) -> None:
    p, q = shares(1, 30, 10), shares(2, 30, 10)
    expected = [reference_distance(a, b, metric) for a, b in zip(p, q, strict=True)]
    np.testing.assert_allclose(label_counts.distance(p, q, metric), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(label_counts.distance(p, q[0], metric)[0], expected[0], rtol=1e-9)
    assert (label_counts.distance(p, p, metric) == 0).all()
    if metric != "kl":
        torch.testing.assert_close(
            label_counts.distance(p, q, metric), label_counts.distance(q, p, metric)
        )
    else:
        assert not torch.allclose(
            label_counts.distance(p, q, metric), label_counts.distance(q, p, metric)
        )


def test_distances_at_their_far_end() -> None:
    a, b = [1.0, 0.0], [0.0, 1.0]
    assert float(label_counts.distance(a, b, "l2")) == pytest.approx(math.sqrt(2))
    assert float(label_counts.distance(a, b, "js")) == pytest.approx(math.log(2))
    assert math.isfinite(float(label_counts.distance(a, b, "kl")))
    assert float(label_counts.distance(a, b, "kl", smoothing=0.0)) == math.inf


# papers.md 13.7


# papers.md 13.9
