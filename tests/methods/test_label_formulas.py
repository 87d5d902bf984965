"""Formulas of methods that are functions of label shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstill.core import label_counts
from fedstill.core.errors import ConfigError, UnknownName
from fedstill.methods.fedadkd import adaptive_weights
from fedstill.methods.hiper_fedkd import (
    TemperatureSchedule,
    client_temperature,
    heterogeneity_score,
)
from fedstill.methods.sfedkd import discrepancy_weights

METRICS = pytest.mark.parametrize("metric", ["l1", "l2", "kl", "js"])


def label_shares(seed: int, *shape: int) -> np.ndarray:
    """Label shares (..., C) with zeros in them."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, 6, size=shape) * draw.integers(0, 2, size=shape)
    counts[..., 0] += 1
    return counts / counts.sum(-1, keepdims=True)


# FedADKD's phi.


@settings(max_examples=50, deadline=None)
@given(
    gini=st.lists(st.just(0.0) | st.floats(1e-6, 1), min_size=1, max_size=20),
    delta=st.floats(1e-3, 100),
)
def test_adaptive_weights_have_mean_one_and_give_single_class_clients_none(
    gini: list[float], delta: float
) -> None:
    """Unless all clients have a single class: then each has weight one."""
    phi = adaptive_weights(gini, delta).numpy()

    f = np.log1p(delta * np.array(gini))
    if f.sum() == 0:
        assert (phi == 1).all()
    else:
        np.testing.assert_allclose(phi, len(gini) * f / f.sum(), rtol=1e-9)
        assert phi.mean() == pytest.approx(1)
        assert (phi[f == 0] == 0).all()


def test_adaptive_weights_of_small_and_large_delta() -> None:
    """A small delta weighs by the Gini index itself; the larger it is, the nearer are weights."""
    gini = torch.tensor([0.2, 0.4], dtype=torch.float64)

    torch.testing.assert_close(adaptive_weights(gini, 1e-9), gini / gini.mean())
    larger_weights = [float(adaptive_weights(gini, delta)[1]) for delta in (0.01, 1.0, 100.0)]
    assert larger_weights == sorted(larger_weights, reverse=True)
    assert adaptive_weights([], 1.0).shape == (0,)
    with pytest.raises(ConfigError, match="delta"):
        adaptive_weights(gini, 0.0)


# SFedKD's g and h.


@METRICS
def test_discrepancy_weights_are_eq_5(metric: label_counts.Metric) -> None:
    teachers = label_shares(3, 5, 10)
    student = label_shares(4, 10)

    g, h = discrepancy_weights(teachers, student, metric)

    distances = [float(label_counts.distance(shares, student, metric)) for shares in teachers]
    d = np.array(distances)
    closeness = 1 / (d + 1e-4)
    np.testing.assert_allclose(g, d / d.sum(), rtol=1e-9)
    np.testing.assert_allclose(h, closeness / closeness.sum(), rtol=1e-9)
    assert float(g.sum()) == pytest.approx(1)
    assert float(h.sum()) == pytest.approx(1)


@METRICS
def test_discrepancy_weights_at_their_guards(metric: label_counts.Metric) -> None:
    """Where no teacher differs, where one does, of one teacher, and of none."""
    student = np.array([0.5, 0.5, 0.0])
    unlike = np.array([0.0, 0.0, 1.0])

    g, h = discrepancy_weights([student, student], student, metric)
    assert g.tolist() == h.tolist() == [0.5, 0.5]

    g, h = discrepancy_weights([student, unlike], student, metric)
    assert g.tolist() == [0.0, 1.0]
    assert float(h[0]) > 0.99

    g, h = discrepancy_weights([unlike], student, metric)
    assert g.tolist() == h.tolist() == [1.0]

    g, h = discrepancy_weights(np.zeros((0, 3)), student, metric)
    assert g.shape == h.shape == (0,)


# HiPer-FedKD's temperatures.


