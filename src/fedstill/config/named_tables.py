"""Tables that name a registered thing, such as a method, and set its fields: each thing has a model
that is made from its signature.
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
    Model,
    Problem,
    WrongConfig,
    contradiction,
    is_legal,
    keys_of,
    model_of,
    validated,
)
from fedstill.core import registry
from fedstill.core.errors import ConfigError, UnknownName, on_one_line
from fedstill.core.fields import Seed, shown
from fedstill.core.files import named_path
from fedstill.core.registry import short_name

NAMED = {
    "method": ("name", "fedavg"),
    "model": ("name", ""),
    "partition": ("kind", "dirichlet"),
    "topology": ("kind", ""),
    "stream": ("kind", "none"),
}
"""Tables that name a registered thing: under which key, and which one if none is named."""

DEFAULTS: dict[str, dict[str, Any]] = {"dirichlet": {"alpha": 0.1}, "sharding": {"shards": 2}}
"""Values for parameters that a partition asks for and that we choose if the user does not."""


@dataclass(frozen=True)
class Named:
    """A registered thing that a table names, its name resolved, and every field of it, set or by
    default.
    """

    kind: str
    name: str
    values: Mapping[str, Any]

    @property
    def entry(self) -> registry.Entry:
        """The registered thing."""
        return registry.lookup(self.kind, self.name)

    @property
    def label(self) -> str:
        """The name as people read it, without the folder of a file."""
        return short_name(self.name)

    @property
    def table(self) -> dict[str, Any]:
        """The same as a table of a config."""
        return {NAMED[self.kind][0]: self.name, **self.values}

    def build(self) -> Any:
        """The thing itself; raises ConfigError where it cannot be made from these fields."""
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
    default: str = "",
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Named:
    """What a table names and sets. Raises WrongConfig, and ConfigError for a file that cannot be
    used.

    ``default``: the name where the table has none. ``options``: defaults of fields, by the name of
    what they are for.
    """
    key, first = NAMED[kind]
    given = dict(table)
    # the number of clients may be in both tables, and is a field of neither
    if kind in ("partition", "topology"):
        given.pop("clients", None)
    name = given.pop(key, default or first)
    if not isinstance(name, str):
        raise contradiction(
            f"{kind}.{key}", f"= {shown(name)} must be a name, a file or an import path"
        )
    known = known_name(f"{kind}.{key}", kind, name, base)
    model = model_of_name(kind, name, base)
    defaults = (options or {}).get(name, {})
    own = {field: defaults[field] for field in keys_of(model) if field in defaults}
    values = validated(model, {**own, **given}, kind)
    if kind == "model":
        values = with_code(values, base)
    return Named(kind, known, values)


def known_name(key: str, kind: str, name: str, base: Path | None) -> str:
    """A name as it stands in a run's config.toml; raises WrongConfig with the key that names
    something unknown.
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


def schedules(own: str, options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The defaults of a method's topologies: of its own all that it asks for, of others the stage
    at a task's end.
    """
    everywhere = {k: v for k, v in options.items() if k == "task_end"}
    return {**dict.fromkeys(registry.names("topology"), everywhere), own: options}


def with_code(fields: Mapping[str, Any], base: Path | None) -> dict[str, Any]:
    """The fields of a model, in which each ``of`` names code as it stands in a run's
    config.toml.
    """
    named = dict(fields)
    for key, value in fields.items():
        if isinstance(value, Mapping):
            named[key] = with_code(value, base)
        elif key == "of" and isinstance(value, str):
            named[key] = known_name("model.of", "model", value, base)
    return named


def resolved_name(kind: str, name: str, base: Path | None) -> str:
    """A name as it stands in a run's config.toml: that of a file by its whole path."""
    registry.lookup(kind, name, base)
    if name.startswith(registry.LIVE):
        return name
    path, colon, attribute = name.partition(":")
    return (
        str(((base or Path.cwd()) / named_path(path)).resolve()) + colon + attribute
        if path.endswith(".py")
        else name
    )


def model_of_name(kind: str, name: str, base: Path | None) -> Model:
    """The model of what a config may set of a registered thing. Raises ConfigError where its fields
    cannot be read.
    """
    return _model_of_entry(registry.lookup(kind, name, base), name)


@functools.lru_cache(maxsize=1024)
def _model_of_entry(entry: registry.Entry, name: str) -> Model:
    """The model of an entry; ``name``: as the config writes it."""
    try:
        fields = dict(entry.fields)
        is_seeded = entry.kind == "partition" and "seed" in _parameters(entry)
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{entry.kind} {name!r} has fields that cannot be read: {on_one_line(error)}"
        ) from error
    if entry.kind == "model":
        fields = _settable(fields)
    if is_seeded:
        fields["seed"] = (Seed | None, None)
    for key, value in DEFAULTS.get(name, {}).items():
        if key in fields and fields[key][1] is ...:
            fields[key] = (fields[key][0], value)
    return model_of(f"{entry.kind} {short_name(name)}", fields)


def _settable(fields: Fields) -> dict[str, tuple[Any, Any]]:
    """The fields of a network that a config can hold. A constructor that was not written for a
    config may have others, which keep their defaults.
    """
    return {
        key: (hint, default)
        for key, (hint, default) in fields.items()
        if default is ... or (is_legal(hint) and _is_plain(default))
    }


def _is_plain(value: Any) -> bool:
    """Whether a config can hold a value.

    >>> _is_plain((1, "a")), _is_plain(print)
    (True, False)
    """
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _parameters(entry: registry.Entry) -> Mapping[str, inspect.Parameter]:
    """The parameters of a partition; raises ConfigError where it does not take what the library
    gives it.
    """
    taken = inspect.signature(entry.target).parameters
    if (
        any(p.kind is p.VAR_KEYWORD for p in taken.values())
        or {"labels", "clients"} <= taken.keys()
    ):
        return taken
    given = "those that it is given are called labels, clients and, where it draws, seed"
    raise ConfigError(
        f"partition {short_name(entry.name)} has parameters {', '.join(taken) or 'none'}; {given}"
    )
