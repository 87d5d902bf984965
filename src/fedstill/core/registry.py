"""The registry of methods, models, data sets, partitions, topologies, measures and streams.

``@register(kind, name)`` registers a class or a function. The package of a kind is imported when a
name of that kind is first looked up, unless a module of the package has this name. Users name a
file beside the config (``"mine.py:Mine"``, or ``"mine.py"``) or an installed module
(``"package.module:Mine"``).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, TypeVar

from fedstill.core.errors import USER, ConfigError, UnknownName

HOMES = {
    "method": "fedstill.methods",
    "model": "fedstill.models",
    "dataset": "fedstill.data.sources",
    "partition": "fedstill.data.partition",
    "topology": "fedstill.core.topology",
    "measure": "fedstill.measures",
    "stream": "fedstill.continual",
}
"""The package of the built-in entries of each kind."""

Target = TypeVar("Target")


@dataclass(frozen=True, eq=False)
class Entry:
    """A registered class or function, the ``target``, under a name.

    ``preset``: values of fields that the name implies. ``about``: the summary, if it is not the
    docstring's. An entry only equals itself, so it can be the key of a cache.
    """

    kind: str
    name: str
    target: Callable[..., Any]
    preset: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""

    def build(self, *supplied: Any, **fields: Any) -> Any:
        """Call the target. supplied: the library's arguments. fields: values of the config, which
        override the preset.
        """
        return self.target(*supplied, **{**self.preset, **fields})


def short_name(name: str) -> str:
    """A name for human readers: a file without its folder.

    >>> short_name("/home/me/mine.py:Mine"), short_name("owner/name")
    ('mine.py:Mine', 'owner/name')
    """
    path = PurePath(name)
    if path.is_absolute():
        return path.name
    return name


_entries: dict[tuple[str, str], Entry] = {}

LIVE = "python:"
"""The prefix of names of objects passed in Python, which no other process can import."""


def register(kind: str, name: str, *, about: str = "", **preset: Any) -> Callable[[Target], Target]:
    """Register a class or function under a name.

    ``preset``: values of fields that the name implies. Raises ConfigError if an entry of another
    module has the name.
    """

    def decorate(target: Target) -> Target:
        entry = Entry(kind, name, target, preset, about)  # type: ignore[arg-type]
        module = entry.target.__module__
        key = name
        if module.startswith(USER):
            key = f"{module}:{name}"  # several files of users may register the same name
        previous = _entries.get((kind, key))
        if previous is not None and previous.target.__module__ != module:
            raise ConfigError(
                f"{kind} {name!r} is registered already, by {previous.target.__module__}; choose "
                "another name"
            )
        _entries[kind, key] = entry
        return target

    return decorate


def method(name: str, *, about: str = "", **preset: Any) -> Callable[[Target], Target]:
    """Register a method: ``@method("fedntd")`` above its frozen dataclass."""
    return register("method", name, about=about, **preset)


def names(kind: str) -> list[str]:
    """The registered names of a kind, sorted."""
    _import_home(kind)
    return sorted(n for k, n in _entries if k == kind and not n.startswith((USER, LIVE)))


def lookup(kind: str, name: str, base: Path | None = None) -> Entry:
    """The entry of a name, of a file ``"mine.py[:Name]"`` relative to ``base``, or of
    ``"package.module:Name"``.

    Raises UnknownName, and ConfigError if a file or module cannot be imported.
    """
    if not _import_namesake(kind, name):
        _import_home(kind)
    if (kind, name) in _entries:
        return _entries[kind, name]
    if name.startswith(LIVE):
        raise ConfigError(
            f"{kind} {name!r} was passed in Python, and cannot be imported here: resume the run "
            f"with fedstill.resume(DIRECTORY, {kind}={name.removeprefix(LIVE).partition('-')[0]}), "
            "or put it into a file and name the file"
        )
    path, _, attribute = name.partition(":")
    if path.endswith(".py") or (path and attribute):
        return _users_entry(kind, name, base or Path.cwd())
    from fedstill.core.user_code import name_advice  # only for errors

    raise UnknownName(kind, name, names(kind), remedy=name_advice(kind, name, names(kind)))


def registered_as(kind: str, target: object) -> str:
    """The name of a class or function that is registered without a preset; empty if it is not."""
    _import_home(kind)
    for (entry_kind, name), entry in _entries.items():
        if entry_kind == kind and entry.target is target and not entry.preset:
            return name
    return ""


def enter(entry: Entry) -> None:
    """Add an entry, whose name no other entry of its kind has."""
    _entries[entry.kind, entry.name] = entry


def bound(kind: str, name: str) -> Any:
    """The object of a name ``python:Name`` in this process; None if there is none."""
    entry = _entries.get((kind, name))
    if entry is None:
        return None
    return entry.target


@functools.cache
def modules_of(kind: str) -> list[str]:
    """The modules that register built-in entries of a kind."""
    home = importlib.import_module(HOMES[kind])
    submodules = pkgutil.iter_modules(getattr(home, "__path__", []))
    return [home.__name__, *(f"{home.__name__}.{info.name}" for info in submodules)]


def _import_namesake(kind: str, name: str) -> bool:
    """Import the module that has the name of an entry. Returns whether it registers this entry."""
    module = f"{HOMES[kind]}.{name}"
    if module not in modules_of(kind):
        return False
    importlib.import_module(module)
    return (kind, name) in _entries


@functools.cache
def _import_home(kind: str) -> None:
    """Import all modules of a kind, which takes a tenth of a second for methods."""
    for module in modules_of(kind):
        importlib.import_module(module)
    if kind == "measure":
        from fedstill import manifest  # the core does not know the outer packages

        for part in manifest.measures():
            part.load()


def _users_entry(kind: str, name: str, base: Path) -> Entry:
    """The entry of a class or function in a user's file or in another installed package."""
    from fedstill.core import user_modules  # only for users' code

    module = user_modules.module_of(kind, name, base)
    registered = [
        entry
        for (entry_kind, _), entry in _entries.items()
        if entry_kind == kind and entry.target.__module__ == module.__name__
    ]
    target = user_modules.chosen_target(kind, name, module, [e.target for e in registered])
    user_modules.check_fields(kind, target)
    for entry in registered:
        if entry.target is target:
            return entry
    return Entry(kind, name, target)
