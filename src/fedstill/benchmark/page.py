"""The page of the ranking: one HTML file that needs no network, with a section for each suite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedstill.benchmark.map_page import maps_section, sortable
from fedstill.benchmark.maps import MethodMap
from fedstill.benchmark.standings import RankedRow, Standings
from fedstill.benchmark.suites import CHOOSING_SEEDS, TEST_SEEDS
from fedstill.benchmark.tables import (
    AGREEMENT_EXPLANATION,
    AGREEMENT_HEAD,
    AGREEMENT_TITLE,
    GROUPS_EXPLANATION,
    agreement_lines,
    bar_texts,
    cell_table,
    choosing_place,
    description,
    standing_table_by_name,
)
from fedstill.core.files import PAGE, make_folder, replace_file
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
    ACCURACY_COLOURS,
    COLOURS,
    PERCENT,
    Figure,
    Trace,
    escaped,
    new_trace,
    plain_layout,
    rounded,
)
from fedstill.report.page import document
from fedstill.report.tasks import equal_curves

# ---- learned and kept ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowPoint:
    """A row of the ranking in the plane of learned and kept, and its accuracy, their product.

    ``is_bound``: whether it is a bound, such as joint training, and not ranked.
    """

    name: str
    learned: float
    kept_share: float
    accuracy: float
    is_bound: bool


MAX_LEARNED = 1.03
MAX_KEPT = 1.04
"""The ends of the two axes: a little above 1, so that points at 1 are not cut off."""


def scatter(standings: Standings) -> Figure:
    """A point for each row in the plane of learned and kept, the means over columns and seeds.

    Accuracy is constant along the dotted curves. Rows whose kept share is unknown are left out.
    """
    rows = _row_points(standings)
    min_learned = _axis_start([row.learned for row in rows])
    axis_start = _axis_start([row.kept_share for row in rows])
    points = [LabelledPoint(row.name, row.learned, row.kept_share) for row in rows]
    sides = label_sides(points, MAX_LEARNED - min_learned, MAX_KEPT - axis_start)
    traces = equal_curves()
    for index, (row, side) in enumerate(zip(rows, sides, strict=True)):
        traces.append(_row_trace(row, side, COLOURS[index % len(COLOURS)]))
    axes = plain_layout(
        xaxis={**PERCENT.ticks, "title": {"text": "learned"}, "range": [min_learned, MAX_LEARNED]},
        yaxis={**PERCENT.ticks, "title": {"text": "kept"}, "range": [axis_start, MAX_KEPT]},
        height=440,
    )
    return Figure(traces, axes)


def _row_points(standings: Standings) -> list[RowPoint]:
    """The rows whose kept share is known, bounds last."""
    points = [
        RowPoint(
            name=placed.row.name,
            learned=placed.learned,
            kept_share=placed.kept,
            accuracy=placed.accuracy,
            is_bound=False,
        )
        for placed in standings.placed
    ]
    points += [
        RowPoint(
            name=row.name,
            learned=row.mean("learned", standings.columns),
            kept_share=row.kept(standings.columns),
            accuracy=row.mean("accuracy", standings.columns),
            is_bound=True,
        )
        for row in standings.bounds
    ]
    return [point for point in points if not math.isnan(point.kept_share)]


def _axis_start(values: Sequence[float]) -> float:
    """The start of an axis of shares, which leaves some room for the points."""
    return max(0.0, round(min(values, default=0.0) - 0.1, 1))


def _row_trace(row: RowPoint, side: str, colour: str) -> Trace:
    """A point with its name on one side; ``side`` is empty if there is no room for the name."""
    text = ""
    position = "top center"  # has no effect without a text
    if side:
        text = escaped(row.name)
        position = side
    symbol = "circle"
    if row.is_bound:
        symbol = "diamond-open"
    accuracy = f"accuracy {100 * row.accuracy:.1f} %"
    return new_trace(
        "scatter",
        mode="markers+text",
        name=escaped(row.name),
        text=[text],
        textposition=position,
        textfont={"size": 10},
        x=[rounded(row.learned)],
        y=[rounded(row.kept_share)],
        marker={"size": 10, "symbol": symbol, "color": colour},
        hovertemplate=f"learned %{{x:.1%}}, kept %{{y:.1%}}: {accuracy}",
    )


# ---- labels that do not overlap ------------------------------------------------------------------

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
"""Plotly's names for the sides of a point, in the order of preference, and their directions."""

