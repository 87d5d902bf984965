"""Suites of the ranking: recipes without published numbers that list the configurations to try for
each row, and the rows that serve as bounds.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from fedstill.benchmark.recipes import RANKING, Cell, Recipe, parse_recipe, recipe_text
from fedstill.core.errors import ConfigError, UnknownName
from fedstill.core.fields import CountOrZero, as_table
from fedstill.core.files import in_shell, make_folder, parse_toml, read_toml, write_whole
from fedstill.methods.fedavg import FedAvg
from fedstill.running.compare import Variant

TIERS = ("digits", "small")
"""By cost: a run takes seconds or minutes."""

TRACKS = {
    "space": "clients differ",
    "time": "the data change",
    "both": "clients differ and the data change",
    "chain": "one client after another",
    "public": "logits travel, on public images",
    "peers": "one exchange between clients",
}
"""The question that each track asks."""

TEST_SEEDS = (0, 1, 2, 3, 4)
"""The seeds of the runs that are reported."""

CHOOSING_SEEDS = (100, 101, 102)
"""The seeds of the runs that choose a configuration; none of them is reported."""

Try = Mapping[str, Any]
"""A configuration to try: values by dotted key, which replace those of a row."""

# ---- the configurations to try -------------------------------------------------------------------

MAX_TRIES = 5
"""The maximum number of configurations per method, in a suite and for a new method."""

FREE_KEYS = ("plan.lr", "stream.head")
"""The keys that a try may set besides the fields of its method."""


def checked_tries(suite: str, row: str, tries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tries of a row, with dotted keys.

    Raises ConfigError for a key that a try must not set, and for too many tries or none.
    """
    if not 1 <= len(tries) <= MAX_TRIES:
        raise ConfigError(f"{row} has {len(tries)} tries; every method has 1 to {MAX_TRIES}")
    return [_with_dotted_keys(suite, row, values) for values in tries]


def _with_dotted_keys(suite: str, row: str, values: Try) -> dict[str, Any]:
    """A try with dotted keys; a key without a dot is a field of the method."""
    dotted: dict[str, Any] = {}
    for key, value in values.items():
        dotted_key = key
        if "." not in key:
            dotted_key = f"method.{key}"
        is_field = dotted_key.startswith("method.") and dotted_key != "method.name"
        if not is_field and dotted_key not in FREE_KEYS:
            raise ConfigError(
                f"{suite}, {row}: a try sets fields of the method, {' and '.join(FREE_KEYS)}, "
                f"not {key!r}"
            )
        dotted[dotted_key] = value
    return dotted


# ---- names and folders of rows and columns -------------------------------------------------------

UNSAFE = re.compile(r"[^ -~]|[<>|`\\]|^[=+\-@]|\]\(|^ | $")
"""What names in tables and pages must not contain: all but printable ASCII, markup, formulas and
links.

Entries come from strangers. With letters of all languages, a name could look like another one.
"""


def check_printable(name: str) -> None:
    """Raise ConfigError for a name that tables and pages cannot show.

    >>> check_printable("FedNTD + ASD")
    """
    if UNSAFE.search(name):
        raise ConfigError(
            f"the name {name!r} contains a character that tables of the ranking cannot show; use "
            "letters without accents, digits and spaces, e.g. FedGap 2"
        )


def slug(name: str) -> str:
    """The folder of a row or column.

    >>> slug("ExDir 2/.5"), slug("FedNTD + ASD")
    ('exdir-2-.5', 'fedntd-+-asd')
    """
    return name.lower().replace("/", "-").replace(":", "-").replace(" ", "-")


def check_slugs(suite: str, kind: str, names: Iterable[str]) -> None:
    """Raise ConfigError if two rows or columns have the same folder: one would overwrite the other.

    >>> check_slugs("clinics", "columns", ["even", "Even"])
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ConfigError: suite clinics: the columns 'even' and 'Even' share the folder even; rename one of them
    """  # noqa: E501
    names_by_slug: dict[str, str] = {}
    for name in names:
        first_name = names_by_slug.setdefault(slug(name), name)
        if first_name != name:
            raise ConfigError(
                f"suite {suite}: the {kind} {first_name!r} and {name!r} share the folder "
                f"{slug(name)}; rename one of them"
            )


# ---- the configuration chosen for a row ----------------------------------------------------------

TIE = 0.002
"""Scores closer than this count as equal; then the try with the fewest bytes wins, then the one
with the higher score, then the first.
"""


