"""Tables that name a registered thing, such as a method, and set its fields.

Each thing has a schema for its fields, which is made from its signature.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.config.validation import (
    UNKNOWN_NAME,
    Fields,
    Problem,
    Schema,
    WrongConfig,
    contradiction,
    is_legal,
    keys_of,
    schema_of,
    validated,
)
from fedstill.core import registry
from fedstill.core.errors import ConfigError, UnknownName, on_one_line
from fedstill.core.fields import Seed, shown
from fedstill.core.files import named_path
from fedstill.core.registry import short_name


@dataclass(frozen=True)
class NameKey:
    """The key under which a table names its thing, and the name of the default thing."""

    key: str
    default: str
    """Empty if the default depends on other tables."""


NAMED = {
    "method": NameKey("name", "fedavg"),
    "model": NameKey("name", ""),
    "partition": NameKey("kind", "dirichlet"),
    "topology": NameKey("kind", ""),
    "stream": NameKey("kind", "none"),
}
"""The tables that name a registered thing."""

NAME_KEYS = {table: name_key.key for table, name_key in NAMED.items()} | {"data": "name"}
"""The key of the name, for all tables that may be written as a name: ``method = "fedntd"`` stands
for ``method.name = "fedntd"``.
"""

PARAMETER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "dirichlet": {"alpha": 0.1},
    "sharding": {"shards": 2},
}
"""Values for parameters of partitions that have no default in their signature, by partition."""


@dataclass(frozen=True)
class Named:
    """A registered thing that a table names, with a value for each of its fields."""

    kind: str
    name: str
    values: Mapping[str, Any]

    @property
    def entry(self) -> registry.Entry:
        """The registered thing."""
        return registry.lookup(self.kind, self.name)

    @property
    def label(self) -> str:
        """The name in messages and tables, without the folder of a file."""
        return short_name(self.name)

    @property
    def table(self) -> dict[str, Any]:
        """The table of a config that names this thing and sets all of its fields."""
        return {NAMED[self.kind].key: self.name, **self.values}

    def build(self) -> Any:
        """Build the thing from its fields. Raises ConfigError if it refuses them."""
        try:
            return self.entry.target(**self.values)
        except (TypeError, ValueError) as error:
            message = (
                f"{self.kind} {self.entry.name} cannot be made from these fields: "
                f"{on_one_line(error)}"
            )
            raise ConfigError(message) from error


def read_named(
    kind: str,
    table: Mapping[str, Any],
    base: Path | None,
    default_name: str = "",
    defaults_by_name: Mapping[str, Mapping[str, Any]] | None = None,
) -> Named:
    """The thing that a table names, with all of its fields.

    ``base``: the folder that paths are relative to. ``default_name``: the name if the table has
    none; empty for the default of ``NAMED``. ``defaults_by_name``: defaults of fields for a thing
    of that name, which replace those of its signature. Raises WrongConfig, and ConfigError for a
    file that cannot be used.
    """
    name_key = NAMED[kind]
    fields = dict(table)
    if kind in ("partition", "topology"):
        # The number of clients may be in either table, and is a field of neither thing.
        fields.pop("clients", None)
    name = fields.pop(name_key.key, default_name or name_key.default)
    if not isinstance(name, str):
        raise contradiction(
            f"{kind}.{name_key.key}", f"= {shown(name)} must be a name, a file or an import path"
        )
    resolved = known_name(f"{kind}.{name_key.key}", kind, name, base)

    schema = schema_of_name(kind, name, base)
    defaults = (defaults_by_name or {}).get(name, {})
    legal_defaults = {key: defaults[key] for key in keys_of(schema) if key in defaults}
    values = validated(schema, {**legal_defaults, **fields}, kind)
    if kind == "model":
        values = with_resolved_code(values, base)
    return Named(kind, resolved, values)


def known_name(key: str, kind: str, name: str, base: Path | None) -> str:
    """A name as it stands in a run's config.toml. Raises WrongConfig for the key if no thing of
    that kind has the name.
    """
    try:
        return resolved_name(kind, name, base)
    except UnknownName as error:
        problem = Problem(
            code=UNKNOWN_NAME,
            key=key,
            reason=f"unknown {kind} {shown(error.name)}",
            hint=error.advice,
        )
        raise WrongConfig([problem]) from error


def resolved_name(kind: str, name: str, base: Path | None) -> str:
    """A name as it stands in a run's config.toml, in which files have absolute paths.

    Raises UnknownName if there is no such thing, and ConfigError for a file that cannot be used.
    """
    registry.lookup(kind, name, base)
    path, colon, attribute = name.partition(":")
    if name.startswith(registry.LIVE) or not path.endswith(".py"):
        return name
    file = (base or Path.cwd()) / named_path(path)
    return f"{file.resolve()}{colon}{attribute}"


def with_resolved_code(fields: Mapping[str, Any], base: Path | None) -> dict[str, Any]:
    """The fields of a network, with the resolved name of the network that it wraps.

    Networks such as ``low_rank`` wrap another one, which they name under ``of``; its own fields are
    in a table in theirs, and may wrap a third one.
    """
    resolved = dict(fields)
    for key, value in fields.items():
        if isinstance(value, Mapping):
            resolved[key] = with_resolved_code(value, base)
        elif key == "of" and isinstance(value, str):
            resolved[key] = known_name("model.of", "model", value, base)
    return resolved


def schema_of_name(kind: str, name: str, base: Path | None) -> Schema:
    """The schema of the fields of a registered thing. Raises ConfigError if its signature cannot be
    read.
    """
    return _schema_of_entry(registry.lookup(kind, name, base), name)


@functools.lru_cache(maxsize=1024)
def _schema_of_entry(entry: registry.Entry, name: str) -> Schema:
    """The schema of an entry. ``name``: the name in the config, for messages."""
    try:
        fields = dict(entry.fields)
        is_seeded = entry.kind == "partition" and "seed" in _partition_parameters(entry)
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{entry.kind} {name!r} has fields that cannot be read: {on_one_line(error)}"
        ) from error
    if entry.kind == "model":
        fields = _settable(fields)
    if is_seeded:
        fields["seed"] = (Seed | None, None)
    for key, default in PARAMETER_DEFAULTS.get(name, {}).items():
        if key in fields and fields[key][1] is ...:
            annotation = fields[key][0]
            fields[key] = (annotation, default)
    return schema_of(f"{entry.kind} {short_name(name)}", fields)


def _settable(fields: Fields) -> dict[str, tuple[Any, Any]]:
    """The fields of a network that a config can hold.

    The constructor of another library's network may have others, which keep their defaults. Fields
    without a default stay, so that the config must set them.
    """
    return {
        key: (annotation, default)
        for key, (annotation, default) in fields.items()
        if default is ... or (is_legal(annotation) and _is_plain(default))
    }


def _is_plain(value: Any) -> bool:
    """Whether a config can hold a value.

    >>> _is_plain((1, "a")), _is_plain(print)
    (True, False)
    """
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _partition_parameters(entry: registry.Entry) -> Mapping[str, inspect.Parameter]:
    """The parameters of a partition. Raises ConfigError if it cannot take the labels and the number
    of clients.
    """
    parameters = inspect.signature(entry.target).parameters
    has_keywords = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if has_keywords or {"labels", "clients"} <= parameters.keys():
        return parameters
    raise ConfigError(
        f"partition {short_name(entry.name)} has parameters {', '.join(parameters) or 'none'}; "
        "those that it is given are called labels, clients and, where it draws, seed"
    )
