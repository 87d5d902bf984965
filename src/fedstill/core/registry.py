"""Finds methods, models, data sets, partitions, topologies, measures and streams by name, file or
import path.

A thing registers itself by ``@register(kind, name)``; a kind's package is imported when one of its
names is first asked for. A user's own is a file beside the config (``"mine.py:Mine"``, or
``"mine.py"``) or ``"package.module:Mine"``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar, get_type_hints

from fedstill.core.errors import USER, ConfigError, UnknownName, name_advice

HOMES = {
    "method": "fedstill.methods",
    "model": "fedstill.models",
    "dataset": "fedstill.data.sources",
    "partition": "fedstill.data.partition",
    "topology": "fedstill.core.topology",
    "measure": "fedstill.measures",
    "stream": "fedstill.continual",
}
"""The package in which each kind's built-in things register themselves."""

GIVEN = {
    "partition": {"labels", "clients", "groups", "seed"},
    "model": {"input_shape", "in_channels", "vocabulary", "classes", "num_classes"},
    "dataset": {"folder"},
    "stream": {"labels", "domains", "tasks", "seed", "classes"},
}
"""Parameters that the library supplies, and that are therefore no fields of a config."""

Target = TypeVar("Target")


@dataclass(frozen=True, eq=False)
class Entry:
    """One registered thing: its target (a class or a function), and the fields fixed by this
    name. It equals itself alone, so it can be the key of a cache.
    """

    kind: str
    name: str
    target: Callable[..., Any]
    preset: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""

    @property
    def summary(self) -> str:
        """One line that says what it is: the first paragraph of its docstring, unless ``about`` is
        given.
        """
        first_paragraph = (inspect.getdoc(self.target) or "").partition("\n\n")[0]
        text = self.about or " ".join(first_paragraph.split())
        return text.replace("``", "")

    @functools.cached_property
    def fields(self) -> Mapping[str, tuple[Any, Any]]:
        """{name: (annotation, default)} of what a config may set; a field without default has
        ``...``.
        """
        hints = get_type_hints(_annotated(self.target), include_extras=True)
        out = {}
        for name, p in inspect.signature(self.target).parameters.items():
            if name not in GIVEN.get(self.kind, ()) and p.kind not in (
                p.VAR_POSITIONAL,
                p.VAR_KEYWORD,
            ):
                default = ... if p.default is p.empty else p.default
                out[name] = (hints.get(name, Any), self.preset.get(name, default))
        return out

    @property
    def sentences(self) -> dict[str, str]:
        """{name: sentence} of what a config may set, as far as sentences are written (see
        ``fedstill.core.docstrings``).
        """
        from fedstill.core import docstrings  # for lists of fields, not for runs

        return {
            name: text.replace("``", "") for name, text in docstrings.sentences(self.target).items()
        }

    def build(self, *given: Any, **fields: Any) -> Any:
        """Call the target with what the library gives and what the config says, over this name's
        preset.
        """
        return self.target(*given, **{**self.preset, **fields})


def short_name(name: str) -> str:
    """A name as people read it: of a file by its whole path, the file.

    >>> short_name("/home/me/mine.py:Mine"), short_name("owner/name")
    ('mine.py:Mine', 'owner/name')
    """
    return PurePath(name).name if PurePath(name).is_absolute() else name


def _annotated(target: Any) -> Any:
    """Where the annotations of what can be called are: of a class, a function, a partial one, or
    another object.
    """
    while isinstance(target, functools.partial):
        target = target.func
    if inspect.isclass(target):
        return target if is_dataclass(target) else target.__init__
    return target if inspect.isroutine(target) else type(target).__call__


_entries: dict[tuple[str, str], Entry] = {}

LIVE = "python:"
"""How names of things begin that were handed over from Python, and that another process cannot
import.
"""


def register(kind: str, name: str, *, about: str = "", **preset: Any) -> Callable[[Target], Target]:
    """Register a class or function under a name; with ``preset``, a registered setting of it (no
    copy).

    Raises ConfigError if the name is taken by a thing of another module.
    """

    def decorate(target: Target) -> Target:
        entry = Entry(kind, name, target, preset, about)  # type: ignore[arg-type]
        home = entry.target.__module__
        # Two users' files may share a name.
        key = f"{home}:{name}" if home.startswith(USER) else name
        if (old := _entries.get((kind, key))) and old.target.__module__ != home:
            raise ConfigError(
                f"{kind} {name!r} is registered already, by {old.target.__module__}; choose "
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
    """The entry of a name, of a file ``"mine.py[:Thing]"`` relative to ``base``, or of
    ``"package.module:Thing"``.

    Raises UnknownName with the nearest legal name, ConfigError if a file or module cannot be
    imported.
    """
    _import_home(kind)
    if (kind, name) in _entries:
        return _entries[kind, name]
    if name.startswith(LIVE):
        raise ConfigError(
            f"{kind} {name!r} was handed over in Python, and cannot be imported here: "
            "resume the run with fedstill.resume(DIRECTORY, "
            f"{kind}={name.removeprefix(LIVE).partition('-')[0]}), "
            f"or put it in a file and name that"
        )
    path, _, attribute = name.partition(":")
    if path.endswith(".py") or (path and attribute):
        return _users_entry(kind, name, base or Path.cwd())
    known = names(kind)
    raise UnknownName(kind, name, known, todo=name_advice(kind, name, known))


def registered_as(kind: str, target: object) -> str:
    """The name under which a class or function is registered without a preset; empty if it is
    not.
    """
    _import_home(kind)
    for (of_kind, name), entry in _entries.items():
        if of_kind == kind and entry.target is target and not entry.preset:
            return name
    return ""


def enter(entry: Entry) -> None:
    """Make an entry known under its name, which is not of this kind's yet."""
    _entries[entry.kind, entry.name] = entry


def bound(kind: str, name: str) -> Any:
    """What a name ``python:Name`` stands for in this process; None if nothing does."""
    entry = _entries.get((kind, name))
    if entry is None:
        return None
    return entry.target


def builtin_modules() -> list[str]:
    """The modules in which the built-in things of all kinds register themselves."""
    return [module for kind in HOMES for module in _modules_of(kind)]


def _modules_of(kind: str) -> list[str]:
    home = importlib.import_module(HOMES[kind])
    submodules = pkgutil.iter_modules(getattr(home, "__path__", []))
    return [home.__name__, *(f"{home.__name__}.{info.name}" for info in submodules)]


@functools.cache
def _import_home(kind: str) -> None:
    for module in _modules_of(kind):
        importlib.import_module(module)
    if kind == "measure":
        from fedstill import manifest  # the core does not know the outer packages

        for part in manifest.measures():
            part.load()


def _users_entry(kind: str, name: str, base: Path) -> Entry:
    """The entry of a thing in a user's file or in another installed package."""
    from fedstill.core import user_modules  # for users' own things alone

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
