"""A misspelt hook is an error when its class is defined; otherwise nothing would call it, and
FedAvg would be trained.

The hooks of a class are the public methods that its base class has: ``fold`` of a ``Method``,
``terms`` of a ``ClientWork``, ``look`` of a ``Measure``. A declaration is a class variable of the
base class, such as ``needs``.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator
from functools import cached_property, partialmethod
from typing import Any

from fedstill.errors import ConfigError
from fedstill.origin import definition

CUTOFF = 0.8
"""From which ratio of ``difflib`` on two names resemble each other, of 0 (no letter in common) to 1
(the same name).
"""

METHOD_CLASSES = {"Method": "fedstill.method", "ClientWork": "fedstill.work"}
"""Both base classes of a method and their modules: a hook of the server is of no use at a client,
nor the reverse.
"""

_METHOD_LIKE = (property, cached_property, classmethod, staticmethod, partialmethod)


def reject_misspelt_hooks(cls: type) -> None:
    """Raise ConfigError for a public name in a class body that resembles a hook or a declaration of
    a base class.

    Methods are compared with the hooks, and unannotated class variables with the declarations.
    Names that a base class has are overrides. Fields, and names that begin with an underscore, may
    be anything. A method with the exact name of a hook of the other of ``METHOD_CLASSES`` is
    rejected as well.
    """
    library_bases = [base for base in cls.__mro__[1:] if _is_of_library(base)]
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)}

    for name, value in _public(cls):
        if name in inherited:
            continue
        is_method = _is_method(value)
        known = {
            base_name for base in library_bases for base_name in _names(base, methods=is_method)
        }
        nearest = resembled(name, known)
        if nearest:
            _reject(cls, name, value, f"did you mean {nearest}? Rename it")
        owner = _owner_elsewhere(cls, name)
        if is_method and owner is not None:
            _reject(cls, name, value, f"{name} belongs in the {owner.__name__}. Move it there")


def resembled(name: str, hooks: Collection[str]) -> str:
    """The hook that a name resembles most; empty if it resembles none.

    Two names resemble each other if they differ in capitals, underscores or a plural "s" alone, if
    they have the same letters in another order, or if ``difflib`` gives them a ratio of ``CUTOFF``
    and more.

    >>> hooks = ["fold", "lookahead", "predictors"]
    >>> [
    ...     resembled(name, hooks)
    ...     for name in ("look_ahead", "predictor", "flod", "fould", "hold", "compute_loss")
    ... ]
    ['lookahead', 'predictors', 'fold', 'fold', '', '']
    """
    plain = _plain(name)
    by_plain_name = {_plain(hook): hook for hook in sorted(hooks)}
    for plain_hook, hook in by_plain_name.items():
        if plain.removesuffix("s") == plain_hook.removesuffix("s") or sorted(plain) == sorted(
            plain_hook
        ):
            return hook
    nearest = difflib.get_close_matches(plain, by_plain_name, n=1, cutoff=CUTOFF)
    return by_plain_name[nearest[0]] if nearest else ""


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _public(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and class variables in a class body, by name; no fields and no nested
    classes.
    """
    annotations = inspect.get_annotations(cls)
    for name, value in vars(cls).items():
        is_field = name in annotations and "ClassVar" not in str(annotations[name])
        if not (name.startswith("_") or is_field or isinstance(value, type)):
            yield name, value


def _names(cls: type, methods: bool) -> set[str]:
    """The hooks of a class, or its declarations."""
    return {name for name, value in _public(cls) if _is_method(value) == methods}


def _is_method(value: object) -> bool:
    return callable(value) or isinstance(value, _METHOD_LIKE)


def _owner_elsewhere(cls: type, name: str) -> type | None:
    """Whose hook a name is, if not of a user's class: the other of ``METHOD_CLASSES``; None if it
    is no hook.
    """
    if _is_of_library(cls):  # both modules may still be under way
        return None
    bases = [
        getattr(importlib.import_module(module), base) for base, module in METHOD_CLASSES.items()
    ]
    if not issubclass(cls, tuple(bases)):
        return None
    for base in bases:
        if not issubclass(cls, base) and name in _names(base, methods=True):
            return base  # type: ignore[no-any-return]
    return None


def _is_of_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "fedstill"


def _reject(cls: type, name: str, value: Any, remedy: str) -> None:
    place = definition(_function(value))
    in_file = f" ({place})" if place else ""
    own = f"name it _{name} if it is your own"
    raise ConfigError(f"{cls.__name__}.{name}{in_file} overrides nothing: {remedy}, or {own}")


def _function(value: Any) -> Callable[..., Any]:
    """The function behind a method, a property, a static method or a class method."""
    if isinstance(value, property):
        value = value.fget
    inner = getattr(value, "__func__", getattr(value, "func", value))
    return inspect.unwrap(inner) if callable(inner) else inner  # type: ignore[no-any-return]
