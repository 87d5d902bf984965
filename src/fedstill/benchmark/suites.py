"""Suites of the ranking: recipes without published numbers, which say what may be tried and which
rows are bounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from fedstill.benchmark.recipes import RANKING, Recipe, recipe_of, recipe_text
from fedstill.core.errors import ConfigError, UnknownName
from fedstill.core.fields import as_table
from fedstill.core.files import make_folder, parse_toml, read_toml, write_whole
from fedstill.methods.fedavg import FedAvg
from fedstill.running.compare import Variant

# What may be tried of a row: a few tables of its method's own fields and of two further keys.


MOST_TRIES = 5
"""How many configurations of each method may be tried, a newcomer's too."""

FREE = ("plan.lr", "stream.head")
"""What a try may set beside its method's own fields."""


def checked_tries(suite: str, row: str, tries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tries of a row with dotted keys; raises ConfigError for a key that is not free, and for
    too many or none.
    """
    if not 1 <= len(tries) <= MOST_TRIES:
        raise ConfigError(f"{row} has {len(tries)} tries; every method has 1 to {MOST_TRIES}")
    return [_dotted(suite, row, one) for one in tries]


def _dotted(suite: str, row: str, one: Mapping[str, Any]) -> dict[str, Any]:
    """A try with dotted keys: a bare one is a field of the method."""
    keys = {key: key if "." in key else f"method.{key}" for key in one}
    strange = [
        key for key, whole in keys.items() if not whole.startswith("method.") and whole not in FREE
    ]
    if strange or "method.name" in keys.values():
        raise ConfigError(
            f"{suite}, {row}: a try sets fields of the method, {' and '.join(FREE)}, not "
            f"{(strange or ['name'])[0]!r}"
        )
    return {keys[key]: value for key, value in one.items()}


# What the folders of rows and columns are called, and that no two of a suite have one folder.


def slug(name: str) -> str:
    """A name as a folder's.

    >>> slug("ExDir 2/.5"), slug("FedNTD + ASD")
    ('exdir-2-.5', 'fedntd-+-asd')
    """
    return name.lower().replace("/", "-").replace(":", "-").replace(" ", "-")


def refuse_one_folder(suite: str, what: str, names: Iterable[str]) -> None:
    """Raises ConfigError where two names of a suite's rows or columns would have one folder: one
    replaces the other.

    >>> refuse_one_folder("clinics", "columns", ["even", "Even"])
    Traceback (most recent call last):
    ...
    fedstill.core.errors.ConfigError: suite clinics: the columns 'even' and 'Even' would have one folder, even; rename one
    """  # noqa: E501
    folders: dict[str, str] = {}
    for name in names:
        if (other := folders.setdefault(slug(name), name)) != name:
            raise ConfigError(
                f"suite {suite}: the {what} {other!r} and {name!r} would have one folder, "
                f"{slug(name)}; rename one"
            )


# What was chosen for each row of a suite: the scores of all tries on the seeds of choosing, and the
# best of them.


CHOOSING_SEEDS = (100, 101, 102)
"""Fields are chosen on other seeds than those that are reported."""

TIE = 0.002
"""Scores that are nearer than this are alike: then fewer bytes win, and of these the try that
stands first.
"""


@dataclass(frozen=True)
class Choice:
    """The scores of a row's tries, one by seed each, and the bytes that a run of each sends.

    A run that diverged scores 0, as no accuracy is below it.
    """

    scores: tuple[tuple[float, ...], ...]
    sent: tuple[int, ...]

    @property
    def best(self) -> int:
        """The number of the try that is chosen, counted from 0: the best mean; of those alike, the
        fewest bytes.
        """
        means = [statistics.fmean(own) for own in self.scores]
        alike = [i for i, mean in enumerate(means) if mean >= max(means) - TIE]
        return min(alike, key=lambda i: (self.sent[i], -means[i], i))

    @property
    def table(self) -> dict[str, Any]:
        """As it stands in a file."""
        return {"scores": [list(own) for own in self.scores], "sent": list(self.sent)}


def read_choice(where: str, table: Any, tries: int) -> Choice:
    """A choice from its table; raises ConfigError unless it has as many scores as there are
    tries.
    """
    try:
        scores = tuple(tuple(float(v) for v in own) for own in table["scores"])
        sent = tuple(int(v) for v in table["sent"])
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{where}: the scores of its tries cannot be read: {error}") from error
    seeds = {len(try_scores) for try_scores in scores}
    if len(scores) != tries or len(sent) != tries or seeds != {len(CHOOSING_SEEDS)}:
        raise ConfigError(
            f"{where}: it has scores of {len(scores)} tries; it needs {len(CHOOSING_SEEDS)} scores "
            f"of each of {tries} tries, and the bytes sent"
        )
    shares = [score for try_scores in scores for score in try_scores]
    if not all(0 <= score <= 1 for score in shares) or min(sent) < 0:
        raise ConfigError(f"{where}: scores must be from 0 to 1, and bytes sent not negative")
    return Choice(scores, sent)


def chosen_from(suite: str, version: int, tries: Mapping[str, Sequence[Any]]) -> dict[str, Choice]:
    """What ships with a suite, by row; nothing where nothing was chosen. Raises ConfigError for
    another version's.
    """
    file = resources.files("fedstill.recipes") / RANKING / "chosen" / f"{suite}.toml"
    if not file.is_file():
        return {}
    tree = parse_toml(file.read_bytes())
    if tree.pop("version", None) != version:
        raise ConfigError(f"recipes/rank/chosen/{suite}.toml is of another version than the suite")
    return {
        row: read_choice(f"{suite}, {row}", table, len(tries[row]))
        for row, table in tree.items()
        if row in tries
    }


def write_choices(
    path: Path, version: int, chosen: Mapping[str, Choice], shown: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write choices to a file, with the fields that each comes to for people to read."""
    tree = {row: {"fields": dict(shown[row]), **choice.table} for row, choice in chosen.items()}
    head = (
        "# Made by `fedstill rank choose`: by row, the score of each try on each seed of choosing, "
        "and bytes sent.\n"
    )
    make_folder(path.parent)
    write_whole(path, (head + tomli_w.dumps({"version": version, **tree})).encode())


TIERS = ("digits", "small")
"""By cost: seconds a run, minutes a run."""

TRACKS = {
    "space": "clients differ",
    "time": "the data change",
    "both": "clients differ and the data change",
    "chain": "one client after another",
    "public": "logits travel, on public images",
    "peers": "one exchange between clients",
}
"""The six questions."""

TEST_SEEDS = (0, 1, 2, 3, 4)

KEYS = {"paper", "version", "against", "bounds", "choosing", "common", "columns", "rows", "tries"}

CHOOSING = ({"of"}, {"column", "rounds"}, {"column", "rounds", "rate"})
"""What ``choosing`` says: whose choices are taken; or where fields are chosen, and whose learning
rate all have.
"""

Try = Mapping[str, Any]
"""Values by dotted key over a row's."""

_own: dict[str, Suite] = {}
"""Suites from files of yours that this process has read, by name."""


@dataclass(frozen=True)
class Suite:
    """One track of one tier: its settings, which never change within a version.

    ``tries``: by row, what may be tried; rows without any are bounds, which are not
    ranked. ``floor``: the row at share 0 of the gap; ``ceilings``: the rows at share 1, of which a
    column has one at most. ``against``: the row that differences are to. ``column``, ``rounds``:
    where fields are chosen, and in how many rounds (0: all; a row that says its own has these).
    ``rate_of``: the row whose chosen learning rate all others' tries have, where they set none; "":
    the suite's.
    ``chosen``: by row, what was.
    ``there``: the suite in which all of this is chosen, where it is another; ``column`` is then
    this one's first.
    """

    tier: str
    track: str
    version: int
    recipe: Recipe
    tries: Mapping[str, Sequence[Try]]
    against: str
    floor: str
    ceilings: tuple[str, ...]
    column: str
    rounds: int
    rate_of: str = ""
    chosen: Mapping[str, Choice] = field(default_factory=dict)
    there: Suite | None = None

    @property
    def name(self) -> str:
        """``TIER-TRACK``; of a file of yours the file's, whatever it is."""
        return "-".join(filter(None, (self.tier, self.track)))

    @property
    def title(self) -> str:
        """Tier, track and what it asks; of a suite of yours its name and what it says of itself."""
        asked = TRACKS.get(self.track)
        return (
            f"{self.tier}, {self.track}: {asked}" if asked else f"{self.name}: {self.recipe.paper}"
        )

    @property
    def chooses_in(self) -> Suite:
        """The suite in which its fields are chosen: itself, mostly."""
        return self.there or self

    @property
    def choosing(self) -> str:
        """The command that chooses its fields."""
        suite = self.chooses_in
        ships = suite.name in suite_names()
        return (
            "fedstill rank choose "
            f"{f'{suite.tier} --track {suite.track}' if ships else f'{suite.name}.toml'}"
        )

    @property
    def competing(self) -> list[str]:
        """The rows that are ranked."""
        return [row for row in self.recipe.rows if row in self.tries]

    def columns(self, row: str) -> list[str]:
        """The columns of a row."""
        return [c for r, c in self.recipe.cells() if r == row]

    def row_named(self, name: str) -> str:
        """A row by its name in any case, or by its method's; raises UnknownName."""
        if name.lower() not in self._rows_by_name:
            raise UnknownName("row", name, self.recipe.rows, where=self.name)
        return self._rows_by_name[name.lower()]

    def rows_named(self, names: Sequence[str]) -> list[str]:
        """Rows by what people call them, from a list cut at its commas, which a row's name may
        hold; UnknownName.
        """
        rows, left = [], list(names)
        while left:
            held = (
                n
                for n in range(len(left), 1, -1)
                if ", ".join(left[:n]).lower() in self._rows_by_name
            )
            many = next(held, 1)
            rows.append(self.row_named(", ".join(left[:many])))
            left = left[many:]
        return rows

    @cached_property
    def _rows_by_name(self) -> dict[str, str]:
        like = {row.lower(): row for row in self.recipe.rows}
        return like | {self.method(row)["name"]: row for row in reversed(self.competing)}

    def method(self, row: str) -> dict[str, Any]:
        """A row's method and the fields that it sets."""
        named = self.recipe.rows[row].get("method", {})
        return {"name": named} if isinstance(named, str) else dict(named)

    def settings_chosen(self, row: str) -> Try:
        """What was chosen for a row over the suite's settings; raises ConfigError where nothing was
        yet.
        """
        if row not in self.tries:
            return {}
        if row not in self.chosen:
            raise ConfigError(f"{self.name}: nothing is chosen for {row} yet: {self.choosing}")
        return self.tries_of(row)[self.chosen[row].best]

    def tries_of(self, row: str) -> Sequence[Try]:
        """What may be tried of a row, the learning rate of ``rate_of`` under it; ConfigError before
        that is chosen.

        Else a row that tries learning rates would be compared with rows that could not.
        """
        if not self.rate_of or row == self.rate_of:
            return self.tries[row]
        rate = {
            key: value
            for key, value in self.settings_chosen(self.rate_of).items()
            if key == "plan.lr"
        }
        return [{**rate, **one} for one in self.tries[row]]

    def runs(self, row: str, out: Path, seeds: Sequence[int] = TEST_SEEDS) -> list[Variant]:
        """The runs that are reported of a row: all its columns, all seeds."""
        cells = [(row, column) for column in self.columns(row)]
        return self.recipe.variants(cells, seeds, self.settings_chosen(row), out)

    def trials(self, row: str, out: Path) -> list[list[Variant]]:
        """For each try of a row, the runs on the seeds of choosing: tested on training images that
        clients lack.
        """
        if self.there:
            return replace(self.there, chosen=self.chosen).trials(row, out)
        fixed = self.trial_settings(row)
        return [
            self.recipe.variants(
                [(row, self.column)], CHOOSING_SEEDS, {**fixed, **one}, out / f"try{number + 1}"
            )
            for number, one in enumerate(self.tries_of(row))
        ]

    def trial_settings(self, row: str) -> Try:
        """What all trials of a row have over the suite's settings: what they are tested on, and how
        long they are.
        """
        size = (
            {"rounds": self.rounds} if self.rounds and "rounds" not in self.recipe.rows[row] else {}
        )
        return {**size, "data.test_from": "held_out"}

    def with_defaults(self, name: str, method: str) -> Suite:
        """The suite with one row more, of a method with its documented defaults; nothing is tried
        or chosen of it.
        """
        return replace(
            self, recipe=replace(self.recipe, rows={**self.recipe.rows, name: {"method": method}})
        )

    def with_row(
        self,
        name: str,
        method: str,
        tries: Sequence[Try],
        topology: Mapping[str, Any] | None = None,
    ) -> Suite:
        """The suite with one row more, of a newcomer's method.

        ``topology``: its kind and the stages that the method adds to it (``row_topology``); by
        default the suite's. Raises ConfigError for a name that is taken, and for a topology of
        which the suite has no row.
        """
        if name in self.recipe.rows:
            raise ConfigError(
                f"{self.name} has a row {name!r} already; choose another name with --name"
            )
        row: dict[str, Any] = {"method": method}
        if topology:
            row["topology"] = self.row_topology(name, topology)
        if not any("plan" in column for column in self.recipe.columns.values()):
            # What the suite leaves open is FedAvg's, whatever plans the method has.
            plan = {**as_table(FedAvg.plans["train"]), **self.recipe.common["plan"]}
            row["plan"] = {key: value for key, value in plan.items() if value is not None}
        recipe = replace(self.recipe, rows={**self.recipe.rows, name: row})
        own = {**self.tries, name: checked_tries(self.name, name, tries)}
        return replace(
            self,
            recipe=recipe,
            tries=own,
            there=self.there and self.there.with_row(name, method, tries, topology),
        )

    def own_topology(self, row: str) -> dict[str, Any]:
        """What a row's topology has beside the suite's: its kind, if it is another, and stages."""
        common = self.recipe.common["topology"]
        own = self.recipe.rows[row].get("topology", {})
        return {k: v for k, v in own.items() if k not in OF_CLIENTS and v != common.get(k)}

    def row_topology(self, row: str, topology: Mapping[str, Any]) -> dict[str, Any]:
        """The topology of a newcomer's row: as many clients as the suite's rows have, and the
        stages that the method adds.

        topology: ``kind``, and further options, of which each names a stage. Raises ConfigError for
        a kind of which no row is, and for options that are no names of stages.
        """
        common = self.recipe.common["topology"]
        kind = topology.get("kind", common["kind"])
        rows = [self.recipe.rows[other].get("topology", common) for other in self.competing]
        known = {table["kind"]: table for table in reversed([common, *rows])}
        if kind not in known:
            raise ConfigError(
                f"{row} has the topology {kind}, and the rows of {self.name} have "
                f"{' or '.join(sorted(known))}; {_other_track(kind)}"
            )
        stages = {key: value for key, value in topology.items() if key != "kind"}
        for key, value in stages.items():
            if key in OF_CLIENTS or not isinstance(value, str):
                raise ConfigError(
                    f"{row} sets topology.{key} = {value!r}, which is the same for all rows of "
                    f"{self.name}; leave it out of the method's schedule"
                )
        if kind == common["kind"]:
            return {**common, **stages}
        clients = {key: known[kind][key] for key in OF_CLIENTS if key in known[kind]}
        return {"kind": kind, **clients, **stages}


OF_CLIENTS = ("clients", "sampled", "cohorts", "order")
"""The options of topologies that say which clients act: in a suite they are the same for all."""

TRACK_OF_TOPOLOGY = {
    "parallel": "space",
    "sequential": "chain",
    "public_logits": "public",
    "peer_to_peer": "peers",
}
"""The first track whose rows have a topology."""


def _other_track(topology: str) -> str:
    """Where a method of a topology is entered, in words."""
    if topology in TRACK_OF_TOPOLOGY:
        return f"enter it with --track {TRACK_OF_TOPOLOGY[topology]}"
    return "no track has it"


def suite_names(tier: str = "", track: str = "") -> list[str]:
    """The suites there are, ``TIER-TRACK``, of a tier and a track where they are named; raises
    UnknownName.
    """
    for what, said, known in (("tier", tier, TIERS), ("track", track, tuple(TRACKS))):
        if said and said not in known:
            raise UnknownName(what, said, known)
    every = [
        f"{one}-{other}"
        for one in TIERS
        for other in TRACKS
        if tier in ("", one) and track in ("", other)
    ]
    there = {f.name for f in (resources.files("fedstill.recipes") / RANKING).iterdir()}
    return [name for name in every if f"{name}.toml" in there]


def load_suite(name: str) -> Suite:
    """A suite by its name, with what was chosen for its rows; raises UnknownName, ConfigError."""
    if name in _own:
        return _own[name]
    if name not in suite_names():
        raise UnknownName("suite", name, suite_names())
    return _suite(name, parse_toml(recipe_text(f"{RANKING}/{name}").encode()))


def own_suite(path: Path) -> Suite:
    """A suite from a file of yours, ``NAME.toml``; ``load_suite`` knows its name from then on, as
    entries say it.

    Raises ConfigError for a file that is no suite, or has the name of one that ships.
    """
    if path.stem in suite_names():
        raise ConfigError(f"{path}: {path.stem} is the name of a built-in suite; rename the file")
    try:
        tree = read_toml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the suite {path} cannot be read: {error}") from error
    _own[path.stem] = _suite(path.stem, tree)
    return _own[path.stem]


def _suite(name: str, tree: Mapping[str, Any]) -> Suite:
    if set(tree) != KEYS:
        raise ConfigError(f"suite {name}: it has {sorted(tree)}, and must have {sorted(KEYS)}")
    recipe = recipe_of(
        f"{RANKING}/{name}",
        {k: v for k, v in tree.items() if k in ("paper", "common", "columns", "rows")},
    )
    for what, named_so in (("rows", recipe.rows), ("columns", recipe.columns)):
        refuse_one_folder(name, what, named_so)
    tries = {row: checked_tries(name, row, each) for row, each in tree["tries"].items()}
    tier, _, track = name.partition("-")
    bounds, choosing = tree["bounds"], tree["choosing"]
    if set(choosing) not in CHOOSING:
        raise ConfigError(
            f"suite {name}: choosing has {sorted(choosing)}, and must have column and rounds, also "
            "rate; or of"
        )
    there = load_suite(choosing["of"]) if "of" in choosing else None
    column, rounds = (
        (next(iter(recipe.columns)), 0) if there else (choosing["column"], choosing["rounds"])
    )
    rate_of = there.rate_of if there else choosing.get("rate", "")
    named = [*tries, tree["against"], bounds["floor"], *bounds["ceiling"], *filter(None, [rate_of])]
    if strange := sorted(set(named) - set(recipe.rows)):
        raise ConfigError(
            f"suite {name}: it says something of a row {strange[0]!r}, which it does not have"
        )
    if column not in recipe.columns:
        raise ConfigError(
            f"suite {name}: fields are chosen on {column!r}, which is none of its columns"
        )
    if there and (other := [row for row, own in tries.items() if own != there.tries.get(row)]):
        raise ConfigError(
            f"suite {name}: {other[0]} has not the tries of {there.name}, in which its fields are "
            "chosen"
        )
    chosen = there.chosen if there else chosen_from(name, tree["version"], tries)
    ends = (tree["against"], bounds["floor"], tuple(bounds["ceiling"]))
    return Suite(
        tier, track, tree["version"], recipe, tries, *ends, column, rounds, rate_of, chosen, there
    )
