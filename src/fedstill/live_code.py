"""Classes, functions and networks that are handed over from Python: their name in a config, and
what they are.

What can be imported again is named by its file or its import path. The rest (a class of a notebook,
a lambda, a network that exists) is bound to a name ``python:Name`` that only this process knows.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from typing import Any

from torch import nn

from fedstill import registry
from fedstill.errors import ConfigError
from fedstill.files import digest

_binding = threading.Lock()


def name_for(kind: str, thing: Any) -> str:
    """The name of a class, a function, a network or another object that can be called, as a config
    writes it.
    """
    with _binding:
        given = _given(thing)
        if again := _importable(kind, given):
            return again
        first = name = f"{registry.LIVE}{_called(given)}"
        number = 1
        while (there := registry.bound(kind, name)) is not None and _given(there) is not given:
            number += 1
            name = f"{first}-{number}"
        if there is None:
            _bind(kind, name, given)
        return name


def bind(kind: str, name: str, thing: Any) -> None:
    """Say what a name ``python:Name`` of a run's config stands for; what is bound already in this
    process stays.
    """
    with _binding:
        if registry.bound(kind, name) is None:
            _bind(kind, name, _given(thing))


def fingerprint(kind: str, name: str) -> str:
    """The SHA-256 of what a name ``python:Name`` stands for: its source, a network's weights;
    "unknown" without any.
    """
    return _fingerprint(registry.bound(kind, name))


def _fingerprint(target: Any) -> str:
    thing = _given(target)
    parts = []
    while isinstance(thing, functools.partial):
        parts.append(repr((thing.args, sorted(thing.keywords.items()))))
        thing = thing.func
    if isinstance(thing, nn.Module):
        parts += [
            f"{k} {digest(v.detach().cpu().contiguous().numpy().tobytes())}"
            for k, v in _state(thing)
        ]
    try:
        parts.append(inspect.getsource(_defined(thing)))
    except (OSError, TypeError):
        return digest("\n".join(parts).encode()) if parts else "unknown"
    return digest("\n".join(parts).encode())


class Copies:
    """Makes copies of one network, its weights included; it takes neither an image's shape nor the
    classes.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.__doc__ = (
            f"A {type(network).__name__} that was handed over from Python, with its weights."
        )

    def __call__(self) -> nn.Module:
        """A copy of its own."""
        return copy.deepcopy(self.network)


def _given(thing: Any) -> Any:
    """What the user handed over: a network where ``thing`` makes copies of it."""
    return thing.network if isinstance(thing, Copies) else thing


def _bind(kind: str, name: str, thing: Any) -> None:
    if not callable(thing):
        raise ConfigError(f"{kind} = {thing!r:.60} is no name, class or function")
    registry.enter(
        registry.Entry(kind, name, Copies(thing) if isinstance(thing, nn.Module) else thing)
    )


def _importable(kind: str, thing: Any) -> str:
    """Under which name a class or function is found again in any process; empty where there is
    none.
    """
    name, home = getattr(thing, "__qualname__", ""), getattr(thing, "__module__", "")
    module = sys.modules.get(home)
    if module is None or getattr(module, name, None) is not thing:
        return ""
    if home.startswith("fedstill."):
        return registry.registered_as(kind, thing)
    if home.startswith(registry.USER):
        return f"{module.__file__}:{name}"
    return f"{home}:{name}" if home != "__main__" and getattr(module, "__spec__", None) else ""


def _called(thing: Any) -> str:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return str(getattr(thing, "__name__", type(thing).__name__)).strip("<>")


def _defined(thing: Any) -> Any:
    return thing if inspect.isclass(thing) or inspect.isroutine(thing) else type(thing)


def _state(network: nn.Module) -> list[tuple[str, Any]]:
    return sorted(network.state_dict().items())
