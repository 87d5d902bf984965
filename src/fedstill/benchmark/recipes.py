"""Recipes: a paper's table as a file, with the setting of every cell and the number that was
published.
"""

from __future__ import annotations

import fnmatch
import hashlib
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

TOP = {"paper", "common", "columns", "rows", "published"}

RANKING = "rank"
"""The folder of the ranking's suites, which have no published numbers and are no papers' tables."""
USUAL = ("accuracy", "forgetting")
"""What a cell prints, if the recipe does not say other ``measures``: keys of a run's summary."""


BESIDE_VALUES = ("measured", "clients")
"""What a cell may hold beside its numbers in percent."""

ONLY = "only"
"""The key of a row beside its setting: the columns in which it has a meaning; all, if it is left
out.
"""


@dataclass(frozen=True)
class Published:
    """What a paper prints in a cell: ``values`` in percent by the recipe's measures, ``spread``
    that of the first.

    ``measured``: numbers of measures, as they are, by ``measure/key/key`` of what the journal
    holds.
    ``clients``: a number for each client, by what is measured (``private``: a run's
    ``private_by_client``).
    """

    values: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    clients: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A table: rows (methods, mostly) × columns (settings), each a part of a config, over what all
    have in common.

    Of two that have the same table the row's stands; but of ``[method]`` a column may set fields of
    the rows' methods.
    ``starts``: further runs by name, from whose models the cells start that say
    ``start_from = "NAME"``.
    """

    name: str
    paper: str
    common: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]
    columns: Mapping[str, Mapping[str, Any]]
    published: Mapping[tuple[str, str], Published]
    measures: tuple[str, ...] = USUAL
    starts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def cells(self, patterns: Sequence[str] = ()) -> list[tuple[str, str]]:
        """(row, column) of the cells that match any ``ROW:COLUMN`` pattern (``*`` and ``?``), all
        if there is none.

        Raises UnknownName for a pattern that matches nothing.
        """
        every = [
            (r, c) for c in self.columns for r in self.rows if c in self.only.get(r, self.columns)
        ]
        matching: dict[tuple[str, str], None] = {}
        for pattern in patterns or ("*:*",):
            row, _, column = pattern.partition(":")
            wanted = [(r, c) for r, c in every if _like(r, row) and _like(c, column or "*")]
            if not wanted:
                raise UnknownName("cell", pattern, [f"{r}:{c}" for r, c in every], where=self.name)
            matching.update(dict.fromkeys(wanted))
        return list(matching)

    def with_row(self, cells: Sequence[tuple[str, str]], row: str) -> list[tuple[str, str]]:
        """Some cells, and those of a row in the same columns, each once."""
        columns = {column for _, column in cells}
        return list(
            dict.fromkeys([*cells, *((r, c) for r, c in self.cells() if r == row and c in columns)])
        )

    def variants(
        self,
        cells: Sequence[tuple[str, str]],
        seeds: Sequence[int],
        changes: Mapping[str, Any],
        out: Path,
    ) -> list[Variant]:
        """The runs of some cells; ``changes`` are dotted keys over the recipe's (a reduced size,
        other data).

        Other ``rounds`` are those of the run that a cell starts from, if it does: a visit stays as
        long as it is.
        """
        runs = []
        for row, column in cells:
            tree = self._tree(row, column)
            folder = _folder(out, f"{column} {row}")
            for seed in seeds:
                start = tree.get("start_from", "")
                after = self._start(start, seed, changes, out) if start else None
                own = {k: v for k, v in changes.items() if after is None or k != "rounds"}
                own |= {"start_from": str(after.folder)} if after else {}
                experiment = from_tree(tree, {}, None).with_values(own, COMMAND_LINE)
                runs.append(
                    replace(seeded(f"{row} | {column}", experiment, seed, folder), after=after)
                )
        return runs

    def _tree(self, row: str, column: str) -> dict[str, Any]:
        """The config of a cell."""
        tree = {**self.common, **self.columns[column], **self.rows[row]}
        fields, method = self.columns[column].get("method", {}), self.rows[row].get("method", {})
        named = {"name": method} if isinstance(method, str) else method
        return {**tree, "method": {**fields, **named}} if fields else tree

    def _start(self, name: str, seed: int, changes: Mapping[str, Any], out: Path) -> Variant:
        if name not in self.starts:
            raise UnknownName("start", name, self.starts, where=self.name)
        experiment = from_tree({**self.common, **self.starts[name]}, {}, None)
        changed = experiment.with_values(changes, COMMAND_LINE)
        return seeded(f"start {name}", changed, seed, _folder(out, f"start {name}"))

    def folder(self, changes: Mapping[str, Any]) -> Path:
        """The default folder of its runs: one for every reduced size."""
        base = Path("runs") / self.name.replace("/", "-")
        if not changes:
            return base
        key = hashlib.sha256(json.dumps(dict(changes), sort_keys=True).encode()).hexdigest()[:6]
        return base.with_name(f"{base.name}-reduced-{key}")


def recipe_names() -> list[str]:
    """The recipes there are, as ``paper/table``."""
    root = resources.files("fedstill.recipes")
    folders = [
        f for f in root.iterdir() if f.is_dir() and not f.name.startswith("_") and f.name != RANKING
    ]
    return sorted(
        f"{f.name}/{t.name.removesuffix('.toml')}"
        for f in folders
        for t in f.iterdir()
        if _is_toml(t)
    )


def load_recipe(name: str) -> Recipe:
    """A recipe by its name; raises UnknownName with the nearest one, ConfigError for a file that is
    no recipe.
    """
    if name not in recipe_names():
        raise UnknownName("recipe", name, recipe_names())
    tree = tomllib.loads(recipe_text(name))
    if set(tree) - {"measures", "starts"} != TOP:
        raise ConfigError(f"recipe {name}: it has {sorted(tree)}, and must have {sorted(TOP)}")
    return recipe_of(name, tree)


def recipe_text(name: str) -> str:
    """The text of ``recipes/NAME.toml``."""
    return (
        resources.files("fedstill.recipes")
        .joinpath(*f"{name}.toml".split("/"))
        .read_text(encoding="utf-8")
    )


def recipe_of(name: str, tree: Mapping[str, Any]) -> Recipe:
    """A recipe from its tables; ``published`` may be left out. Raises ConfigError for cells and
    columns it has not.
    """
    measures = tuple(tree.get("measures", USUAL))
    published: dict[tuple[str, str], Published] = {}
    for row, cells in tree.get("published", {}).items():
        for column, cell in cells.items():
            strange = sorted(set(cell) - {*measures, "spread", *BESIDE_VALUES})
            if strange:
                raise ConfigError(
                    f"recipe {name}, {row}:{column}: {strange[0]!r} is not one of its measures"
                )
            values = {k: v for k, v in cell.items() if k not in BESIDE_VALUES}
            published[row, column] = Published(
                values, **{k: cell[k] for k in BESIDE_VALUES if k in cell}
            )
    rows = {
        row: {k: v for k, v in setting.items() if k != ONLY}
        for row, setting in tree["rows"].items()
    }
    only = {row: setting[ONLY] for row, setting in tree["rows"].items() if ONLY in setting}
    strange = sorted(
        {column for columns in only.values() for column in columns} - set(tree["columns"])
    )
    if strange:
        raise ConfigError(
            f"recipe {name}: column {strange[0]!r}, to which a row is limited, does not exist"
        )
    starts, columns = tree.get("starts", {}), tree["columns"]
    return Recipe(
        name, tree["paper"], tree["common"], rows, columns, published, measures, starts, only
    )


def _folder(out: Path, label: str) -> Path:
    return out / label.replace("/", "-").replace(":", "-").replace(" ", "_")


def _is_toml(file: Traversable) -> bool:
    return file.name.endswith(".toml")


def _like(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name.lower(), pattern.strip().lower())
