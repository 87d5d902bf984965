"""The cell of a map that is nearest to a setting, and what maps say there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import astuple

from fedstill.experiment.ranking.cell_settings import Setting
from fedstill.experiment.ranking.where import Grid, MapCell

APART = 0.1
"""Label distances that differ by this count as much as a factor of two in steps or in the share of
clients.

A cell that is further than one of these units away in any of the three says nothing of a setting.
Neighbours on the maps' axes are up to two units apart, so all that lies between cells is near one
of them.
"""

MOST_SAID = 3
"""How many methods are named where several help."""


def nearest_cell(one: Grid, here: Setting) -> MapCell | None:
    """The cell with the smallest Euclidean distance in units of ``APART`` and of factors of two.

    None where one of the three numbers is further than one unit away, or the map has no settings of
    its cells.
    """
    each = [(away(cell, here), cell) for cell in one.cells if cell.settings]
    if not each:
        return None
    apart, cell = min(each, key=lambda pair: math.hypot(*pair[0]))
    return cell if max(apart) <= 1 else None


def away(cell: MapCell, here: Setting) -> tuple[float, float, float]:
    """How far a setting is from a cell, in units, one for each of the three numbers."""
    there = cell.setting
    steps, share = (
        abs(math.log2(ours / theirs)) if ours > 0 and theirs > 0 else math.inf
        for ours, theirs in zip(astuple(here)[1:], astuple(there)[1:], strict=True)
    )
    return abs(here.labels_apart - there.labels_apart) / APART, steps, share


def told_of_maps(maps: Mapping[str, Grid], method: str, here: Setting | None) -> Iterator[str]:
    """What maps, by method, say of a setting: of its method if that has a map, else which methods
    helped most.

    Nothing where there is no map, or none has a cell that is near enough.
    """
    near = {name: cell for name, one in maps.items() if here and (cell := nearest_cell(one, here))}
    if not near or here is None:
        return
    cell = near.get(method) or next(iter(near.values()))
    there, floor = cell.setting, statistics.fmean(score.accuracy for score in cell.theirs.values())
    yield (
        f"map: the nearest cell of the ranking's maps (digits) is {cell.name}: labels "
        f"{there.labels_apart:.2f} from the"
        f" whole (here {here.labels_apart:.2f}), {there.steps_per_example:.3g} local steps an "
        "example (here"
        f" {here.steps_per_example:.3g}), {100 * there.clients_share:.0f} % of clients a round "
        "(here"
        f" {100 * here.clients_share:.0f} %). FedAvg reached {100 * floor:.1f} % there."
    )
    if method in near:
        yield f"map: {_said(maps[method], cell)}."
        return
    helped = {n: c for n, c in near.items() if c.sign > 0 and c.values == cell.values}
    best = sorted(helped, key=lambda n: -helped[n].gain)[:MOST_SAID]
    gains = ", ".join(f"{maps[n].row} {100 * helped[n].gain:+.1f}" for n in best)
    yield (
        f"map: most helped there, in points over FedAvg and on all seeds: {gains}."
        if best
        else f"map: none of {', '.join(maps[n].row for n in near)} was above FedAvg there on all "
        "seeds."
    )


def _said(one: Grid, cell: MapCell) -> str:
    """What a map says of its method in a cell."""
    low, high = (f"{100 * end:+.1f}" for end in (min(cell.gains), max(cell.gains)))
    how = {
        1: "it helped on all seeds",
        -1: "it hurt on all seeds",
        0: "not all seeds say the same",
    }[cell.sign]
    return f"{one.row} was {100 * cell.gain:+.1f} points from FedAvg there ({low} to {high}): {how}"
