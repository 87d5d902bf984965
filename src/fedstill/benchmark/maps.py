"""Maps: the gain of a method over the suite's floor, in many cells that differ in partition, local
training and participation; and maps as files.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fedstill.benchmark.entries import column_of
from fedstill.benchmark.recipes import RANKING, Recipe
from fedstill.benchmark.scoring import SCORE_FIELDS, Execute, Score, ScoredRun, scored_runs
from fedstill.benchmark.suites import Suite, SuiteRow
from fedstill.benchmark.tables import in_full
from fedstill.config.named_tables import NAME_KEYS, resolved_name
from fedstill.core import registry
from fedstill.core.errors import ConfigError, CorruptFile, UnknownName
from fedstill.core.files import make_folder, write_whole
from fedstill.core.label_counts import distance, proportions
from fedstill.core.records import SERVER, Stage
from fedstill.core.user_modules import split_name
from fedstill.report.table_files import TextTable
from fedstill.running.compare import Variant
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.world import local_steps

# ---- the position of a run on a map --------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Three numbers that describe a run in which each round has one exchange, without tasks.

    ``labels_apart``: the mean over clients of the Jensen-Shannon divergence between a client's
    labels and those of all clients together, in nats (0 to 0.69).
    ``steps_per_example``: the mean over clients of the optimiser steps in a round per example.
    ``clients_share``: the share of all clients that take part in a round.
    """

    labels_apart: float
    steps_per_example: float
    clients_share: float


SETTING_FIELDS = tuple(setting_field.name for setting_field in fields(Setting))
"""The names of the three numbers, in order."""


def setting_of(prepared: Prepared) -> Setting | None:
    """The setting of a run; None for other kinds of runs: chains, tasks, public logits, and data
    that are held elsewhere.
    """
    stage = _training_stage(prepared)
    sites = prepared.sites
    if stage is None or sites.split is None or sites.tasks is not None:
        return None
    counts = sites.split.label_table(sites.train.labels, len(prepared.dataset.classes)).numpy()
    counts = counts[counts.sum(axis=1) > 0]
    if not len(counts):
        return None
    sizes = [int(size) for size in counts.sum(axis=1)]
    divergences = distance(proportions(counts), proportions(counts.sum(axis=0)), "js")
    plan = prepared.world.plans[stage.name]
    steps = [local_steps(plan, size) / size for size in sizes]
    return Setting(
        labels_apart=float(divergences.mean()),
        steps_per_example=float(np.mean(steps)),
        clients_share=len(stage.clients) / prepared.world.clients,
    )


def _training_stage(prepared: Prepared) -> Stage | None:
    """The stage in which clients train side by side on their own data, if a round has no other."""
    world = prepared.world
    stages = prepared.settings.schedule(1, world)
    client_stages = [stage for stage in stages if any(client != SERVER for client in stage.clients)]
    if len(client_stages) != 1:
        return None
    stage = client_stages[0]
    if stage.sequential or stage.view == "public" or stage.name not in world.plans:
        return None
    return stage


# ---- the cells of a map --------------------------------------------------------------------------

MAP_SEEDS = (0, 1, 2)

EVEN = "even"
"""The value of partition.alpha that stands for a partition without any skew."""

AXES: Mapping[str, tuple[Any, ...]] = {
    "partition.alpha": (0.05, 0.1, 0.5, EVEN),
    "plan.epochs": (1, 3, 10),
    "topology.sampled": (2, 5, 20),
}
"""The default axes: label skew, length of local training, and clients per round."""

MAX_CELLS = 200


