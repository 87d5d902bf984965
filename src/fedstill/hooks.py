"""Functions of a user's class that nothing calls, because their name is not quite a hook's."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

from fedstill.errors import ConfigError
from fedstill.origin import definition

NEAR = 0.75
"""How alike a name must be to a hook's to be taken for it; 1 is the same (difflib's ratio)."""


def refuse_uncalled(what: str, made: object, *other_contracts: type) -> None:
    """Raise ConfigError for a public function or setting of a user's class that is most likely a misspelt hook.

    That is one that its classes of the library do not have, that nothing in the modules of its own classes uses, and
    whose name is near to one that the library's do have. The same goes for the exact name of a hook of
    ``other_contracts``. The library's own classes pass, and so does every name that begins with an underscore.
    ``what``: how the message calls it: "method mine.py".
    """
    library = [kind for kind in type(made).__mro__ if _is_library(kind)]
    own = [kind for kind in type(made).__mro__ if kind is not object and not _is_library(kind)]
    if not own:
        return
    known = {name for kind in library for name in _own(kind)}
    elsewhere = {name: kind for kind in other_contracts if not isinstance(made, kind) for name in _own(kind)}
    used = _used(own)
    for kind in own:
        for name in sorted({*_own(kind)} - known - used):
            near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
            where = definition(vars(kind)[name]) or kind.__name__
            if name in elsewhere:
                contract = elsewhere[name].__name__
                raise ConfigError(f"{what}: nothing calls {name} ({where}): it belongs in the {contract}")
            if near:
                how = f"did you mean {near[0]!r}? A name of your own for it begins with an underscore: _{name}"
                raise ConfigError(f"{what}: nothing calls {name} ({where}): {how}")


def _is_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "fedstill"


def _own(kind: type) -> Iterator[str]:
    """The public names that a class itself defines, without those that are fields of a config."""
    fields = {name for name, hint in vars(kind).get("__annotations__", {}).items() if "ClassVar" not in str(hint)}
    return (name for name in vars(kind) if name[0] != "_" and name not in fields)


def _used(kinds: Sequence[type]) -> set[str]:
    """The names that any code of the modules of some classes uses."""
    modules = {kind.__module__: sys.modules.get(kind.__module__) for kind in kinds}
    inside = [v for m in modules.values() if m for v in vars(m).values() if getattr(v, "__module__", "") in modules]
    return {name for code in _codes([*kinds, *inside]) for name in code.co_names}


def _codes(things: Iterable[Any]) -> Iterator[CodeType]:
    """The code of functions, of all functions of classes, and of the functions within them."""
    for thing in things:
        if isinstance(thing, CodeType):
            yield thing
            yield from _codes(c for c in thing.co_consts if isinstance(c, CodeType))
        elif isinstance(thing, type):
            yield from _codes(v for v in vars(thing).values() if not isinstance(v, type))
        elif isinstance(thing, property):
            yield from _codes(f for f in (thing.fget, thing.fset) if f)
        else:
            function = inspect.unwrap(getattr(thing, "__func__", getattr(thing, "func", thing)))
            if isinstance(code := getattr(function, "__code__", None), CodeType):
                yield from _codes([code])