PLOT_WIDTH = 400.0
PLOT_HEIGHT = 330.0
"""Approximate size of the plot within its axes, in pixels, on a wide screen."""

CHARACTER_WIDTH = 6.4
LABEL_HEIGHT = 12.0
MARKER_RADIUS = 5.0
"""Approximate sizes of a label in the figure's small type, and of a marker, in pixels."""

LABEL_DISTANCE = 12.0
LABEL_DISTANCE_BESIDE = 7.0
"""From the centre of a marker: to the centre of a label above or below, which must clear the
marker, and to the near end of a label beside it.
"""


@dataclass(frozen=True)
class LabelledPoint:
    """A point with its label, in units of the data."""

    label: str
    x: float
    y: float


@dataclass(frozen=True)
class _Box:
    """A rectangle in pixels, by its centre and half its sizes."""

    x: float
    y: float
    half_width: float
    half_height: float

    def overlaps(self, box: _Box) -> bool:
        is_near_in_x = abs(self.x - box.x) < self.half_width + box.half_width
        is_near_in_y = abs(self.y - box.y) < self.half_height + box.half_height
        return is_near_in_x and is_near_in_y


def label_sides(points: Sequence[LabelledPoint], x_span: float, y_span: float) -> list[str]:
    """Choose the side of each label: the first one on which it covers no point and no earlier
    label; empty if there is none.

    ``x_span``, ``y_span``: lengths of the axes, in units of the data.
    """
    markers = [
        _Box(
            x=point.x / x_span * PLOT_WIDTH,
            y=point.y / y_span * PLOT_HEIGHT,
            half_width=MARKER_RADIUS,
            half_height=MARKER_RADIUS,
        )
        for point in points
    ]
    occupied = list(markers)
    sides = []
    for point, marker in zip(points, markers, strict=True):
        free_side = ""
        for side, direction in SIDES.items():
            box = _label_box(point.label, marker, direction)
            if not any(box.overlaps(item) for item in occupied):
                free_side = side
                occupied.append(box)
                break
        sides.append(free_side)
    return sides


def _label_box(label: str, marker: _Box, direction: tuple[float, float]) -> _Box:
    """The approximate box of a label, in a direction from its marker."""
    right, up = direction
    half_width = CHARACTER_WIDTH / 2 * len(label)
    vertical_distance = LABEL_DISTANCE
    if right:  # a label at a corner is beside the marker and need not clear it vertically
        vertical_distance = LABEL_DISTANCE_BESIDE
    return _Box(
        x=marker.x + right * (half_width + LABEL_DISTANCE_BESIDE),
        y=marker.y + up * vertical_distance,
        half_width=half_width,
        half_height=LABEL_HEIGHT / 2,
    )


# ---- ranks and tasks -----------------------------------------------------------------------------


def rank_figure(standings: Standings) -> Figure:
    """Mean ranks with their intervals, best at the top; on the right a bar for each group without
    significant differences.
    """
    names = [escaped(placed.row.name) for placed in standings.placed]
    first_bar = len(names) + 0.8
    bars = [_bar(first_bar + 0.45 * index, group) for index, group in enumerate(standings.bars)]
    ranks = {
        "title": {"text": "mean rank"},
        "range": [0.5, first_bar + 0.45 * max(1, len(standings.bars))],
        "tickvals": list(range(1, len(names) + 1)),
    }
    methods = {"type": "category", "categoryorder": "array", "categoryarray": names[::-1]}
    axes = plain_layout(
        height=110 + 26 * len(names),
        xaxis=ranks,
        yaxis=methods,
    )
    return Figure([_rank_trace(standings, names), *bars], axes)


def _rank_trace(standings: Standings, names: Sequence[str]) -> Trace:
    """The mean rank of each row, with its interval."""
    above = [rounded(placed.rank_interval[1] - placed.rank) for placed in standings.placed]
    below = [rounded(placed.rank - placed.rank_interval[0]) for placed in standings.placed]
    return new_trace(
        "scatter",
        mode="markers",
        x=[rounded(placed.rank) for placed in standings.placed],
        y=names,
        error_x={
            "type": "data",
            "symmetric": False,
            "array": above,
            "arrayminus": below,
            "thickness": 1.5,
            "color": COLOURS[0],
        },
        marker={"size": 9, "color": COLOURS[0]},
        hovertemplate="%{y}: mean rank %{x:.2f}<extra></extra>",
    )


