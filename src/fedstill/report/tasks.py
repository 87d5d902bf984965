"""The section on tasks over time: the accuracy matrix as a heat map, accuracy by task over rounds,
and learned accuracy against the share of it that was kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedstill.metrics import tasks as task_metrics
from fedstill.metrics.accuracy import Values
from fedstill.report.blocks import (
    Block,
    Chart,
    Gallery,
    Paragraph,
    Section,
    group_chart,
    group_label,
    line_key,
)
from fedstill.report.figures import (
    MAX_IN_LEGEND,
    NOT_DOTTED,
    PERCENT,
    Figure,
    Style,
    Trace,
    group_name,
    heat_map,
    layout,
    line_colour,
    line_dash,
    lines,
    measured,
    new_trace,
    percentage,
    plain_layout,
    rounded,
)
from fedstill.report.page import Report
from fedstill.report.series import known_means, of_runs
from fedstill.running.runs import Group, Run

ABOUT = (
    "Tasks come one after another. At the end of each task, the model is tested on all tasks. "
    "Forgetting over time is the knowledge of earlier tasks that is lost at the end."
)
ABOUT_MAPS = (
    "Each row is a task, and each column is the end of a task. Colours show the accuracy at that "
    "time, averaged over the seeds that have reached it. A frame marks the end of the row's own "
    "task. The last column shows the drop from the task's best accuracy, which may occur at a "
    "different time for each seed."
)
ABOUT_BOUNDARIES = "Dotted lines mark the start of a task."
ABOUT_CURVES = (
    "Accuracy on the classes of each task by round, averaged over seeds. The model chooses among "
    f"all classes, including those of future tasks. {ABOUT_BOUNDARIES}"
)
ABOUT_SEEN = (
    "Accuracy on test examples of all classes seen so far; the model chooses among these classes."
)
ABOUT_PLANE = (
    "Horizontal axis: learned accuracy, the mean of the best accuracies on each task. Vertical "
    "axis: the share of it that was kept to the end. Their product, the final accuracy, is "
    "constant along a dotted curve. Each point is one seed, after its last finished task."
)
SEEN = "accuracy_seen"
"""The metric of accuracy on the classes of all tasks so far."""

MAX_NUMBERED_TASKS = 12
"""A matrix with more tasks than this is drawn without numbers."""

BRIGHT = 0.6
"""From this accuracy on, the colour of a cell is so bright that its number is black."""

DOTTED = {"color": "#999999", "width": 1, "dash": "dot"}


def over_tasks(report: Report) -> Section | None:
    """Return the section on tasks; None if no run has finished a task."""
    groups = [group for group in report.groups if _ended(group)]
    if not groups:
        return None
    style = report.style
    charts = [Chart([learned_and_kept(groups, style)], ABOUT_PLANE, "Learned and kept")]
    if measured(groups, SEEN):
        charts.insert(0, _seen_classes(groups, style))
    maps = [_map_chart(group, style) for group in groups]
    blocks: list[Block | None] = [
        Paragraph(ABOUT),
        line_key(groups, style),
        Gallery(charts),
        Paragraph(ABOUT_MAPS),
        Gallery(maps, "small"),
    ]
    curves = [
        group_chart(group, [task_curves(group)], ABOUT_CURVES, style, "by task")
        for group in groups
        if _has_class_tasks(group)
    ]
    if curves:
        blocks += [Paragraph(ABOUT_CURVES), Gallery(curves, "small")]
    return Section("tasks", "Tasks over time", blocks)


def _seen_classes(groups: Sequence[Group], style: Style) -> Chart:
    boundaries = _common_boundaries([group for group in groups if measured([group], SEEN)])
    about = ABOUT_SEEN
    if boundaries:
        about = f"{ABOUT_SEEN} {ABOUT_BOUNDARIES}"
    figure = lines(groups, style, SEEN, PERCENT, shapes=boundaries)
    return Chart([figure], about, "Accuracy on the classes seen so far")


# The accuracy matrix


def run_rows(run: Run) -> Values:
    """A run's accuracy matrix (T, T), with one row for each finished task."""
    return run.numbers.task_rows