@dataclass(frozen=True)
class Choice:
    """The results of a row's tries, from which the best try follows.

    ``scores``: by try, one accuracy for each of ``CHOOSING_SEEDS``; 0 for a run that diverged.
    ``sent``: by try, the bytes that one run sends.
    """

    scores: tuple[tuple[float, ...], ...]
    sent: tuple[int, ...]

    @property
    def best_try(self) -> int:
        """The index of the chosen try: the best mean score; among equal ones, the fewest bytes."""
        means = [statistics.fmean(seed_scores) for seed_scores in self.scores]
        highest = max(means)
        tied = [index for index, mean in enumerate(means) if mean >= highest - TIE]
        return min(tied, key=lambda index: (self.sent[index], -means[index], index))

    @property
    def table(self) -> dict[str, Any]:
        """The choice as a TOML table."""
        return {"scores": [list(seed_scores) for seed_scores in self.scores], "sent": [*self.sent]}


def read_choice(source: str, table: Any, try_count: int) -> Choice:
    """A choice from its TOML table.

    Raises ConfigError, which starts with ``source``, unless there is a valid result for each try.
    """
    try:
        scores = tuple(tuple(map(float, seed_scores)) for seed_scores in table["scores"])
        sent = tuple(map(int, table["sent"]))
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{source}: cannot read the scores of the tries: {error}") from error

    score_counts = {len(seed_scores) for seed_scores in scores}
    is_complete = len(scores) == len(sent) == try_count
    if not is_complete or score_counts != {len(CHOOSING_SEEDS)}:
        raise ConfigError(
            f"{source}: it has scores of {len(scores)} tries; it needs {len(CHOOSING_SEEDS)} "
            f"scores of each of {try_count} tries, and the bytes sent"
        )
    all_scores = list(itertools.chain.from_iterable(scores))
    if not all(0 <= score <= 1 for score in all_scores) or min(sent) < 0:
        raise ConfigError(f"{source}: scores must be from 0 to 1, and bytes sent not negative")
    return Choice(scores, sent)


def shipped_choices(
    suite: str, version: int, tries: Mapping[str, Sequence[Any]]
) -> dict[str, Choice]:
    """The choices that ship with a suite, by row; empty if none do.

    Raises ConfigError for choices of another version of the suite.
    """
    file = resources.files("fedstill") / "recipes" / RANKING / "chosen" / f"{suite}.toml"
    if not file.is_file():
        return {}
    tree = parse_toml(file.read_bytes())
    if tree.pop("version", None) != version:
        raise ConfigError(
            f"recipes/rank/chosen/{suite}.toml belongs to another version of the suite; choose the "
            "fields again"
        )
    return {
        row: read_choice(f"{suite}, {row}", table, len(tries[row]))
        for row, table in tree.items()
        if row in tries
    }


def write_choices(
    path: Path, version: int, choices: Mapping[str, Choice], fields: Mapping[str, Try]
) -> None:
    """Write choices to a file, with the chosen ``fields`` of each row for human readers."""
    tables = {row: {"fields": dict(fields[row]), **choice.table} for row, choice in choices.items()}
    head = (
        "# Written by `fedstill rank choose`. By row: the score of each try on each seed of "
        "choosing, and the bytes sent.\n"
    )
    make_folder(path.parent)
    write_whole(path, (head + tomli_w.dumps({"version": version, **tables})).encode())


