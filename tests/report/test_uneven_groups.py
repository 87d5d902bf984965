"""Groups on one page whose runs differ in their rounds, tasks, classes or clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from run_journals import run_of

from fedstill.report import overview
from fedstill.report.figures import Style, lines, over_seconds
from fedstill.report.page import Report
from fedstill.report.rounds import ABOUT_ENDS, learning_and_forgetting
from fedstill.report.series import mean_seconds_elapsed
from fedstill.running.runs import Group, Run
from pages import as_html, figures_in

TWO_CLASSES = {"event": "start", "classes": ["a", "b"]}


def run_by_round(accuracies: Sequence[float], **fields: Any) -> Run:
    """A run with these accuracies after each round, and the same fields in every round."""
    rounds = [
        {"event": "round", "round": number, "accuracy": accuracy, **fields}
        for number, accuracy in enumerate(accuracies, 1)
    ]
    return run_of([TWO_CLASSES, *rounds])


# ---- rounds --------------------------------------------------------------------------------------


UNEVEN = Group("uneven", [run_by_round([0.1, 0.3, 0.5]), run_by_round([0.3, 0.5])])
EVEN = Group("even", [run_by_round([0.1, 0.3]), run_by_round([0.3, 0.5])])


def test_a_band_ends_where_one_run_is_left() -> None:
    band, mean = lines([UNEVEN], Style([UNEVEN]), "accuracy").traces
    assert band["x"] == [1, 2, 2, 1]
    assert mean["x"] == [1, 2, 3]


def test_the_page_says_so_if_runs_of_a_group_end_in_different_rounds() -> None:
    assert ABOUT_ENDS in as_html(learning_and_forgetting(Report([EVEN, UNEVEN])))
    assert ABOUT_ENDS not in as_html(learning_and_forgetting(Report([EVEN])))


def test_accuracy_by_seconds_never_runs_backwards() -> None:
    slow = run_by_round([0.2, 0.4], seconds=100.0)
    fast = run_by_round([0.2, 0.4, 0.6, 0.7], seconds=1.0)
    group = Group("uneven", [slow, fast])
    (line,) = over_seconds([group], Style([group]), mean_seconds_elapsed, "seconds").traces
    assert line["x"] == [50.5, 101.0]
    assert line["y"] == [0.2, 0.4]


@pytest.mark.parametrize("step", range(1, 21))
def test_a_target_is_reached_by_an_equal_accuracy(step: int) -> None:
    group = Group("fedavg", [run_by_round([step / 20], seconds_clients=1.0)])
    goals = overview._goals([group])
    assert goals[-1] == pytest.approx(step / 20)
    assert all(overview.seconds_to(group.runs[0], goal) == 1.0 for goal in goals)


def test_accuracy_on_own_tests_is_drawn_beside_the_servers() -> None:
    group = Group("fedavg", [run_by_round([0.2, 0.4], own_test_accuracy=0.5)])
    section = as_html(learning_and_forgetting(Report([group])))
    drawn = [trace["y"] for figure in figures_in(section) for trace in figure["data"]]
    assert drawn == [[0.2, 0.4], [0.5, 0.5]]