def _map_chart(group: Group, style: Style) -> Chart:
    """The heat map of a group, with a note if some seeds have finished fewer tasks than others."""
    farthest = _farthest(_ended(group))
    note = ""
    if len(farthest) < len(group.runs):
        share = f"{len(farthest)} of {len(group.runs)}"
        tasks = len(run_rows(farthest[0]))
        note = f"lost: mean over the seeds that have finished task {tasks} ({share})"
    return Chart(
        [matrix_map(group)],
        f"{group.label}: {ABOUT_MAPS} {note}".strip(),
        group_label(group, style, note),
        "matrix",
        is_explained=True,
    )


def _farthest(runs: Sequence[Run]) -> list[Run]:
    """The runs with the most finished tasks."""
    finished_tasks = [len(run_rows(run)) for run in runs]
    most = max(finished_tasks)
    return [run for run, tasks in zip(runs, finished_tasks, strict=True) if tasks == most]


def matrix_map(group: Group) -> Figure:
    """A heat map of accuracy by task (rows) and end of a task (columns).

    A cell is the mean over the runs that have finished the task of its column. A frame marks the
    end of each task. The last column shows the forgetting of each task, as the mean over the runs
    with the most finished tasks.
    """
    runs = _ended(group)
    mean = _mean_matrix([run_rows(run) for run in runs])
    forgetting_of_runs = [
        task_metrics.forgetting_by_column(run_rows(run)) for run in _farthest(runs)
    ]
    forgetting = np.mean(forgetting_of_runs, axis=0)
    ends, tasks = mean.shape

    trace = heat_map(
        [*(f"after {end + 1}" for end in range(ends)), "lost"],
        [f"task {task + 1}" for task in range(tasks)],
        [_map_row(accuracies) for accuracies in mean.T],
        hovertemplate="%{y}, %{x}: %{z:.1f} %<extra></extra>",
    )
    notes = _forgetting_notes(forgetting, column=ends)
    if tasks <= MAX_NUMBERED_TASKS:
        notes += _cell_notes(mean)
    axes = plain_layout(
        height=90 + max(160, min(720, 34 * tasks)),
        xaxis={"type": "category", "showgrid": False},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
        shapes=[_frame(task) for task in range(min(ends, tasks))],
        annotations=notes,
    )
    return Figure([trace], axes)


def _mean_matrix(matrices: Sequence[Values]) -> Values:
    """The mean of each cell over the matrices (T, K) that have it; NaN if none has it.

    The matrices may differ in their number of rows.
    """
    ends = max(len(matrix) for matrix in matrices)
    padded = np.full((len(matrices), ends, matrices[0].shape[1]), np.nan)
    for index, matrix in enumerate(matrices):
        padded[index, : len(matrix)] = matrix
    return known_means(padded)


def _map_row(accuracies: Values) -> list[float | None]:
    """A task's accuracies in percent, followed by an uncoloured cell for its forgetting."""
    return [*map(percentage, accuracies), None]


def _forgetting_notes(forgetting: Values, column: int) -> list[dict[str, Any]]:
    """Labels with the forgetting of each task, for one column of the heat map."""
    return [
        _note(column, task, value, "#888888")
        for task, value in enumerate(forgetting)
        if not math.isnan(value)
    ]


def _cell_notes(mean: Values) -> list[dict[str, Any]]:
    """A label with the value of each cell, in a legible colour."""
    notes = []
    for (end, task), value in np.ndenumerate(mean):
        if math.isnan(value):
            continue
        colour = "#ffffff"
        if value > BRIGHT:
            colour = "#000000"
        notes.append(_note(end, task, value, colour))
    return notes


def _note(x: int, y: int, value: float, colour: str) -> dict[str, Any]:
    return {
        "x": x,
        "y": y,
        "text": f"{100 * value:.0f}",
        "showarrow": False,
        "font": {"color": colour, "size": 11},
    }


def _frame(task: int) -> dict[str, Any]:
    """A frame around the cell of a task at the end of that task."""
    return {
        "type": "rect",
        "line": {"color": "#ffffff", "width": 3},
        "fillcolor": "rgba(0,0,0,0)",
        "x0": task - 0.46,
        "x1": task + 0.46,
        "y0": task - 0.44,
        "y1": task + 0.44,
    }


# Accuracy by task over rounds


