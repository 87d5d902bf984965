"""Maps: a method's gain over the suite's floor, cell by cell, and maps as files."""

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
from fedstill.benchmark.scoring import NUMBERS, Do, Ended, Score, ended
from fedstill.benchmark.suites import Suite
from fedstill.config.named_tables import NAME_KEYS, resolved_name
from fedstill.core import registry
from fedstill.core.errors import ConfigError, CorruptFile, UnknownName
from fedstill.core.files import make_folder, write_whole
from fedstill.core.labels import distance, proportions
from fedstill.core.records import SERVER
from fedstill.report.table_files import csv_text
from fedstill.running.compare import Variant
from fedstill.running.explain import local_steps
from fedstill.running.preparation import Prepared, prepare

# Where a run stands among the cells of a map: how uneven its clients are, how long each trains, how
# many take part.


@dataclass(frozen=True)
class Setting:
    """Three numbers of a run with one round trip and no tasks.

    ``labels_apart``: the Jensen-Shannon divergence of a client's labels from those of all clients
    together, in nats (0 to 0.69), the mean over clients. ``steps_per_example``: the optimiser's
    steps of a client's round over its number of examples, the mean over clients. ``clients_share``:
    of all clients, those that take part in a round.
    """

    labels_apart: float
    steps_per_example: float
    clients_share: float


SETTING = tuple(f.name for f in fields(Setting))
"""The names of the three, in order."""


def setting_of(prepared: Prepared) -> Setting | None:
    """Where a run stands; None where it is another kind of run: a chain, tasks, public logits, data
    held elsewhere.
    """
    sites, world = prepared.sites, prepared.world
    acting = [
        s for s in prepared.settings.schedule(1, world) if any(c != SERVER for c in s.clients)
    ]
    if (
        sites.split is None
        or sites.tasks is not None
        or len(acting) != 1
        or acting[0].sequential
        or acting[0].view == "public"
        or acting[0].name not in world.plans
    ):
        return None
    table = sites.split.label_table(sites.train.labels, len(prepared.dataset.classes)).numpy()
    table = table[table.sum(axis=1) > 0]
    if not len(table):
        return None
    sizes = [int(size) for size in table.sum(axis=1)]
    apart = distance(proportions(table), proportions(table.sum(axis=0)), "js")
    pace = [local_steps(prepared, acting[0], size) / size for size in sizes]
    return Setting(
        float(apart.mean()), float(np.mean(pace)), len(acting[0].clients) / world.clients
    )


# Where a method helps: its gain over the suite's floor in points, cell by cell, with the fields it
# ships with.


SEEDS = (0, 1, 2)

EVEN = "even"
"""The value of partition.alpha that stands for a split without any skew."""

AXES: Mapping[str, tuple[Any, ...]] = {
    "partition.alpha": (0.05, 0.1, 0.5, EVEN),
    "plan.epochs": (1, 3, 10),
    "topology.sampled": (2, 5, 20),
}
"""What varies where nobody says otherwise: how uneven, how long alone, how many together."""

MOST_CELLS = 200


@dataclass(frozen=True)
class MapCell:
    """One setting: its values by key, the method's and the floor's scores by seed, and where the
    floor's runs stand.
    """

    values: Mapping[str, Any]
    ours: Mapping[int, Score]
    theirs: Mapping[int, Score]
    settings: Mapping[int, Setting] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its values, as people read them."""
        return _name(self.values)

    @property
    def setting(self) -> Setting:
        """The mean over seeds of where it stands."""
        return Setting(
            *map(statistics.fmean, zip(*map(astuple, self.settings.values()), strict=True))
        )

    @property
    def gains(self) -> list[float]:
        """The difference in accuracy, seed by seed."""
        return [self.ours[s].accuracy - self.theirs[s].accuracy for s in sorted(self.ours)]

    @property
    def gain(self) -> float:
        """Its mean."""
        return statistics.fmean(self.gains)

    @property
    def floor(self) -> float:
        """The floor's own accuracy, the mean over seeds."""
        return statistics.fmean(score.accuracy for score in self.theirs.values())

    @property
    def shown(self) -> str:
        """The gain in points, with a ~ where not all seeds say the same."""
        return f"{'' if self.sign else '~'}{100 * self.gain:+.1f}"

    @property
    def sign(self) -> int:
        """1 where the method is above the floor on every seed, -1 where it is below on every seed,
        0 else.
        """
        return int(min(self.gains) > 0) - int(max(self.gains) < 0)


@dataclass(frozen=True)
class Grid:
    """The cells of a map, and the axes that they are on, rows, columns and panels in this order.

    ``against``: the row over which the gains are.
    """

    row: str
    axes: Mapping[str, Sequence[Any]]
    cells: Sequence[MapCell]
    against: str = "FedAvg"

    @property
    def summary(self) -> str:
        """How often it helps and hurts, and where most, over what, in a sentence."""
        helps, hurts = (sum(cell.sign == s for cell in self.cells) for s in (1, -1))
        best = max(self.cells, key=lambda cell: cell.gain)
        many = len(self.cells)
        return (
            f"{self.row} helps in {helps} of {many} cells and hurts in {hurts}, on all seeds. In "
            f"{many - helps - hurts} cells the seeds disagree. It helps most at {best.name}: "
            f"{100 * best.gain:+.1f} points over {self.against} at {100 * best.floor:.1f} %"
        )


