"""The section on tasks: the accuracy matrix as a map, curves by task, and methods as points of what
they learned and kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_journals import run_of

import toys
from fedstill.report.figures import Style
from fedstill.report.page import Report, write_page
from fedstill.report.tasks import (
    ABOUT_CURVES,
    learned_and_kept,
    matrix_map,
    over_tasks,
    run_rows,
    task_boundaries,
    task_curves,
)
from fedstill.running.runner import run
from fedstill.running.runs import Group, Run, groups
from pages import as_html, as_json, as_plotly

STREAM = {"kind": "classes", "tasks": 3, "order": [[0, 1], [2, 3], [4]], "rounds": [1, 2, 1]}

TWO_PEAKS = (
    ((0.8, None, None), (0.6, 0.5, None), (0.4, 0.5, 0.9)),
    ((0.6, None, None), (0.8, 0.7, None), (0.2, 0.5, 0.9)),
)
"""Accuracy matrices of two seeds whose accuracy in the first task is highest at different ends."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two seeds that lose the data of former tasks, ``gone``, or keep them, ``kept``."""
    folder = tmp_path_factory.mktemp("streams")
    for name, stream in {"gone": STREAM, "kept": {**STREAM, "past": "kept"}}.items():
        for seed in (1, 2):
            experiment = toys.toy(rounds=4, seed=seed, partition={"kind": "iid"}, stream=stream)
            run(experiment, folder / f"{name}{seed}", toys.blobs())
    return folder


def gone_group(runs: Path) -> Group:
    """The runs that lose the data of former tasks."""
    (group,) = [group for group in groups([runs]) if "gone" in group.label]
    return group


def test_the_map_has_the_mean_over_seeds_and_the_forgetting(runs: Path) -> None:
    group = gone_group(runs)
    drawn = matrix_map(group)
    (trace,) = as_json(drawn)["data"]
    assert trace["x"] == ["after 1", "after 2", "after 3", "lost"]
    assert trace["y"] == ["task 1", "task 2", "task 3"]

    first, second = [accuracy_after_first_task(seed_run) for seed_run in group.runs]
    assert trace["z"][0][0] == pytest.approx(100 * (first + second) / 2, abs=0.06)

    axes = as_plotly(drawn).layout
    assert len(axes.shapes) == 3
    losses = [note for note in axes.annotations if note.x == 3]
    assert [note.y for note in losses] == [0, 1], "the last task has nothing to lose yet"


def accuracy_after_first_task(seed_run: Run) -> float:
    """The accuracy in the first task at its end."""
    ends = [event for event in seed_run.task_ends if event["task"] == 1]
    (accuracy,) = [event["row"][0] for event in ends]
    return float(accuracy)


def test_each_task_is_a_curve_and_tasks_change_between_rounds(runs: Path) -> None:
    group = groups([runs])[0]
    drawn = as_plotly(task_curves(group))
    assert [trace.name for trace in drawn.data] == ["task 1", "task 2", "task 3"]
    assert drawn.data[0].x == (0, 1, 2, 3, 4)
    assert [line["x0"] for line in task_boundaries(group)] == [1.5, 3.5]


def test_curves_are_of_the_classes_that_a_task_has_in_each_seed(tmp_path: Path) -> None:
    """The seed draws the order of the classes."""
    stream = {"kind": "classes", "tasks": 2, "rounds": [1, 1]}
    for seed in (1, 2, 3):
        experiment = toys.toy(rounds=2, seed=seed, partition={"kind": "iid"}, stream=stream)
        run(experiment, tmp_path / f"seed{seed}", toys.blobs())
    (group,) = groups([tmp_path])
    orders = {str(seed_run.start["stream"]["classes"]) for seed_run in group.runs}
    assert len(orders) == 3

    last_rows = [run_rows(seed_run)[-1] for seed_run in group.runs]
    ends = [curve["y"][-1] for curve in task_curves(group).traces]
    assert ends == pytest.approx(np.mean(last_rows, axis=0), abs=1e-5)


def test_the_forgetting_of_a_task_is_the_mean_over_the_forgetting_of_each_seed() -> None:
    """The seeds lose 40 and 60 points of the first task, and 0 and 20 of the second."""
    stream = {"classes": [[0], [1], [2]], "first_rounds": [1, 2, 3]}
    start = {"event": "start", "classes": ["a", "b", "c"], "stream": stream}
    runs = []
    for matrix in TWO_PEAKS:
        events: list[dict[str, Any]] = [start]
        for task, row in enumerate(matrix, start=1):
            events.append({"event": "round", "round": task})
            events.append({"event": "task", "task": task, "round": task, "row": list(row)})
        runs.append(run_of(events))

    drawn = as_plotly(matrix_map(Group("two peaks", runs)))

    losses = [note.text for note in drawn.layout.annotations if note.x == 3]
    assert losses == ["50", "10"]


def test_methods_are_points_in_the_plane(runs: Path) -> None:
    compared = groups([runs])
    plane = as_plotly(learned_and_kept(compared, Style(compared)))
    points = [trace for trace in plane.data if trace.mode == "markers"]
    assert [len(trace.x) for trace in points] == [2, 2]

    summary = json.loads((runs / "gone1" / "summary.json").read_text())
    (gone,) = [trace for trace in points if "gone" in trace.name]
    assert gone.x[0] == pytest.approx(summary["learned"], abs=1e-5)
    assert gone.y[0] == pytest.approx(summary["kept"], abs=1e-5)


def test_only_runs_with_tasks_have_the_section(runs: Path, tmp_path: Path) -> None:
    assert "Tasks over time" in write_page([runs], tmp_path / "with.html").read_text()
    run(toys.toy(rounds=1), tmp_path / "plain", toys.blobs())
    plain = groups([tmp_path / "plain"])
    assert over_tasks(Report(plain)) is None


def test_domains_have_no_curves_by_class(tmp_path: Path) -> None:
    experiment = toys.toy(rounds=2, stream={"kind": "drift", "tasks": 2})
    run(experiment, tmp_path / "run", toys.blobs())
    section = as_html(over_tasks(Report(groups([tmp_path / "run"]))))
    assert "Learned and kept" in section
    assert ABOUT_CURVES not in section