@dataclass(frozen=True)
class MapCell:
    """One cell of a map.

    ``values``: by key of the axes. ``scores``, ``floor_scores``: of the method and of the floor, by
    seed. ``settings``: those of the floor's runs, by seed; empty for runs without a ``Setting``.
    """

    values: Mapping[str, Any]
    scores: Mapping[int, Score]
    floor_scores: Mapping[int, Score]
    settings: Mapping[int, Setting] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The values as text, such as ``alpha 0.1, epochs 3``."""
        return _cell_name(self.values)

    @property
    def setting(self) -> Setting:
        """The mean of the settings over seeds."""
        columns = zip(*map(astuple, self.settings.values()), strict=True)
        return Setting(*map(statistics.fmean, columns))

    @property
    def gains(self) -> list[float]:
        """The gain in accuracy of each seed."""
        return [
            self.scores[seed].accuracy - self.floor_scores[seed].accuracy
            for seed in sorted(self.scores)
        ]

    @property
    def gain(self) -> float:
        """The mean gain."""
        return statistics.fmean(self.gains)

    @property
    def floor_accuracy(self) -> float:
        """The floor's mean accuracy."""
        return statistics.fmean(score.accuracy for score in self.floor_scores.values())

    @property
    def gain_text(self) -> str:
        """The mean gain in points, with a ~ if its sign depends on the seed."""
        mark = ""
        if not self.sign:
            mark = "~"
        return f"{mark}{100 * self.gain:+.1f}"

    @property
    def sign(self) -> int:
        """1 if the method gains with every seed, -1 if it loses with every seed, else 0."""
        if min(self.gains) > 0:
            return 1
        if max(self.gains) < 0:
            return -1
        return 0


def _cell_name(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in values.items())


@dataclass(frozen=True)
class MethodMap:
    """The map of a method: its axes (rows, columns and panels, in this order) and its cells.

    ``row``: the method's row. ``floor``: the row that gains are taken over.
    """

    row: str
    axes: Mapping[str, Sequence[Any]]
    cells: Sequence[MapCell]
    floor: str = "FedAvg"

    @property
    def summary(self) -> str:
        """A sentence on how often the method helps and hurts, and where it helps most."""
        helps = sum(cell.sign == 1 for cell in self.cells)
        hurts = sum(cell.sign == -1 for cell in self.cells)
        undecided = len(self.cells) - helps - hurts
        best = max(self.cells, key=lambda cell: cell.gain)
        counts = f"helps in {helps} of {len(self.cells)} cells and hurts in {hurts}, on all seeds"
        gain = f"{100 * best.gain:+.1f} points over {self.floor}"
        floor_accuracy = f"{100 * best.floor_accuracy:.1f} %"
        return (
            f"{self.row} {counts}. In {undecided} cells the seeds disagree. It helps most at "
            f"{best.name}: {gain} at {floor_accuracy}"
        )


# ---- making a map --------------------------------------------------------------------------------


def row_to_map(suite: Suite, name: str) -> SuiteRow:
    """The row of a method; a method without one gets a row with its default fields.

    ``name``: of a row or a registered method, or a method's file. Raises UnknownName.
    """
    is_file = split_name(name).is_file
    try:
        return SuiteRow(suite, suite.find_row(name))
    except UnknownName:
        known = [*suite.recipe.rows, *registry.names("method")]
        if not is_file and name.lower() not in known:
            raise UnknownName("method", name, known) from None
    if not is_file:
        name = name.lower()
    method = resolved_name("method", name, None)
    row = _name_of_new_row(suite, method)
    return SuiteRow(suite.with_defaults(row, method), row)


def _name_of_new_row(suite: Suite, method: str) -> str:
    """The name of a method's class; of a preset, or if that row exists, its registered name."""
    entry = registry.lookup("method", method)
    class_name = getattr(entry.target, "__name__", entry.name)
    if entry.preset or class_name in suite.recipe.rows:
        return entry.name
    return class_name


def make_map(
    suite: Suite, row: str, axes: Mapping[str, Sequence[Any]], out: Path, execute: Execute
) -> MethodMap:
    """Execute the unfinished runs of a row's map, and return the map.

    The method has the fields chosen in the suite, or its defaults, and the floor's learning rate.
    Raises ConfigError for too many cells, and for values that cannot be run.
    """
    products = itertools.product(*axes.values())
    values = [dict(zip(axes, combination, strict=True)) for combination in products]
    if len(values) > MAX_CELLS:
        raise ConfigError(f"these axes have {len(values)} cells; the maximum is {MAX_CELLS}")
    if row == suite.floor:
        raise ConfigError(f"a map shows the gain over {suite.floor}; name another method")
    _check_values(axes)
    _check_axes(suite, row, axes)

    columns = {_cell_name(cell): _column(suite, cell) for cell in values}
    recipe = replace(suite.recipe, columns=columns, only={})
    floor_runs = _runs(suite, recipe, suite.floor, axes, out)
    runs = _runs(suite, recipe, row, axes, out)
    # Check the settings before the runs of the floor, which take long.
    prepare(runs[0].settings)
    settings = _settings_by_cell(floor_runs)
    scored = scored_runs([*floor_runs, *runs], execute)
    floor_scores = _scores_by_cell(scored[: len(floor_runs)])
    scores = _scores_by_cell(scored[len(floor_runs) :])
    cells = []
    for cell in values:
        name = _cell_name(cell)
        cells.append(MapCell(cell, scores[name], floor_scores[name], settings[name]))
    return MethodMap(row, axes, cells, suite.floor)