def row_to_map(suite: Suite, name: str) -> tuple[Suite, str]:
    """The suite and one of its rows; a method that has none gets one, with its documented defaults,
    nothing chosen.

    ``name``: a row's, a registered method's, or a method's file. Raises UnknownName for what is
    none of these.
    """
    own_file = name.partition(":")[0].endswith(".py")
    try:
        return suite, suite.row_named(name)
    except UnknownName:
        known = [*suite.recipe.rows, *registry.names("method")]
        if not own_file and name.lower() not in known:
            raise UnknownName("method", name, known) from None
    method = resolved_name("method", name if own_file else name.lower(), None)
    entry = registry.lookup("method", method)
    called = entry.name if entry.preset else getattr(entry.target, "__name__", entry.name)
    row = entry.name if called in suite.recipe.rows else called
    return suite.with_defaults(row, method), row


def grid_of(suite: Suite, row: str, axes: Mapping[str, Sequence[Any]], out: Path, do: Do) -> Grid:
    """The map of a row, when its runs are done; the same call goes on where it was stopped.

    Fields are those chosen in the suite, or the documented ones where nothing is tried; the floor's
    learning rate. Raises ConfigError for too many cells, or values that cannot be run.
    """
    each = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if len(each) > MOST_CELLS:
        raise ConfigError(f"these axes have {len(each)} cells; {MOST_CELLS} is the most")
    named = {_name(cell): cell for cell in each}
    if row == suite.floor:
        raise ConfigError(f"a map shows the gain over {suite.floor}; name another method")
    _refuse_axes_of_rows(suite, row, axes)
    columns = {name: _column(suite, cell) for name, cell in named.items()}
    recipe = replace(suite.recipe, columns=columns, only={})
    runs = {who: _runs(suite, recipe, who, axes, out) for who in (suite.floor, row)}
    prepare(runs[row][0].settings)  # refuses now what does not fit
    standing = _standing(runs[suite.floor])
    done = ended([run for own in runs.values() for run in own], do)
    scores = {who: _by_cell([one for one in done if one.run in own]) for who, own in runs.items()}
    ours, theirs = scores[row], scores[suite.floor]
    return Grid(
        row,
        axes,
        [MapCell(cell, ours[n], theirs[n], standing[n]) for n, cell in named.items()],
        suite.floor,
    )


def _refuse_axes_of_rows(suite: Suite, row: str, axes: Iterable[str]) -> None:
    """Raise ConfigError for a key that the map or a row sets itself, so that cells would not differ
    in it.
    """
    if "seed" in axes:
        raise ConfigError("--grid seed: each cell of a map has the same seeds; leave it out")
    for name in (suite.floor, row):
        tables = set(suite.recipe.rows[name]) - {"method"}
        fields = {f"method.{field}" for field in suite.method(name)}
        for key in axes:
            if key == "method" or key in fields or key.partition(".")[0] in tables:
                raise ConfigError(
                    f"--grid {key}: row {name} of {suite.name} sets it itself; choose another axis"
                )


def _runs(
    suite: Suite, recipe: Recipe, row: str, axes: Collection[str], out: Path
) -> list[Variant]:
    chosen = {k: v for k, v in suite.settings_chosen(row).items() if k != "plan.lr"}
    rate = {k: v for k, v in suite.settings_chosen(suite.floor).items() if k == "plan.lr"}
    changes = {key: value for key, value in {**chosen, **rate}.items() if key not in axes}
    return recipe.variants([(row, column) for column in recipe.columns], SEEDS, changes, out)


def _standing(runs: Iterable[Variant]) -> dict[str, dict[int, Setting]]:
    """Where the runs of each cell stand, by seed; nothing of those that have tasks, for example."""
    where: dict[str, dict[int, Setting]] = {}
    for run in runs:
        own = where.setdefault(run.label.partition(" | ")[2], {})
        if there := setting_of(prepare(run.settings)):
            own[run.seed] = there
    return where


def _by_cell(runs: Sequence[Ended]) -> dict[str, dict[int, Score]]:
    scores: dict[str, dict[int, Score]] = {}
    for one in runs:
        scores.setdefault(column_of(one.run), {})[one.run.seed] = one.score
    return scores


def _name(cell: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in cell.items())


def _column(suite: Suite, cell: Mapping[str, Any]) -> dict[str, Any]:
    """The tables that a cell sets, over those of the suite's column of choosing."""
    column = {**suite.recipe.common, **suite.recipe.columns[suite.column]}
    own: dict[str, Any] = {"partition": dict(column["partition"])}
    for dotted, value in cell.items():
        table, _, key = dotted.partition(".")
        if dotted == "partition.alpha" and value == EVEN:
            own["partition"] = {"kind": "iid"}
        elif not key:
            own[table] = value
        else:
            own[table] = {**_as_table(table, own.get(table, column.get(table, {}))), key: value}
    return own


def _as_table(table: str, value: Any) -> Mapping[str, Any]:
    """A table of a column, which may be written as the name in it."""
    if isinstance(value, str) and table in NAME_KEYS:
        return {NAME_KEYS[table]: value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"--grid {table}: it is a value, not a table; leave out what follows it")
    return value


# The cell of a map that is nearest to a setting, and what maps say there.


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


def explain_maps(screen: Console, prepared: Prepared) -> None:
    """Print what ``fedstill explain`` says of a run from the maps that ship."""
    setting = None
    if prepared.dataset.about.kind == "image":  # as the maps' digits are
        setting = setting_of(prepared)
    for line in told_of_maps(shipped_maps(), prepared.settings.named.method.name, setting):
        screen.print(line)


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


# A map as a file: a line a run, with all digits; and the maps that ship.


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
