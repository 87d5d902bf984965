"""Advice about unknown keys: a suggested key, or a field that needs a type.

A key is only suggested if the config is accepted with it, so that a suggestion does not lead to the
next error.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedstill import manifest
from fedstill.config.data_table import ALL_DEFAULT_MODELS
from fedstill.config.experiment import KEYS, Experiment, from_tree
from fedstill.config.named_tables import NAME_KEYS, NAMED, schema_of_name
from fedstill.config.overrides import COMMAND_LINE, COMMON_FIELDS
from fedstill.config.tables import StreamTable, TopKeys, record_tables
from fedstill.config.validation import WrongConfig, keys_of, schema_of_record
from fedstill.core import registry
from fedstill.core.errors import ConfigError
from fedstill.core.records import Plan
from fedstill.core.registry import short_name
from fedstill.core.user_modules import is_library_module, split_name

SIMILARITY = 0.75
"""How similar a key must be to one of another table, to be taken for a misspelling of it."""

SYNONYMS = {
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
"""The dotted keys for words that other libraries, and readers of a config, use."""

Tree = Mapping[str, Any]


@dataclass(frozen=True)
class KeyPath:
    """A dotted key, split into its table and the key in the table."""

    table: str
    """The name of the table, such as ``data`` or ``plan.train``; empty outside all tables."""
    key: str
    """The key in the table. It has dots where the table has tables of its own."""

    @classmethod
    def of(cls, dotted_key: str, tree: Tree) -> KeyPath:
        """The path of a dotted key in a config.

        >>> KeyPath.of("plan.train.lr", {"plan": {"train": {"lr": 0.1}}})
        KeyPath(table='plan.train', key='lr')
        >>> KeyPath.of("model.inner.width", {"model": {"inner": {"width": 8}}})
        KeyPath(table='model', key='inner.width')
        """
        name, dot, rest = dotted_key.partition(".")
        table = tree.get(name)
        if not dot or not isinstance(table, Mapping):
            return cls("", dotted_key)
        stage, _, key = rest.partition(".")
        if name == "plan" and key and isinstance(table.get(stage), Mapping):
            return cls(f"plan.{stage}", key)
        return cls(name, rest)

    @property
    def prefix(self) -> str:
        """What the dotted keys of the table begin with."""
        return f"{self.table}." if self.table else ""

    def values(self, tree: Tree) -> Mapping[str, Any]:
        """The values of the table in a config."""
        values = tree
        for name in self._table_names:
            values = values[name]
        return values

    def removed_from(self, tree: Tree) -> dict[str, Any]:
        """The config without this key."""
        return _without(tree, [*self._table_names, self.key])

    @property
    def _table_names(self) -> list[str]:
        return self.table.split(".") if self.table else []


def _without(tree: Tree, names: Sequence[str]) -> dict[str, Any]:
    """A tree without the value at the end of a path of names."""
    first, *further = names
    if further:
        return {**tree, first: _without(tree[first], further)}
    return {key: value for key, value in tree.items() if key != first}


@dataclass(frozen=True)
class UnknownKey:
    """A key of an experiment that its table lacks."""

    path: KeyPath
    experiment: Experiment
    accepts: Callable[[Experiment, str], bool]
    """Whether a run of an experiment could start, as far as one dotted key is concerned."""

    @property
    def advice(self) -> str:
        """What to do about this key: a suggestion, or the keys to choose from. Empty if the table
        names no registered object, so that its keys are unknown here.
        """
        return self.suggestion or self._choices()

    @property
    def suggestion(self) -> str:
        """The key that was meant, or a change of the value's place; empty if none is likely."""
        return (
            # [privacy], but the package is not installed
            _advice_on_package(self.path.table or self.path.key)
            # data.n, where n is a parameter of the user's function
            or self._advice_on_function()
            # method.beta, where the user's class has beta = 0.5 without a type
            or self._advice_on_type()
            # method.kind for method.name
            or self._question([self._name_key()])
            # method.lr for plan.lr, learning_rate for plan.lr
            or self._question(self._keys_elsewhere(self.path.key))
            # method.beta, which fedntd has, and not the named fedavg
            or self._advice_on_owners()
            # method.bta for method.beta
            or self._question(self._similar_in_table())
            # data.batchsize for plan.batch
            or self._question(self._similar_elsewhere())
        )

    # Suggestions.

    def _question(self, candidates: Iterable[str]) -> str:
        """The accepted ones among the candidates, as a question; empty if there is none."""
        accepted: list[str] = []
        for candidate in filter(None, candidates):
            accepted += self._accepted_forms(candidate)
        if not accepted:
            return ""
        *first, last = [_quoted(key) for key in dict.fromkeys(accepted[:3])]
        if not first:
            return f"did you mean {last}?"
        return f"did you mean {', '.join(first)} or {last}?"

    def _accepted_forms(self, candidate: str) -> Sequence[str]:
        """A key if it is accepted. Otherwise, of a key of ``[plan]``, the accepted ones among the
        same keys of single stages.
        """
        if self._is_accepted(candidate):
            return [candidate]
        plan = self._tree.get("plan")
        field = candidate.removeprefix("plan.")
        if field == candidate or not isinstance(plan, Mapping):
            return []
        stages = [name for name, value in plan.items() if isinstance(value, Mapping)]
        keys = [f"plan.{stage}.{field}" for stage in stages]
        return [key for key in keys if self._is_accepted(key)]

    def _is_accepted(self, candidate: str) -> bool:
        """Whether the experiment could start with the value of this key under another key."""
        try:
            moved = self._moved_to(candidate)
        except WrongConfig:
            return False
        except ConfigError:
            return True  # something else is wrong
        return self.accepts(moved, candidate)

    def _moved_to(self, candidate: str) -> Experiment:
        """The experiment with the value of this key under another dotted key."""
        value = self.path.values(self._tree)[self.path.key]
        values = {candidate: value}
        if isinstance(value, Mapping) and "." not in candidate:
            values = {f"{candidate}.{key}": item for key, item in value.items()}
        tree = self.path.removed_from(self._tree)
        without_key = from_tree(tree, self.experiment.origins, self._base)
        return without_key.with_values(values, COMMAND_LINE)

    def _name_key(self) -> str:
        """The key of the table's name, if this is the one that other tables have for theirs."""
        if self.path.table not in NAMED or self.path.key not in ("name", "kind"):
            return ""
        return f"{self.path.table}.{NAME_KEYS[self.path.table]}"

    def _keys_elsewhere(self, word: str) -> list[str]:
        """The dotted keys of other tables that end with a word, or that it is a synonym for."""
        keys = list(self._all_keys.get(word, ()))
        is_table = word in NAMED or word in record_tables()
        if word in SYNONYMS and (is_table or not keys):
            keys = [SYNONYMS[word]]
        return [key for key in keys if key != f"{self.path.prefix}{word}"]

    def _similar_elsewhere(self) -> list[str]:
        """The keys of other tables that are most similar to this one."""
        words = {**self._all_keys, **SYNONYMS}
        similar = difflib.get_close_matches(self.path.key, words, n=1, cutoff=SIMILARITY)
        return [key for word in similar for key in self._keys_elsewhere(word)]

    def _similar_in_table(self) -> list[str]:
        """The key of the same table that is most similar to this one."""
        similar = difflib.get_close_matches(self.path.key, self._keys_in_table, n=1)
        return [f"{self.path.prefix}{key}" for key in similar]

    # Other advice.

    def _advice_on_function(self) -> str:
        """The advice about a parameter of the user's function that returns the data, which a config
        cannot set; empty for other keys.
        """
        if self.path.table != "data":
            return ""
        name = self.path.values(self._tree).get("name")
        if not isinstance(name, str) or not split_name(name).is_code:
            return ""
        if self.path.key not in _fields_of("dataset", name, self._base):
            return ""
        return (
            f"a config cannot set {self.path.key!r} of {short_name(name)}; change its default, or "
            "write one function for each value"
        )

    def _advice_on_type(self) -> str:
        """The advice to give a value of a user's class a type, so that it becomes a field."""
        if not self._object_name:
            return ""
        target = registry.lookup(self.path.table, self._object_name, self._base).target
        if not inspect.isclass(target):
            return ""
        for cls in target.__mro__:
            if is_library_module(cls.__module__) or self.path.key not in vars(cls):
                continue
            value = vars(cls)[self.path.key]
            if not callable(value):
                return (
                    f"class {cls.__name__} sets it without a type annotation; write "
                    f"{self.path.key}: {type(value).__name__} = {value!r}"
                )
        return ""

    def _advice_on_owners(self) -> str:
        """The advice to name another object, if others have a field of this name."""
        kind = self.path.table
        if kind not in NAMED:
            return ""
        owners = [
            name
            for name in registry.names(kind)
            if name != self._object_name and self.path.key in _fields_of(kind, name, self._base)
        ]
        if not owners:
            return ""
        listed = ", ".join(owners)
        if len(owners) > 4:
            listed = f"{', '.join(owners[:3])} and {len(owners) - 3} more"
        advice = f"it is a field of {listed}: set {kind}.{NAME_KEYS[kind]}"
        if not self._object_name:
            return advice
        return f"{self._fields_in_words}; {advice}"

    def _choices(self) -> str:
        """The advice to choose one of the keys that the table has; empty if they are unknown."""
        if self.path.table in NAMED and not self._object_name:
            return ""
        if not self._keys_in_table:
            return f"{self._fields_in_words}; leave this key out"
        if self._object_name:
            return f"{self._fields_in_words}: write one of these, or leave it out"
        return f"choose one of {', '.join(sorted(self._keys_in_table))}"

    @property
    def _fields_in_words(self) -> str:
        fields = ", ".join(sorted(self._keys_in_table)) or "no fields"
        return f"{short_name(self._object_name)} has {fields}"

    # What the experiment has.

    @cached_property
    def _tree(self) -> Tree:
        return self.experiment.tree

    @property
    def _base(self) -> Path | None:
        return self.experiment.base

    @cached_property
    def _all_keys(self) -> Mapping[str, Sequence[str]]:
        """All dotted keys that the config may have, by their last part."""
        return _keys_by_last_part(self._tree, self._base)

    @cached_property
    def _keys_in_table(self) -> Sequence[str]:
        """The keys that the table has."""
        table = self.path.table.partition(".")[0]
        if not table:
            return KEYS
        if table == "plan":
            return keys_of(schema_of_record(Plan))
        if table in record_tables():
            return keys_of(record_tables()[table])
        return [
            *_fields_of(table, self._object_name, self._base),
            *COMMON_FIELDS.get(table, ()),
        ]

    @cached_property
    def _object_name(self) -> str:
        """The name of the registered object that the table configures. Empty if it configures none,
        or if it names none and the default depends on the data.
        """
        table = self.path.table
        if table not in NAMED:
            return ""
        name = _name_in(self._tree, table)
        if not name and table == "topology":
            return _method_topology(self._tree, self._base)
        return name