# ---- suites --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suite:
    """One track in one tier. Its settings never change within a version.

    ``tries``: by row, the configurations to try; rows without tries are bounds and are not ranked.
    ``baseline``: the row that differences are taken to.
    ``floor``: the row at share 0 of the gap. ``ceilings``: the rows at share 1, at most one of them
    in each column.
    ``choosing_column``, ``choosing_rounds``: where the configurations are chosen, and over how many
    rounds (0: all); a row with its own number of rounds keeps it.
    ``rate_row``: the row whose chosen learning rate all other rows use in tries that set none;
    empty: the suite's own rate.
    ``choices``: by row, the results of its tries.
    ``choices_from``: the suite whose choices this one uses, if it does not make its own.
    ``file``: a user's file; None for a suite that ships.
    ``out``: the folder of the runs, if it is not the usual one; ``choose_command`` names it.
    """

    tier: str
    track: str
    version: int
    recipe: Recipe
    tries: Mapping[str, Sequence[Try]]
    baseline: str
    floor: str
    ceilings: tuple[str, ...]
    choosing_column: str
    choosing_rounds: int
    rate_row: str = ""
    choices: Mapping[str, Choice] = field(default_factory=dict)
    choices_from: Suite | None = None
    file: Path | None = None
    out: Path | None = None

    @property
    def name(self) -> str:
        """``TIER-TRACK``, or the stem of a user's file."""
        return "-".join(filter(None, (self.tier, self.track)))

    @property
    def title(self) -> str:
        """Tier, track and its question; for a user's suite, its name and description."""
        question = TRACKS.get(self.track)
        if question is None:
            return f"{self.name}: {self.recipe.paper}"
        return f"{self.tier}, {self.track}: {question}"

    @property
    def choosing_suite(self) -> Suite:
        """The suite in which the configurations are chosen, usually this one."""
        return self.choices_from or self

    @property
    def choose_command(self) -> str:
        """The command that chooses the configurations."""
        suite = self.choosing_suite
        if suite.file is None:
            command = f"fedstill rank choose {suite.tier} --track {suite.track}"
        else:
            command = f"fedstill rank choose {in_shell(suite.file)}"
        if self.out is not None:
            command += f" --out {in_shell(self.out)}"
        return command

    @property
    def ranked_rows(self) -> list[str]:
        """The rows that are ranked, without the bounds."""
        return [row for row in self.recipe.rows if row in self.tries]

    def columns_of(self, row: str) -> list[str]:
        """The columns in which a row has a cell."""
        return [column for cell_row, column in self.recipe.cells() if cell_row == row]

    def find_row(self, name: str) -> str:
        """A row by its name or by its method's name, in any case. Raises UnknownName."""
        if name.lower() not in self._rows_by_name:
            raise UnknownName("row", name, self.recipe.rows, place=self.name)
        return self._rows_by_name[name.lower()]

    def find_rows(self, names: Sequence[str]) -> list[str]:
        """Rows by name, from an option that was split at commas. Raises UnknownName.

        The name of a row may contain commas, so adjacent parts are joined where that gives a row.
        """
        rows = []
        remaining = list(names)
        while remaining:
            count = self._parts_of_first_name(remaining)
            rows.append(self.find_row(", ".join(remaining[:count])))
            remaining = remaining[count:]
        return rows

    def _parts_of_first_name(self, parts: Sequence[str]) -> int:
        for count in range(len(parts), 1, -1):
            if ", ".join(parts[:count]).lower() in self._rows_by_name:
                return count
        return 1

    @cached_property
    def _rows_by_name(self) -> dict[str, str]:
        rows = {row.lower(): row for row in self.recipe.rows}
        # If two rows have the same method, its name stands for the first of them.
        for row in reversed(self.ranked_rows):
            rows[self.method_of(row)["name"]] = row
        return rows

    def method_of(self, row: str) -> dict[str, Any]:
        """The table ``[method]`` of a row: the name and the fields that it sets."""
        method = self.recipe.rows[row].get("method", {})
        if isinstance(method, str):
            return {"name": method}
        return dict(method)

    def chosen_fields(self, row: str) -> Try:
        """The configuration chosen for a row; empty for a bound.

        Raises ConfigError if none has been chosen yet.
        """
        if row not in self.tries:
            return {}
        if row not in self.choices:
            raise ConfigError(
                f"{self.name}: nothing has been chosen for {row} yet; run {self.choose_command}"
            )
        return self.tries_of(row)[self.choices[row].best_try]

    def tries_of(self, row: str) -> Sequence[Try]:
        """The configurations to try for a row, with the learning rate chosen for ``rate_row``.

        Without it, a row that tries learning rates would be compared with rows that cannot.
        Raises ConfigError if that rate has not been chosen yet.
        """
        if not self.rate_row or row == self.rate_row:
            return self.tries[row]
        return self._tries_with_rate_of(row, self.chosen_fields(self.rate_row))

    def possible_tries(self, row: str) -> list[Sequence[Try]]:
        """The lists of tries that a row may have: one for each learning rate that may be chosen for
        ``rate_row``. There is only one if this choice is known, or if rates are not shared.
        """
        shares_rate = self.rate_row and row != self.rate_row
        if not shares_rate or self.rate_row in self.choices:
            return [self.tries_of(row)]
        return [self._tries_with_rate_of(row, fields) for fields in self.tries[self.rate_row]]

    def _tries_with_rate_of(self, row: str, fields: Try) -> list[Try]:
        """The tries of a row, with the learning rate of some fields in tries that set none."""
        rate = {key: value for key, value in fields.items() if key == "plan.lr"}
        return [{**rate, **values} for values in self.tries[row]]

    def runs(self, row: str, out: Path, seeds: Sequence[int] = TEST_SEEDS) -> list[Variant]:
        """The runs of a row that are reported: all columns, all seeds."""
        cells = [(row, column) for column in self.columns_of(row)]
        return self.recipe.variants(cells, seeds, self.chosen_fields(row), out)

    def trials(self, row: str, out: Path) -> list[list[Variant]]:
        """For each try of a row, the runs that score it, one for each of ``CHOOSING_SEEDS``."""
        if self.choices_from:
            return replace(self.choices_from, choices=self.choices).trials(row, out)
        trials = []
        for number, values in enumerate(self.tries_of(row), 1):
            changes = {**self.trial_settings(row), **values}
            cells = [(row, self.choosing_column)]
            folder = out / f"try{number}"
            trials.append(self.recipe.variants(cells, CHOOSING_SEEDS, changes, folder))
        return trials

    def trial_settings(self, row: str) -> Try:
        """The settings shared by all trials of a row: the test data and the number of rounds.

        Trials are tested on training images that no client holds, never on the test set.
        """
        settings: dict[str, Any] = {}
        if self.choosing_rounds and "rounds" not in self.recipe.rows[row]:
            settings["rounds"] = self.choosing_rounds
        settings["data.test_from"] = "held_out"
        return settings

    def with_defaults(self, name: str, method: str) -> Suite:
        """The suite with one more row: a method with its default fields and without tries."""
        rows = {**self.recipe.rows, name: {"method": method}}
        return replace(self, recipe=replace(self.recipe, rows=rows))

    def with_row(
        self,
        name: str,
        method: str,
        tries: Sequence[Try],
        topology: Mapping[str, Any] | None = None,
    ) -> Suite:
        """The suite with one more row, for a new method.

        ``topology``: its kind and the stages that the method adds, as ``topology_of_new_row`` takes
        it; by default the suite's topology. Raises ConfigError for a name that is taken, and for a
        topology that no row of the suite has.
        """
        if name in self.recipe.rows:
            raise ConfigError(
                f"{self.name} already has a row {name!r}; choose another name with --name"
            )
        row: dict[str, Any] = {"method": method}
        if topology:
            row["topology"] = self.topology_of_new_row(name, topology)
        if not any("plan" in column for column in self.recipe.columns.values()):
            # FedAvg's plan fills the keys that the suite leaves open, whatever plans the method
            # has: all rows train alike.
            plan = {**as_table(FedAvg.plans["train"]), **self.recipe.common["plan"]}
            row["plan"] = {key: value for key, value in plan.items() if value is not None}

        choices_from = None
        if self.choices_from is not None:
            choices_from = self.choices_from.with_row(name, method, tries, topology)
        return replace(
            self,
            recipe=replace(self.recipe, rows={**self.recipe.rows, name: row}),
            tries={**self.tries, name: checked_tries(self.name, name, tries)},
            choices_from=choices_from,
        )

    def added_topology(self, row: str) -> dict[str, Any]:
        """The topology options in which a row differs from the suite, without ``CLIENT_OPTIONS``:
        its kind, and the stages that its method adds.
        """
        common = self.recipe.common["topology"]
        topology = self.recipe.rows[row].get("topology", {})
        return {
            key: value
            for key, value in topology.items()
            if key not in CLIENT_OPTIONS and value != common.get(key)
        }

    def topology_of_new_row(self, row: str, topology: Mapping[str, Any]) -> dict[str, Any]:
        """The topology of a new row: the clients of the suite's rows, and the stages that its
        method adds.

        ``topology``: ``kind``, and options that each name a stage. Raises ConfigError for a kind
        that no row has, and for other options.
        """
        common = self.recipe.common["topology"]
        kind = topology.get("kind", common["kind"])
        known = self._topologies_by_kind()
        if kind not in known:
            raise ConfigError(
                f"{row} has the topology {kind}, and the rows of {self.name} have "
                f"{' or '.join(sorted(known))}; {_track_hint(kind)}"
            )
        stages = {key: value for key, value in topology.items() if key != "kind"}
        for key, value in stages.items():
            if key in CLIENT_OPTIONS or not isinstance(value, str):
                raise ConfigError(
                    f"{row} sets topology.{key} = {value!r}, which is the same for all rows of "
                    f"{self.name}; remove it from the method's schedule"
                )
        if kind == common["kind"]:
            return {**common, **stages}
        clients = {key: value for key, value in known[kind].items() if key in CLIENT_OPTIONS}
        return {"kind": kind, **clients, **stages}

    def _topologies_by_kind(self) -> dict[str, Mapping[str, Any]]:
        """A topology of each kind that the suite has; the suite's own one comes first."""
        common = self.recipe.common["topology"]
        topologies = [common]
        topologies += [self.recipe.rows[row].get("topology", common) for row in self.ranked_rows]
        by_kind: dict[str, Mapping[str, Any]] = {}
        for topology in topologies:
            by_kind.setdefault(topology["kind"], topology)
        return by_kind


