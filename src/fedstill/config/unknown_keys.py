"""Keys that their table lacks: the message names the key of another table that was meant, or a
field without a type.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedstill import manifest
from fedstill.config.named_tables import NAMED, fields_of
from fedstill.config.tables import StreamTable, TopKeys, record_tables
from fedstill.core import registry
from fedstill.core.errors import ConfigError, UnknownKeys
from fedstill.core.fields import fields_of_record
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


def named_better(error: UnknownKeys, tree: Tree, base: Path | None) -> UnknownKeys:
    """The same error, with the keys of other tables that were meant; ``tree``: the whole config."""
    keys = []
    for table, key, remedy in error.keys:
        keys.append((table, key, what_to_do(table, key, remedy, tree, base)))
    return UnknownKeys(error.wrong, keys)


def meant(key: str, table: str, tree: Tree, base: Path | None, near: bool = True) -> str:
    """Which key of which table was meant by one that ``table`` lacks, as a part of a message; empty
    if none is known.

    ``table``: empty for the keys outside all tables. ``near``: whether a similar key counts, too.
    """
    homes = _homes(tree, base)
    tables = {*NAMED, *record_tables()}
    for other, home in OTHER_WORDS.items():
        if other not in homes or other in tables:
            homes[other] = [home]

    word = key
    if key not in homes and near:
        word = next(iter(difflib.get_close_matches(key, homes, n=1, cutoff=NEAR)), key)
    others = [home for home in homes.get(word, ()) if home != f"{table}.{key}"]
    if not others:
        return ""
    *first, last = [_quoted(home) for home in others[:3]]
    if not first:
        return f"did you mean {last}?"
    return f"did you mean {', '.join(first)} or {last}?"


def _quoted(home: str) -> str:
    """A dotted key as a message names it."""
    if home == "plan":
        return "the table [plan]"
    if "." in home:
        return repr(home)
    return f"{home!r} (before all tables)"


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


def what_to_do(where: str, key: str, remedy: str, tree: Tree, base: Path | None) -> str:
    """What to do about a key that a table lacks: ``remedy``, which knows the table's own keys, or
    something better.
    """
    table = where.partition(".")[0]
    better = (
        _of_missing_package(table or key)
        or _untyped(table, key, tree, base)
        or _called(table, key)
        or meant(key, table, tree, base, near=False)
        or _of_another(table, key, tree, base)
    )
    if better:
        return better
    if remedy.startswith("did you mean"):
        return remedy
    similar = meant(key, table, tree, base)
    if similar:
        return similar
    name = _name(table, tree) if table in NAMED else ""
    if not name:
        return remedy
    return _has(name, _fields(table, name, base))


def _of_missing_package(table: str) -> str:
    """What to do about a table of a package that is not installed."""
    package = manifest.missing_package(table)
    if not package:
        return ""
    return f"[{table}] belongs to {package}, which is not installed; leave it out, or install it"


def _called(table: str, key: str) -> str:
    """What to do about a table's name under the key that other tables have for theirs."""
    if table not in NAMED or key not in ("name", "kind"):
        return ""
    name_key = NAMED[table][0]
    if key == name_key:
        return ""
    return f"did you mean '{table}.{name_key}'?"


def _of_another(table: str, key: str, tree: Tree, base: Path | None) -> str:
    """What to do about a field that other methods have, say, and the one that is named has not."""
    if table not in NAMED:
        return ""
    name = _name(table, tree)
    if not name and table == "topology":
        name = _topology(tree, base)
    others = [
        other
        for other in registry.names(table)
        if other != name and key in _fields(table, other, base)
    ]
    if not others:
        return ""
    owners = ", ".join(others)
    if len(others) > 4:
        owners = f"{', '.join(others[:3])} and {len(others) - 3} more"
    remedy = f"it is a field of {owners}: set {table}.{NAMED[table][0]}"
    if not name:
        return remedy
    return f"{_has(name, _fields(table, name, base))}; {remedy}"


def _has(name: str, fields: Iterable[str]) -> str:
    """Which fields a registered thing has, as a part of a message."""
    return f"{short_name(name)} has {', '.join(sorted(fields)) or 'no fields'}"


def _untyped(table: str, key: str, tree: Tree, base: Path | None) -> str:
    """What to do about a class of the user's that has a value of that name, which is no field
    without a type.
    """
    name = _name(table, tree) if table in NAMED else ""
    if not name:
        return ""
    target = registry.lookup(table, name, base).target
    if not inspect.isclass(target):
        return ""
    for kind in target.__mro__:
        is_users = not kind.__module__.startswith("fedstill.")
        if not is_users or key not in vars(kind):
            continue
        value = vars(kind)[key]
        if not callable(value):
            return (
                f"in class {kind.__name__} it has no type, write: {key}: {type(value).__name__} = "
                f"{value!r}"
            )
    return ""


def _homes(tree: Tree, base: Path | None) -> dict[str, list[str]]:
    """Of all that a config may say: the dotted keys that end with a key, by key."""
    homes = {field.name: [field.name] for field in fields(TopKeys)}

    def add(table: str, keys: Iterable[str]) -> None:
        for key in dict.fromkeys(keys):
            homes.setdefault(key, []).append(f"{table}.{key}")

    for table, record in record_tables().items():
        add(table, fields_of_record(record))
    if tree.get("stream"):
        add("stream", fields_of_record(StreamTable))
    add("plan", fields_of_record(Plan))
    for kind, (name_key, _) in NAMED.items():
        keys = [name_key]
        for name in _names(kind, tree, base):
            keys += _fields(kind, name, base)
        if kind == "topology":
            keys.append("clients")
        add(kind, keys)
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


def _fields(kind: str, name: str, base: Path | None) -> Iterable[str]:
    """The fields of a registered thing; none where it cannot be read, which is said elsewhere."""
    try:
        return fields_of(kind, name, base)[1]
    except ConfigError:
        return ()
