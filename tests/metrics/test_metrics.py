"""Measures: formulas against NumPy, identities, missing classes, and every kind of input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
BEFORE = RNG.random(6)
AFTER = RNG.random(6)
"""Accuracies by class."""

SHARES = np.array([0.5, 0.3, 0.2, 0.0, 0.0, 0.0])
"""A client's shares of classes."""

ROUNDS = RNG.random((8, 6))
"""Accuracies by round and class."""

QUERY = [3, 4]

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Example:
    """A measure with inputs, and its value by the formula."""

    measure: Callable[..., float]
    inputs: Inputs
    expected: float

    @classmethod
    def of(cls, measure: Callable[..., float], *inputs: Any, expected: float) -> Example:
        """An example with these inputs."""
        return cls(measure, inputs, expected)


CHANGE = AFTER - BEFORE
LOSSES = ROUNDS[:-1].max(axis=0) - ROUNDS[-1]
NORMS = math.sqrt((BEFORE @ BEFORE) * (AFTER @ AFTER))

MEASURES = {
    "top1": Example.of(metrics.top1, np.array([1, 2]), np.array([4, 4]), expected=3 / 8),
    "in_local_accuracy": Example.of(
        metrics.in_local_accuracy, BEFORE, SHARES, expected=BEFORE @ SHARES
    ),
    "out_local_accuracy": Example.of(
        metrics.out_local_accuracy, BEFORE, SHARES, expected=BEFORE @ (1 - SHARES) / 5
    ),
    "average_accuracy": Example.of(
        metrics.average_accuracy,
        BEFORE,
        SHARES,
        QUERY,
        expected=(BEFORE @ SHARES + BEFORE[3] + BEFORE[4]) / 3,
    ),
    "uniform_accuracy": Example.of(
        metrics.uniform_accuracy, BEFORE, SHARES, QUERY, expected=BEFORE[:5].mean()
    ),
    "forgetting": Example.of(metrics.forgetting, ROUNDS, expected=LOSSES.mean()),
    "query_accuracy_gain": Example.of(
        metrics.query_accuracy_gain, BEFORE, AFTER, QUERY, expected=CHANGE[QUERY].mean()
    ),
    "query_forgetting": Example.of(
        metrics.query_forgetting,
        BEFORE,
        AFTER,
        SHARES,
        expected=np.minimum(0, CHANGE)[:3].mean(),
    ),
    "consistency": Example.of(metrics.consistency, BEFORE, AFTER, expected=BEFORE @ AFTER / NORMS),
}

every_measure = pytest.mark.parametrize("name", MEASURES)


def as_tensor(value: Any) -> torch.Tensor:
    """An input as a tensor."""
    return torch.as_tensor(value)


