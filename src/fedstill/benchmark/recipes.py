"""Recipes: a paper's table as a TOML file, with the settings of every cell and the published
numbers.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedstill.config.experiment import from_tree
from fedstill.config.overrides import COMMAND_LINE
from fedstill.core.errors import ConfigError, UnknownName
from fedstill.running.compare import Variant, seeded

Cell = tuple[str, str]
"""A cell of a table: its row and its column."""

RANKING = "rank"
"""The folder of the ranking's suites, which have no published numbers."""

RECIPE_KEYS = {"paper", "common", "columns", "rows", "published"}
"""The keys of every recipe; ``measures`` and ``starts`` are optional."""

DEFAULT_MEASURES = ("accuracy", "forgetting")
"""The keys of a run's summary that a cell prints if the recipe has no ``measures``."""

STRUCTURED_KEYS = ("measured", "clients")
"""The keys of a published cell that are not numbers in percent."""

ONLY = "only"
"""The key of a row that lists the columns in which it has a cell; by default, all."""


@dataclass(frozen=True)
class Published:
    """The numbers that a paper prints in one cell.

    ``values``: in percent, by measure; ``spread`` is the deviation of the first measure.
    ``measured``: further numbers, by ``measure/key/key`` as a journal nests them.
    ``clients``: one number for each client, by kind; ``private`` is compared with
    ``private_by_client`` in a run's summary.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    clients: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A table with rows (usually methods) and columns (settings).

    Rows and columns are parts of a config, on top of ``common``. If both set a table, the row's
    counts; only in ``[method]`` do a column's fields extend the row's.
    ``starts``: further runs by name; cells with ``start_from = "NAME"`` start from their models.
    ``only``: by row, the columns in which it has a cell, if these are not all.
    ``base``: the folder that paths are relative to; by default, the working directory.
    """

    name: str
    paper: str
    common: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]
    columns: Mapping[str, Mapping[str, Any]]
    published: Mapping[Cell, Published]
    measures: tuple[str, ...] = DEFAULT_MEASURES
    starts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    base: Path | None = None

    def published_in(self, cell: Cell) -> Published:
        """The paper's numbers in a cell; empty if it prints none."""
        return self.published.get(cell, Published())

    def cells(self, patterns: Sequence[str] = ()) -> list[Cell]:
        """The cells that match any of the patterns ``ROW:COLUMN``; all cells if there is none.

        Patterns may contain ``*`` and ``?``. Raises UnknownName for one that matches nothing.
        """
        pairs = itertools.product(self.columns, self.rows)
        cells = [
            (row, column) for column, row in pairs if column in self.only.get(row, self.columns)
        ]
        if not patterns:
            return cells
        # The keys of a dictionary: each cell once, in order.
        selected: dict[Cell, None] = {}
        for pattern in patterns:
            matching = [cell for cell in cells if _matches(cell, pattern)]
            if not matching:
                known = [f"{row}:{column}" for row, column in cells]
                raise UnknownName("cell", pattern, known, place=self.name)
            selected.update(dict.fromkeys(matching))
        return list(selected)

    def with_row(self, cells: Sequence[Cell], row: str) -> list[Cell]:
        """Some cells, and those of a row in the same columns, each once."""
        columns = {column for _, column in cells}
        added = [(r, column) for r, column in self.cells() if r == row and column in columns]
        return list(dict.fromkeys([*cells, *added]))

    def variants(
        self, cells: Sequence[Cell], seeds: Sequence[int], changes: Mapping[str, Any], out: Path
    ) -> list[Variant]:
        """The runs of some cells.

        ``changes``: by dotted key, values that replace the recipe's (a smaller size, other data).
        If a cell starts from another run, ``rounds`` is the number of rounds of that run: the
        visit after it keeps its length.
        """
        return [
            self._variant(cell, seed, changes, out)
            for cell, seed in itertools.product(cells, seeds)
        ]

    def _variant(self, cell: Cell, seed: int, changes: Mapping[str, Any], out: Path) -> Variant:
        row, column = cell
        tree = self._config(cell)
        start = None
        cell_changes = dict(changes)
        if tree.get("start_from"):
            start = self._start(tree["start_from"], seed, changes, out)
            cell_changes.pop("rounds", None)
            cell_changes["start_from"] = str(start.folder)
        experiment = from_tree(tree, {}, self.base).with_values(cell_changes, COMMAND_LINE)
        variant = seeded(f"{row} | {column}", experiment, seed, self.run_folder(cell, out))
        return replace(variant, after=start)

    def run_folder(self, cell: Cell, out: Path) -> Path:
        """The folder of a cell's runs."""
        row, column = cell
        return _folder(out, f"{column} {row}")

    def _config(self, cell: Cell) -> dict[str, Any]:
        """The config of a cell."""
        row, column = cell
        config = {**self.common, **self.columns[column], **self.rows[row]}
        column_fields = self.columns[column].get("method")
        if column_fields:
            method = self.rows[row].get("method", {})
            if isinstance(method, str):
                method = {"name": method}
            config["method"] = {**column_fields, **method}
        return config

    def _start(self, name: str, seed: int, changes: Mapping[str, Any], out: Path) -> Variant:
        """The run from whose model a cell starts."""
        if name not in self.starts:
            raise UnknownName("start", name, self.starts, place=self.name)
        experiment = from_tree({**self.common, **self.starts[name]}, {}, self.base)
        changed = experiment.with_values(changes, COMMAND_LINE)
        return seeded(f"start {name}", changed, seed, _folder(out, f"start {name}"))

    def folder(self, changes: Mapping[str, Any]) -> Path:
        """The default folder of the runs, a different one for each set of changes."""
        folder = Path("runs") / self.name.replace("/", "-")
        if not changes:
            return folder
        # Dates and times of TOML have no form in JSON.
        text = json.dumps(dict(changes), sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:6]
        return folder.with_name(f"{folder.name}-reduced-{key}")


