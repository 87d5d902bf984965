"""Where a method helps: its gain over the suite's floor in points, cell by cell, with the fields it
ships with.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedstill import registry
from fedstill.errors import ConfigError, UnknownName
from fedstill.experiment.comparing.recipes import Recipe
from fedstill.experiment.comparing.variants import Variant
from fedstill.experiment.config.named_tables import resolved_name
from fedstill.experiment.preparing.prepared import prepare
from fedstill.experiment.ranking.carried_out import Do, Ended, ended
from fedstill.experiment.ranking.cell_settings import Setting, setting_of
from fedstill.experiment.ranking.entries import column_of
from fedstill.experiment.ranking.scoring import Score
from fedstill.experiment.ranking.suites import Suite

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
            f"{self.row} helps in {helps} of {many} cells and hurts in {hurts}, on all seeds; in "
            f"{many - helps - hurts} they do not all say the same; most at {best.name}: "
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
    columns = {name: _column(suite, cell) for name, cell in named.items()}
    recipe = replace(suite.recipe, columns=columns, only={})
    runs = {who: _runs(suite, recipe, who, list(columns), out) for who in (suite.floor, row)}
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


def _runs(
    suite: Suite, recipe: Recipe, row: str, columns: Sequence[str], out: Path
) -> list[Variant]:
    chosen = {k: v for k, v in suite.settings_chosen(row).items() if k != "plan.lr"}
    rate = {k: v for k, v in suite.settings_chosen(suite.floor).items() if k == "plan.lr"}
    return recipe.variants([(row, column) for column in columns], SEEDS, {**chosen, **rate}, out)


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
        scores.setdefault(column_of(one), {})[one.run.seed] = one.score
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
            own[table] = {**own.get(table, column.get(table, {})), key: value}
    return own
