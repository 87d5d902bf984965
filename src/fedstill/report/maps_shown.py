"""The maps that ship, on the ranking's page and in Markdown: a sentence and the gains of every cell
for each method.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

from fedstill.experiment.ranking.where import Grid, MapCell
from fedstill.report.map_file import MAPPED
from fedstill.report.markup import Html, folded, html_table, section, sentence
from fedstill.report.table_files import markdown
from fedstill.report.where_it_helps import CHANCE, cell_table, how_to_read, panels

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