@dataclass(frozen=True)
class SuiteRow:
    """A row of a suite."""

    suite: Suite
    name: str


CLIENT_OPTIONS = ("clients", "sampled", "cohorts", "order")
"""The options of topologies that decide which clients act; all rows of a suite share them."""

TRACK_OF_TOPOLOGY = {
    "parallel": "space",
    "sequential": "chain",
    "public_logits": "public",
    "peer_to_peer": "peers",
}
"""The first track whose rows have a topology."""


def _track_hint(topology: str) -> str:
    """Advice on where to enter a method with a topology."""
    if topology in TRACK_OF_TOPOLOGY:
        return f"enter it with --track {TRACK_OF_TOPOLOGY[topology]}"
    return "no track has this topology"


# ---- reading suites ------------------------------------------------------------------------------


class BoundsForm(BaseModel):
    """The table ``bounds`` of a suite's file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    floor: str
    ceiling: list[str]


class ChoosingForm(BaseModel):
    """The types of the values in the table ``choosing``; ``CHOOSING_KEYS`` are its keys."""

    model_config = ConfigDict(strict=True)

    of: str = ""
    column: str = ""
    rounds: CountOrZero = 0
    rate: str = ""


class SuiteForm(BaseModel):
    """The keys of a suite's file, and the types of their values."""

    model_config = ConfigDict(strict=True, extra="forbid")

    paper: str
    version: int
    against: str
    bounds: BoundsForm
    choosing: ChoosingForm
    common: dict[str, Any]
    columns: dict[str, dict[str, Any]]
    rows: dict[str, dict[str, Any]]
    tries: dict[str, list[dict[str, Any]]]