def key_for(word: str) -> str:
    """The dotted key that a word stands for, a dotted key itself or the last part of one; empty if
    no table has it, or several have.

    >>> key_for("seed"), key_for("method"), key_for("learning_rate"), key_for("quiet")
    ('seed', 'method', 'plan.lr', '')
    >>> key_for("topology.clients"), key_for("name")
    ('topology.clients', '')
    """
    candidates = _keys_by_last_part({}, None).get(word.rpartition(".")[2], [])
    if word in SYNONYMS:
        candidates = [SYNONYMS[word]]
    if word in candidates or word in NAME_KEYS:  # the name of a table stands for the name in it
        return word
    if len(candidates) == 1:
        return candidates[0]
    return ""


def _quoted(key: str) -> str:
    """A dotted key as a message names it."""
    if key in record_tables() or key == "plan":
        return f"the table [{key}]"
    if "." in key or key not in keys_of(schema_of_record(TopKeys)):
        return repr(key)
    return f"{key!r} (before all tables)"


def _advice_on_package(table: str) -> str:
    """The advice about a table whose package is not installed; empty for all others."""
    package = manifest.missing_package(table)
    if not package:
        return ""
    return f"[{table}] belongs to {package}, which is not installed; leave it out, or install it"


def _keys_by_last_part(tree: Tree, base: Path | None) -> dict[str, list[str]]:
    """All dotted keys that a config may have, by their last part.

    The fields of a named table are those of the objects that the config names or has by default.
    """
    keys_by_table: dict[str, list[str]] = {}
    for table, schema in record_tables().items():
        if not schema.is_suggested:
            continue
        keys_by_table[table] = keys_of(schema)
    if tree.get("stream"):
        keys_by_table["stream"] = keys_of(StreamTable)
    keys_by_table["plan"] = keys_of(schema_of_record(Plan))
    for kind, name_key in NAMED.items():
        keys = [*keys_by_table.get(kind, ()), name_key.key]
        for name in _possible_names(kind, tree, base):
            keys += _fields_of(kind, name, base)
        if kind == "topology":
            keys.append("clients")
        keys_by_table[kind] = keys

    by_last_part = {key: [key] for key in keys_of(schema_of_record(TopKeys))}
    for table, keys in keys_by_table.items():
        for key in dict.fromkeys(keys):
            by_last_part.setdefault(key, []).append(f"{table}.{key}")
    return by_last_part


def _possible_names(kind: str, tree: Tree, base: Path | None) -> Sequence[str]:
    """The name of the object that a table configures, or the names that it can have by default."""
    name = _name_in(tree, kind)
    if name:
        return [name]
    if kind == "model":
        return ALL_DEFAULT_MODELS
    if kind == "topology":
        return [_method_topology(tree, base)]
    return []


def _name_in(tree: Tree, table: str) -> str:
    """The name in a table, or its default; empty if the default depends on other tables."""
    name_key = NAMED[table]
    name = tree.get(table)
    if isinstance(name, Mapping):
        name = name.get(name_key.key)
    if not isinstance(name, str):
        return name_key.default
    return name


def _method_topology(tree: Tree, base: Path | None) -> str:
    """The topology of the method that a config names; empty if there is no such method."""
    try:
        method = registry.lookup("method", _name_in(tree, "method"), base).target
    except ConfigError:
        return ""
    return str(getattr(method, "topology", ""))


def _fields_of(kind: str, name: str, base: Path | None) -> list[str]:
    """The fields of a registered object; none if it cannot be read, which is another problem."""
    try:
        return keys_of(schema_of_name(kind, name, base))
    except ConfigError:
        return []
