"""A map as a file: a line a run, with all digits; and the maps that ship."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fedstill.errors import CorruptFile
from fedstill.experiment.comparing.recipes import RANKING
from fedstill.experiment.ranking.cell_settings import SETTING, Setting
from fedstill.experiment.ranking.scoring import NUMBERS, Score
from fedstill.experiment.ranking.where import Grid, MapCell
from fedstill.files import make_folder, write_whole
from fedstill.report.table_files import csv_text

MAPPED = {
    "fedntd": "FedNTD",
    "fedadkd": "FedADKD",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fedlc": "FedLC",
    "fedsol": "FedSOL",
}
"""The methods whose maps are to ship, with their names on the page; all of the tier digits."""


def map_text(one: Grid) -> str:
    """A map as CSV: a line a run of the method and of its floor, with its cell, its score, and
    where that stands.
    """
    lines = []
    for cell in one.cells:
        for who, scores in ((one.row, cell.ours), (one.against, cell.theirs)):
            for seed, score in scores.items():
                there = cell.settings.get(seed)
                numbers = [getattr(there, name) if there else float("nan") for name in SETTING]
                told = ("" if v != v else repr(v) for v in (*score.table.values(), *numbers))
                lines.append([who, *map(str, cell.values.values()), str(seed), *told])
    return csv_text(["method", *one.axes, "seed", *NUMBERS, *SETTING], lines)


def map_from(text: str) -> Grid:
    """A map from the text that ``map_text`` gave; raises CorruptFile for one that is none, or lacks
    a run.
    """
    reader = csv.DictReader(io.StringIO(text))
    runs: dict[tuple[str, ...], dict[str, dict[int, dict[str, str]]]] = {}
    try:
        head = list(reader.fieldnames or ())
        axes = head[1 : head.index("seed")]
        for line in reader:
            own = runs.setdefault(tuple(line[key] for key in axes), {})
            own.setdefault(line["method"], {})[int(line["seed"])] = line
        row, against = dict.fromkeys(who for own in runs.values() for who in own)
        cells = [_cell(axes, values, own[row], own[against]) for values, own in runs.items()]
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptFile(
            f"this is no map's table of runs: {type(error).__name__}: {error}"
        ) from error
    return Grid(
        row,
        {key: list(dict.fromkeys(cell.values[key] for cell in cells)) for key in axes},
        cells,
        against,
    )


def _cell(
    axes: list[str], values: tuple[str, ...], *by_seed: Mapping[int, Mapping[str, str]]
) -> MapCell:
    ours, theirs = by_seed
    if not ours or ours.keys() != theirs.keys():
        raise ValueError(f"cell {', '.join(values)} does not have the same seeds of both")
    scores = [{seed: Score.of(line) for seed, line in own.items()} for own in by_seed]
    there = {
        seed: Setting(*(float(line[k]) for k in SETTING))
        for seed, line in theirs.items()
        if line[SETTING[0]]
    }
    return MapCell(dict(zip(axes, map(_value, values), strict=True)), scores[0], scores[1], there)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def shipped_maps() -> dict[str, Grid]:
    """The maps that ship, by the method's registered name, in the order of ``MAPPED``; others
    behind.
    """
    folder = _folder()
    names = [file.name.removesuffix(".csv") for file in folder.iterdir()] if folder.is_dir() else []
    order = [*(name for name in MAPPED if name in names), *sorted(set(names) - set(MAPPED))]
    return {name: map_from((folder / f"{name}.csv").read_text(encoding="utf-8")) for name in order}


def keep_map(one: Grid, method: str) -> Path:
    """Write a map to where those that ship are; its path."""
    folder = _folder()
    make_folder(folder)
    write_whole(folder / f"{method}.csv", map_text(one).encode())
    return folder / f"{method}.csv"


def _folder() -> Path:
    return Path(str(resources.files("fedstill.recipes"))) / RANKING / "maps"
