"""Every number from an accuracy matrix against values worked out by hand, with blanks as NaN, None
and 0.
"""

import itertools
import math

import numpy as np
import pytest

from fedstill.core.errors import ConfigError
from fedstill.metrics import tasks as over
from fedstill.metrics.accuracy import forgetting
from fedstill.metrics.tasks import TABLE

NAN = float("nan")
A = [[80, NAN, NAN], [78, 60, NAN], [75, 55, 50]]
B = [[70, None, None], [80, 40, None], [60, 50, 90]]
C = [[70, 30, 20], [80, 60, 35], [75, 65, 90]]

BY_HAND = {
    "final_accuracy": (60, 200 / 3, 230 / 3),
    "incremental_accuracy": ((80 + 69 + 60) / 3, (70 + 60 + 200 / 3) / 3, (70 + 70 + 230 / 3) / 3),
    "learning_accuracy": (190 / 3, 200 / 3, 220 / 3),
    "average_forgetting": (5, 5, 0),
    "backward_transfer": (-5, 0, 5),
    "worst_forgetting": (5, 20, 5),
    "learned": (190 / 3, 220 / 3, 235 / 3),
    "lost": (10 / 3, 20 / 3, 5 / 3),
    "kept": (180 / 190, 200 / 220, 230 / 235),
    "forgetting": (5, 5, -55 / 3),
    "forgetting, blanks as 0": (-40 / 3, -80 / 3, -55 / 3),
    "published.stsa": (5, 10, 2.5),
    "published.fed_mammoth": (10 / 3, 0, -10 / 3),
    "published.fot": (5, 0, -5),
    "published.lander": (53 / 3, 40 / 3, None),
    "published.mfcl": ((0.8 - 75 + 5) / 3, (0.7 - 60 - 10) / 3, None),
}


@pytest.mark.parametrize("definition", TABLE, ids=lambda d: d.name)
def test_values_by_hand(definition):
    for matrix, value in zip((A, B, C), BY_HAND[definition.name], strict=True):
        if value is not None:
            assert definition.of(matrix, None) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("definition", TABLE, ids=lambda d: d.name)
def test_the_unit_of_the_matrix_is_the_unit_of_the_number(definition):
    shares = np.array(A, dtype=float) / 100
    scale = 1 if definition.name == "kept" else 100
    assert scale * definition.of(shares, None) == pytest.approx(
        BY_HAND[definition.name][0], abs=1e-9
    )


def test_forward_transfer_needs_columns_of_tasks_to_come():
    assert over.forward_transfer(C, [10, 10, 10]) == pytest.approx(22.5, abs=1e-9)
    assert math.isnan(over.forward_transfer(A, [10, 10, 10]))


def test_forward_transfer_takes_the_untrained_accuracy_of_the_same_column():
    """The first of three columns is of a task to come; the last, of task 2, is 20 above the
    untrained model before.
    """
    assert over.forward_transfer(
        [[10, 70, 30], [12, 80, 60]], [50, 0, 10], [2, 0, 1]
    ) == pytest.approx(20)
    with pytest.raises(ConfigError, match="classes"):
        over.forward_transfer(C, [10, 10])


def test_blanks_read_as_zero_change_what_they_should():
    zeros = over.with_zeros(B)
    # a maximum over earlier rows, of which one was measured
    assert over.average_forgetting(zeros) == pytest.approx(5)
    assert forgetting(zeros) == pytest.approx(-80 / 3)
    assert over.learned(zeros) == pytest.approx(220 / 3)
    assert over.final_accuracy(zeros) == pytest.approx(200 / 3)


def test_the_worst_names_its_column():
    assert over.worst_forgetting(B) == (20.0, 0)
    assert over.worst_forgetting([[80]])[1] is None


def test_a_maximum_of_means_is_at_most_the_mean_of_maxima():
    classes, own = [[90, 50, NAN], [50, 90, NAN], [50, 50, 60]], [0, 0, 1]
    by_class = over.average_forgetting([*classes[:2], [50, 50, 60]], own)
    assert by_class == pytest.approx(40)
    assert forgetting([row[:2] for row in classes]) == pytest.approx(40)
    joined = over.by_task(classes, own)
    np.testing.assert_allclose(joined, [[70, NAN], [70, NAN], [50, 60]])
    assert over.average_forgetting(joined, [0, 1]) == pytest.approx(20)


