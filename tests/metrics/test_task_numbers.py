"""Every number from an accuracy matrix against values worked out by hand, with blanks as NaN, None
and 0.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest

from fedstill.core.errors import ConfigError
from fedstill.metrics import tasks
from fedstill.metrics.accuracy import forgetting
from fedstill.metrics.tasks import TABLE, Definition

NAN = float("nan")


@dataclass(frozen=True)
class ByHand:
    """A number of the three matrices, computed by hand; None where a formula does not apply."""

    triangular: float
    with_blanks: float
    full: float | None


TRIANGULAR = [[80, NAN, NAN], [78, 60, NAN], [75, 55, 50]]
WITH_BLANKS = [[70, None, None], [80, 40, None], [60, 50, 90]]
FULL = [[70, 30, 20], [80, 60, 35], [75, 65, 90]]
"""Accuracies in percent, after the task of the row, on the task of the column."""

BY_HAND = {
    "final_accuracy": ByHand(60, 200 / 3, 230 / 3),
    "incremental_accuracy": ByHand(
        triangular=(80 + 69 + 60) / 3,
        with_blanks=(70 + 60 + 200 / 3) / 3,
        full=(70 + 70 + 230 / 3) / 3,
    ),
    "learning_accuracy": ByHand(190 / 3, 200 / 3, 220 / 3),
    "average_forgetting": ByHand(5, 5, 0),
    "backward_transfer": ByHand(-5, 0, 5),
    "worst_forgetting": ByHand(5, 20, 5),
    "learned": ByHand(190 / 3, 220 / 3, 235 / 3),
    "lost": ByHand(10 / 3, 20 / 3, 5 / 3),
    "kept": ByHand(180 / 190, 200 / 220, 230 / 235),
    "forgetting": ByHand(5, 5, -55 / 3),
    "forgetting, blanks as 0": ByHand(-40 / 3, -80 / 3, -55 / 3),
    "published.stsa": ByHand(5, 10, 2.5),
    "published.fed_mammoth": ByHand(10 / 3, 0, -10 / 3),
    "published.fot": ByHand(5, 0, -5),
    "published.lander": ByHand(53 / 3, 40 / 3, None),
    "published.mfcl": ByHand((0.8 - 75 + 5) / 3, (0.7 - 60 - 10) / 3, None),
}

every_definition = pytest.mark.parametrize(
    "definition", TABLE, ids=lambda definition: definition.name
)


@every_definition
def test_values_by_hand(definition: Definition) -> None:
    expected = BY_HAND[definition.name]

    assert definition.of(TRIANGULAR, None) == pytest.approx(expected.triangular, abs=1e-9)
    assert definition.of(WITH_BLANKS, None) == pytest.approx(expected.with_blanks, abs=1e-9)
    if expected.full is not None:
        assert definition.of(FULL, None) == pytest.approx(expected.full, abs=1e-9)


@every_definition
def test_the_unit_of_the_matrix_is_the_unit_of_the_number(definition: Definition) -> None:
    """But for the share of what was learned, which has no unit."""
    shares = np.array(TRIANGULAR, dtype=float) / 100
    percent = 100 * definition.of(shares, None)
    if definition.name == "kept":
        percent /= 100

    assert percent == pytest.approx(BY_HAND[definition.name].triangular, abs=1e-9)


def test_forward_transfer_needs_columns_of_future_tasks() -> None:
    assert tasks.forward_transfer(FULL, [10, 10, 10]) == pytest.approx(22.5, abs=1e-9)
    assert math.isnan(tasks.forward_transfer(TRIANGULAR, [10, 10, 10]))


def test_forward_transfer_takes_the_untrained_accuracy_of_the_same_column() -> None:
    """The first of three columns is of a future task; the last, of task 2, is 20 above the
    untrained model before.
    """
    matrix = [[10, 70, 30], [12, 80, 60]]

    assert tasks.forward_transfer(matrix, [50, 0, 10], [2, 0, 1]) == pytest.approx(20)
    with pytest.raises(ConfigError, match="classes"):
        tasks.forward_transfer(FULL, [10, 10])


def test_blanks_read_as_zero_change_only_differences_to_them() -> None:
    """The average forgetting takes a maximum over earlier rows, of which one was measured."""
    zeros = tasks.with_zeros(WITH_BLANKS)

    assert tasks.average_forgetting(zeros) == pytest.approx(5)
    assert forgetting(zeros) == pytest.approx(-80 / 3)
    assert tasks.learned(zeros) == pytest.approx(220 / 3)
    assert tasks.final_accuracy(zeros) == pytest.approx(200 / 3)


def test_the_worst_forgetting_names_its_column() -> None:
    value, column = tasks.worst_forgetting(WITH_BLANKS)

    assert value == 20.0
    assert column == 0
    assert tasks.worst_forgetting([[80]])[1] is None


def test_a_maximum_of_means_is_at_most_the_mean_of_maxima() -> None:
    """Two classes of task 0, one of task 1: by class, 40 is forgotten; by task, 20."""
    by_class = [[90, 50, NAN], [50, 90, NAN], [50, 50, 60]]
    task_of_class = [0, 0, 1]

    by_task = tasks.by_task(by_class, task_of_class)

    np.testing.assert_allclose(by_task, [[70, NAN], [70, NAN], [50, 60]])
    assert tasks.average_forgetting(by_class, task_of_class) == pytest.approx(40)
    assert forgetting([row[:2] for row in by_class]) == pytest.approx(40)
    assert tasks.average_forgetting(by_task, [0, 1]) == pytest.approx(20)


@pytest.mark.parametrize("seed", range(5))
def test_accuracy_is_learned_times_kept_and_learned_minus_lost(seed: int) -> None:
    generator = np.random.default_rng(seed)
    full = generator.random((6, 6))
    triangular = generator.random((6, 6))
    triangular[np.triu_indices(6, 1)] = np.nan

    final = tasks.final_accuracy(triangular)
    learned = tasks.learned(triangular)

    assert learned * tasks.kept_share(triangular) == pytest.approx(final, abs=1e-12)
    assert learned - tasks.lost(triangular) == pytest.approx(final, abs=1e-12)
    assert tasks.lost(triangular) >= 0
    assert tasks.lost(full) >= forgetting(full) - 1e-12


def test_columns_of_future_tasks_are_left_out() -> None:
    stopped = FULL[:2]

    assert tasks.final_accuracy(stopped) == pytest.approx(70)
    assert tasks.incremental_accuracy(stopped) == pytest.approx(70)
    assert tasks.average_forgetting(stopped) == pytest.approx(-10)
    assert tasks.learned(stopped) == pytest.approx(70)


@every_definition
def test_every_definition_leaves_out_columns_of_future_tasks(definition: Definition) -> None:
    """As ``fedstill forgetting`` does with such a matrix."""
    number = definition.of([[70, 30, 20], [80, 60, 35]], None)

    assert number == pytest.approx(definition.of([[70, 30], [80, 60]], None), abs=1e-12)
    if definition.by_class:
        reordered = definition.of([[20, 70, 30], [35, 80, 60]], [2, 0, 1])
        assert reordered == pytest.approx(number, abs=1e-12)


def test_one_task_has_no_forgetting() -> None:
    assert tasks.final_accuracy([[80]]) == 80
    assert tasks.learned([[80]]) == 80
    assert math.isnan(tasks.average_forgetting([[80]]))
    assert math.isnan(tasks.backward_transfer([[80]]))


def test_round_forgetting_and_its_two_parts() -> None:
    start = [0.8, 0.6]
    local = [[0.9, 0.2], [0.4, 0.8]]
    end = [0.7, 0.5]

    assert tasks.round_forgetting(start, end) == pytest.approx(0.10, abs=1e-9)
    assert tasks.local_forgetting(start, local) == pytest.approx(0.20, abs=1e-9)
    assert tasks.aggregation_forgetting(local, end) == pytest.approx(0.125, abs=1e-9)
    assert tasks.aggregation_forgetting(local, end, best=True) == pytest.approx(0.25, abs=1e-9)


def test_the_change_of_a_round_is_its_gain_minus_its_forgetting() -> None:
    rounds = np.random.default_rng(0).random((5, 7))

    change = 0.0
    for start, end in itertools.pairwise(rounds):
        gain = np.maximum(0, end - start).mean()
        change += gain - tasks.round_forgetting(start, end)

    assert change == pytest.approx(rounds[-1].mean() - rounds[0].mean(), abs=1e-12)


@pytest.mark.parametrize("task_of_column", [[0, 1], [0, 1, -1], [0, 0.5, 1]])
def test_wrong_tasks_of_columns_are_refused(task_of_column: list[float]) -> None:
    with pytest.raises(ConfigError, match="3 columns"):
        tasks.final_accuracy(TRIANGULAR, task_of_column)


def test_an_empty_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match="row"):
        tasks.final_accuracy(np.zeros((0, 3)))


PUBLISHED = [definition for definition in TABLE if not definition.by_class]


@pytest.mark.parametrize("definition", PUBLISHED, ids=lambda definition: definition.name)
def test_published_definitions_need_a_column_for_each_task(definition: Definition) -> None:
    with pytest.raises(ConfigError, match="3 tasks"):
        definition.of([[0.5, None], [0.4, 0.6], [0.3, 0.5]], None)


def test_a_maximum_over_tasks_finds_forgetting_of_a_hard_task_and_too_little_elsewhere() -> None:
    """LANDER's formula takes the best task of each row, as its code does: the two matrices of
    docs/forgetting.md.
    """
    hard = [[90, None], [90, 40]]
    forgotten = [[90, None], [50, 90]]

    assert tasks.average_forgetting(hard) == 0.0
    assert tasks.lander(hard) == 25.0
    assert tasks.average_forgetting(forgotten) == 40.0
    assert tasks.lander(forgotten) == 20.0