def _matches(cell: Cell, pattern: str) -> bool:
    row, _, column = pattern.partition(":")
    return _like(cell[0], row) and _like(cell[1], column or "*")


def _like(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name.lower(), pattern.strip().lower())


def _folder(out: Path, label: str) -> Path:
    return out / label.replace("/", "-").replace(":", "-").replace(" ", "_")


# ---- reading recipes -----------------------------------------------------------------------------


def recipe_names() -> list[str]:
    """The names of all recipes, ``paper/table``."""
    names = []
    for folder in (resources.files("fedstill") / "recipes").iterdir():
        is_paper = folder.is_dir() and not folder.name.startswith("_") and folder.name != RANKING
        if is_paper:
            names += [f"{folder.name}/{table}" for table in _tables(folder)]
    return sorted(names)


def _tables(folder: Traversable) -> list[str]:
    files = [file.name for file in folder.iterdir()]
    return [name.removesuffix(".toml") for name in files if name.endswith(".toml")]


def load_recipe(name: str) -> Recipe:
    """A recipe by its name.

    Raises UnknownName, with the most similar name, and ConfigError for a malformed file.
    """
    if name not in recipe_names():
        raise UnknownName("recipe", name, recipe_names())
    tree = tomllib.loads(recipe_text(name))
    if set(tree) - {"measures", "starts"} != RECIPE_KEYS:
        raise ConfigError(
            f"recipe {name}: it has the keys {sorted(tree)} and must have {sorted(RECIPE_KEYS)}"
        )
    return parse_recipe(name, tree)


def recipe_text(name: str) -> str:
    """The text of ``recipes/NAME.toml``."""
    parts = f"{name}.toml".split("/")
    return resources.files("fedstill").joinpath("recipes", *parts).read_text(encoding="utf-8")


def parse_recipe(name: str, tree: Mapping[str, Any]) -> Recipe:
    """A recipe from its tables; ``published`` may be missing.

    Raises ConfigError for a published number of an unknown measure, and for a row that is limited
    to an unknown column.
    """
    measures = tuple(tree.get("measures", DEFAULT_MEASURES))
    rows: dict[str, dict[str, Any]] = {}
    only: dict[str, Sequence[str]] = {}
    for row, table in tree["rows"].items():
        rows[row] = {key: value for key, value in table.items() if key != ONLY}
        if ONLY in table:
            only[row] = table[ONLY]
    unknown = sorted(set(itertools.chain.from_iterable(only.values())) - set(tree["columns"]))
    if unknown:
        raise ConfigError(f"recipe {name}: a row is limited to an unknown column {unknown[0]!r}")
    return Recipe(
        name=name,
        paper=tree["paper"],
        common=tree["common"],
        rows=rows,
        columns=tree["columns"],
        published=_published(name, tree.get("published", {}), measures),
        measures=measures,
        starts=tree.get("starts", {}),
        only=only,
    )


def _published(
    recipe: str, tables: Mapping[str, Mapping[str, Mapping[str, Any]]], measures: Sequence[str]
) -> dict[Cell, Published]:
    published: dict[Cell, Published] = {}
    for row, columns in tables.items():
        for column, numbers in columns.items():
            unknown = sorted(set(numbers) - {*measures, "spread", *STRUCTURED_KEYS})
            if unknown:
                raise ConfigError(
                    f"recipe {recipe}, {row}:{column}: {unknown[0]!r} is not one of its measures"
                )
            values = {key: value for key, value in numbers.items() if key not in STRUCTURED_KEYS}
            published[row, column] = Published(
                values=values,
                measured=numbers.get("measured", {}),
                clients=numbers.get("clients", {}),
            )
    return published
