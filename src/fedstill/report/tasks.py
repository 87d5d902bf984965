"""Tasks over time: the accuracy matrix as a map, accuracy by task over rounds, and what was learned
and kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedstill.metrics import tasks as over
from fedstill.metrics.values import Values
from fedstill.report.figures import (
    ACCURACY,
    COLOURS,
    PERCENT,
    Figure,
    Style,
    flat_range,
    layout,
    lines,
    named,
    rounded,
)
from fedstill.report.knowledge import measured
from fedstill.report.markup import Html, figure, grid, key, labelled, section, sentence
from fedstill.running.groups import Group
from fedstill.running.runs import Run

ABOUT = (
    "Tasks come one after another. At the end of each the model is tested on all of them. "
    "Forgetting over time is what"
    " the model knew of an earlier task and does not know at the end."
)
MAP = (
    "Each row is a task, each column a task's end; the colour is the accuracy on that task then, "
    "mean over seeds. A"
    " frame marks the end of the task itself. The last column says what was lost of the task since "
    "its best end, which"
    " may be another one on each seed."
)
CURVES = (
    "Accuracy on the classes of each task by round, mean over seeds, where the answer is the "
    "likeliest of all classes,"
    " those to come among them. Dotted lines are changes of task."
)
SEEN = (
    "Accuracy on test examples of all classes seen so far, among these; dotted lines are changes "
    "of task."
)
PLANE = (
    "Right: more was learned, the best that was known of each task. Up: more of it was kept to the "
    "end. On a dotted"
    " curve the final accuracy, which is the product, is the same. One point for each seed."
)
MOST_NUMBERS = 12
"""A matrix of more tasks than these is drawn without numbers."""


def over_tasks(groups: Sequence[Group], style: Style) -> Html | None:
    """The section; None if no run has ended a task."""
    some = [g for g in groups if _ended(g)]
    if not some:
        return None
    maps = [
        figure([matrix_map(g)], f"{g.label}: {MAP}", labelled(g, style), "matrix") for g in some
    ]
    curves = [
        figure([task_curves(g)], f"{g.label}: {CURVES}", labelled(g, style), "by task")
        for g in some
        if _class_tasks(g)
    ]
    whole = [figure([learned_and_kept(some, style)], PLANE, "Learned and kept")]
    if measured(some, "accuracy_seen"):
        drawn = lines(some, style, "accuracy_seen", **PERCENT)
        drawn["layout"]["shapes"] = changes(some[0])
        whole.insert(0, figure([drawn], SEEN, "Accuracy on the classes seen so far"))
    return section(
        "Tasks over time",
        sentence(ABOUT),
        key(some, style),
        grid(whole),
        sentence(MAP),
        grid(maps, "small"),
        *([sentence(CURVES), grid(curves, "small")] if curves else []),
        name="tasks",
    )


def run_rows(run: Run) -> Values:
    """A run's accuracy matrix (T, T), a row for each task that has ended."""
    ends = [end["row"] for end in run.task_ends if end["task"]]
    return np.array(ends, dtype=np.float64)


def matrix_map(group: Group) -> Figure:
    """Task × task end, the mean over seeds, with the task's own end framed and its loss beside
    it.
    """
    each = [run_rows(run) for run in _ended(group)]
    ends = min(map(len, each))
    matrices = [matrix[:ends] for matrix in each]
    mean = np.mean(matrices, axis=0)
    lost = np.mean([over.forgetting_by_column(matrix) for matrix in matrices], axis=0)
    tasks = mean.shape[1]
    columns = [*(f"after {t + 1}" for t in range(ends)), "lost"]
    cells = [[*(_percent(v) for v in mean[:, j]), None] for j in range(tasks)]
    trace = {
        "type": "heatmap",
        "x": columns,
        "y": [f"task {j + 1}" for j in range(tasks)],
        "z": cells,
        "zmin": 0,
        "zmax": 100,
        "colorscale": ACCURACY,
        "showscale": False,
        "hoverongaps": False,
        "hovertemplate": "%{y}, %{x}: %{z:.1f} %<extra></extra>",
    }
    notes = [
        _note(ends, j, lost[j], "#888888") for j in range(len(lost)) if not math.isnan(lost[j])
    ]
    if tasks <= MOST_NUMBERS:
        notes += [
            _note(t, j, mean[t, j], "#000000" if mean[t, j] > 0.6 else "#ffffff")
            for t in range(ends)
            for j in range(tasks)
            if not math.isnan(mean[t, j])
        ]
    axes = layout(
        height=90 + max(160, min(720, 34 * tasks)),
        showlegend=False,
        hovermode="closest",
        xaxis={"type": "category", "showgrid": False},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
    )
    return {
        "data": [trace],
        "layout": {
            **axes,
            "shapes": [_frame(t) for t in range(min(ends, tasks))],
            "annotations": notes,
        },
    }


