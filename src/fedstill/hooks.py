"""Functions of a user's class that nothing calls, because their name is no hook's, or not quite."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

from fedstill.errors import ConfigError
from fedstill.origin import definition

NEAR = 0.75
"""How alike a name must be to a hook's to be taken for it; 1 is the same (difflib's ratio)."""


CALLED_WHERE_THERE = frozenset({"sent_logits"})
"""Hooks that no class of the library need have: the measure leakage calls a method's, if it has one."""


def refuse_uncalled(what: str, made: object, *other_contracts: type) -> None:
    """Raise ConfigError for a public function or setting of a user's class that most likely is meant as a hook.

    That is one that its classes of the library do not have, that nothing in the modules of its own classes uses, and
    whose name is near to one that the library's do have, or the exact name of a hook of ``other_contracts``. In the
    file of the class itself the same goes for every function. The library's own classes pass, and so does every name
    that begins with an underscore. ``what``: how the message calls it: "method mine.py".
    """
    library = [kind for kind in type(made).__mro__ if _is_library(kind)]
    own = [kind for kind in type(made).__mro__ if kind is not object and not _is_library(kind)]
    if not own:
        return
    known = {name for kind in library for name in _own(kind)} | CALLED_WHERE_THERE
    elsewhere = {name: kind for kind in other_contracts if not isinstance(made, kind) for name in _own(kind)}
    used = _used(own)
    for kind in own:
        for name in sorted({*_own(kind)} - known):
            it = vars(kind)[name]
            if used[name] > _used_in(it)[name]:  # by other code than its own
                continue
            said = f"{what}: nothing calls {name} ({definition(_function(it)) or kind.__name__})"
            near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
            own_name = f"name of your own for it begins with an underscore: _{name}"
            if name in elsewhere:
                raise ConfigError(f"{said}: it belongs in the {elsewhere[name].__name__}")
            if near:
                raise ConfigError(f"{said}: did you mean {near[0]!r}? A {own_name}")
            if kind.__module__ == type(made).__module__ and definition(_function(it)):
                raise ConfigError(f"{said}: what is called is {', '.join(_hooks(library))}; a {own_name}")


def is_users_own(made: object, name: str) -> bool:
    """Whether an attribute is of a user's class, and not of one of the library's."""
    return not _is_library(next(kind for kind in type(made).__mro__ if name in vars(kind)))


def names_in(*functions: object) -> set[str]:
    """The names that functions use: of variables, attributes and keyword arguments."""
    codes = _codes(functions)
    keywords = {word for code in codes for c in code.co_consts if isinstance(c, tuple) for word in c}
    return {name for code in codes for name in code.co_names} | {word for word in keywords if isinstance(word, str)}


def _hooks(kinds: Sequence[type]) -> list[str]:
    """The functions that the library's classes have, in the order in which they are written."""
    return list(dict.fromkeys(name for kind in reversed(kinds) for name in _own(kind) if _codes([vars(kind)[name]])))


def _is_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "fedstill"


def _own(kind: type) -> Iterator[str]:
    """The public names that a class itself defines, without those that are fields of a config."""
    fields = {name for name, hint in vars(kind).get("__annotations__", {}).items() if "ClassVar" not in str(hint)}
    return (name for name in vars(kind) if name[0] != "_" and name not in fields)


def _used(kinds: Sequence[type]) -> Counter[str]:
    """The names that any code of the modules of some classes uses, with the number of functions that do."""
    modules = {kind.__module__: sys.modules.get(kind.__module__) for kind in kinds}
    inside = [v for m in modules.values() if m for v in vars(m).values() if getattr(v, "__module__", "") in modules]
    return _used_in(*kinds, *inside)


def _used_in(*things: object) -> Counter[str]:
    """The names that code uses, be it as a text for getattr, with the number of functions that do."""
    used = Counter[str]()
    for code in set(_codes(things)):
        texts = [c for c in code.co_consts if isinstance(c, str)] if "getattr" in code.co_names else []
        used.update({*code.co_names, *texts})
    return used


def _codes(things: Iterable[Any]) -> list[CodeType]:
    """The code of functions, of all functions of classes, and of the functions within them."""
    return [code for thing in things for code in _codes_of(thing)]


def _codes_of(thing: Any) -> Iterator[CodeType]:
    if isinstance(thing, CodeType):
        yield thing
        yield from _codes(c for c in thing.co_consts if isinstance(c, CodeType))
    elif isinstance(thing, type):
        yield from _codes(v for v in vars(thing).values() if not isinstance(v, type))
    elif isinstance(thing, property):
        yield from _codes(f for f in (thing.fget, thing.fset) if f)
    elif isinstance(code := getattr(_function(thing), "__code__", None), CodeType):
        yield from _codes([code])


def _function(thing: Any) -> Any:
    """The function in what a class holds: itself, or that of a static method, a class method or a property."""
    inner = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", getattr(thing, "func", thing))
    return inspect.unwrap(inner) if callable(inner) else inner