def as_list(value: Any) -> Any:
    """An array as a list, a list as a tuple."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return tuple(value)


@every_measure
def test_a_measure_is_its_formula_for_arrays_tensors_and_lists(name: str) -> None:
    example = MEASURES[name]
    tensors = map(as_tensor, example.inputs)
    lists = map(as_list, example.inputs)

    for inputs in (example.inputs, tensors, lists):
        value = example.measure(*inputs)
        assert type(value) is float
        assert value == pytest.approx(example.expected, rel=1e-12)


def with_untested_class(value: Any) -> Any:
    """Accuracies with a further class that was never tested; nobody has examples of it."""
    if not isinstance(value, np.ndarray):
        return value
    column = np.full((*value.shape[:-1], 1), NAN)
    if value is SHARES:
        column = np.zeros(1)
    return np.concatenate([value, column], axis=-1)


def never_tested(value: Any) -> Any:
    """Accuracies of classes that were never tested."""
    if isinstance(value, np.ndarray) and value is not SHARES:
        return np.full_like(value, NAN)
    return value


@every_measure
def test_a_measure_leaves_out_a_class_that_was_never_tested(name: str) -> None:
    """``top1`` takes counts, which are never NaN."""
    if name == "top1":
        return
    example = MEASURES[name]

    value = example.measure(*map(with_untested_class, example.inputs))

    assert value == pytest.approx(example.expected, rel=1e-12)


@every_measure
def test_a_measure_without_tests_is_not_a_number(name: str) -> None:
    example = MEASURES[name]
    inputs: Iterable[Any] = map(never_tested, example.inputs)
    if name == "top1":
        inputs = [[0, 0], [0, 0]]

    assert math.isnan(example.measure(*inputs))


@every_measure
def test_a_measure_refuses_shapes_that_do_not_fit(name: str) -> None:
    measure = MEASURES[name].measure
    further_inputs = MEASURES[name].inputs[1:]

    with pytest.raises(ConfigError, match="shape"):
        measure(0.5, *further_inputs)
    if further_inputs:
        with pytest.raises(ConfigError, match="classes"):
            measure(np.ones(3), *further_inputs)


def test_class_accuracy_counts_and_marks_the_untested() -> None:
    """A journal has None for a class that was not tested."""
    accuracy = metrics.class_accuracy(torch.tensor([3, 0, 0]), torch.tensor([4, 2, 0]))

    np.testing.assert_array_equal(accuracy, [0.75, 0.0, np.nan])
    assert metrics.in_local_accuracy([0.5, None, 1.0], [0.25, 0.5, 0.25]) == 0.75


def test_with_equal_shares_in_and_out_local_accuracy_are_the_mean() -> None:
    uniform = np.full(6, 1 / 6)

    assert metrics.out_local_accuracy(BEFORE, uniform) == pytest.approx(BEFORE.mean())
    assert metrics.in_local_accuracy(BEFORE, uniform) == pytest.approx(BEFORE.mean())
    assert math.isnan(metrics.out_local_accuracy([0.5], [1.0]))


def test_unweighted_local_accuracies_are_means_of_seen_and_unseen_classes() -> None:
    in_local = metrics.in_local_accuracy(BEFORE, SHARES, unweighted=True)
    out_local = metrics.out_local_accuracy(BEFORE, SHARES, unweighted=True)

    assert in_local == pytest.approx(BEFORE[:3].mean())
    assert out_local == pytest.approx(BEFORE[3:].mean())


# papers.md 13.12
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_client_without_any_answer_scores_one_over_one_more_than_its_queries(count: int) -> None:
    """It is perfect on its own three classes, and always wrong on those of its query."""
    accuracy = (SHARES > 0).astype(float)
    query = range(3, 3 + count)

    average = metrics.average_accuracy(accuracy, SHARES, query)
    uniform = metrics.uniform_accuracy(accuracy, SHARES, query)

    assert average == pytest.approx(1 / (1 + count))
    assert uniform == pytest.approx(3 / (3 + count))


def test_a_class_both_local_and_queried_counts_once_with_weight_one() -> None:
    assert metrics.average_accuracy([1.0, 0.0], [0.5, 0.5], [0]) == pytest.approx(1 / 1.5)
    assert metrics.average_accuracy([1.0, 0.0], [0.5, 0.5], [0, 0]) == pytest.approx(1 / 1.5)
    in_local = metrics.in_local_accuracy(BEFORE, SHARES)
    assert metrics.average_accuracy(BEFORE, SHARES, []) == pytest.approx(in_local)
    gain = metrics.query_accuracy_gain(BEFORE, AFTER, torch.tensor([3, 3]))
    assert gain == pytest.approx(AFTER[3] - BEFORE[3])


@pytest.mark.parametrize("query", [[6], [-1]])
def test_a_query_outside_the_classes_is_refused(query: list[int]) -> None:
    with pytest.raises(ConfigError, match="query class"):
        metrics.average_accuracy(BEFORE, SHARES, query)
    with pytest.raises(ConfigError, match="query class"):
        metrics.uniform_accuracy(BEFORE, SHARES, query)
    with pytest.raises(ConfigError, match="query class"):
        metrics.query_accuracy_gain(BEFORE, AFTER, query)


# papers.md 13.13
@settings(max_examples=50, deadline=None)
@given(arrays(np.float64, st.tuples(st.integers(2, 6), st.just(1)), elements=st.floats(0, 1)))
def test_a_class_counts_negatively_only_if_its_last_round_is_strictly_its_best(
    rounds: np.ndarray,
) -> None:
    assert (metrics.forgetting(rounds) < 0) == bool(rounds[-1, 0] > rounds[:-1, 0].max())
    assert metrics.query_forgetting(rounds[0], rounds[1], [1.0]) <= 0


def test_running_forgetting_takes_each_round_as_the_last() -> None:
    running = metrics.running_forgetting(ROUNDS)

    assert len(running) == 8
    assert running[0] == 0
    for rounds in range(2, 9):
        assert running[rounds - 1] == pytest.approx(metrics.forgetting(ROUNDS[:rounds]))
    assert metrics.forgetting(ROUNDS[:1]) == 0
    assert metrics.forgetting(ROUNDS[:0]) == 0
    assert metrics.running_forgetting(ROUNDS[:0]) == []


def test_forgetting_of_a_class_that_was_tested_in_some_rounds_only() -> None:
    assert metrics.forgetting([[0.75, NAN], [NAN, 0.5], [0.25, 0.25]]) == 0.375
    assert metrics.forgetting([[0.75, 0.5], [0.25, NAN]]) == 0.5


def test_running_consistency_compares_each_round_with_the_one_before() -> None:
    running = metrics.running_consistency(ROUNDS)

    assert len(running) == 8
    assert math.isnan(running[0])
    assert running[3] == pytest.approx(metrics.consistency(ROUNDS[2], ROUNDS[3]))
    assert metrics.consistency(BEFORE, 0.5 * BEFORE) == pytest.approx(1)
    assert math.isnan(metrics.consistency(BEFORE, 0 * BEFORE))
    assert metrics.running_consistency(ROUNDS[:0]) == []


def test_a_weighted_mean_of_ones_is_exactly_one() -> None:
    generator = np.random.default_rng(0)
    for _ in range(2000):
        assert weighted_mean(np.ones(10), generator.random(10)) == 1.0
