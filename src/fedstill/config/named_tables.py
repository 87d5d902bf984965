"""Tables that name a registered thing, such as a method, and set its fields."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.core import registry
from fedstill.core.errors import ConfigError, on_one_line
from fedstill.core.fields import Fields, Seed, checked, held, shown
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
            return self.entry.build(**self.values)
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
    """What a table names and sets; raises ConfigError in one line for what is wrong.

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
        raise ConfigError(f"{kind}.{key} = {shown(name)} must be a name, a file or an import path")
    own = (options or {}).get(name, {})
    fields = {
        k: (hint, own.get(k, value)) for k, (hint, value) in fields_of(kind, name, base)[1].items()
    }
    return Named(
        kind, resolved_name(kind, name, base), with_code(kind, checked(fields, given, kind), base)
    )


def schedules(own: str, options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The defaults of a method's topologies: of its own all that it asks for, of others the stage
    at a task's end.
    """
    everywhere = {k: v for k, v in options.items() if k == "task_end"}
    return {**dict.fromkeys(registry.names("topology"), everywhere), own: options}


def with_code(kind: str, value: Any, base: Path | None) -> Any:
    """The fields of a model, in which each ``of`` names code as it stands in a run's
    config.toml.
    """
    if kind != "model" or not isinstance(value, Mapping):
        return value
    return {
        k: resolved_name("model", v, base)
        if k == "of" and isinstance(v, str)
        else with_code(kind, v, base)
        for k, v in value.items()
    }


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


def fields_of(kind: str, name: str, base: Path | None) -> tuple[registry.Entry, Fields]:
    """A registered thing and what a config may set of it. Raises ConfigError where its fields
    cannot be read.
    """
    entry = registry.lookup(kind, name, base)
    try:
        fields = dict(entry.fields)
        seeded = kind == "partition" and "seed" in _parameters(entry)
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{kind} {name!r} has fields that cannot be read: {on_one_line(error)}"
        ) from error
    # a constructor that was not written for a config may have others, which keep their defaults
    if kind == "model":
        fields = {k: (hint, v) for k, (hint, v) in fields.items() if v is ... or held(hint, v)}
    if seeded:
        fields["seed"] = (Seed | None, None)
    for key, value in DEFAULTS.get(name, {}).items():
        if key in fields and fields[key][1] is ...:
            fields[key] = (fields[key][0], value)
    return entry, fields


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