def notebook_shares(alpha: float) -> np.ndarray:
    """Label shares (4, 10) of HiPer-FedKD's clients: one Dirichlet draw a class from NumPy's old
    generator, seed 42.

    Each class has 4,500 images, cut at whole ones: a share below 1/4500 is none.
    """
    draw = np.random.RandomState(42)
    counts_by_class = []
    for _ in range(10):
        cuts = (np.cumsum(draw.dirichlet([alpha] * 4)) * 4500).astype(int)
        counts_by_class.append(np.diff([0, *cuts[:-1], 4500]))
    counts = np.stack(counts_by_class, axis=1)
    return counts / counts.sum(1, keepdims=True)


def scores_of(shares: np.ndarray, *, count_absent: bool = False) -> list[float]:
    """The score of each client."""
    mean = shares.mean(0)
    return [heterogeneity_score(row, mean, count_absent=count_absent) for row in shares]


@pytest.mark.parametrize(
    ("schedule", "printed"),
    [
        ("linear", [0.2892, 0.3038, 0.3477, 0.3424]),
        ("exponential", [0.1159, 0.1212, 0.1386, 0.1364]),
    ],
)
def test_temperatures_are_those_that_hiper_fedkd_printed(
    schedule: TemperatureSchedule, printed: list[float]
) -> None:
    scores = scores_of(notebook_shares(1.0))

    temperatures = [client_temperature(score, schedule) for score in scores]

    np.testing.assert_allclose(temperatures, printed, atol=1e-3)


def test_scores_at_alpha_a_tenth() -> None:
    """With and without the classes that a client lacks."""
    shares = notebook_shares(0.1)

    np.testing.assert_allclose(scores_of(shares), [0.553, 0.862, 0.666, 1.0], atol=2e-3)
    with_absent = scores_of(shares, count_absent=True)
    np.testing.assert_allclose(with_absent, [1.0, 1.0, 0.97, 1.0], atol=5e-3)


def test_heterogeneity_score_floors_the_global_shares_and_skips_absent_classes() -> None:
    client = np.array([0.9, 0.1, 0.0])
    everybody = np.array([1.0, 0.0, 0.0])

    score = heterogeneity_score(client, everybody)

    floored = np.array([1.0, 0.01, 0.01]) / 1.02
    expected = (abs(0.9 / floored[0] - 1) + abs(0.1 / floored[1] - 1)) / 3
    assert score == pytest.approx(min(1, expected))


def test_heterogeneity_score_of_two_classes() -> None:
    uniform = torch.tensor([0.5, 0.5])
    assert heterogeneity_score(uniform, uniform) == 0
    assert heterogeneity_score([1.0, 0.0], [0.5, 0.5]) == 0.5
    assert heterogeneity_score([1.0, 0.0], [0.5, 0.5], count_absent=True) == 1.0


@given(score=st.floats(0, 1))
def test_temperatures_fall_with_the_score_and_stay_within_the_clamp(score: float) -> None:
    for schedule in ("linear", "exponential"):
        temperature = client_temperature(score, schedule)  # type: ignore[arg-type]
        highest = client_temperature(0.0, schedule)  # type: ignore[arg-type]
        assert 0.01 <= temperature <= highest == 0.99
    assert client_temperature(score, "linear", low=0.05) >= 0.05


def test_temperature_options() -> None:
    assert client_temperature(1.0, "linear") == pytest.approx(0.01)
    assert client_temperature(1.0, "exponential") == pytest.approx(0.99 * math.exp(-3))
    assert client_temperature(1.0, "exponential", decay=1.0) == pytest.approx(0.99 / math.e)
    assert client_temperature(0.0, "linear", high=0.5) == 0.5
    with pytest.raises(UnknownName, match="linear"):
        client_temperature(0.5, "lineal")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_floating_tensors_keep_their_dtype(dtype: torch.dtype) -> None:
    shares = torch.tensor(label_shares(7, 2, 4), dtype=dtype)

    g, h = discrepancy_weights(shares, shares[0])
    phi = adaptive_weights(shares[0], 1.0)

    assert g.dtype == h.dtype == phi.dtype == dtype


def test_lists_give_float64() -> None:
    assert adaptive_weights([0.5, 0.25], 1.0).dtype == torch.float64
