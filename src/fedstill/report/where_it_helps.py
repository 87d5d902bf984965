"""The map of a method: a page with a panel for each value of the last axis, runs as CSV, cells as
Markdown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedstill.experiment.ranking.where import Grid, MapCell
from fedstill.files import make_folder, write_whole
from fedstill.report.figures import Figure, layout
from fedstill.report.map_file import map_text
from fedstill.report.markup import Html, escape, figure, grid, html_table, section, sentence
from fedstill.report.page import document
from fedstill.report.summary import NONE
from fedstill.report.table_files import markdown
from fedstill.written_over import PAGE, refuse_other_kind

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
    title = f"Where {one.row} helps"
    shown = section(
        f"Gain over {one.against}", sentence(how_to_read(one.against)), panels(one), name=PARTS[0]
    )
    table = section(
        "All cells", html_table(*cell_table(one), "numbers wide sortable"), name=PARTS[1]
    )
    head = f"<header><h1>{escape(title)}</h1><p>{escape(one.summary)}. {CHANCE}.</p></header>"
    return document(title, f"{head}{shown.text}{table.text}")


def panels(one: Grid) -> Html:
    """A picture for each value of the last axis."""
    keys = list(one.axes)
    drawn = []
    for value in list(one.axes[keys[2]]) if len(keys) > 2 else [None]:
        cells = [c for c in one.cells if value is None or c.values[keys[2]] == value]
        name = "" if value is None else f"{keys[2]} = {value}"
        title = Html(escape(name or f"Where {one.row} helps"))
        drawn.append(
            figure([_panel(one, cells)], f"{name} {how_to_read(one.against)}", title, "map")
        )
    return grid(drawn, "small")


def _panel(one: Grid, cells: Sequence[MapCell]) -> Figure:
    keys = list(one.axes)
    rows = list(one.axes[keys[0]])
    columns = list(one.axes[keys[1]]) if len(keys) > 1 else [None]
    most = max([0.01, *(abs(cell.gain) for cell in one.cells)])
    by = {(c.values[keys[0]], c.values[keys[1]] if len(keys) > 1 else None): c for c in cells}
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": ["" if c is None else f"{c}" for c in columns],
        "y": [f"{r}" for r in rows],
        "z": [[round(100 * by[r, c].gain, 1) for c in columns] for r in rows],
        "text": [[_text(by[r, c]) for c in columns] for r in rows],
        "texttemplate": "%{text}",
        "zmin": -100 * most,
        "zmax": 100 * most,
        "colorscale": GAINS,
        "showscale": False,
        "hovertemplate": "%{y}, %{x}: %{z:+.1f} points<extra></extra>",
    }
    right = {
        "type": "category",
        "title": {"text": keys[1] if len(keys) > 1 else ""},
        "showgrid": False,
    }
    up = {
        "type": "category",
        "title": {"text": keys[0]},
        "autorange": "reversed",
        "showgrid": False,
    }
    axes = layout(
        height=110 + 46 * len(rows), showlegend=False, hovermode="closest", xaxis=right, yaxis=up
    )
    return {"data": [trace], "layout": axes}


def _text(cell: MapCell) -> str:
    """The number of a cell, marked where not all seeds say the same, and the floor's own accuracy
    below it.
    """
    return f"{cell.shown}<br>({100 * cell.floor:.0f} %)"
