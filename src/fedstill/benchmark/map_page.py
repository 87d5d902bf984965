"""Maps of methods as pages and in Markdown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedstill.benchmark.maps import MAPPED, Grid, MapCell, map_text
from fedstill.core.files import PAGE, make_folder, refuse_other_kind, write_whole
from fedstill.report.blocks import Block, Chart, Folded, Gallery, Paragraph, Section, Table
from fedstill.report.figures import Figure, layout, new_trace
from fedstill.report.page import document
from fedstill.report.summary import NONE
from fedstill.report.table_files import markdown

# The map of a method: a page with a panel for each value of the last axis, runs as CSV, cells as
# Markdown.


PARTS = ("map-of-gains", "map-cells")
"""The sections of the page."""

GAINS = ((0.0, "#b2182b"), (0.5, "#f7f7f7"), (1.0, "#2166ac"))
"""Red hurts, blue helps."""

CHANCE = "By chance alone three seeds say the same in one cell of four"


def write_map(one: Grid, folder: Path) -> list[Path]:
    """Write index.html, map.csv (a line a run) and map.md; the paths."""
    make_folder(folder)
    head, lines = cell_table(one)
    texts = {
        "index.html": _page(one),
        "map.csv": map_text(one),
        "map.md": f"{one.summary}. {CHANCE}.\n\n{markdown(head, lines)}",
    }
    refuse_other_kind(folder / "index.html", PAGE)
    for name, text in texts.items():
        write_whole(folder / name, text.encode())
    return [folder / name for name in texts]


def how_to_read(against: str = "FedAvg") -> str:
    """What colours and numbers are, over the row that gains are over."""
    return (
        f"Colour and number are the gain over {against} in points, the mean over seeds paired by "
        "seed: blue helps, red"
        f" hurts. A ~ stands where not all seeds say the same. Below it {against}'s own accuracy: "
        "where nothing is lost"
        ", nothing is to be won."
    )


def cell_table(one: Grid) -> tuple[list[str], list[list[str]]]:
    """A line a cell: its values, the gain, the range over seeds, and the floor's accuracy and what
    it kept.
    """
    head = [
        *one.axes,
        "gain [points]",
        "least and most",
        f"{one.against} [%]",
        f"{one.against} kept [%]",
    ]
    return head, [[*map(str, cell.values.values()), *_numbers(cell)] for cell in one.cells]


def _numbers(cell: MapCell) -> list[str]:
    low, high = min(cell.gains), max(cell.gains)
    kept = fmean(score.kept for score in cell.theirs.values())
    ends = f"{100 * low:+.1f} to {100 * high:+.1f}"
    shown = NONE if math.isnan(kept) else f"{100 * kept:.1f}"
    return [f"{100 * cell.gain:+.1f}", ends, f"{100 * cell.floor:.1f}", shown]


def _page(one: Grid) -> str:
    explained = Paragraph(how_to_read(one.against))
    gains = Section(PARTS[0], f"Gain over {one.against}", [explained, panels(one)])
    head, rows = cell_table(one)
    cells = Section(PARTS[1], "All cells", [Table(head, rows, "numbers wide sortable")])
    introduction = Paragraph(f"{one.summary}. {CHANCE}.")
    return document(f"Where {one.row} helps", [introduction], [gains, cells])


def panels(one: Grid) -> Gallery:
    """A picture for each value of the last axis."""
    keys = list(one.axes)
    if len(keys) < 3:
        return Gallery([_chart(one, one.cells, "")], "small")
    last = keys[2]
    charts = []
    for value in one.axes[last]:
        cells = [cell for cell in one.cells if cell.values[last] == value]
        charts.append(_chart(one, cells, f"{last} = {value}"))
    return Gallery(charts, "small")


def _chart(one: Grid, cells: Sequence[MapCell], name: str) -> Chart:
    return Chart(
        [_panel(one, cells)],
        f"{name} {how_to_read(one.against)}",
        name or f"Where {one.row} helps",
        "map",
        is_explained=True,
    )


def _panel(one: Grid, cells: Sequence[MapCell]) -> Figure:
    keys = list(one.axes)
    rows = list(one.axes[keys[0]])
    columns: Sequence[Any] = [None]
    column_key = ""
    if len(keys) > 1:
        column_key = keys[1]
        columns = list(one.axes[column_key])
    most = max([0.01, *(abs(cell.gain) for cell in one.cells)])
    placed = {(cell.values[keys[0]], cell.values.get(column_key)): cell for cell in cells}
    laid_out = [[placed[row, column] for column in columns] for row in rows]
    trace = new_trace(
        "heatmap",
        x=[_shown(column) for column in columns],
        y=[str(row) for row in rows],
        z=[[round(100 * cell.gain, 1) for cell in line] for line in laid_out],
        text=[[_text(cell) for cell in line] for line in laid_out],
        texttemplate="%{text}",
        zmin=-100 * most,
        zmax=100 * most,
        colorscale=GAINS,
        showscale=False,
        hovertemplate="%{y}, %{x}: %{z:+.1f} points<extra></extra>",
    )
    axis = {"type": "category", "showgrid": False}
    axes = layout(
        height=110 + 46 * len(rows),
        showlegend=False,
        hovermode="closest",
        xaxis={**axis, "title": {"text": column_key}},
        yaxis={**axis, "title": {"text": keys[0]}, "autorange": "reversed"},
    )
    return Figure([trace], axes)


def _shown(column: Any) -> str:
    """The name of a column; empty where a map has no second axis."""
    if column is None:
        return ""
    return str(column)


def _text(cell: MapCell) -> str:
    """The number of a cell, marked where not all seeds say the same, and the floor's own accuracy
    below it.
    """
    return f"{cell.shown}<br>({100 * cell.floor:.0f} %)"


# The maps that ship, on the ranking's page and in Markdown: a sentence and the gains of every cell
# for each method.


MAPS = "maps"
"""The section's name."""