def _bar(x: float, group: Sequence[str]) -> Trace:
    """A vertical line through the rows of a group without significant differences."""
    return new_trace(
        "scatter",
        mode="lines+markers",
        x=[x] * len(group),
        y=[escaped(name) for name in group],
        line={"width": 3, "color": "#888888"},
        marker={"size": 7, "color": "#888888"},
        hovertemplate="%{y}: less than the critical difference from the others on this bar"
        "<extra></extra>",
    )


def _percentages(accuracies: Sequence[float]) -> list[float]:
    return [round(100 * accuracy, 1) for accuracy in accuracies]


def task_matrix(row: RankedRow, column: str) -> Figure | None:
    """The mean accuracy over seeds on each task at the end of each task; None without tasks."""
    matrices = [
        np.array(matrix, dtype=np.float64)
        for (run_column, _seed), matrix in row.tasks.items()
        if run_column == column
    ]
    shapes = {matrix.shape for matrix in matrices}
    if len(shapes) != 1:
        return None
    mean = np.mean(matrices, axis=0)
    ends, tasks = mean.shape
    category: dict[str, Any] = {"type": "category", "showgrid": False}
    trace = new_trace(
        "heatmap",
        x=[f"after {number}" for number in range(1, ends + 1)],
        y=[f"task {number}" for number in range(1, tasks + 1)],
        z=[_percentages(accuracies) for accuracies in mean.T],
        zmin=0,
        zmax=100,
        colorscale=ACCURACY_COLOURS,
        showscale=False,
        hovertemplate="%{y}, %{x}: %{z:.1f} %<extra></extra>",
    )
    axes = plain_layout(
        height=240,
        xaxis=category,
        yaxis={**category, "autorange": "reversed"},
    )
    return Figure([trace], axes)


# ---- the page ------------------------------------------------------------------------------------

AGREEMENT_SECTION = "agreement"
"""The name of the section on the tiers; all other sections have the names of their suites."""

TITLE = "The ranking: which methods forget, and which learn"

LIMITS = (
    "A rank holds only for these settings. We chose the settings, which are the columns of the "
    "tables, so the ranking says nothing about other data. Methods on the same grey bar of the "
    "page do not differ significantly. Every method had the same number of tries to choose its "
    "fields (hyper-parameters), which favours methods with few fields. Methods below the "
    "reference, FedAvg or FedSeq, stay in the table: they did not help in these settings."
)
PROCEDURE = (
    f"Fields are chosen with the seeds {', '.join(map(str, CHOOSING_SEEDS))}, on training images "
    f"that clients lack. The results come from the seeds {', '.join(map(str, TEST_SEEDS))} on the "
    "test set. Accuracy is a mean over classes, over tasks in permuted streams, or over the "
    "clients that query their peers. It is learned × kept. Learned is the best accuracy on each "
    "class, and kept is the share that remains at the end. With tasks, both are computed at the "
    "ends of tasks. With peers, they are computed before and after the exchange. Otherwise, they "
    "are computed from means of five successive rounds. CPU is the CPU time of whole runs, divided "
    "by that of the method in the column's title. MB counts the bytes that are sent in both "
    "directions. † marks a method with a diverged run; the rounds before the divergence count."
)
INTERVALS = (
    "Intervals over all columns come from resampling the seeds within each column 10,000 times. "
    "The value p compares a method with the reference. It is from a sign-flip test over columns × "
    "seeds, corrected for the number of methods (Holm). Grey bars and groups compare all pairs of "
    "methods by Nemenyi's test, at a level of 5 % for all pairs together. Two methods differ "
    "significantly if their mean ranks are at least the critical difference apart. The test counts "
    "columns × seeds as independent. In the table by column, intervals are Student's t intervals "
    "of differences paired by seed. Five seeds do not support a claim about a single cell."
)
BARS = (
    "Mean rank with its interval; 1 is best. Methods with a mark on the same grey bar do not "
    "differ significantly: their mean ranks are less than the critical difference apart."
)
LEARNED_AND_KEPT = (
    "Further right, more was learned; further up, more of it was kept. Along a dotted curve, "
    "accuracy, their product, is constant."
)
TASK_MATRIX = (
    "Rows are tasks, columns are the ends of tasks; the colour is the accuracy on the task at that "
    "time, the mean over seeds."
)