def _check_values(axes: Mapping[str, Sequence[Any]]) -> None:
    """Raise ConfigError for an axis with a repeated value: a cell would count twice."""
    for key, values in axes.items():
        repeated = [value for value in values if values.count(value) > 1]
        if repeated:
            raise ConfigError(f"--grid {key} has the value {repeated[0]!r} twice; name it once")


def _check_axes(suite: Suite, row: str, axes: Iterable[str]) -> None:
    """Raise ConfigError for a key that the map or a row sets itself: the cells would not differ."""
    if "seed" in axes:
        raise ConfigError("--grid seed: every cell of a map has the same seeds; remove it")
    for name in (suite.floor, row):
        tables = set(suite.recipe.rows[name]) - {"method"}
        method_keys = {f"method.{field_name}" for field_name in suite.method_of(name)}
        for key in axes:
            is_set = key == "method" or key in method_keys or key.partition(".")[0] in tables
            if is_set:
                raise ConfigError(
                    f"--grid {key}: row {name} of {suite.name} sets it itself; choose another axis"
                )


def _runs(
    suite: Suite, recipe: Recipe, row: str, axes: Collection[str], out: Path
) -> list[Variant]:
    changes = {key: value for key, value in suite.chosen_fields(row).items() if key != "plan.lr"}
    floor_fields = suite.chosen_fields(suite.floor)
    if "plan.lr" in floor_fields:
        changes["plan.lr"] = floor_fields["plan.lr"]
    changes = {key: value for key, value in changes.items() if key not in axes}
    cells = [(row, column) for column in recipe.columns]
    return recipe.variants(cells, MAP_SEEDS, changes, out)


def _settings_by_cell(runs: Iterable[Variant]) -> dict[str, dict[int, Setting]]:
    """The settings of runs by cell and seed. Runs without a setting are left out."""
    settings: dict[str, dict[int, Setting]] = {}
    for run in runs:
        by_seed = settings.setdefault(column_of(run), {})
        setting = setting_of(prepare(run.settings))
        if setting is not None:
            by_seed[run.seed] = setting
    return settings


def _scores_by_cell(runs: Iterable[ScoredRun]) -> dict[str, dict[int, Score]]:
    scores: dict[str, dict[int, Score]] = {}
    for run in runs:
        scores.setdefault(column_of(run.variant), {})[run.variant.seed] = run.score
    return scores


def _column(suite: Suite, values: Mapping[str, Any]) -> dict[str, Any]:
    """The tables that a cell sets, on top of those of the suite's choosing column."""
    column = dict(suite.recipe.columns[suite.choosing_column])
    for key, value in values.items():
        table, _, table_key = key.partition(".")
        if key == "partition.alpha" and value == EVEN:
            column["partition"] = {"kind": "iid"}
        elif not table_key:
            column[table] = value
        else:
            common_table = suite.recipe.common.get(table, {})
            contents = _as_table(table, column.get(table, common_table))
            column[table] = {**contents, table_key: value}
    return column


def _as_table(table: str, value: Any) -> Mapping[str, Any]:
    """A table, which a column may abbreviate to the name in it."""
    if isinstance(value, str) and table in NAME_KEYS:
        return {NAME_KEYS[table]: value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"--grid {table}: it is a value, not a table; remove what follows it")
    return value


# ---- the nearest cell of the maps that ship ------------------------------------------------------

LABEL_UNIT = 0.1
"""A difference of label divergences that counts as much as a factor of two in steps or in the share
of clients.

A cell says nothing about settings more than one unit away in any of the three numbers. Neighbours
on the axes are up to two units apart, so every setting between two cells is near one of them.
"""

MAX_METHODS_NAMED = 3
"""How many of the methods that help are named."""


