"""A user's code: where an error in it was raised, and mistakes in classes: misspelt hooks, and
declarations that are no flags.

Runs load this module for classes of users and for errors only.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from functools import cache, cached_property, partialmethod
from pathlib import Path
from types import CodeType
from typing import Any

from fedstill.core.capabilities import Addition, Declared, Need, Permit
from fedstill.core.errors import (
    MAX_REASON,
    BadReturn,
    ConfigError,
    FedstillError,
    cut_reason,
    suggestion,
)
from fedstill.core.fields import shown

_LIBRARY = Path(__file__).parents[1]
_METHODS = _LIBRARY / "methods"
_HERE = (lambda: None).__code__


def reason(error: BaseException, author: Any = None) -> str:
    """What a method's code raised, on one line: its type, its text, and where it was raised (as in
    ``definition``).

    ``author``: the object whose code was called; where no line of a user's raised, a user's class
    is named instead.
    """
    expected = isinstance(error, FedstillError)
    text = str(error) if expected else f"{type(error).__name__}: {error}"
    where = "" if isinstance(error, BadReturn) else _users_line(error)
    if not where and not expected:
        where = _users_class(author) or _methods_line(error)
    where = f" ({where})" if where else ""
    return (cut_reason(text, MAX_REASON - len(where)) + where) or "no reason"


def is_users(error: BaseException) -> bool:
    """Whether a line of a user's file raised it, be it in a call to a library."""
    return bool(_users_line(error))


def definition(function: Callable[..., Any]) -> str:
    """Where a user's function is written: "mine.py, line 31, in terms"; empty for the library's
    own.
    """
    code = getattr(function, "__code__", None)
    if code is None or not _is_users(code.co_filename):
        return ""
    return _said(code.co_filename, code.co_firstlineno, code.co_name)


def _users_line(error: BaseException) -> str:
    """The innermost line of a user's file: below it are only calls to libraries."""
    lines = [
        _said(c.co_filename, line, c.co_name)
        for c, line in _frames(error)
        if _is_users(c.co_filename)
    ]
    if not lines:
        return ""
    return lines[-1]


def _methods_line(error: BaseException) -> str:
    """The innermost line of a method of the library; without one, of the library."""
    own = [(c, line) for c, line in _frames(error) if _LIBRARY in Path(c.co_filename).parents]
    methods = [(c, line) for c, line in own if _METHODS in Path(c.co_filename).parents]
    for code, line in (methods or own)[-1:]:
        return _said(code.co_filename, line, code.co_name)
    return ""


def _users_class(author: Any) -> str:
    """Where a user's class is written: the library stumbled over something that one of its
    functions gave.
    """
    for kind in type(author).__mro__:
        codes = [getattr(function, "__code__", _HERE) for function in vars(kind).values()]
        users_codes = [code for code in codes if _is_users(code.co_filename)]
        if users_codes:
            first = min(users_codes, key=lambda code: code.co_firstlineno)
            file = Path(first.co_filename).name
            return f"{file}, from line {first.co_firstlineno}, class {kind.__name__}"
    return ""


