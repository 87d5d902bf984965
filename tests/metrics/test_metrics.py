"""Measures: formulas against NumPy, identities, missing classes, and every kind of input."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedstill import metrics
from fedstill.core.errors import ConfigError
from fedstill.metrics.accuracy import weighted_mean

NAN = float("nan")
RNG = np.random.default_rng(0)
A, B = RNG.random(6), RNG.random(6)
P = np.array([0.5, 0.3, 0.2, 0.0, 0.0, 0.0])
ROUNDS = RNG.random((8, 6))

MEASURES: dict[str, tuple[Callable[..., float], tuple[object, ...]]] = {
    "top1": (metrics.top1, (np.array([1, 2]), np.array([4, 4]))),
    "in_local_accuracy": (metrics.in_local_accuracy, (A, P)),
    "out_local_accuracy": (metrics.out_local_accuracy, (A, P)),
    "average_accuracy": (metrics.average_accuracy, (A, P, [3, 4])),
    "uniform_accuracy": (metrics.uniform_accuracy, (A, P, [3, 4])),
    "forgetting": (metrics.forgetting, (ROUNDS,)),
    "query_accuracy_gain": (metrics.query_accuracy_gain, (A, B, [3, 4])),
    "query_forgetting": (metrics.query_forgetting, (A, B, P)),
    "consistency": (metrics.consistency, (A, B)),
}

EXPECTED = {
    "top1": 3 / 8,
    "in_local_accuracy": float(A @ P),
    "out_local_accuracy": float(A @ (1 - P) / 5),
    "average_accuracy": float((A @ P + A[3] + A[4]) / 3),
    "uniform_accuracy": float(A[:5].mean()),
    "forgetting": float(
        np.mean([max(ROUNDS[t, c] - ROUNDS[-1, c] for t in range(7)) for c in range(6)])
    ),
    "query_accuracy_gain": float((B - A)[[3, 4]].mean()),
    "query_forgetting": float(np.minimum(0, B - A)[:3].mean()),
    "consistency": float(A @ B / math.sqrt((A @ A) * (B @ B))),
}

every_measure = pytest.mark.parametrize("name", MEASURES)


def as_tensor(x: object) -> object:
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else torch.tensor(x)


def as_list(x: object) -> object:
    return x.tolist() if isinstance(x, np.ndarray) else tuple(x)  # type: ignore[arg-type]


@every_measure
def test_a_measure_is_its_formula_for_arrays_tensors_and_lists(name: str) -> None:
    measure, inputs = MEASURES[name]
    for kind in (lambda x: x, as_tensor, as_list):
        found = measure(*(kind(x) for x in inputs))
        assert type(found) is float
        assert found == pytest.approx(EXPECTED[name], rel=1e-12)


@every_measure
def test_a_measure_leaves_out_a_class_that_was_never_tested(name: str) -> None:
    if name == "top1":
        return
    measure, inputs = MEASURES[name]

    def longer(x: object) -> object:
        if not isinstance(x, np.ndarray):
            return x
        extra = np.zeros(1) if x is P else np.full((*x.shape[:-1], 1), np.nan)
        return np.concatenate([x, extra], axis=-1)

    assert measure(*(longer(x) for x in inputs)) == pytest.approx(EXPECTED[name], rel=1e-12)


@every_measure
def test_a_measure_of_nothing_is_not_a_number(name: str) -> None:
    measure, inputs = MEASURES[name]
    if name == "top1":
        assert math.isnan(measure([0, 0], [0, 0]))
        return
    blank = [
        np.full_like(x, np.nan) if isinstance(x, np.ndarray) and x is not P else x for x in inputs
    ]
    assert math.isnan(measure(*blank))


@every_measure
def test_a_measure_refuses_shapes_that_do_not_fit(name: str) -> None:
    measure, inputs = MEASURES[name]
    with pytest.raises(ConfigError, match="shape"):
        measure(0.5, *inputs[1:])
    if len(inputs) > 1:
        with pytest.raises(ConfigError, match="classes"):
            measure(np.ones(3), *inputs[1:])


def test_class_accuracy_counts_and_marks_the_untested() -> None:
    found = metrics.class_accuracy(torch.tensor([3, 0, 0]), torch.tensor([4, 2, 0]))
    np.testing.assert_array_equal(found, [0.75, 0.0, np.nan])
    # as a journal writes it
    assert metrics.in_local_accuracy([0.5, None, 1.0], [0.25, 0.5, 0.25]) == 0.75


def test_out_local_shares_collapse_to_uniform_with_the_local_ones() -> None:
    uniform = np.full(6, 1 / 6)
    assert metrics.out_local_accuracy(A, uniform) == pytest.approx(A.mean())
    assert metrics.in_local_accuracy(A, uniform) == pytest.approx(A.mean())
    assert math.isnan(metrics.out_local_accuracy([0.5], [1.0]))


def test_seen_and_unseen_classes() -> None:
    assert metrics.in_local_accuracy(A, P, unweighted=True) == pytest.approx(A[:3].mean())
    assert metrics.out_local_accuracy(A, P, unweighted=True) == pytest.approx(A[3:].mean())


# papers.md 13.12
@pytest.mark.parametrize("asked", [1, 2, 3])
def test_perfect_at_home_and_lost_elsewhere_scores_one_in_one_plus_the_query(asked: int) -> None:
    accuracy = (P > 0).astype(float)
    assert metrics.average_accuracy(accuracy, P, range(3, 3 + asked)) == pytest.approx(
        1 / (1 + asked)
    )
    assert metrics.uniform_accuracy(accuracy, P, range(3, 3 + asked)) == pytest.approx(
        3 / (3 + asked)
    )


def test_a_class_both_local_and_queried_counts_once_with_weight_one() -> None:
    assert metrics.average_accuracy([1.0, 0.0], [0.5, 0.5], [0]) == pytest.approx(1 / 1.5)
    assert metrics.average_accuracy([1.0, 0.0], [0.5, 0.5], [0, 0]) == pytest.approx(1 / 1.5)
    assert metrics.average_accuracy(A, P, []) == pytest.approx(metrics.in_local_accuracy(A, P))
    assert metrics.query_accuracy_gain(A, B, torch.tensor([3, 3])) == pytest.approx(B[3] - A[3])


@pytest.mark.parametrize("bad", [[6], [-1]])
def test_a_query_outside_the_classes_is_refused(bad: list[int]) -> None:
    for ask in (metrics.average_accuracy, metrics.uniform_accuracy):
        with pytest.raises(ConfigError, match="query class"):
            ask(A, P, bad)
    with pytest.raises(ConfigError, match="query class"):
        metrics.query_accuracy_gain(A, B, bad)


# papers.md 13.13
@settings(max_examples=50, deadline=None)
@given(arrays(np.float64, st.tuples(st.integers(2, 6), st.just(1)), elements=st.floats(0, 1)))
def test_a_class_counts_negatively_only_if_its_last_round_is_strictly_its_best(
    rounds: np.ndarray,
) -> None:
    assert (metrics.forgetting(rounds) < 0) == bool(rounds[-1, 0] > rounds[:-1, 0].max())
    assert metrics.query_forgetting(rounds[0], rounds[1], [1.0]) <= 0


def test_running_forgetting_takes_each_round_as_the_last() -> None:
    found = metrics.running_forgetting(ROUNDS)
    assert found[0] == 0
    for t in range(2, 9):
        assert found[t - 1] == pytest.approx(metrics.forgetting(ROUNDS[:t]))
    assert metrics.forgetting(ROUNDS[:1]) == metrics.forgetting(ROUNDS[:0]) == 0
    assert metrics.running_forgetting(ROUNDS[:0]) == []


def test_forgetting_with_a_class_that_was_tested_now_and_then() -> None:
    assert metrics.forgetting([[0.75, NAN], [NAN, 0.5], [0.25, 0.25]]) == 0.375
    assert metrics.forgetting([[0.75, 0.5], [0.25, NAN]]) == 0.5


def test_running_consistency_is_one_value_a_round() -> None:
    found = metrics.running_consistency(ROUNDS)
    assert len(found) == 8
    assert math.isnan(found[0])
    assert found[3] == pytest.approx(metrics.consistency(ROUNDS[2], ROUNDS[3]))
    assert metrics.consistency(A, 0.5 * A) == pytest.approx(1)
    assert math.isnan(metrics.consistency(A, 0 * A))
    assert metrics.running_consistency(ROUNDS[:0]) == []


def test_a_weighted_mean_never_leaves_its_numbers() -> None:
    draw = np.random.default_rng(0)
    for _ in range(2000):
        weights = draw.random(10)
        assert weighted_mean(np.ones(10), weights) == 1.0
