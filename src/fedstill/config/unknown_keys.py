"""What to do about keys that their table lacks: the key of another table that was meant, or a field
without a type. A key is suggested only if the config is accepted with it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill import manifest
from fedstill.config.experiment import KEYS
from fedstill.config.named_tables import NAMED, model_of_name
from fedstill.config.tables import StreamTable, TopKeys, record_tables
from fedstill.config.validation import keys_of, model_of_record
from fedstill.core import registry
from fedstill.core.errors import ConfigError
from fedstill.core.records import Plan
from fedstill.core.registry import short_name

MODELS = ("cnn", "digits_cnn")
"""The networks that a run has if its config names none."""

NEAR = 0.75
"""How alike a key must be to one of another table, to be taken for it."""

OTHER_WORDS = {
    "batch_size": "plan.batch",
    "dataset": "data.name",
    "data": "data.name",
    "learning_rate": "plan.lr",
    "local_epochs": "plan.epochs",
    "method": "method.name",
    "model": "model.name",
    "num_rounds": "rounds",
    "partition": "partition.kind",
    "topology": "topology.kind",
    "train": "plan",
    "training": "plan",
}
"""Words that other libraries, and readers of a config, have for a key."""

Tree = Mapping[str, Any]


@dataclass(frozen=True)
class UnknownKey:
    """A key that its table lacks, in a config.

    ``table``: empty for keys outside all tables. ``tree``: the whole config. ``base``: its folder.
    ``accepts``: whether the config is accepted with another dotted key in the place of this one.
    """

    table: str
    key: str
    tree: Tree
    base: Path | None
    accepts: Callable[[str], bool]

    @property
    def advice(self) -> str:
        """What to do about it."""
        return (
            _of_missing_package(self.table or self.key)
            or self._without_type()
            or self._suggested([self._name_key()])
            or self._suggested(self._elsewhere(self.key))
            or self._of_other_things()
            or self._suggested(self._similar_in_table())
            or self._suggested(self._similar_elsewhere())
            or self._choices()
        )

    def _suggested(self, candidates: Iterable[str]) -> str:
        """The candidates that are accepted, as a question; empty if none is."""
        accepted = [
            working
            for candidate in filter(None, candidates)
            for working in self._working(candidate)
        ]
        if not accepted:
            return ""
        *first, last = [_quoted(key) for key in dict.fromkeys(accepted[:3])]
        if not first:
            return f"did you mean {last}?"
        return f"did you mean {', '.join(first)} or {last}?"

    def _working(self, candidate: str) -> Sequence[str]:
        """A key, or those of its stages where each stage has its own, as far as it is accepted."""
        if self.accepts(candidate):
            return [candidate]
        plan = self.tree.get("plan")
        field = candidate.removeprefix("plan.")
        if field == candidate or not isinstance(plan, Mapping):
            return []
        of_stages = [f"plan.{name}.{field}" for name in plan if isinstance(plan[name], Mapping)]
        return [key for key in of_stages if self.accepts(key)]

    @property
    def _place(self) -> str:
        """How the dotted keys of its table begin."""
        return f"{self.table}." if self.table else ""

    def _without_type(self) -> str:
        """What to do about a value of a user's class that is no field, as it has no type."""
        name = self._thing
        if not name:
            return ""
        target = registry.lookup(self.table, name, self.base).target
        if not inspect.isclass(target):
            return ""
        for kind in target.__mro__:
            is_users = not kind.__module__.startswith("fedstill.")
            if not is_users or self.key not in vars(kind):
                continue
            value = vars(kind)[self.key]
            if not callable(value):
                return (
                    f"in class {kind.__name__} it has no type, write: {self.key}: "
                    f"{type(value).__name__} = {value!r}"
                )
        return ""

    def _name_key(self) -> str:
        """The key of a table's name, if the key is the one that other tables have for theirs."""
        if self.table not in NAMED or self.key not in ("name", "kind"):
            return ""
        return f"{self.table}.{NAMED[self.table][0]}"

    def _elsewhere(self, key: str) -> list[str]:
        """The dotted keys of other tables that end with a key, or that are another word for it."""
        homes = _homes(self.tree, self.base)
        tables = {*NAMED, *record_tables()}
        for word, home in OTHER_WORDS.items():
            if word not in homes or word in tables:
                homes[word] = [home]
        return [home for home in homes.get(key, ()) if home != f"{self._place}{key}"]

    def _similar_elsewhere(self) -> list[str]:
        """The keys of other tables that are most like it."""
        words = {**_homes(self.tree, self.base), **OTHER_WORDS}
        similar = difflib.get_close_matches(self.key, words, n=1, cutoff=NEAR)
        return [home for word in similar for home in self._elsewhere(word)]

    def _similar_in_table(self) -> list[str]:
        """The key of its own table that is most like it."""
        similar = difflib.get_close_matches(self.key, self._known, n=1)
        return [f"{self._place}{key}" for key in similar]

    @property
    def _known(self) -> Sequence[str]:
        """The keys of its table."""
        table = self.table.partition(".")[0]
        if not table:
            return KEYS
        if table == "plan":
            return keys_of(model_of_record(Plan))
        if table in record_tables():
            return keys_of(record_tables()[table])
        keys = _keys_of_thing(table, self._thing, self.base)
        if table == "stream":
            keys = [*keys, *keys_of(StreamTable)]
        return keys

    @property
    def _thing(self) -> str:
        """What its table names; empty if it is the default of something else."""
        if self.table not in NAMED:
            return ""
        name = _name(self.table, self.tree)
        if not name and self.table == "topology":
            return _topology(self.tree, self.base)
        return name

    def _of_other_things(self) -> str:
        """What to do about a field that other methods have, and the named one has not."""
        if self.table not in NAMED:
            return ""
        others = [
            name
            for name in registry.names(self.table)
            if name != self._thing and self.key in _keys_of_thing(self.table, name, self.base)
        ]
        if not others:
            return ""
        owners = ", ".join(others)
        if len(others) > 4:
            owners = f"{', '.join(others[:3])} and {len(others) - 3} more"
        advice = f"it is a field of {owners}: set {self.table}.{NAMED[self.table][0]}"
        if not self._thing:
            return advice
        return f"{self._fields}; {advice}"

    @property
    def _fields(self) -> str:
        """Which fields the named thing has, as a part of a message."""
        return f"{short_name(self._thing)} has {', '.join(sorted(self._known)) or 'no fields'}"

    def _choices(self) -> str:
        """The keys that there are."""
        if not self._known:
            return f"{self._fields}: leave it out"
        if self._thing:
            return f"{self._fields}: write one of these, or leave it out"
        return f"choose one of {', '.join(sorted(self._known))}"