def task_curves(group: Group) -> Figure:
    """Accuracy on the classes of each task by round, a line a task; the mean over seeds, each with
    its own classes.
    """
    runs = _ended(group)
    data = []
    classes = [run.start["stream"]["classes"] for run in runs]  # whose order a seed may draw
    for t in range(len(classes[0])):
        curves = [_of_classes(run, own[t]) for run, own in zip(runs, classes, strict=True)]
        rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"task {t + 1}",
                "x": rounds,
                "y": [rounded(float(np.mean([curve[r] for curve in curves]))) for r in rounds],
                "line": {"color": COLOURS[t % len(COLOURS)], "width": 2},
                "hovertemplate": "%{y:.1%}",
            }
        )
    up = PERCENT | flat_range(data, PERCENT)
    axes = layout(xaxis={"title": {"text": "round"}, "rangemode": "tozero"}, yaxis=up)
    return {"data": data, "layout": {**axes, "shapes": changes(group)}}


def learned_and_kept(groups: Sequence[Group], style: Style) -> Figure:
    """What was learned and which share of it was kept, a point for each seed."""
    data = equal_curves()
    for group in groups:
        matrices = [run_rows(run) for run in _ended(group)]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": named(group),
                "legendgroup": group.label,
                "x": [rounded(over.learned(m)) for m in matrices],
                "y": [rounded(over.kept_share(m)) for m in matrices],
                "marker": {"size": 10, "color": style.colour(group)},
                "hovertemplate": "learned %{x:.1%}, kept %{y:.1%}",
            }
        )
    axis = {**PERCENT, "range": [0, 1.03]}
    right, up = ({**axis, "title": {"text": what}} for what in ("learned", "kept"))
    return {
        "data": data,
        "layout": layout(hovermode="closest", xaxis=right, yaxis=up, showlegend=False),
    }


def equal_curves() -> list[dict[str, Any]]:
    """Curves of equal accuracy in the plane of learned and kept: 20, 40, 60 and 80 %."""
    along = [0.02 * i for i in range(1, 51)]
    curves = {level: [v for v in along if v >= level] for level in (0.2, 0.4, 0.6, 0.8)}
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": x,
            "y": [rounded(level / v) for v in x],
            "line": {"color": "#999999", "width": 1, "dash": "dot"},
            "hoverinfo": "skip",
            "showlegend": False,
        }
        for level, x in curves.items()
    ]


def changes(group: Group) -> list[dict[str, Any]]:
    """Dotted lines before the first round of each later task."""
    line = {
        "type": "line",
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": "#999999", "width": 1, "dash": "dot"},
    }
    starts = _ended(group)[0].start["stream"].get("first_rounds", [])
    return [{**line, "x0": first - 0.5, "x1": first - 0.5} for first in starts[1:]]


def _ended(group: Group) -> list[Run]:
    return [run for run in group.started if any(end["task"] for end in run.task_ends)]


def _class_tasks(group: Group) -> bool:
    """Whether tasks differ in their classes, and there is a test set of them."""
    run = _ended(group)[0]
    told = run.start["stream"]["classes"]
    return len({tuple(own) for own in told}) > 1 and "totals" in run.task_ends[-1]


def _of_classes(run: Run, own: Sequence[int]) -> dict[int, float]:
    rows = {
        r: [row[c] for c in own if row[c] is not None] for r, row in run.class_accuracy().items()
    }
    return {r: float(np.mean([v for v in row if v is not None])) for r, row in rows.items() if row}


def _frame(t: int) -> dict[str, Any]:
    """A frame around the cell of a task at its own end."""
    corners = {"x0": t - 0.46, "x1": t + 0.46, "y0": t - 0.44, "y1": t + 0.44}
    return {
        "type": "rect",
        "line": {"color": "#ffffff", "width": 3},
        "fillcolor": "rgba(0,0,0,0)",
        **corners,
    }


def _note(x: int, y: int, value: float, colour: str) -> dict[str, Any]:
    return {
        "x": x,
        "y": y,
        "text": f"{100 * value:.0f}",
        "showarrow": False,
        "font": {"color": colour, "size": 11},
    }


def _percent(value: float) -> float | None:
    return None if math.isnan(value) else round(100 * value, 1)