@pytest.mark.parametrize("seed", range(5))
def test_accuracy_is_learned_times_kept_and_learned_minus_lost(seed):
    draw = np.random.default_rng(seed)
    matrix = draw.random((6, 6))
    matrix[np.triu_indices(6, 1)] = np.nan
    final = over.final_accuracy(matrix)
    assert over.learned(matrix) * over.kept_share(matrix) == pytest.approx(final, abs=1e-12)
    assert over.learned(matrix) - over.lost(matrix) == pytest.approx(final, abs=1e-12)
    assert over.lost(matrix) >= 0
    full = draw.random((6, 6))
    assert over.lost(full) >= forgetting(full) - 1e-12


def test_columns_of_tasks_that_have_not_come_are_left_out():
    stopped = [[70, 30, 20], [80, 60, 35]]
    assert over.final_accuracy(stopped) == pytest.approx(70)
    assert over.incremental_accuracy(stopped) == pytest.approx(70)
    assert over.average_forgetting(stopped) == pytest.approx(-10)
    assert over.learned(stopped) == pytest.approx(70)


@pytest.mark.parametrize("definition", TABLE, ids=lambda d: d.name)
def test_every_definition_leaves_out_columns_of_tasks_that_have_not_come(definition):
    """As ``fedstill forgetting`` says of such a matrix."""
    stopped = definition.of([[70, 30, 20], [80, 60, 35]], None)
    assert stopped == pytest.approx(definition.of([[70, 30], [80, 60]], None), abs=1e-12)
    if definition.by_class:
        shuffled = definition.of([[20, 70, 30], [35, 80, 60]], [2, 0, 1])
        assert shuffled == pytest.approx(stopped, abs=1e-12)


def test_one_task_has_nothing_to_forget():
    assert over.final_accuracy([[80]]) == over.learned([[80]]) == 80
    assert math.isnan(over.average_forgetting([[80]]))
    assert math.isnan(over.backward_transfer([[80]]))


def test_round_forgetting_and_its_two_parts():
    before, local, after = [0.8, 0.6], [[0.9, 0.2], [0.4, 0.8]], [0.7, 0.5]
    assert over.round_forgetting(before, after) == pytest.approx(0.10, abs=1e-9)
    assert over.local_forgetting(before, local) == pytest.approx(0.20, abs=1e-9)
    assert over.aggregation_forgetting(local, after) == pytest.approx(0.125, abs=1e-9)
    assert over.aggregation_forgetting(local, after, best=True) == pytest.approx(0.25, abs=1e-9)


def test_a_round_is_its_gain_minus_what_it_forgot():
    rounds = np.random.default_rng(0).random((5, 7))
    moved = 0.0
    for before, after in itertools.pairwise(rounds):
        moved += np.maximum(0, after - before).mean() - over.round_forgetting(before, after)
    assert moved == pytest.approx(rounds[-1].mean() - rounds[0].mean(), abs=1e-12)


@pytest.mark.parametrize("own", [[0, 1], [0, 1, -1], [0, 0.5, 1]])
def test_wrong_tasks_of_columns_are_refused(own):
    with pytest.raises(ConfigError, match="3 columns"):
        over.final_accuracy(A, own)


def test_an_empty_matrix_is_refused():
    with pytest.raises(ConfigError, match="row"):
        over.final_accuracy(np.zeros((0, 3)))


def test_a_maximum_over_tasks_invents_forgetting_and_understates_it_elsewhere() -> None:
    """LANDER's formula takes the best task of each row, as its code does: the two matrices of
    docs/forgetting.md.
    """
    hard, forgotten = [[90, None], [90, 40]], [[90, None], [50, 90]]
    assert [over.average_forgetting(m) for m in (hard, forgotten)] == [0.0, 40.0]
    assert [over.lander(m) for m in (hard, forgotten)] == [25.0, 20.0]