CHOOSING_KEYS = ({"of"}, {"column", "rounds"}, {"column", "rounds", "rate"})
"""The possible keys of the table ``choosing``: another suite whose choices are used, or the column
and the rounds in which configurations are chosen, and the row whose learning rate all others use.
"""

_suites_from_files: dict[str, Suite] = {}
"""The suites that this process has read from users' files, by name."""


def suite_names(tier: str = "", track: str = "") -> list[str]:
    """The names of the suites that ship, ``TIER-TRACK``, of one tier and track if these are given.

    Raises UnknownName for an unknown tier or track.
    """
    if tier and tier not in TIERS:
        raise UnknownName("tier", tier, TIERS)
    if track and track not in TRACKS:
        raise UnknownName("track", track, tuple(TRACKS))
    tiers = [tier] if tier else TIERS
    tracks = [track] if track else TRACKS
    names = ["-".join(pair) for pair in itertools.product(tiers, tracks)]
    folder = resources.files("fedstill") / "recipes" / RANKING
    return [name for name in names if (folder / f"{name}.toml").is_file()]


def load_suite(name: str) -> Suite:
    """A suite by its name, with the choices that ship. Raises UnknownName or ConfigError."""
    if name in _suites_from_files:
        return _suites_from_files[name]
    if name not in suite_names():
        raise UnknownName("suite", name, suite_names())
    return _parse_suite(name, parse_toml(recipe_text(f"{RANKING}/{name}").encode()))


def read_suite(path: Path) -> Suite:
    """A suite from a user's file ``NAME.toml``; afterwards ``load_suite`` finds it by its name.

    Paths in the file are relative to its folder.
    Raises ConfigError for a file that is not a suite, or has the name of one that ships.
    """
    if path.stem in suite_names():
        raise ConfigError(f"{path}: {path.stem} is the name of a built-in suite; rename the file")
    try:
        tree = read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the suite {path}: {error}") from error
    suite = _parse_suite(path.stem, tree)
    recipe = replace(suite.recipe, base=path.parent.resolve())
    suite = replace(suite, recipe=recipe, file=path)
    _suites_from_files[path.stem] = suite
    return suite