def _quoted(key: str) -> str:
    """A dotted key as a message names it."""
    if key in record_tables() or key == "plan":
        return f"the table [{key}]"
    if "." in key or key not in keys_of(model_of_record(TopKeys)):
        return repr(key)
    return f"{key!r} (before all tables)"


def home_of(word: str) -> str:
    """The dotted key that a word alone stands for; empty if it is none, or is in more than one
    table.

    >>> home_of("seed"), home_of("method"), home_of("learning_rate"), home_of("quiet")
    ('seed', 'method', 'plan.lr', '')
    """
    homes = _homes({}, None) | {other: [home] for other, home in OTHER_WORDS.items()}
    candidates = homes.get(word, [])
    if word in candidates or word in (*NAMED, "data"):  # a table's name stands for the name in it
        return word
    if len(candidates) == 1:
        return candidates[0]
    return ""


def _of_missing_package(table: str) -> str:
    """What to do about a table of a package that is not installed."""
    package = manifest.missing_package(table)
    if not package:
        return ""
    return f"[{table}] belongs to {package}, which is not installed; leave it out, or install it"


def _homes(tree: Tree, base: Path | None) -> dict[str, list[str]]:
    """Of all that a config may say: the dotted keys that end with a key, by key."""
    homes = {key: [key] for key in keys_of(model_of_record(TopKeys))}
    tables = {table: keys_of(record) for table, record in record_tables().items()}
    if tree.get("stream"):
        tables["stream"] = keys_of(StreamTable)
    tables["plan"] = keys_of(model_of_record(Plan))
    for kind, (name_key, _) in NAMED.items():
        keys = [*tables.get(kind, ()), name_key]
        for name in _names(kind, tree, base):
            keys += _keys_of_thing(kind, name, base)
        if kind == "topology":
            keys.append("clients")
        tables[kind] = keys
    for table, keys in tables.items():
        for key in dict.fromkeys(keys):
            homes.setdefault(key, []).append(f"{table}.{key}")
    return homes


def _names(kind: str, tree: Tree, base: Path | None) -> Sequence[str]:
    """What a table names, or what it may name by default."""
    name = _name(kind, tree)
    if name:
        return [name]
    if kind == "model":
        return MODELS
    return [_topology(tree, base)]


def _name(kind: str, tree: Tree) -> str:
    """What a table names; empty if it is the default of something else."""
    name_key, default = NAMED[kind]
    table = tree.get(kind)
    name = table.get(name_key, default) if isinstance(table, Mapping) else table
    return name if isinstance(name, str) else default


def _topology(tree: Tree, base: Path | None) -> str:
    """The topology of the method that a config names; empty if there is no such method."""
    try:
        method = registry.lookup("method", _name("method", tree), base).target
    except ConfigError:
        return ""
    return str(getattr(method, "topology", ""))


def _keys_of_thing(kind: str, name: str, base: Path | None) -> list[str]:
    """The fields of a registered thing; none where another message says that it is unreadable."""
    try:
        return keys_of(model_of_name(kind, name, base))
    except ConfigError:
        return []
