"""Keys that their table lacks: the message names the key of another table that was meant, or a
field without a type.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedstill import manifest
from fedstill.config.named_tables import NAMED, fields_of
from fedstill.config.package_tables import record_tables
from fedstill.config.tables import StreamTable, TopKeys
from fedstill.core import registry
from fedstill.core.errors import ConfigError, UnknownKeys
from fedstill.core.fields import fields_of_record
from fedstill.core.files import short_name
from fedstill.core.records import Plan

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
    keys = [
        (where, key, what_to_do(where, key, todo, tree, base)) for where, key, todo in error.keys
    ]
    return UnknownKeys(error.wrong, keys)


def meant(key: str, table: str, tree: Tree, base: Path | None, near: bool = True) -> str:
    """Which key of which table was meant by one that ``table`` lacks, as a part of a message; empty
    if none is known.

    ``table``: empty for the keys outside all tables. ``near``: whether a similar key counts, too.
    """
    homes = _homes(tree, base)
    homes |= {
        word: [home]
        for word, home in OTHER_WORDS.items()
        if word not in homes or word in (*NAMED, *record_tables())
    }
    like = difflib.get_close_matches(key, homes, n=1, cutoff=NEAR) if near else []
    there = [
        home for home in homes.get(key, homes[like[0]] if like else []) if home != f"{table}.{key}"
    ]
    said = [
        "the table [plan]"
        if home == "plan"
        else f"{home!r}{'' if '.' in home else ' (before all tables)'}"
        for home in there[:3]
    ]
    return (
        f"did you mean {' or '.join(filter(None, [', '.join(said[:-1]), said[-1]]))}?"
        if said
        else ""
    )


def home_of(word: str) -> str:
    """The dotted key that a word alone stands for; empty if it is none, or is in more than one
    table.

    >>> home_of("seed"), home_of("method"), home_of("learning_rate"), home_of("quiet")
    ('seed', 'method', 'plan.lr', '')
    """
    homes = _homes({}, None) | {other: [home] for other, home in OTHER_WORDS.items()}
    there = homes.get(word, [])
    if word in there or word in (*NAMED, "data"):  # a table's name stands for the name in it
        return word
    return there[0] if len(there) == 1 else ""


def what_to_do(where: str, key: str, todo: str, tree: Tree, base: Path | None) -> str:
    """What to do about a key that a table lacks: ``todo``, which knows the table's own keys, or
    something better.
    """
    table = where.partition(".")[0]
    return (
        _of_missing_package(table or key)
        or _untyped(table, key, tree, base)
        or _called(table, key)
        or meant(key, table, tree, base, near=False)
        or _of_another(table, key, tree, base)
        or (todo if todo.startswith("did you mean") else meant(key, table, tree, base))
        or (
            _has(name, _fields(table, name, base))
            if table in NAMED and (name := _name(table, tree))
            else todo
        )
    )


def _of_missing_package(table: str) -> str:
    """What to do about a table of a package that is not installed."""
    package = manifest.missing_package(table)
    if not package:
        return ""
    return f"[{table}] belongs to {package}, which is not installed; leave it out, or install it"


def _called(table: str, key: str) -> str:
    """What to do about a table's name under the key that other tables have for theirs."""
    right = NAMED.get(table, ("", ""))[0]
    return (
        f"did you mean '{table}.{right}'?"
        if right and key in ("name", "kind") and key != right
        else ""
    )


def _of_another(table: str, key: str, tree: Tree, base: Path | None) -> str:
    """What to do about a field that other methods have, say, and the one that is named has not."""
    if table not in NAMED:
        return ""
    name = _name(table, tree) or (_topology(tree, base) if table == "topology" else "")
    have = [
        other
        for other in registry.names(table)
        if other != name and key in _fields(table, other, base)
    ]
    if not have:
        return ""
    some = f"{', '.join(have[:3])} and {len(have) - 3} more" if len(have) > 4 else ", ".join(have)
    has = f"{_has(name, _fields(table, name, base))}; " if name else ""
    return f"{has}it is a field of {some}: set {table}.{NAMED[table][0]}"


def _has(name: str, fields: Iterable[str]) -> str:
    return f"{short_name(name)} has {', '.join(sorted(fields)) or 'no fields'}"


def _untyped(table: str, key: str, tree: Tree, base: Path | None) -> str:
    """What to do about a class of the user's that has a value of that name, which is no field
    without a type.
    """
    name = _name(table, tree) if table in NAMED else ""
    if not name:
        return ""
    target = registry.lookup(table, name, base).target
    for kind in target.__mro__ if inspect.isclass(target) else ():
        if (
            key in vars(kind)
            and not kind.__module__.startswith("fedstill.")
            and not callable(vars(kind)[key])
        ):
            value = vars(kind)[key]
            return (
                f"in class {kind.__name__} it has no type, write: {key}: {type(value).__name__} = "
                f"{value!r}"
            )
    return ""


def _homes(tree: Tree, base: Path | None) -> dict[str, list[str]]:
    """{key: dotted keys that end with it} of all that a config may say."""
    homes = {f.name: [f.name] for f in fields(TopKeys)}

    def add(table: str, keys: Iterable[str]) -> None:
        for key in dict.fromkeys(keys):
            homes.setdefault(key, []).append(f"{table}.{key}")

    for table, record in record_tables().items():
        add(table, fields_of_record(record))
    if tree.get("stream"):
        add("stream", fields_of_record(StreamTable))
    add("plan", fields_of_record(Plan))
    for kind, (key, _) in NAMED.items():
        names = (
            [_name(kind, tree)]
            if _name(kind, tree)
            else MODELS
            if kind == "model"
            else [_topology(tree, base)]
        )
        of_kind = [field for name in names for field in _fields(kind, name, base)]
        add(kind, [key, *of_kind, *(["clients"] if kind == "topology" else [])])
    return homes


def _name(kind: str, tree: Tree) -> str:
    """What a table names; empty if it is the default of something else."""
    key, default = NAMED[kind]
    given = tree.get(kind)
    name = given.get(key, default) if isinstance(given, Mapping) else given
    return name if isinstance(name, str) else default


def _topology(tree: Tree, base: Path | None) -> str:
    try:
        return str(
            getattr(registry.lookup("method", _name("method", tree), base).target, "topology", "")
        )
    except ConfigError:
        return ""


def _fields(kind: str, name: str, base: Path | None) -> Iterable[str]:
    """The fields of a registered thing; none where it cannot be read, which is said elsewhere."""
    try:
        return fields_of(kind, name, base)[1]
    except ConfigError:
        return ()
