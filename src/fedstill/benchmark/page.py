"""The page of the ranking: one file that needs no network, a section for each suite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedstill.benchmark import standings as agreement
from fedstill.benchmark.map_page import maps_section
from fedstill.benchmark.maps import Grid
from fedstill.benchmark.standings import RankedRow, Standings
from fedstill.benchmark.suites import CHOOSING_SEEDS, TEST_SEEDS
from fedstill.benchmark.tables import (
    about,
    cell_lines,
    chosen_where,
    joined,
    standing_head,
    standing_lines,
)
from fedstill.core.files import PAGE, make_folder, write_over
from fedstill.report.figures import ACCURACY, COLOURS, PERCENT, Figure, layout, plain, rounded
from fedstill.report.markup import Html, escape, figure, folded, grid, html_table, section, sentence
from fedstill.report.page import document
from fedstill.report.tasks import equal_curves

# The pictures of the ranking: learned against kept, ranks with bars, and the matrix of tasks.


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


# The page of the ranking: one file that needs no network, with a section for each suite.


AGREEMENT = "agreement"
"""The section on how far tiers agree; the others have their suites' names."""

TITLE = "The ranking: who forgets, and who learns"

MEANS = (
    "What a rank does not mean. The columns are chosen, not drawn: nothing here reaches beyond "
    "them, and small settings"
    " rank small settings. Methods on one bar cannot be told apart. Every method had the same "
    "number of tries, which"
    " favours methods with few fields. A row below the one that differences are to stays: on these "
    "columns it did not"
    " help."
)
HOW = (
    f"Fields are chosen on seeds {', '.join(map(str, CHOOSING_SEEDS))}, on training images that "
    "clients lack; numbers"
    f" are of seeds {', '.join(map(str, TEST_SEEDS))} on the test set. Accuracy is a mean over "
    "classes; over tasks"
    " where these are permuted, over the clients that ask among peers. It is learned × kept: what "
    "was known of each at"
    " its best, and how much of it is left at the end. Both are taken from the ends of tasks where "
    "there are tasks,"
    " from before and after the exchange among peers, else from means of five successive rounds. "
    "CPU seconds are of"
    " whole runs, over those of the row in the head; MB go up and down. † a run diverged, and "
    "counts as far as it came."
)
INTERVALS = (
    "Intervals over columns resample seeds within columns, 10,000 times; p is of a sign-flip test "
    "over columns × seeds,"
    " Holm's over methods. In the table by column the interval is Student's, of differences paired "
    "by seed: five seeds"
    " allow no single cell a claim. Click on a head to sort."
)
BARS = (
    "Mean rank with its interval, 1 the best. Methods with a mark on the same grey bar cannot be "
    "told apart by rank."
)
PAIR = (
    "Right: more was learned. Up: more of it was kept. On a dotted curve the accuracy, the "
    "product, is the same."
)
MATRIX = (
    "Each row is a task, each column a task's end; the colour is the accuracy on that task then, "
    "mean over seeds."
)


def write_ranking_page(
    every: Sequence[Standings], out: Path, maps: Mapping[str, Grid] | None = None
) -> Path:
    """Write the page to a file; its path. ``maps``: by method; None: without a section on them."""
    make_folder(out.parent)
    write_over(out, ranking_page(every, maps).encode(), PAGE)
    return out


def ranking_page(every: Sequence[Standings], maps: Mapping[str, Grid] | None = None) -> str:
    """The page as text."""
    head = f"<header><h1>{escape(TITLE)}</h1></header>"
    parts = [
        Html(head),
        *map(sentence, (MEANS, HOW, INTERVALS)),
        *_agreement(every),
        *map(_section, every),
    ]
    parts += [] if maps is None else [maps_section(maps)]
    return document(TITLE, "\n".join(part.text for part in parts))


def _section(one: Standings) -> Html:
    suite = one.suite
    missing = [sentence(f"No entry yet: {', '.join(one.missing)}.")] if one.missing else []
    drawn = [figure([rank_figure(one)], BARS, "Ranks")] if len(one.placed) > 1 else []
    if any(not math.isnan(p.kept) for p in one.placed):
        drawn.append(figure([scatter(one)], PAIR, "Learned and kept"))
    groups = (
        [sentence(f"Cannot be told apart by rank: {'; '.join(joined(one))}.")] if one.bars else []
    )
    lines = [[line[1], line[0], *line[2:]] for line in standing_lines(one)]
    head = standing_head(one)
    return section(
        suite.title,
        sentence(f"{about(one)} Version {suite.version} of {suite.name}."),
        html_table([head[1], head[0], *head[2:]], lines, "numbers wide sortable"),
        *missing,
        grid(drawn, "top"),
        *groups,
        folded("By column", html_table(*cell_lines(one), "numbers wide sortable")),
        *_matrices(one),
        folded("The fields that were chosen, to copy", *_fields(one)),
        name=suite.name,
    )


def _matrices(one: Standings) -> Iterator[Html]:
    """The matrix of tasks of each row, column by column."""
    rows = [*(p.row for p in one.placed), *one.bounds]
    for column in one.columns:
        drawn = [(row.name, task_matrix(row, column)) for row in rows]
        maps = [
            figure([f], f"{name}, {column}: {MATRIX}", Html(escape(name)), "matrix")
            for name, f in drawn
            if f
        ]
        if maps:
            yield folded(
                f"The matrix of tasks by method: {column}", sentence(MATRIX), grid(maps, "small")
            )


def _fields(one: Standings) -> Iterator[Html]:
    """The settings of a row as a config's lines, for those who want them."""
    suite = one.suite
    yield sentence(
        f"Over the settings that all rows of {suite.name} have; chosen {chosen_where(suite)}."
    )
    for name in (p.row.name for p in one.placed):
        text = (
            f"<strong>{escape(name)}</strong></p><pre "
            f"class='copy'>{escape(copied_fields(one, name))}</pre>"
        )
        yield Html(f"<p>{text}")


def copied_fields(one: Standings, name: str) -> str:
    """A row's method, and what was chosen over the suite's settings, as tables of a config."""
    row = next(p.row for p in one.placed if p.row.name == name)
    tree: dict[str, dict[str, object]] = {"method": dict(one.suite.method(name))}
    for key, value in row.fields.items():
        table, _, field = key.partition(".")
        tree.setdefault(table, {})[field] = value
    return tomli_w.dumps(tree)


def _agreement(every: Sequence[Standings]) -> Iterator[Html]:
    if lines := agreement.agreement_lines(every):
        table = html_table(agreement.HEAD, lines, "numbers")
        yield section(agreement.TITLE, sentence(agreement.MEANS), table, name=AGREEMENT)
