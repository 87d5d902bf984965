"""The page of the ranking: one file that needs no network, a section for each suite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from fedstill.report.blocks import (
    Block,
    Chart,
    Folded,
    Gallery,
    Listing,
    Paragraph,
    Section,
    Table,
)
from fedstill.report.figures import (
    ACCURACY,
    COLOURS,
    PERCENT,
    Figure,
    Trace,
    layout,
    new_trace,
    plain,
    rounded,
)
from fedstill.report.page import document
from fedstill.report.tasks import equal_curves

# The pictures of the ranking: learned against kept, ranks with bars, and the matrix of tasks.


@dataclass(frozen=True)
class RowPoint:
    """A row of the ranking in the plane of learned and kept, and its accuracy, the product.

    is_bound: whether it is no entrant but a bound, such as joint training.
    """

    name: str
    learned: float
    kept: float
    accuracy: float
    is_bound: bool


def scatter(one: Standings) -> Figure:
    """Learned and kept, a point for each row: the means over columns and seeds; accuracy is the
    same along a curve.

    Without the rows of which it is not known what was kept.
    """
    rows = _row_points(one)
    low_learned = _low([row.learned for row in rows])
    low_kept = _low([row.kept for row in rows])
    sides = label_sides(
        [(row.name, row.learned, row.kept) for row in rows],
        (HIGHEST[0] - low_learned, HIGHEST[1] - low_kept),
    )
    traces = equal_curves()
    for index, (row, side) in enumerate(zip(rows, sides, strict=True)):
        traces.append(_row_trace(row, side, COLOURS[index % len(COLOURS)]))
    axes = layout(
        hovermode="closest",
        xaxis={**PERCENT, "title": {"text": "learned"}, "range": [low_learned, HIGHEST[0]]},
        yaxis={**PERCENT, "title": {"text": "kept"}, "range": [low_kept, HIGHEST[1]]},
        showlegend=False,
        height=440,
    )
    return Figure(traces, axes)


def _row_points(one: Standings) -> list[RowPoint]:
    """The rows of which it is known what was kept, bounds last."""
    points = [
        RowPoint(
            name=placed.row.name,
            learned=placed.learned,
            kept=placed.kept,
            accuracy=placed.accuracy,
            is_bound=False,
        )
        for placed in one.placed
    ]
    points += [
        RowPoint(
            name=row.name,
            learned=row.mean("learned", one.columns),
            kept=row.kept(one.columns),
            accuracy=row.mean("accuracy", one.columns),
            is_bound=True,
        )
        for row in one.bounds
    ]
    return [point for point in points if not math.isnan(point.kept)]


def _row_trace(row: RowPoint, side: str, colour: str) -> Trace:
    """A point, and its name on a side where there is room; no name where there is none."""
    text = ""
    if side:
        text = plain(row.name)
    symbol = "circle"
    if row.is_bound:
        symbol = "diamond-open"
    return new_trace(
        "scatter",
        mode="markers+text",
        name=plain(row.name),
        text=[text],
        textposition=side or "top center",
        textfont={"size": 10},
        x=[rounded(row.learned)],
        y=[rounded(row.kept)],
        marker={"size": 10, "symbol": symbol, "color": colour},
        hovertemplate=f"learned %{{x:.1%}}, kept %{{y:.1%}}: accuracy {100 * row.accuracy:.1f} %",
    )


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
    names = [plain(placed.row.name) for placed in one.placed]
    ranks = new_trace(
        "scatter",
        mode="markers",
        x=[rounded(placed.rank) for placed in one.placed],
        y=names,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [rounded(placed.rank_ends[1] - placed.rank) for placed in one.placed],
            "arrayminus": [rounded(placed.rank - placed.rank_ends[0]) for placed in one.placed],
            "thickness": 1.5,
            "color": COLOURS[0],
        },
        marker={"size": 9, "color": COLOURS[0]},
        hovertemplate="%{y}: mean rank %{x:.2f}<extra></extra>",
    )
    start = len(names) + 0.8
    bars = [_bar(start + 0.45 * index, group) for index, group in enumerate(one.bars)]
    right = {
        "title": {"text": "mean rank"},
        "range": [0.5, start + 0.45 * max(1, len(one.bars))],
        "tickvals": list(range(1, len(names) + 1)),
    }
    up = {"type": "category", "categoryorder": "array", "categoryarray": names[::-1]}
    axes = layout(
        height=110 + 26 * len(names), hovermode="closest", xaxis=right, yaxis=up, showlegend=False
    )
    return Figure([ranks, *bars], axes)


def _bar(x: float, group: Sequence[str]) -> Trace:
    return new_trace(
        "scatter",
        mode="lines+markers",
        x=[x] * len(group),
        y=[plain(name) for name in group],
        line={"width": 3, "color": "#888888"},
        marker={"size": 7, "color": "#888888"},
        hovertemplate="%{y} cannot be told apart from the others on this bar<extra></extra>",
    )


def task_matrix(row: RankedRow, column: str) -> Figure | None:
    """Task by task end of one row, the mean over seeds; None without tasks."""
    matrices = [np.array(m, dtype=np.float64) for (c, _), m in row.tasks.items() if c == column]
    shapes = {matrix.shape for matrix in matrices}
    if len(shapes) != 1:
        return None
    mean = np.mean(matrices, axis=0)
    ends, tasks = mean.shape
    trace = new_trace(
        "heatmap",
        x=[f"after {end + 1}" for end in range(ends)],
        y=[f"task {task + 1}" for task in range(tasks)],
        z=[[round(100 * value, 1) for value in mean[:, task]] for task in range(tasks)],
        zmin=0,
        zmax=100,
        colorscale=ACCURACY,
        showscale=False,
        hovertemplate="%{y}, %{x}: %{z:.1f} %<extra></extra>",
    )
    axes = layout(
        height=240,
        showlegend=False,
        hovermode="closest",
        xaxis={"type": "category", "showgrid": False},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
    )
    return Figure([trace], axes)


# The page of the ranking: one file that needs no network, with a section for each suite.


AGREEMENT = "agreement"
"""The section on how far tiers agree; the others have their suites' names."""

