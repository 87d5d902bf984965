"""Label statistics: formulas against NumPy, identities, and the temperatures that a paper's
notebook printed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core import labels
from fedstill.core.errors import ConfigError, DataError, UnknownName

METRICS: list[labels.Metric] = ["l1", "l2", "kl", "js"]


def shares(seed: int, *shape: int) -> np.ndarray:
    """Label shares (..., C) with zeros in them."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 6, size=shape) * rng.integers(0, 2, size=shape)
    counts[..., 0] += 1
    return counts / counts.sum(-1, keepdims=True)


def test_counts_of_lists_arrays_and_tensors() -> None:
    for given_labels in ([2, 0, 2], np.array([2, 0, 2], dtype=np.uint8), torch.tensor([2, 0, 2])):
        found = labels.counts(given_labels, 4)
        assert found.dtype == torch.int64
        assert found.tolist() == [1, 0, 2, 0]
    assert labels.counts([], 3).tolist() == [0, 0, 0]


def test_means_by_class_are_plain_means_and_zeros_where_there_is_no_example() -> None:
    values, y = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)), torch.arange(50) % 3
    means, sizes = labels.means_by_class(values, y, 5)
    assert sizes.tolist() == [17, 17, 16, 0, 0]
    assert means.dtype == torch.float32
    for c in range(3):
        torch.testing.assert_close(means[c], values[y == c].mean(0))
    assert not means[3:].any()
    nothing, none = labels.means_by_class(values[:0], y[:0], 5)
    assert (nothing.shape, none.sum()) == ((5, 4), 0)


@pytest.mark.parametrize("bad", [[-1, 0], [0, 3], [0.5], [[0, 1]]])
def test_counts_refuses_what_is_no_label(bad: list[int]) -> None:
    with pytest.raises(DataError):
        labels.counts(bad, 3)


def test_proportions_sum_to_one_and_need_a_label() -> None:
    found = labels.proportions(torch.tensor([[3, 1], [0, 7]]))
    assert found.dtype == torch.float64
    assert found.tolist() == [[0.75, 0.25], [0.0, 1.0]]
    for bad in ([0, 0], [[1, 0], [0, 0]], [2, -1]):
        with pytest.raises(DataError, match="label"):
            labels.proportions(bad)


def test_floating_tensors_keep_their_dtype_and_all_else_is_float64() -> None:
    p = [[0.1, 0.9], [0.5, 0.5]]
    for dtype in (torch.float32, torch.float64):
        t = torch.tensor(p, dtype=dtype)
        found = [
            labels.gini_index(t),
            labels.distance(t, t[0], "kl"),
            *labels.discrepancy_weights(t, t[0]),
        ]
        assert {x.dtype for x in [*found, labels.adaptive_weights(t[0], 1.0)]} == {dtype}
    assert labels.gini_index(p).dtype == torch.float64
    assert float(labels.gini_index(p)[0]) == 1 - (0.1**2 + 0.9**2)


def test_gini_is_its_formula_and_within_its_bounds() -> None:
    p = shares(0, 20, 10)
    np.testing.assert_allclose(
        labels.gini_index(p), [1 - sum(x * x for x in row) for row in p], rtol=1e-12
    )
    assert float(labels.gini_index(np.eye(10)[3])) == 0
    assert float(labels.gini_index(np.full(10, 0.1))) == pytest.approx(0.9)


# papers.md 13.3
@settings(max_examples=50, deadline=None)
@given(
    gini=st.lists(st.just(0.0) | st.floats(1e-6, 1), min_size=1, max_size=20),
    delta=st.floats(1e-3, 100),
)
def test_adaptive_weights_have_mean_one_and_give_single_class_clients_none(
    gini: list[float], delta: float
) -> None:
    phi = labels.adaptive_weights(gini, delta).numpy()
    f = np.log1p(delta * np.array(gini))
    if f.sum() == 0:
        assert (phi == 1).all()
        return
    np.testing.assert_allclose(phi, len(gini) * f / f.sum(), rtol=1e-9)
    assert phi.mean() == pytest.approx(1)
    assert (phi[f == 0] == 0).all()