def _parse_suite(name: str, tree: Mapping[str, Any]) -> Suite:
    try:
        SuiteForm.model_validate(tree)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_context=False, include_input=False)
        key = ".".join(map(str, first["loc"]))
        # Of a table, pydantic also names the class here.
        reason = first["msg"].partition(" or instance of ")[0]
        raise ConfigError(f"suite {name}, {key}: {reason}; correct the file") from error
    recipe = parse_recipe(
        f"{RANKING}/{name}", {key: tree[key] for key in ("paper", "common", "columns", "rows")}
    )
    for text in (name, *recipe.rows):
        check_printable(text)
    check_slugs(name, "rows", recipe.rows)
    check_slugs(name, "columns", recipe.columns)
    check_run_folders(name, recipe)
    tier, _, track = name.partition("-")
    tries = {row: checked_tries(name, row, values) for row, values in tree["tries"].items()}
    suite = Suite(
        tier=tier,
        track=track,
        version=tree["version"],
        recipe=recipe,
        tries=tries,
        baseline=tree["against"],
        floor=tree["bounds"]["floor"],
        ceilings=tuple(tree["bounds"]["ceiling"]),
        choosing_column=next(iter(recipe.columns)),
        choosing_rounds=0,
    )
    suite = _with_choosing(suite, tree["choosing"])
    _check_names(suite)
    return suite


def check_run_folders(suite: str, recipe: Recipe) -> None:
    """Raise ConfigError if the runs of two cells have the same folder."""
    cell_by_folder: dict[Path, Cell] = {}
    for cell in recipe.cells():
        first_cell = cell_by_folder.setdefault(recipe.run_folder(cell, Path()), cell)
        if first_cell != cell:
            raise ConfigError(
                f"suite {suite}: the runs of {' in '.join(map(repr, first_cell))} and of "
                f"{' in '.join(map(repr, cell))} share a folder; rename a row or a column"
            )


def _with_choosing(suite: Suite, choosing: Mapping[str, Any]) -> Suite:
    """A suite with what its table ``choosing`` says, and with the choices that ship."""
    if set(choosing) not in CHOOSING_KEYS:
        raise ConfigError(
            f"suite {suite.name}: choosing has the keys {sorted(choosing)}; it must have column "
            "and rounds (and may have rate), or of"
        )
    if "of" not in choosing:
        return replace(
            suite,
            choosing_column=choosing["column"],
            choosing_rounds=choosing["rounds"],
            rate_row=choosing.get("rate", ""),
            choices=shipped_choices(suite.name, suite.version, suite.tries),
        )
    source = load_suite(choosing["of"])
    for row, tries in suite.tries.items():
        if tries != source.tries.get(row):
            raise ConfigError(
                f"suite {suite.name}: the tries of {row} must be those of {source.name}, which "
                "chooses its fields"
            )
    return replace(suite, rate_row=source.rate_row, choices=source.choices, choices_from=source)


def _check_names(suite: Suite) -> None:
    """Raise ConfigError if a suite names a row or a column that it does not have, and if a ranked
    row lacks a column: ranks compare rows over the same columns.
    """
    names = {*suite.tries, suite.baseline, suite.floor, *suite.ceilings}
    if suite.rate_row:
        names.add(suite.rate_row)
    unknown = sorted(names - set(suite.recipe.rows))
    if unknown:
        raise ConfigError(f"suite {suite.name}: there is no row {unknown[0]!r}")
    for row in suite.recipe.rows:
        if "name" not in suite.method_of(row):
            raise ConfigError(
                f"suite {suite.name}: row {row!r} has no method; set one, e.g. method = 'fedavg'"
            )
    if suite.choosing_column not in suite.recipe.columns:
        raise ConfigError(
            f"suite {suite.name}: choosing.column is {suite.choosing_column!r}, which is not one "
            "of its columns"
        )
    for row in suite.ranked_rows:
        missing = [name for name in suite.recipe.columns if name not in suite.columns_of(row)]
        if missing:
            raise ConfigError(
                f"suite {suite.name}: row {row!r} has tries, so it is ranked and needs all "
                f"columns, but lacks {missing[0]!r}; remove its key only, or its tries"
            )