TITLE = "The ranking: who forgets, and who learns"

MEANS = (
    "A rank is no verdict beyond these settings. We chose the columns, so the ranking says nothing "
    "about other data. Methods on one bar cannot be told apart. Every method had the same number "
    "of tries, which favours methods with few fields. Methods below the reference row stay in the "
    "table: they did not help on these columns."
)
HOW = (
    f"Fields are chosen on seeds {', '.join(map(str, CHOOSING_SEEDS))}, on training images that "
    f"clients lack. The numbers are of seeds {', '.join(map(str, TEST_SEEDS))} on the test set. "
    "Accuracy is a mean over classes, over tasks in permuted streams, or over the clients that "
    "ask their peers. It is learned × kept. Learned is the best accuracy on each class, and kept "
    "is the share that is left at the end. With tasks, both are taken at the ends of tasks. Among "
    "peers, they are taken before and after the exchange. Otherwise they are means of five "
    "successive rounds. CPU seconds are those of whole runs, divided by those of the row in the "
    "head. MB are sent in both directions. †: a run diverged; its rounds until then count."
)
INTERVALS = (
    "Intervals over columns resample seeds within columns, 10,000 times. p is from a sign-flip "
    "test over columns × seeds, corrected over methods (Holm). In the table by column, the "
    "interval is Student's, of differences paired by seed. Five seeds do not support a claim "
    "about a single cell."
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
    introduction = [Paragraph(text) for text in (MEANS, HOW, INTERVALS)]
    sections = [*_agreement(every), *map(_section, every)]
    if maps is not None:
        sections.append(maps_section(maps))
    return document(TITLE, introduction, sections)


def _section(one: Standings) -> Section:
    suite = one.suite
    blocks: list[Block] = [
        Paragraph(f"{about(one)} Version {suite.version} of {suite.name}."),
        _standing_table(one),
    ]
    if one.missing:
        blocks.append(Paragraph(f"No entry yet: {', '.join(one.missing)}."))
    blocks.append(Gallery(_standing_charts(one), "top"))
    if one.bars:
        blocks.append(Paragraph(f"Cannot be told apart by rank: {'; '.join(joined(one))}."))
    head, rows = cell_lines(one)
    blocks.append(Folded("By column", [Table(head, rows, "numbers wide sortable")]))
    blocks += _matrices(one)
    blocks.append(Folded("The fields that were chosen, to copy", _fields(one)))
    return Section(suite.name, suite.title, blocks)


def _standing_table(one: Standings) -> Table:
    """The standings, the name before the rank."""
    rank, name, *columns = standing_head(one)
    rows = [[line[1], line[0], *line[2:]] for line in standing_lines(one)]
    return Table([name, rank, *columns], rows, "numbers wide sortable")


def _standing_charts(one: Standings) -> list[Chart]:
    charts = []
    if len(one.placed) > 1:
        charts.append(Chart([rank_figure(one)], BARS, "Ranks"))
    if any(not math.isnan(placed.kept) for placed in one.placed):
        charts.append(Chart([scatter(one)], PAIR, "Learned and kept"))
    return charts


def _matrices(one: Standings) -> Iterator[Folded]:
    """The matrix of tasks of each row, column by column."""
    rows = [*(placed.row for placed in one.placed), *one.bounds]
    for column in one.columns:
        charts = []
        for row in rows:
            figure = task_matrix(row, column)
            if figure is not None:
                description = f"{row.name}, {column}: {MATRIX}"
                chart = Chart([figure], description, row.name, "matrix", is_explained=True)
                charts.append(chart)
        if charts:
            title = f"The matrix of tasks by method: {column}"
            yield Folded(title, [Paragraph(MATRIX), Gallery(charts, "small")])


def _fields(one: Standings) -> list[Block]:
    """The settings of a row as a config's lines, for those who want them."""
    suite = one.suite
    explained = Paragraph(
        f"Over the settings that all rows of {suite.name} have; chosen {chosen_where(suite)}."
    )
    names = [placed.row.name for placed in one.placed]
    return [explained, *(Listing(name, copied_fields(one, name)) for name in names)]


def copied_fields(one: Standings, name: str) -> str:
    """A row's method, and what was chosen over the suite's settings, as tables of a config."""
    row = next(p.row for p in one.placed if p.row.name == name)
    tree: dict[str, dict[str, object]] = {"method": dict(one.suite.method(name))}
    for key, value in row.fields.items():
        table, _, field = key.partition(".")
        tree.setdefault(table, {})[field] = value
    return tomli_w.dumps(tree)


def _agreement(every: Sequence[Standings]) -> Iterator[Section]:
    lines = agreement.agreement_lines(every)
    if lines:
        table = Table(agreement.HEAD, lines, "numbers")
        yield Section(AGREEMENT, agreement.TITLE, [Paragraph(agreement.MEANS), table])
