"""The pictures of the ranking: learned against kept, ranks with bars, and the matrix of tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedstill.report.figures import COLOURS, PERCENT, Figure, layout, plain, rounded
from fedstill.report.heatmaps import ACCURACY
from fedstill.report.over_tasks import equal_curves
from fedstill.report.standings import RankedRow, Standings


def scatter(one: Standings) -> Figure:
    """Learned and kept, a point for each row: the means over columns and seeds; accuracy is the
    same along a curve.

    Without the rows of which it is not known what was kept.
    """
    data, own = equal_curves(), one.columns
    every = [(p.row.name, p.learned, p.kept, p.accuracy, "circle") for p in one.placed]
    every += [
        (
            row.name,
            row.mean("learned", own),
            row.kept(own),
            row.mean("accuracy", own),
            "diamond-open",
        )
        for row in one.bounds
    ]
    places = [place for place in every if not math.isnan(place[2])]
    low = _low([p[1] for p in places]), _low([p[2] for p in places])
    sides = label_sides(
        [(p[0], p[1], p[2]) for p in places], (HIGHEST[0] - low[0], HIGHEST[1] - low[1])
    )
    for i, (name, learned, kept, accuracy, symbol) in enumerate(places):
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": plain(name),
                "text": [plain(name) if sides[i] else ""],
                "textposition": sides[i] or "top center",
                "textfont": {"size": 10},
                "x": [rounded(learned)],
                "y": [rounded(kept)],
                "marker": {"size": 10, "symbol": symbol, "color": COLOURS[i % len(COLOURS)]},
                "hovertemplate": f"learned %{{x:.1%}}, kept %{{y:.1%}}: accuracy "
                f"{100 * accuracy:.1f} %",
            }
        )
    right = {**PERCENT, "title": {"text": "learned"}, "range": [low[0], HIGHEST[0]]}
    up = {**PERCENT, "title": {"text": "kept"}, "range": [low[1], HIGHEST[1]]}
    return {
        "data": data,
        "layout": layout(hovermode="closest", xaxis=right, yaxis=up, showlegend=False, height=440),
    }


SIDES = {
    "top center": (0.0, 1.0),
    "bottom center": (0.0, -1.0),
    "middle right": (1.0, 0.0),
    "middle left": (-1.0, 0.0),
    "top right": (1.0, 1.0),
    "top left": (-1.0, 1.0),
    "bottom right": (1.0, -1.0),
    "bottom left": (-1.0, -1.0),
}
"""Where a label may stand, and in which direction from its point that is."""

WIDE, HIGH = 400.0, 330.0
"""About the pixels of the picture within its axes, on a wide screen."""

HIGHEST = 1.03, 1.04
"""Where the axes of learned and of kept end: a little beyond all, so that points there are
whole.
"""

Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in pixels."""


def label_sides(
    points: Sequence[tuple[str, float, float]], spans: tuple[float, float]
) -> list[str]:
    """For each (name, x, y) a side of the point on which its label is on no other label or point;
    "" where all are.
    """
    at = [(x / spans[0] * WIDE, y / spans[1] * HIGH) for _, x, y in points]
    taken: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y in at]
    sides = []
    for (name, _, _), (x, y) in zip(points, at, strict=True):
        boxes = {side: _label(name, x, y, *to) for side, to in SIDES.items()}
        free = [
            side for side, box in boxes.items() if not any(_overlap(box, other) for other in taken)
        ]
        sides.append(free[0] if free else "")
        taken += [boxes[side] for side in free[:1]]
    return sides


def _label(name: str, x: float, y: float, right: float, up: float) -> Box:
    """About where a label in the figure's small type is, in a direction from its point."""
    half = 3.2 * len(name)
    x, y = x + right * (half + 7), y + up * (7 if right else 12)
    return (x - half, y - 6, x + half, y + 6)


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _low(values: Sequence[float]) -> float:
    """Where an axis of shares begins, so that the points have room."""
    return max(0.0, round(min(values, default=0.0) - 0.1, 1))


def rank_figure(one: Standings) -> Figure:
    """Mean ranks with their intervals, the best above; to the right a bar for each group that
    cannot be told apart.
    """
    names = [plain(p.row.name) for p in one.placed]
    low, high = ([p.rank_ends[k] for p in one.placed] for k in (0, 1))
    ranks = [p.rank for p in one.placed]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [rounded(r) for r in ranks],
            "y": names,
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [rounded(b - r) for b, r in zip(high, ranks, strict=True)],
                "arrayminus": [rounded(r - a) for a, r in zip(low, ranks, strict=True)],
                "thickness": 1.5,
                "color": COLOURS[0],
            },
            "marker": {"size": 9, "color": COLOURS[0]},
            "hovertemplate": "%{y}: mean rank %{x:.2f}<extra></extra>",
        }
    ]
    start = len(names) + 0.8
    data += [_bar(start + 0.45 * i, group) for i, group in enumerate(one.bars)]
    ticks = list(range(1, len(names) + 1))
    right = {
        "title": {"text": "mean rank"},
        "range": [0.5, start + 0.45 * max(1, len(one.bars))],
        "tickvals": ticks,
    }
    up = {"type": "category", "categoryorder": "array", "categoryarray": list(reversed(names))}
    height = 110 + 26 * len(names)
    axes = layout(height=height, hovermode="closest", xaxis=right, yaxis=up, showlegend=False)
    return {"data": data, "layout": axes}


def _bar(x: float, group: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [x] * len(group),
        "y": [plain(name) for name in group],
        "line": {"width": 3, "color": "#888888"},
        "marker": {"size": 7, "color": "#888888"},
        "hovertemplate": "%{y} cannot be told apart from the others on this bar<extra></extra>",
    }


def task_matrix(row: RankedRow, column: str) -> Figure | None:
    """Task by task end of one row, the mean over seeds; None without tasks."""
    own = [np.array(m, dtype=np.float64) for (c, _), m in row.tasks.items() if c == column]
    if not own or len({m.shape for m in own}) > 1:
        return None
    mean = np.mean(own, axis=0)
    trace = {
        "type": "heatmap",
        "x": [f"after {t + 1}" for t in range(len(mean))],
        "y": [f"task {j + 1}" for j in range(mean.shape[1])],
        "z": [[round(100 * v, 1) for v in mean[:, j]] for j in range(mean.shape[1])],
        "zmin": 0,
        "zmax": 100,
        "colorscale": ACCURACY,
        "showscale": False,
        "hovertemplate": "%{y}, %{x}: %{z:.1f} %<extra></extra>",
    }
    axes = layout(
        height=240,
        showlegend=False,
        hovermode="closest",
        xaxis={"type": "category", "showgrid": False},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
    )
    return {"data": [trace], "layout": axes}