def write_ranking_page(
    all_standings: Sequence[Standings], out: Path, maps: Mapping[str, MethodMap] | None = None
) -> Path:
    """Write the page to a file; its path. ``maps``: by method; None for a page without maps."""
    make_folder(out.parent)
    replace_file(out, ranking_page(all_standings, maps).encode(), PAGE)
    return out


def ranking_page(
    all_standings: Sequence[Standings], maps: Mapping[str, MethodMap] | None = None
) -> str:
    """The page as HTML."""
    introduction = [Paragraph(text) for text in (LIMITS, PROCEDURE, INTERVALS)]
    sections = [*_agreement_section(all_standings), *map(_section, all_standings)]
    if maps is not None:
        sections.append(maps_section(maps))
    return document(TITLE, introduction, sections)


def _agreement_section(all_standings: Sequence[Standings]) -> Iterator[Section]:
    lines = agreement_lines(all_standings)
    if lines:
        table = Table(AGREEMENT_HEAD, lines, "numbers")
        blocks = [Paragraph(AGREEMENT_EXPLANATION), table]
        yield Section(AGREEMENT_SECTION, AGREEMENT_TITLE, blocks)


def _section(standings: Standings) -> Section:
    """The section of a suite."""
    suite = standings.suite
    about = f"{description(standings)} Version {suite.version} of {suite.name}."
    blocks: list[Block] = [Paragraph(about), sortable(standing_table_by_name(standings))]
    if standings.missing:
        blocks.append(Paragraph(f"No entry yet: {', '.join(standings.missing)}."))
    blocks.append(Gallery(_standing_charts(standings), "top"))
    if standings.bars:
        groups = "; ".join(bar_texts(standings))
        blocks.append(Paragraph(f"{GROUPS_EXPLANATION}: {groups}."))
    blocks.append(Folded("By column", [sortable(cell_table(standings))]))
    blocks += _task_matrices(standings)
    blocks.append(Folded("The chosen fields, to copy", _field_listings(standings)))
    return Section(suite.name, suite.title, blocks)


def _standing_charts(standings: Standings) -> list[Chart]:
    charts = []
    if len(standings.placed) > 1:
        charts.append(Chart([rank_figure(standings)], BARS, "Ranks"))
    if any(not math.isnan(placed.kept) for placed in standings.placed):
        charts.append(Chart([scatter(standings)], LEARNED_AND_KEPT, "Learned and kept"))
    return charts


def _task_matrices(standings: Standings) -> Iterator[Folded]:
    """The task matrices of all rows, by column."""
    rows = [*(placed.row for placed in standings.placed), *standings.bounds]
    for column in standings.columns:
        charts = []
        for row in rows:
            figure = task_matrix(row, column)
            if figure is not None:
                text = f"{row.name}, {column}: {TASK_MATRIX}"
                charts.append(Chart([figure], text, row.name, "matrix", is_explained=True))
        if charts:
            title = f"The accuracy on each task, by method: {column}"
            yield Folded(title, [Paragraph(TASK_MATRIX), Gallery(charts, "small")])


def _field_listings(standings: Standings) -> list[Block]:
    """The chosen fields of each ranked row as lines of a config."""
    suite = standings.suite
    explanation = Paragraph(
        f"These go on top of the settings shared by all rows of {suite.name}; chosen "
        f"{choosing_place(suite)}."
    )
    names = [placed.row.name for placed in standings.placed]
    return [explanation, *(Listing(name, config_lines(standings, name)) for name in names)]


def config_lines(standings: Standings, name: str) -> str:
    """A row's method and chosen fields, as TOML tables of a config."""
    fields = {placed.row.name: placed.row.fields for placed in standings.placed}
    tables: dict[str, dict[str, object]] = {"method": dict(standings.suite.method_of(name))}
    for dotted_key, value in fields[name].items():
        table, _, key = dotted_key.partition(".")
        tables.setdefault(table, {})[key] = value
    return tomli_w.dumps(tables)
