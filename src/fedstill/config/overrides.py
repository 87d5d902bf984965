"""Values by dotted key: ``key=value`` for one run, ``key=value,value`` for a grid of runs, a tree
as one level. No value over a config's is dropped: what is set twice is an error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.config.named_tables import NAMED
from fedstill.config.tables import NO_STREAM, StreamTable
from fedstill.config.validation import Typed, keys_of
from fedstill.core.errors import ConfigError
from fedstill.core.files import named_path


def parse_overrides(overrides: tuple[str, ...]) -> dict[str, Any]:
    """``("method.beta=0.5",)`` as ``{"method.beta": 0.5}``; raises ConfigError for what is no
    KEY=VALUE.

    >>> parse_overrides(("method.beta=0.5", "method=fedntd"))
    {'method.beta': 0.5, 'method': 'fedntd'}
    """
    out: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"override {text!r} is not of the form key=value, e.g. -s method.beta=0.5"
            )
        try:
            read = tomllib.loads(f"v = {value}")
        except (ValueError, RecursionError):
            read = {}
        if key.strip() in out:
            raise ConfigError(f"{key.strip()} is set twice by -s; leave one of the two out")
        out[key.strip()] = read["v"] if len(read) == 1 else Typed(value.strip())
    return out


# Values that are set more than once.


COMMAND_LINE = "command line"
"""The origin of values that ``-s`` sets."""

NAME_KEYS = {table: key for table, (key, _) in NAMED.items()} | {"data": "name"}
"""Tables that name a thing, and under which key."""

COMMON_FIELDS: Mapping[str, Sequence[str]] = {
    "partition": ["clients"],
    "stream": keys_of(StreamTable),
    "topology": ["clients"],
}
"""Fields of a table that do not belong to the thing that it names."""


def is_name(key: str) -> bool:
    """Whether a key names what a table is about.

    >>> is_name("method"), is_name("method.name"), is_name("method.beta"), is_name("plan")
    (True, True, False, False)
    """
    table, _, field = key.partition(".")
    return table in NAME_KEYS and field in ("", NAME_KEYS[table])


def leaf_keys(values: Mapping[str, Any]) -> list[str]:
    """The keys that values set, of tables the keys in them.

    >>> leaf_keys({"method": "fedntd", "plan": {"lr": 0.1}, "seed": 1})
    ['method.name', 'plan.lr', 'seed']
    """
    leaves = flat(values)
    return [f"{key}.{NAME_KEYS[key]}" if key in NAME_KEYS else key for key in leaves]


def overridden(origins: Mapping[str, str]) -> dict[str, str]:
    """The keys whose values override the config's, and what sets them."""
    return {key: origin for key, origin in origins.items() if not origin.startswith("file")}


def renamed(
    table: str, values: Mapping[str, Any], name: str, origins: Mapping[str, str]
) -> dict[str, Any]:
    """The values of a table that names another thing, or the same one again.

    Fields that override the config stay. Those of the config belong to the thing that it names, and
    to every one if it names none; but those of [partition] are then the default partition's.
    """
    key = NAME_KEYS[table]
    default = NAMED["partition"][1] if table == "partition" else name
    if values.get(key, default) == name:
        return {**values, key: name}
    kept = overridden_fields(table, origins)
    if name != NO_STREAM:
        kept |= set(COMMON_FIELDS.get(table, ()))
    return {**{field: value for field, value in values.items() if field in kept}, key: name}


def overridden_fields(table: str, origins: Mapping[str, str]) -> set[str]:
    """The fields of a table whose values override the config's."""
    keys = (key.split(".") for key in overridden(origins))
    return {parts[1] for parts in keys if parts[0] == table and len(parts) > 1}


def refuse_set_twice(values: Mapping[str, Any], origins: Mapping[str, str], origin: str) -> None:
    """Raise ConfigError where an option of a command sets a value, or replaces its table, that
    ``-s`` or another option has set.

    In Python, who sets a value again means the new one.
    """
    leaves = leaf_keys(values)
    repeated = {key for number, key in enumerate(leaves) if key in leaves[:number]}
    if repeated:
        raise ConfigError(_set_twice(min(repeated), origin, origin))
    if not origin.startswith("--"):
        return
    tables = [key for key, value in values.items() if isinstance(value, Mapping)]
    for key, first in origins.items():
        is_option = first == COMMAND_LINE or first.startswith("--")
        is_replaced = key in leaves or any(key.startswith(f"{table}.") for table in tables)
        if is_option and is_replaced:
            raise ConfigError(_set_twice(key, first, origin))


def _set_twice(key: str, *origins: str) -> str:
    first, second = ("-s" if origin == COMMAND_LINE else origin for origin in origins)
    return f"{key} is set twice, by {first} and by {second}; leave one of them out"


# Names of files on the command line, and trees of settings.


PATHS = ("start_from", "data.folder", "data.tokenizer", "flower.federation")
"""Keys whose texts are paths, however they look."""


def from_here(value: Any, base: Path | None, is_path: bool = False) -> Any:
    """Values that were typed, in which a file that is in the working directory, and not in
    ``base``, is named whole.

    A text is taken for a file's name where it has a slash or a dot, or its key is one of ``PATHS``;
    ``:Name`` may follow. In lists and tables, too.
    """
    if isinstance(value, Mapping):
        return {key: from_here(one, base, key in PATHS) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(from_here(one, base) for one in value)
    path, colon, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if base is None or not ("/" in path or "." in path or is_path) or len(path) > 1000:
        return value
    try:
        there = named_path(path)
        here = not (base / there).exists() and there.exists()
    except (ConfigError, OSError, ValueError):  # no name that a file can have
        return value
    return type(value)(f"{there.resolve()}{colon}{rest}") if here else value


def parse_grid(texts: tuple[str, ...]) -> dict[str, list[Any]]:
    """``("method.beta=0.1,1",)`` as ``{"method.beta": [0.1, 1]}``.

    >>> parse_grid(("method.beta=0.1,1", "partition=iid,sharding"))
    {'method.beta': [0.1, 1], 'partition': ['iid', 'sharding']}
    >>> parse_grid(("model.hidden=[8],[8, 8]",))
    {'model.hidden': [[8], [8, 8]]}
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        if key.strip() in grid:
            raise ConfigError(
                f"--grid names {key.strip()} twice; write its values with commas: "
                f"--grid {key.strip()}=A,B"
            )
        (whole,) = parse_overrides((f"{key}=[{values}]",)).values()
        words = (
            []
            if isinstance(whole, list)
            else [parse_overrides((f"{key}={v}",)) for v in values.split(",")]
        )
        grid[key.strip()] = (
            whole if isinstance(whole, list) else [v for word in words for v in word.values()]
        )
    return grid


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of settings by dotted key.

    >>> flat({"seed": 1, "plan": {"train": {"lr": 0.1}}})
    {'seed': 1, 'plan.train.lr': 0.1}
    """
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out.update(
            flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return out