def task_curves(group: Group) -> Figure:
    """Accuracy on the classes of each task by round: one line per task, averaged over seeds."""
    runs = _ended(group)
    traces = []
    for task in range(len(_task_classes(runs[0]))):
        curve = _task_curve(runs, task)
        traces.append(
            new_trace(
                "scatter",
                mode="lines",
                name=f"task {task + 1}",
                x=list(curve),
                y=[rounded(accuracy) for accuracy in curve.values()],
                line={"color": line_colour(task), "width": 2, "dash": line_dash(task, NOT_DOTTED)},
                hovertemplate="%{y:.1%}",
            )
        )
    axes = layout(
        xaxis={"title": {"text": "round"}, "rangemode": "tozero"},
        yaxis=PERCENT.fitted(traces),
        shapes=task_boundaries(group),
    )
    return Figure(traces, axes)


def _task_curve(runs: Sequence[Run], task: int) -> dict[int, float]:
    """The accuracy on a task by round, as the mean over the runs that have the round."""
    # The classes of a task may differ by run, because the seed may draw their order.
    curves = [_accuracy_on(run, _task_classes(run)[task]) for run in runs]
    return of_runs(curves).mean_by_round


def task_boundaries(group: Group) -> list[dict[str, Any]]:
    """Dotted lines before the first round of each later task."""
    first_rounds = _ended(group)[0].start["stream"].get("first_rounds", [])
    across = [first - 0.5 for first in first_rounds[1:]]
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": DOTTED}
    return [{**line, "x0": x, "x1": x} for x in across]


def _common_boundaries(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The boundaries of all groups; empty if their tasks do not start in the same rounds."""
    boundaries = [task_boundaries(group) for group in groups]
    if any(of_group != boundaries[0] for of_group in boundaries):
        return []
    return boundaries[0]


def _ended(group: Group) -> list[Run]:
    """The runs of a group that have finished at least one task."""
    return [run for run in group.started if any(end["task"] for end in run.task_ends)]


def _task_classes(run: Run) -> list[list[int]]:
    """The classes of each task."""
    classes: list[list[int]] = run.start["stream"]["classes"]
    return classes


def _has_class_tasks(group: Group) -> bool:
    """Whether tasks differ in their classes and have a common test set."""
    run = _ended(group)[0]
    distinct = {tuple(classes) for classes in _task_classes(run)}
    return len(distinct) > 1 and "totals" in run.task_ends[-1]


def _accuracy_on(run: Run, classes: Sequence[int]) -> dict[int, float]:
    """The mean accuracy on some classes by round; rounds without any of them are omitted."""
    means = {}
    for number, row in run.numbers.class_accuracy.items():
        accuracies = [row[c] for c in classes]
        measured_accuracies = [value for value in accuracies if value is not None]
        if measured_accuracies:
            means[number] = float(np.mean(measured_accuracies))
    return means


# Learned and kept


def learned_and_kept(groups: Sequence[Group], style: Style) -> Figure:
    """Learned accuracy against the share of it that was kept: one point per seed."""
    traces = equal_curves()
    for group in groups:
        matrices = [run_rows(run) for run in _ended(group)]
        trace = new_trace(
            "scatter",
            mode="markers",
            name=group_name(group),
            legendgroup=group.label,
            x=[rounded(task_metrics.learned(matrix)) for matrix in matrices],
            y=[rounded(task_metrics.kept_share(matrix)) for matrix in matrices],
            marker={"size": 10, "color": style.colour(group)},
            hovertemplate="learned %{x:.1%}, kept %{y:.1%}",
        )
        traces.append(trace)
    axis = {**PERCENT.ticks, "range": [0, 1.03]}
    axes = layout(
        hovermode="closest",
        xaxis={**axis, "title": {"text": "learned"}},
        yaxis={**axis, "title": {"text": "kept"}},
        # Of more groups, the section has a separate key.
        showlegend=len(groups) <= MAX_IN_LEGEND,
    )
    return Figure(traces, axes)


def equal_curves() -> list[Trace]:
    """Curves of equal final accuracy (20, 40, 60 and 80 %), for the chart of learned and kept."""
    grid = [0.02 * step for step in range(1, 51)]
    curves = []
    for level in (0.2, 0.4, 0.6, 0.8):
        # Below the level, the kept share would exceed 1.
        x = [learned for learned in grid if learned >= level]
        curve = new_trace(
            "scatter",
            mode="lines",
            x=x,
            y=[rounded(level / learned) for learned in x],
            line=DOTTED,
            hoverinfo="skip",
            showlegend=False,
        )
        curves.append(curve)
    return curves