def test_adaptive_weights_of_small_and_large_delta() -> None:
    gini = torch.tensor([0.2, 0.4], dtype=torch.float64)
    torch.testing.assert_close(labels.adaptive_weights(gini, 1e-9), gini / gini.mean())
    spread = [float(labels.adaptive_weights(gini, d)[1]) for d in (0.01, 1.0, 100.0)]
    assert spread == sorted(spread, reverse=True)
    assert labels.adaptive_weights([], 1.0).shape == (0,)
    with pytest.raises(ConfigError, match="delta"):
        labels.adaptive_weights(gini, 0.0)


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
def test_distances_are_their_formulas(metric: labels.Metric) -> None:
    p, q = shares(1, 30, 10), shares(2, 30, 10)
    expected = [reference_distance(a, b, metric) for a, b in zip(p, q, strict=True)]
    np.testing.assert_allclose(labels.distance(p, q, metric), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(labels.distance(p, q[0], metric)[0], expected[0], rtol=1e-9)
    assert (labels.distance(p, p, metric) == 0).all()
    if metric != "kl":
        torch.testing.assert_close(labels.distance(p, q, metric), labels.distance(q, p, metric))
    else:
        assert not torch.allclose(labels.distance(p, q, metric), labels.distance(q, p, metric))


def test_distances_at_their_far_end() -> None:
    a, b = [1.0, 0.0], [0.0, 1.0]
    assert float(labels.distance(a, b, "l2")) == pytest.approx(math.sqrt(2))
    assert float(labels.distance(a, b, "js")) == pytest.approx(math.log(2))
    assert math.isfinite(float(labels.distance(a, b, "kl")))
    assert float(labels.distance(a, b, "kl", smoothing=0.0)) == math.inf


# papers.md 13.7
@pytest.mark.parametrize("metric", METRICS)
def test_discrepancy_weights_are_eq_5(metric: labels.Metric) -> None:
    teachers, student = shares(3, 5, 10), shares(4, 10)
    d = np.array([reference_distance(t, student, metric) for t in teachers])
    g, h = labels.discrepancy_weights(teachers, student, metric)
    np.testing.assert_allclose(g, d / d.sum(), rtol=1e-9)
    np.testing.assert_allclose(h, 1 / (d + 1e-4) / (1 / (d + 1e-4)).sum(), rtol=1e-9)
    assert float(g.sum()) == pytest.approx(1)
    assert float(h.sum()) == pytest.approx(1)


@pytest.mark.parametrize("metric", METRICS)
def test_discrepancy_weights_at_their_guards(metric: labels.Metric) -> None:
    student = np.array([0.5, 0.5, 0.0])
    g, h = labels.discrepancy_weights([student, student], student, metric)
    assert g.tolist() == h.tolist() == [0.5, 0.5]  # no teacher differs
    g, h = labels.discrepancy_weights([student, [0.0, 0.0, 1.0]], student, metric)
    assert g.tolist() == [0.0, 1.0]
    assert float(h[0]) > 0.99
    g, h = labels.discrepancy_weights([[0.0, 0.0, 1.0]], student, metric)
    assert g.tolist() == h.tolist() == [1.0]  # one teacher
    g, h = labels.discrepancy_weights(np.zeros((0, 3)), student, metric)
    assert g.shape == h.shape == (0,)


def notebook_shares(alpha: float) -> np.ndarray:
    """Label shares (4, 10) of HiPer-FedKD's clients: one Dirichlet draw a class from NumPy's old
    generator, seed 42.

    Each class has 4,500 images, cut at whole ones: a share below 1/4500 is none.
    """
    rng = np.random.RandomState(42)
    cuts = [(np.cumsum(rng.dirichlet([alpha] * 4)) * 4500).astype(int) for _ in range(10)]
    counts = np.stack([np.diff([0, *cut[:-1], 4500]) for cut in cuts], axis=1)
    return counts / counts.sum(1, keepdims=True)


# papers.md 13.9
@pytest.mark.parametrize(
    ("schedule", "printed"),
    [
        ("linear", [0.2892, 0.3038, 0.3477, 0.3424]),
        ("exponential", [0.1159, 0.1212, 0.1386, 0.1364]),
    ],
)
def test_temperatures_are_those_that_hiper_fedkd_printed(
    schedule: labels.Schedule, printed: list[float]
) -> None:
    p = notebook_shares(1.0)
    found = [
        labels.client_temperature(labels.heterogeneity_score(x, p.mean(0)), schedule) for x in p
    ]
    np.testing.assert_allclose(found, printed, atol=1e-3)


def test_scores_at_alpha_a_tenth() -> None:
    p = notebook_shares(0.1)
    np.testing.assert_allclose(
        [labels.heterogeneity_score(x, p.mean(0)) for x in p], [0.553, 0.862, 0.666, 1.0], atol=2e-3
    )
    absent = [labels.heterogeneity_score(x, p.mean(0), count_absent=True) for x in p]
    np.testing.assert_allclose(absent, [1.0, 1.0, 0.97, 1.0], atol=5e-3)


def test_heterogeneity_score_floors_the_global_shares_and_skips_absent_classes() -> None:
    own, everybody = np.array([0.9, 0.1, 0.0]), np.array([1.0, 0.0, 0.0])
    floored = np.array([1.0, 0.01, 0.01]) / 1.02
    expected = (abs(0.9 / floored[0] - 1) + abs(0.1 / floored[1] - 1)) / 3
    assert labels.heterogeneity_score(own, everybody) == pytest.approx(min(1, expected))
    assert labels.heterogeneity_score(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5])) == 0
    score = labels.heterogeneity_score([1.0, 0.0], [0.5, 0.5])
    assert score == 0.5
    assert labels.heterogeneity_score([1.0, 0.0], [0.5, 0.5], count_absent=True) == 1.0


@given(score=st.floats(0, 1))
def test_temperatures_fall_with_the_score_and_stay_within_the_clamp(score: float) -> None:
    for schedule in ("linear", "exponential"):
        t = labels.client_temperature(score, schedule)  # type: ignore[arg-type]
        assert 0.01 <= t <= labels.client_temperature(0.0, schedule) == 0.99  # type: ignore[arg-type]
    assert labels.client_temperature(score, "linear", low=0.05) >= 0.05


def test_temperature_options() -> None:
    assert labels.client_temperature(1.0, "linear") == pytest.approx(0.01)
    assert labels.client_temperature(1.0, "exponential") == pytest.approx(0.99 * math.exp(-3))
    assert labels.client_temperature(1.0, "exponential", decay=1.0) == pytest.approx(0.99 / math.e)
    assert labels.client_temperature(0.0, "linear", high=0.5) == 0.5
    with pytest.raises(UnknownName, match="linear"):
        labels.client_temperature(0.5, "lineal")  # type: ignore[arg-type]
