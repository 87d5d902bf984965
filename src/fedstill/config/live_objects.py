"""Objects that Python hands over to an experiment: classes, functions, networks, and their names in
a config.

An object that another process can import is named by its file or its import path. All others, such
as a class of a notebook, a lambda or a network object, are *live*: they get a name
``python:NAME``, which is bound to them in this process only.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedstill.config.named_tables import NAME_KEYS
from fedstill.core import registry
from fedstill.core.errors import ConfigError
from fedstill.core.fields import as_table, plain_value
from fedstill.core.files import digest
from fedstill.core.method import Method
from fedstill.core.user_code import USER

OBJECT_TABLES = ("method", "model", "partition")
"""The tables that also take the thing itself: a class, a function, or an object that can be
called.
"""

_lock = threading.Lock()
"""Held while a name is chosen and bound: threads may make experiments at the same time."""


class Copies:
    """A constructor of copies of one network, with its weights. It takes neither the shape of the
    inputs nor the number of classes, which the network fixes.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.__doc__ = (
            f"A {type(network).__name__} that was handed over from Python, with its weights."
        )

    def __call__(self) -> nn.Module:
        """A new copy."""
        return copy.deepcopy(self.network)


def has_object(table: str, value: Any) -> bool:
    """Whether a table is an object that Python handed over, or has one in the place of its name."""
    if table not in OBJECT_TABLES:
        return False
    if isinstance(value, Mapping):
        value = value.get(NAME_KEYS[table])
    return callable(value) or isinstance(value, Method)


def with_object_name(table: str, value: Any) -> dict[str, Any]:
    """The table in which an object stands by its name. A method's fields become the table's."""
    key = NAME_KEYS[table]
    if isinstance(value, Method):
        return {key: name_for(table, type(value)), **plain_value(as_table(value))}
    if isinstance(value, Mapping):
        return {**value, key: name_for(table, value[key])}
    return {key: name_for(table, value)}


def name_for(kind: str, thing: Any) -> str:
    """The name of an object in a config. A live object is bound to its name.

    Raises ConfigError for an object that cannot be called.
    """
    original = _unwrapped(thing)
    with _lock:
        importable = _importable_name(kind, original)
        if importable:
            return importable
        name = _live_name(kind, original)
        if registry.bound(kind, name) is None:
            _bind(kind, name, original)
        return name


def bind(kind: str, name: str, thing: Any) -> None:
    """Bind an object to the live name in a run's config. A name that is bound already stays so."""
    with _lock:
        if registry.bound(kind, name) is None:
            _bind(kind, name, _unwrapped(thing))


def fingerprint(kind: str, name: str) -> str:
    """The SHA-256 of a live object: of its source, of the arguments of a partial function, and of
    a network's weights. "unknown" for an object without any of these.
    """
    thing = _unwrapped(registry.bound(kind, name))
    parts = []
    while isinstance(thing, functools.partial):
        parts.append(repr((thing.args, sorted(thing.keywords.items()))))
        thing = thing.func
    if isinstance(thing, nn.Module):
        parts += _weight_digests(thing)
    try:
        parts.append(inspect.getsource(_source_owner(thing)))
    except (OSError, TypeError):
        # Code that was typed at a prompt has no source.
        if not parts:
            return "unknown"
    return digest("\n".join(parts).encode())


def _weight_digests(network: nn.Module) -> list[str]:
    """The name and the SHA-256 of each entry of a network, sorted by name."""
    entries = sorted(network.state_dict().items())
    return [
        f"{name} {digest(entry.detach().cpu().contiguous().numpy().tobytes())}"
        for name, entry in entries
    ]


def _unwrapped(thing: Any) -> Any:
    """The object that the user handed over: a network, where ``thing`` makes copies of it."""
    if isinstance(thing, Copies):
        return thing.network
    return thing


def _bind(kind: str, name: str, thing: Any) -> None:
    """Register an object under a live name. A network is registered by a constructor of copies."""
    if not callable(thing):
        raise ConfigError(f"{kind} = {thing!r:.60} is no name, class or function")
    target = thing
    if isinstance(thing, nn.Module):
        target = Copies(thing)
    registry.enter(registry.Entry(kind, name, target))


def _importable_name(kind: str, thing: Any) -> str:
    """The name by which any process can import a class or function: a registered name, a file or
    an import path. Empty if there is none.
    """
    qualified_name = getattr(thing, "__qualname__", "")
    module_name = getattr(thing, "__module__", "")
    module = sys.modules.get(module_name)
    if module is None or getattr(module, qualified_name, None) is not thing:
        return ""
    if module_name.startswith("fedstill."):
        return registry.registered_as(kind, thing)
    if module_name.startswith(USER):
        return f"{module.__file__}:{qualified_name}"
    if module_name == "__main__" or not getattr(module, "__spec__", None):
        return ""
    return f"{module_name}:{qualified_name}"


def _live_name(kind: str, thing: Any) -> str:
    """The live name that is bound to an object, or else the first one that is free:
    ``python:Net``, ``python:Net-2``, …
    """
    first = f"{registry.LIVE}{_display_name(thing)}"
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(name for name in names if _can_stand_for(kind, name, thing))


def _can_stand_for(kind: str, name: str, thing: Any) -> bool:
    """Whether a live name is free, or is bound to this object."""
    target = registry.bound(kind, name)
    return target is None or _unwrapped(target) is thing


def _display_name(thing: Any) -> str:
    """The name of a class or function, or of an object's class."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    return str(getattr(thing, "__name__", type(thing).__name__)).strip("<>")


def _source_owner(thing: Any) -> Any:
    """The class or function in whose source an object is defined."""
    if inspect.isclass(thing) or inspect.isroutine(thing):
        return thing
    return type(thing)
