"""Maps of methods as HTML pages and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedstill.benchmark.maps import SHIPPED_METHODS, MapCell, MethodMap, map_text
from fedstill.core.files import PAGE, check_may_overwrite, make_folder, write_whole
from fedstill.report.blocks import Block, Chart, Folded, Gallery, Paragraph, Section, Table
from fedstill.report.figures import Figure, Trace, new_trace, plain_layout
from fedstill.report.page import document
from fedstill.report.summary import NONE
from fedstill.report.table_files import TextTable

# ---- the page of one map -------------------------------------------------------------------------

PAGE_SECTIONS = ("map-of-gains", "map-cells")
"""The sections of the page."""

GAIN_COLOURS = ((0.0, "#b2182b"), (0.5, "#f7f7f7"), (1.0, "#2166ac"))
"""Red where a method hurts, blue where it helps."""

CHANCE = "By chance alone, three seeds agree in one cell of four"


def write_map(method_map: MethodMap, folder: Path) -> list[Path]:
    """Write index.html, map.csv (a line for each run) and map.md; the paths."""
    make_folder(folder)
    table = cell_table(method_map)
    texts = {
        "index.html": _page(method_map),
        "map.csv": map_text(method_map),
        "map.md": f"{method_map.summary}. {CHANCE}.\n\n{table.markdown()}",
    }
    check_may_overwrite(folder / "index.html", PAGE)
    for name, text in texts.items():
        write_whole(folder / name, text.encode())
    return [folder / name for name in texts]


def legend(floor: str = "FedAvg") -> str:
    """How to read the colours and numbers of a map."""
    return (
        f"Colour and number are the gain over {floor} in points, the mean over seeds, paired by "
        "seed: blue helps, red hurts. A ~ marks cells in which the sign depends on the seed. Below "
        f"it is the accuracy of {floor}: where nothing is lost, nothing can be gained."
    )


def cell_table(method_map: MethodMap) -> TextTable:
    """A line for each cell: its values, the gain and its range over seeds, and the floor's accuracy
    and kept share.
    """
    head = [
        *method_map.axes,
        "gain [points]",
        "least and most",
        f"{method_map.floor} [%]",
        f"{method_map.floor} kept [%]",
    ]
    lines = [[*map(str, cell.values.values()), *_numbers(cell)] for cell in method_map.cells]
    return TextTable(head, lines)


def _numbers(cell: MapCell) -> list[str]:
    kept = fmean(score.kept for score in cell.floor_scores.values())
    kept_text = NONE
    if not math.isnan(kept):
        kept_text = f"{100 * kept:.1f}"
    return [
        f"{100 * cell.gain:+.1f}",
        f"{100 * min(cell.gains):+.1f} to {100 * max(cell.gains):+.1f}",
        f"{100 * cell.floor_accuracy:.1f}",
        kept_text,
    ]


def _page(method_map: MethodMap) -> str:
    gains_name, cells_name = PAGE_SECTIONS
    floor = method_map.floor
    gains = [Paragraph(legend(floor)), panels(method_map)]
    sections = [
        Section(gains_name, f"Gain over {floor}", gains),
        Section(cells_name, "All cells", [sortable(cell_table(method_map))]),
    ]
    introduction = Paragraph(f"{method_map.summary}. {CHANCE}.")
    return document(f"Where {method_map.row} helps", [introduction], sections)


def sortable(table: TextTable) -> Table:
    """A table of numbers whose lines a reader can sort."""
    return Table(table.head, table.lines, "numbers wide sortable")


def panels(method_map: MethodMap) -> Gallery:
    """A panel for each value of the third axis; one panel if there are fewer axes."""
    keys = list(method_map.axes)
    if len(keys) < 3:
        return Gallery([_chart(method_map, method_map.cells, "")], "small")
    panel_key = keys[2]
    charts = []
    for value in method_map.axes[panel_key]:
        cells = [cell for cell in method_map.cells if cell.values[panel_key] == value]
        charts.append(_chart(method_map, cells, f"{panel_key} = {value}"))
    return Gallery(charts, "small")


def _chart(method_map: MethodMap, cells: Sequence[MapCell], name: str) -> Chart:
    return Chart(
        [_panel(method_map, cells)],
        f"{name} {legend(method_map.floor)}",
        name or f"Where {method_map.row} helps",
        "map",
        is_explained=True,
    )


def _panel(method_map: MethodMap, cells: Sequence[MapCell]) -> Figure:
    """A heat map of some cells: rows are the first axis, columns the second, if there is one."""
    row_key, *other_keys = method_map.axes
    rows = method_map.axes[row_key]
    columns: Sequence[Any] = [None]
    column_key = ""
    if other_keys:
        column_key = other_keys[0]
        columns = method_map.axes[column_key]
    by_values = {(cell.values[row_key], cell.values.get(column_key)): cell for cell in cells}
    table = [[by_values[row, column] for column in columns] for row in rows]
    trace = _heat_map(rows, columns, table, _largest_gain(method_map))
    axis = {"type": "category", "showgrid": False}
    axes = plain_layout(
        height=110 + 46 * len(rows),
        xaxis={**axis, "title": {"text": column_key}},
        yaxis={**axis, "title": {"text": row_key}, "autorange": "reversed"},
    )
    return Figure([trace], axes)


def _largest_gain(method_map: MethodMap) -> float:
    """The end of the colour scale, the same in all panels of a map."""
    return max([0.01, *(abs(cell.gain) for cell in method_map.cells)])


def _heat_map(
    rows: Sequence[Any],
    columns: Sequence[Any],
    table: Sequence[Sequence[MapCell]],
    largest_gain: float,
) -> Trace:
    return new_trace(
        "heatmap",
        x=[_column_name(column) for column in columns],
        y=[str(row) for row in rows],
        z=[[round(100 * cell.gain, 1) for cell in line] for line in table],
        text=[[_cell_text(cell) for cell in line] for line in table],
        texttemplate="%{text}",
        zmin=-100 * largest_gain,
        zmax=100 * largest_gain,
        colorscale=GAIN_COLOURS,
        showscale=False,
        hovertemplate="%{y}, %{x}: %{z:+.1f} points<extra></extra>",
    )


def _column_name(column: Any) -> str:
    """The name of a column; empty if the map has no second axis."""
    if column is None:
        return ""
    return str(column)


def _cell_text(cell: MapCell) -> str:
    """The gain in a cell, and the floor's accuracy below it."""
    return f"{cell.gain_text}<br>({100 * cell.floor_accuracy:.0f} %)"


