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
from fedstill.report.figures import Figure, layout
from fedstill.report.markup import Html, escape, figure, folded, grid, html_table, section, sentence
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


# The maps that ship, on the ranking's page and in Markdown: a sentence and the gains of every cell
# for each method.


MAPS = "maps"
"""The section's name."""

TITLE = "Where a method helps"

WHAT = (
    "The gain over FedAvg on digits with a small network: four splits, three numbers of local "
    "epochs, three numbers of"
    " clients a round of 20, three seeds. Fields are those chosen in the track space, one setting "
    "for all cells, or the"
    " documented ones of a method that is not in it; the learning rate is FedAvg's. A method helps "
    "or hurts in a cell"
    f" if all three seeds say so. {CHANCE}: in 9 of 36."
)

TABLE = "Gains are in points, means over three seeds; ~: not all seeds say the same."

FLOOR = (
    "FedAvg's own accuracy in %, means over three seeds. With ten classes 10 is chance: a large "
    "gain over that says"
    " more of FedAvg, which collapsed, than of the method."
)

COMMAND = "fedstill rank map METHOD"
"""What anybody maps a method with."""


def maps_section(maps: Mapping[str, Grid]) -> Html:
    """The section of the page: each method's pictures and cells, and which maps are missing."""
    parts = [sentence(f"{WHAT} {how_to_read()}" if maps else WHAT)]
    for one in maps.values():
        cells = html_table(*cell_table(one), "numbers wide sortable")
        parts += [
            sentence(f"{one.summary}."),
            folded(f"The map of {one.row}, and all its cells", panels(one), cells),
        ]
    return section(TITLE, *parts, *map(sentence, missing(maps)), name=MAPS)


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