def nearest_cell(method_map: MethodMap, setting: Setting) -> MapCell | None:
    """The cell with the smallest Euclidean distance, in units of ``LABEL_UNIT`` and factors of two.

    None if one of its three numbers is more than one unit away, or if the cells have no settings.
    """
    cells = [cell for cell in method_map.cells if cell.settings]
    if not cells:
        return None
    nearest = min(cells, key=lambda cell: math.hypot(*distances(cell, setting)))
    if max(distances(nearest, setting)) > 1:
        return None
    return nearest


def distances(cell: MapCell, setting: Setting) -> tuple[float, float, float]:
    """The distances of a setting from a cell in each of the three numbers, in units."""
    cell_setting = cell.setting
    return (
        abs(setting.labels_apart - cell_setting.labels_apart) / LABEL_UNIT,
        _doublings(setting.steps_per_example, cell_setting.steps_per_example),
        _doublings(setting.clients_share, cell_setting.clients_share),
    )


def _doublings(first: float, second: float) -> float:
    """How many factors of two lie between two numbers; infinite if one of them is 0."""
    if first <= 0 or second <= 0:
        return math.inf
    return abs(math.log2(first / second))


def explain_maps(screen: Console, prepared: Prepared) -> None:
    """Print the lines of ``fedstill explain`` on the maps that ship."""
    setting = None
    # The maps' data set, digits, consists of images.
    if prepared.dataset.about.kind == "image":
        setting = setting_of(prepared)
    if setting is None:
        return
    for line in map_lines(shipped_maps(), prepared.settings.named.method.name, setting):
        screen.print(line)


def map_lines(maps: Mapping[str, MethodMap], method: str, setting: Setting) -> Iterator[str]:
    """Lines on the cell nearest to a setting: the gain of the run's method, or, if that has no map,
    the methods that helped most.

    Nothing if no cell is near enough.
    """
    cells = {}
    for name, method_map in maps.items():
        cell = nearest_cell(method_map, setting)
        if cell is not None:
            cells[name] = cell
    if not cells:
        return
    nearest = cells.get(method) or next(iter(cells.values()))
    yield f"map: {_cell_sentence(nearest, setting)}"
    if method in cells:
        yield f"map: {_gain_sentence(maps[method], nearest)}"
    else:
        yield f"map: {_best_methods(maps, cells, nearest)}"


def _cell_sentence(cell: MapCell, setting: Setting) -> str:
    """The nearest cell, and its setting beside that of the run ("here")."""
    of_cell = cell.setting
    divergence = f"{of_cell.labels_apart:.2f} (here {setting.labels_apart:.2f})"
    steps = (
        f"{of_cell.steps_per_example:.3g} local steps per example "
        f"(here {setting.steps_per_example:.3g})"
    )
    clients = (
        f"{100 * of_cell.clients_share:.0f} % of clients per round "
        f"(here {100 * setting.clients_share:.0f} %)"
    )
    return (
        f"the nearest cell of the ranking's maps (digits) is {cell.name}: label divergence "
        f"{divergence}, {steps}, {clients}. FedAvg reached {100 * cell.floor_accuracy:.1f} % there."
    )


def _gain_sentence(method_map: MethodMap, cell: MapCell) -> str:
    verdicts = {
        1: "it helped with all seeds",
        -1: "it hurt with all seeds",
        0: "the sign depends on the seed",
    }
    return (
        f"{method_map.row} was {100 * cell.gain:+.1f} points from FedAvg there "
        f"({100 * min(cell.gains):+.1f} to {100 * max(cell.gains):+.1f}): {verdicts[cell.sign]}."
    )


def _best_methods(
    maps: Mapping[str, MethodMap], cells: Mapping[str, MapCell], nearest: MapCell
) -> str:
    """A sentence on the methods with the largest gains in a cell."""
    gains = {
        name: cell.gain
        for name, cell in cells.items()
        if cell.sign > 0 and cell.values == nearest.values
    }
    if not gains:
        rows = ", ".join(maps[name].row for name in cells)
        return f"none of {rows} was above FedAvg there with all seeds."
    best = sorted(gains, key=lambda name: -gains[name])[:MAX_METHODS_NAMED]
    texts = ", ".join(f"{maps[name].row} {100 * gains[name]:+.1f}" for name in best)
    return f"the largest gains there, in points over FedAvg and with all seeds: {texts}."


# ---- maps as files -------------------------------------------------------------------------------