# ---- the maps that ship --------------------------------------------------------------------------

MAPS_SECTION = "maps"
"""The name of the section on the ranking's page."""

TITLE = "Where a method helps"

EXPLANATION = (
    "The maps show the gain over FedAvg on digits with a small network. They cover four splits, "
    "three numbers of local epochs, three numbers of sampled clients (of 20), and three seeds. All "
    "cells of a method use the fields that were chosen in the track space. A method that is not in "
    "the track uses its documented fields. The learning rate is FedAvg's. A method helps or hurts "
    f"in a cell if all three seeds agree. {CHANCE}: in 9 of 36."
)

MAP_COMMAND = "fedstill rank map METHOD"


def maps_section(maps: Mapping[str, MethodMap]) -> Section:
    """The section on the ranking's page: pictures and cells by method, and the missing maps."""
    explanation = EXPLANATION
    if maps:
        explanation = f"{EXPLANATION} {legend()}"
    blocks: list[Block] = [Paragraph(explanation)]
    for method_map in maps.values():
        details = [panels(method_map), sortable(cell_table(method_map))]
        blocks.append(Paragraph(f"{method_map.summary}."))
        blocks.append(Folded(f"The map of {method_map.row}, and all its cells", details))
    blocks += [Paragraph(sentence) for sentence in missing_maps(maps)]
    return Section(MAPS_SECTION, TITLE, blocks)


def missing_maps(maps: Mapping[str, MethodMap]) -> Iterator[str]:
    """A sentence on the methods whose maps should ship but do not yet; nothing if all do."""
    missing = [row for name, row in SHIPPED_METHODS.items() if name not in maps]
    if missing:
        yield f"No map ships yet of {', '.join(missing)}. {MAP_COMMAND} makes one of any method."
