"""Groups on one page whose runs differ in their rounds, tasks, classes or clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from bs4 import BeautifulSoup
from run_journals import run_of

from fedstill.report import overview
from fedstill.report.class_regions import sphere, units
from fedstill.report.clients import MAX_DRAWN, clients
from fedstill.report.figures import Style, lines, over_seconds
from fedstill.report.page import Report
from fedstill.report.rounds import ABOUT_ENDS, learning_and_forgetting
from fedstill.report.series import mean_seconds_elapsed
from fedstill.report.setting_effects import heterogeneity
from fedstill.report.tasks import (
    ABOUT_BOUNDARIES,
    ABOUT_CURVES,
    learned_and_kept,
    matrix_map,
    over_tasks,
    task_curves,
)
from fedstill.running.runs import Group, Run
from pages import as_html, as_plotly, figures_in

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


# ---- tasks ---------------------------------------------------------------------------------------


def run_of_tasks(
    rows: Sequence[Sequence[float | None]], first_rounds: Sequence[int] = (1, 2, 3)
) -> Run:
    """A run with a task per class and these accuracies at the ends of tasks."""
    tasks = len(first_rounds)
    names = [f"class {number}" for number in range(tasks)]
    stream = {"classes": [[task] for task in range(tasks)], "first_rounds": list(first_rounds)}
    events: list[dict[str, Any]] = [{"event": "start", "classes": names, "stream": stream}]
    for task, row in enumerate(rows, 1):
        by_class = {"class_accuracy": list(row), "accuracy_seen": 0.5}
        events.append({"event": "round", "round": task, **by_class})
    for task, row in enumerate(rows, 1):
        end = {
            "event": "task",
            "task": task,
            "round": task,
            "row": list(row),
            "totals": [9] * tasks,
        }
        events.append(end)
    return run_of(events)


FINISHED = run_of_tasks([(0.8, None, None), (0.6, 0.5, None), (0.4, 0.5, 0.9)])
UNFINISHED = run_of_tasks([(0.6, None, None)])


def test_an_unfinished_seed_hides_no_task_of_the_others() -> None:
    group = Group("gone", [FINISHED, UNFINISHED])
    drawn = as_plotly(matrix_map(group))
    assert drawn.data[0].x == ("after 1", "after 2", "after 3", "lost")
    assert list(drawn.data[0].z[0]) == [70.0, 60.0, 40.0, None]
    assert [note.text for note in drawn.layout.annotations if note.x == 3] == ["40", "0"]
    assert [trace["x"][-1] for trace in task_curves(group).traces] == [3, 3, 3]
    section = as_html(over_tasks(Report([group])))
    assert "(1 of 2)" in section
    assert "of 2)" not in as_html(over_tasks(Report([Group("gone", [FINISHED] * 2)])))


@pytest.mark.parametrize(("other_start", "boundaries"), [(2, [1.5, 2.5]), (3, [])])
def test_starts_of_tasks_are_drawn_if_all_groups_have_the_same(
    other_start: int, boundaries: list[float]
) -> None:
    other = run_of_tasks([(0.5, None, None)] * 4, (1, other_start, other_start + 1))
    compared = [Group("first", [FINISHED]), Group("other", [other])]
    section = as_html(over_tasks(Report(compared)))
    seen = figures_in(section)[0]
    assert [line["x0"] for line in seen["layout"].get("shapes", ())] == boundaries
    elsewhere = section.replace(ABOUT_CURVES, "")
    assert (ABOUT_BOUNDARIES in elsewhere) == bool(boundaries)


def test_points_of_learned_and_kept_have_a_legend_unless_the_section_has_a_key() -> None:
    for count, has_legend in ((2, True), (5, False)):
        compared = [Group(f"group {number}", [FINISHED]) for number in range(count)]
        figure = learned_and_kept(compared, Style(compared))
        assert figure.layout["showlegend"] == has_legend


def test_lines_with_the_same_colour_differ_in_their_dash() -> None:
    tasks = 10
    group = Group("many", [run_of_tasks([[0.5] * tasks] * tasks, range(1, tasks + 1))])
    varied = []
    for number_of_clients in range(tasks):
        for alpha in (0.1, 1.0):
            settings = {"topology.clients": number_of_clients, "partition.alpha": alpha}
            run = replace(run_by_round([0.2, 0.4]), settings=settings)
            varied.append(Group(f"{number_of_clients}, {alpha}", [run]))
    by_setting = figures_in(as_html(heterogeneity(Report(varied))))[-1]["data"]
    for traces in (task_curves(group).traces, by_setting):
        pens = {(trace["line"]["color"], trace["line"].get("dash")) for trace in traces}
        assert len(pens) == tasks


# ---- classes -------------------------------------------------------------------------------------


def run_in_network(classes: Sequence[str]) -> Run:
    """A run that recorded the circle of features and the classes of units after a round."""
    place = {"event": "measure", "round": 1, "stage": 0, "name": "train", "models": ["received"]}
    counts = [[[1] * 8 for _ in classes]]
    measures = [
        {**place, "measure": "sphere", "counts": counts},
        {**place, "measure": "units", "classes": [[0, 1]]},
    ]
    run = run_of([{"event": "start", "classes": list(classes)}, {"event": "round", "round": 1}])
    return replace(run, measures=measures)


def test_each_list_of_classes_has_its_colour_key() -> None:
    lists = (["cat", "dog"], ["left", "right", "up"], ["cat", "dog"])
    compared = [
        Group(f"group {number}", [run_in_network(names)]) for number, names in enumerate(lists)
    ]
    for section in (sphere, units):
        document = BeautifulSoup(as_html(section(Report(compared))), "html.parser")
        keys = [key.get_text(" ", strip=True) for key in document.find_all(class_="key")]
        assert keys == ["cat dog", "left right up"]


# ---- clients -------------------------------------------------------------------------------------


def group_of_clients(label: str, count: int, names: Sequence[str] = ()) -> Group:
    """A run with the accuracy of each client on its own test set."""
    by_client = {str(client): 0.5 for client in range(count)}
    run = run_by_round([0.2], own_test_by_client=by_client)
    if names:
        run = replace(run, start={**run.start, "client_names": list(names)})
    return Group(label, [run])


def first_column(groups: Sequence[Group]) -> list[str]:
    document = BeautifulSoup(as_html(clients(Report(groups))), "html.parser")
    return [head.text for head in document.select("tbody th")]


def test_clients_have_names_if_all_runs_name_them_alike() -> None:
    names = ["bern", "chur"]
    assert first_column([group_of_clients("a", 2, names)] * 2) == names
    assert first_column([group_of_clients("a", 2, names), group_of_clients("b", 2)]) == ["0", "1"]
    swapped = group_of_clients("b", 2, names[::-1])
    assert first_column([group_of_clients("a", 2, names), swapped]) == ["0", "1"]


def test_a_group_with_many_clients_is_named_and_hides_no_other() -> None:
    few = group_of_clients("few", 3)
    many = group_of_clients("many", MAX_DRAWN + 1)
    section = as_html(clients(Report([many, few])))
    document = BeautifulSoup(section, "html.parser")
    assert len(document.select("tbody tr")) == 3
    assert "load_runs" in section
    assert "own_test_by_client" in section
    alone = as_html(clients(Report([many])))
    assert "load_runs" in alone
    assert "<table" not in alone
    assert "load_runs" not in as_html(clients(Report([few])))