SHIPPED_METHODS = {
    "fedntd": "FedNTD",
    "fedadkd": "FedADKD",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fedlc": "FedLC",
    "fedsol": "FedSOL",
}
"""The methods whose maps ship, with their names on the page; all in the tier digits."""


def map_text(method_map: MethodMap) -> str:
    """A map as CSV: a line for each run of the method and of the floor, with its cell, its score,
    and the setting of the floor's run.
    """
    head = ["method", *method_map.axes, "seed", *SCORE_FIELDS, *SETTING_FIELDS]
    lines: list[list[str]] = []
    for cell in method_map.cells:
        lines += _cell_lines(method_map.row, cell, cell.scores)
        lines += _cell_lines(method_map.floor, cell, cell.floor_scores)
    return TextTable(head, lines).csv()


def _cell_lines(row: str, cell: MapCell, scores: Mapping[int, Score]) -> Iterator[list[str]]:
    for seed, score in scores.items():
        values = [str(value) for value in cell.values.values()]
        numbers = [*score.table.values()]
        if seed in cell.settings:
            numbers += astuple(cell.settings[seed])
        else:
            numbers += [math.nan] * len(SETTING_FIELDS)
        yield [row, *values, str(seed), *map(in_full, numbers)]


Lines = Mapping[int, Mapping[str, str]]
"""The lines of a map's file for one row in one cell, by seed."""


def parse_map(text: str) -> MethodMap:
    """A map from the text of ``map_text``. Raises CorruptFile if it is malformed or lacks a run."""
    lines: dict[tuple[str, ...], dict[str, dict[int, dict[str, str]]]] = {}
    reader = csv.DictReader(io.StringIO(text))
    try:
        head = list(reader.fieldnames or ())
        axes = head[1 : head.index("seed")]
        for line in reader:
            in_cell = lines.setdefault(tuple(line[key] for key in axes), {})
            in_cell.setdefault(line["method"], {})[int(line["seed"])] = line
        # The first cell has the method, then the floor.
        row, floor = dict.fromkeys(itertools.chain.from_iterable(lines.values()))
        cells = []
        for values, in_cell in lines.items():
            cell_values = dict(zip(axes, values, strict=True))
            cells.append(_parse_cell(cell_values, in_cell[row], in_cell[floor]))
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptFile(
            f"this is not a map's table of runs: {type(error).__name__}: {error}"
        ) from error
    values_by_axis = {key: list(dict.fromkeys(cell.values[key] for cell in cells)) for key in axes}
    return MethodMap(row, values_by_axis, cells, floor)


def _parse_cell(values: Mapping[str, str], lines: Lines, floor_lines: Lines) -> MapCell:
    if not lines or lines.keys() != floor_lines.keys():
        cell = ", ".join(values.values())
        raise ValueError(f"cell {cell}: the seeds of the method and of the floor differ")
    settings = {}
    for seed, line in floor_lines.items():
        if line[SETTING_FIELDS[0]]:  # empty for runs without a setting
            numbers = [float(line[name]) for name in SETTING_FIELDS]
            settings[seed] = Setting(*numbers)
    return MapCell(
        values={key: _parse_value(value) for key, value in values.items()},
        scores={seed: Score.from_texts(line) for seed, line in lines.items()},
        floor_scores={seed: Score.from_texts(line) for seed, line in floor_lines.items()},
        settings=settings,
    )


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def shipped_maps() -> dict[str, MethodMap]:
    """The maps in the package by a method's registered name, in the order of ``SHIPPED_METHODS``.

    Maps of other methods follow.
    """
    folder = _map_folder()
    if not folder.is_dir():
        return {}
    names = {path.stem for path in folder.iterdir()}
    order = [name for name in SHIPPED_METHODS if name in names]
    order += sorted(names - set(SHIPPED_METHODS))
    texts = {name: (folder / f"{name}.csv").read_text(encoding="utf-8") for name in order}
    return {name: parse_map(text) for name, text in texts.items()}


def ship_map(method_map: MethodMap, method: str) -> Path:
    """Write a map to the package and return its path."""
    folder = _map_folder()
    make_folder(folder)
    path = folder / f"{method}.csv"
    write_whole(path, map_text(method_map).encode())
    return path


def _map_folder() -> Path:
    return Path(str(resources.files("fedstill") / "recipes")) / RANKING / "maps"