TITLE = "Where a method helps"

WHAT = (
    "The gain over FedAvg on digits with a small network, for four splits, three numbers of local "
    "epochs, three numbers of sampled clients (of 20), and three seeds. All cells of a method use "
    "the fields that were chosen in the track space. A method that is not in the track uses its "
    "documented fields. The learning rate is FedAvg's. A method helps or hurts in a cell if all "
    f"three seeds agree. {CHANCE}: in 9 of 36."
)

TABLE = "Gains are in points, means over three seeds. ~: the seeds disagree."

FLOOR = (
    "FedAvg's own accuracy in %, means over three seeds. Chance is 10 with ten classes. A large "
    "gain over such an accuracy shows that FedAvg collapsed, more than what the method does."
)

COMMAND = "fedstill rank map METHOD"
"""What anybody maps a method with."""


def maps_section(maps: Mapping[str, Grid]) -> Section:
    """The section of the page: each method's pictures and cells, and which maps are missing."""
    about = WHAT
    if maps:
        about = f"{WHAT} {how_to_read()}"
    blocks: list[Block] = [Paragraph(about)]
    for one in maps.values():
        head, rows = cell_table(one)
        cells = Table(head, rows, "numbers wide sortable")
        blocks.append(Paragraph(f"{one.summary}."))
        blocks.append(Folded(f"The map of {one.row}, and all its cells", [panels(one), cells]))
    blocks += [Paragraph(text) for text in missing(maps)]
    return Section(MAPS, TITLE, blocks)


def maps_text(maps: Mapping[str, Grid]) -> str:
    """The same in Markdown, without pictures; FedAvg's accuracy stands above the maps that have the
    same of it.
    """
    parts, shown = [f"## {TITLE}", WHAT, *([TABLE] if maps else [])], ""
    for one in maps.values():
        if (floor := markdown(*floor_table(one)).rstrip()) != shown:
            parts += ["### FedAvg", FLOOR, floor]
            shown = floor
        parts += [f"### {one.row}", f"{one.summary}.", markdown(*gain_table(one)).rstrip()]
    return "\n\n".join([*parts, *missing(maps)]) + "\n"


def missing(maps: Mapping[str, Grid]) -> Iterator[str]:
    """A sentence on the maps that are to ship and do not yet; nothing where all do."""
    if left := [row for name, row in MAPPED.items() if name not in maps]:
        yield f"No map ships yet of {', '.join(left)}. {COMMAND} makes one of any method."


def gain_table(one: Grid) -> tuple[list[str], list[list[str]]]:
    """The gain of every cell."""
    return _laid_out(one, lambda cell: cell.shown)


def floor_table(one: Grid) -> tuple[list[str], list[list[str]]]:
    """FedAvg's own accuracy in every cell, in %."""
    return _laid_out(one, lambda cell: f"{100 * cell.floor:.1f}")


def _laid_out(one: Grid, text: Callable[[MapCell], str]) -> tuple[list[str], list[list[str]]]:
    """A line for each value of the first axis, a column for each of the others together."""
    first, *others = one.axes
    others = others[::-1]
    by = {
        (cell.values[first], tuple(cell.values[key] for key in others)): cell for cell in one.cells
    }
    columns = list(itertools.product(*(one.axes[key] for key in others)))
    named = [
        ", ".join(f"{k.rpartition('.')[2]} {v}" for k, v in zip(others, c, strict=True))
        for c in columns
    ]
    lines = [[str(value), *(text(by[value, c]) for c in columns)] for value in one.axes[first]]
    return [first.rpartition(".")[2], *named], lines
