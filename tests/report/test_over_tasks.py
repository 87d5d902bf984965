"""The section on tasks: the matrix as a map, accuracy by task, and the plane of what was learned
and kept.
"""

from __future__ import annotations

import json
from pathlib import Path

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
from fedstill.running.runs import Group, groups
from pages import as_html, as_json, as_plotly

STREAM = {"kind": "classes", "tasks": 3, "order": [[0, 1], [2, 3], [4]], "rounds": [1, 2, 1]}

TWO_PEAKS = (
    ((0.8, None, None), (0.6, 0.5, None), (0.4, 0.5, 0.9)),
    ((0.6, None, None), (0.8, 0.7, None), (0.2, 0.5, 0.9)),
)
"""Accuracy matrices of two seeds that know the first task best at other ends."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    for seed in (1, 2):
        what = {"rounds": 4, "seed": seed, "partition": {"kind": "iid"}}
        run(toys.toy(**what, stream=STREAM), folder / f"gone{seed}", toys.blobs())
        run(
            toys.toy(**what, stream={**STREAM, "past": "kept"}),
            folder / f"kept{seed}",
            toys.blobs(),
        )
    return folder


def test_the_map_has_the_mean_over_seeds_and_what_was_lost(runs: Path) -> None:
    gone = next(g for g in groups([runs]) if "gone" in g.label)
    drawn = matrix_map(gone)
    (trace,) = as_json(drawn)["data"]
    assert trace["x"] == ["after 1", "after 2", "after 3", "lost"]
    assert trace["y"] == ["task 1", "task 2", "task 3"]
    rows = [[e["row"] for e in r.task_ends if e["task"]] for r in gone.runs]
    assert trace["z"][0][0] == pytest.approx(50 * (rows[0][0][0] + rows[1][0][0]), abs=0.06)
    axes = as_plotly(drawn).layout
    assert len(axes.shapes) == 3
    lost = [note for note in axes.annotations if note.x == 3]
    assert [note.y for note in lost] == [0, 1], "the last task has nothing to lose yet"


def test_curves_and_changes(runs: Path) -> None:
    group = groups([runs])[0]
    drawn = as_plotly(task_curves(group))
    assert [trace.name for trace in drawn.data] == ["task 1", "task 2", "task 3"]
    assert drawn.data[0].x == (0, 1, 2, 3, 4)
    assert [line["x0"] for line in task_boundaries(group)] == [1.5, 3.5]


def test_curves_are_of_each_seeds_own_classes(tmp_path: Path) -> None:
    for seed in (1, 2, 3):  # which draw the order of classes
        stream = {"kind": "classes", "tasks": 2, "rounds": [1, 1]}
        what = toys.toy(rounds=2, seed=seed, partition={"kind": "iid"}, stream=stream)
        run(what, tmp_path / f"seed{seed}", toys.blobs())
    (group,) = groups([tmp_path])
    assert len({str(r.start["stream"]["classes"]) for r in group.runs}) == 3
    at_end = np.mean([run_rows(r)[-1] for r in group.runs], axis=0)
    assert [curve["y"][-1] for curve in task_curves(group).traces] == pytest.approx(
        at_end, abs=1e-5
    )


def test_what_was_lost_is_the_mean_of_what_each_seed_lost() -> None:
    stream = {"classes": [[0], [1], [2]], "first_rounds": [1, 2, 3]}
    start = {"event": "start", "classes": ["a", "b", "c"], "stream": stream}
    runs = []
    for rows in TWO_PEAKS:
        ends = [
            {"event": "task", "task": task, "round": task, "row": list(row)}
            for task, row in enumerate(rows, 1)
        ]
        rounds = [{"event": "round", "round": end["round"]} for end in ends]
        runs.append(run_of([start, *rounds, *ends]))
    drawn = as_plotly(matrix_map(Group("two peaks", runs)))
    notes = drawn.layout.annotations
    assert [note.text for note in notes if note.x == 3] == ["50", "10"], (
        "40 and 60 of the first, 0 and 20"
    )


def test_methods_are_points_in_the_plane(runs: Path) -> None:
    compared = groups([runs])
    plane = as_plotly(learned_and_kept(compared, Style(compared)))
    points = [trace for trace in plane.data if trace.mode == "markers"]
    assert [len(trace.x) for trace in points] == [2, 2]
    summary = json.loads((runs / "gone1" / "summary.json").read_text())
    gone = next(trace for trace in points if "gone" in trace.name)
    assert gone.x[0] == pytest.approx(summary["learned"], abs=1e-5)
    assert gone.y[0] == pytest.approx(summary["kept"], abs=1e-5)


def test_the_section_is_there_for_runs_with_tasks_alone(runs: Path, tmp_path: Path) -> None:
    assert "Tasks over time" in write_page([runs], tmp_path / "with.html").read_text()
    run(toys.toy(rounds=1), tmp_path / "plain", toys.blobs())
    plain = groups([tmp_path / "plain"])
    assert over_tasks(Report(plain)) is None


def test_domains_have_no_curves_by_class(tmp_path: Path) -> None:
    run(toys.toy(rounds=2, stream={"kind": "drift", "tasks": 2}), tmp_path / "run", toys.blobs())
    drift = groups([tmp_path / "run"])
    section = as_html(over_tasks(Report(drift)))
    assert "Learned and kept" in section
    assert ABOUT_CURVES not in section