def _frames(error: BaseException) -> list[tuple[CodeType, int]]:
    return [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def _said(filename: str, line: int, function: str) -> str:
    """The file by its name alone: a journal has the same bits wherever the file lies."""
    path = Path(filename)
    name = path.name
    if _LIBRARY in path.parents:
        name = path.relative_to(_LIBRARY.parent).as_posix()
    return f"{name}, line {line}, in {function}"


@cache
def _is_users(filename: str) -> bool:
    """Whether a file is neither this library's, nor Python's, nor an installed package's, nor made
    up.
    """
    path = Path(filename)
    if filename.startswith("<") and not filename.startswith(("<stdin>", "<ipython")):
        return False
    standard = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return not (
        {"site-packages", "dist-packages"} & set(path.parts)
        or {_LIBRARY, *standard} & set(path.parents)
    )


# A misspelt hook is an error when its class is defined; otherwise nothing would call it, and FedAvg
# would be trained.
#
# The hooks of a class are the public methods that its base class has: ``aggregate`` of a
# ``Method``, ``terms`` of a ``ClientWork``, ``look`` of a ``Measure``. A declaration is a class
# variable of the base class, such as ``needs``.


CUTOFF = 0.8
"""From which ratio of ``difflib`` on two names resemble each other, of 0 (no letter in common) to 1
(the same name).
"""

FORMER_NAMES = {
    "setup": "initial_state",
    "open": "begin_round",
    "down": "payload_for_client",
    "expects": "expected_reply",
    "fold": "aggregate",
    "idle": "idle_reply",
    "misfit": "incompatibility",
    "caution": "setting_warnings",
    "adjust": "adjust_gradients",
    "settle": "after_step",
    "ascend": "ascent_terms",
    "lookahead": "perturb",
    "score": "validation_score",
}
"""Names that hooks of ``METHOD_CLASSES`` had, with their names today."""

METHOD_CLASSES = ("Method", "ClientWork")
"""Both base classes of a method, in ``fedstill.core.method``: a hook of the server is of no use at
a client, nor the reverse.
"""

_METHOD_LIKE = (property, cached_property, classmethod, staticmethod, partialmethod)


def reject_misspelt_hooks(cls: type) -> None:
    """Raise ConfigError for a public name in a class body that resembles a hook or a declaration of
    a base class.

    Methods are compared with the hooks, and unannotated class variables with the declarations.
    Names that a base class has are overrides. Fields, and names that begin with an underscore, may
    be anything. A method with the exact name of a hook of the other of ``METHOD_CLASSES``, or with
    a former name of a hook (``FORMER_NAMES``), is rejected as well.
    """
    library_bases = [base for base in cls.__mro__[1:] if _is_of_library(base)]
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)}

    for name, value in _public(cls):
        if name in inherited:
            continue
        is_method = _is_method(value)
        successor = FORMER_NAMES.get(name, "")
        if is_method and successor in inherited:
            _reject(cls, name, value, f"{name} is now called {successor}. Rename it")
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

    >>> hooks = ["aggregate", "after_step", "predictors"]
    >>> [
    ...     resembled(name, hooks)
    ...     for name in ("afterStep", "predictor", "agregate", "aggergate", "mean", "compute_loss")
    ... ]
    ['after_step', 'predictors', 'aggregate', 'aggregate', '', '']
    """
    plain = _plain(name)
    by_plain_name = {_plain(hook): hook for hook in sorted(hooks)}
    for plain_hook, hook in by_plain_name.items():
        if plain.removesuffix("s") == plain_hook.removesuffix("s") or sorted(plain) == sorted(
            plain_hook
        ):
            return hook
    nearest = difflib.get_close_matches(plain, by_plain_name, n=1, cutoff=CUTOFF)
    if not nearest:
        return ""
    return by_plain_name[nearest[0]]


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
    if _is_of_library(cls):  # the module of the base classes may still be under way
        return None
    module = importlib.import_module("fedstill.core.method")
    bases = [getattr(module, base) for base in METHOD_CLASSES]
    if not issubclass(cls, tuple(bases)):
        return None
    for base in bases:
        if not issubclass(cls, base) and name in _names(base, methods=True):
            return base  # type: ignore[no-any-return]
    return None


def _is_of_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "fedstill"


def _reject(cls: type, name: str, value: Any, remedy: str) -> None:
    subject = f"{cls.__name__}.{name}"
    place = definition(_function(value))
    if place:
        subject += f" ({place})"
    raise ConfigError(
        f"{subject} overrides nothing: {remedy}, or name it _{name} if it is your own"
    )


def _function(value: Any) -> Callable[..., Any]:
    """The function behind a method, a property, a static method or a class method."""
    if isinstance(value, property):
        value = value.fget
    inner = getattr(value, "__func__", getattr(value, "func", value))
    return inspect.unwrap(inner) if callable(inner) else inner  # type: ignore[no-any-return]


# Declarations that are no flags. No flag is in a set of strings, so such a method would seem to
# need nothing.


DECLARATIONS: Mapping[str, type[Declared]] = {"needs": Need, "permits": Permit, "adds": Addition}
"""The class variables of a method that hold flags."""

FORMER_FLAGS = {
    "linear_fold": "LINEAR_AGGREGATE",
    "robust_fold": "ROBUST_AGGREGATE",
}
"""Names that flags had when they were strings and the hook ``aggregate`` was called ``fold``."""


def check_declarations(cls: type) -> None:
    """Raise ConfigError if a class declares anything but flags, such as a set of strings.

    No flag is in a set of strings, so such a method would seem to need nothing.
    """
    for name, kind in DECLARATIONS.items():
        value = vars(cls).get(name, kind(0))
        if not isinstance(value, kind):
            raise ConfigError(
                f"{cls.__name__}.{name} = {shown(value)} must be fedstill.{kind.__name__} flags: "
                f"{_remedy(value, kind)}"
            )


def _remedy(value: object, kind: type[Declared]) -> str:
    """What to write instead of a value: the flags that its strings name, or the nearest flag."""
    values = value if isinstance(value, (Set, tuple, list)) else [value]
    strings = sorted(v for v in values if isinstance(v, str))
    flags = []
    for string in strings:
        name = FORMER_FLAGS.get(string, string.upper())
        if name not in kind.__members__:
            return f"there is no flag {string!r}; {suggestion(name, kind.__members__)}"
        flags.append(f"{kind.__name__}.{name}")
    if not flags:
        return f"{kind.__name__}.NOTHING stands for none"
    return f"write {' | '.join(flags)}"
