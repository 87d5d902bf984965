"""Where an author's code went wrong: the file, the line and the function, out of a traceback or of
a definition.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

from fedstill.errors import MAX_REASON, BadReturn, FedstillError, cut_reason

T = TypeVar("T")

_LIBRARY = Path(__file__).parent
_METHODS = _LIBRARY / "methods"
_HERE = (lambda: None).__code__


def reason(error: BaseException, author: Any = None) -> str:
    """What a method's code raised, on one line: its type, its text, and where it was raised, as
    ``place`` has it.

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


def returned(value: object, kind: type[T], function: Callable[..., Any], wanted: str) -> T:
    """What a method's function gave; raises BadReturn, naming the function and where it is, if it
    is not of a kind.
    """
    if isinstance(value, kind):
        return value
    raise bad_return(function, f"gives {of_kind(value)}, not {wanted}")


def of_kind(value: object) -> str:
    """What something is, in words: None, a Tensor, an int, the class Carry itself."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def bad_return(function: Callable[..., Any], what: str) -> BadReturn:
    """The error that says what a method's function gave instead of what it is asked for."""
    where = definition(function)
    return BadReturn(f"{function.__qualname__} {what}" + (f" ({where})" if where else ""))


def _users_line(error: BaseException) -> str:
    """The innermost line of a user's file: below it are only calls to libraries."""
    lines = [
        _said(c.co_filename, line, c.co_name)
        for c, line in _frames(error)
        if _is_users(c.co_filename)
    ]
    return lines[-1] if lines else ""


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
        codes = [
            code
            for f in vars(kind).values()
            if _is_users((code := getattr(f, "__code__", _HERE)).co_filename)
        ]
        if codes:
            first = min(codes, key=lambda code: code.co_firstlineno)
            return (
                f"{Path(first.co_filename).name}, from line {first.co_firstlineno}, class "
                f"{kind.__name__}"
            )
    return ""


def _frames(error: BaseException) -> list[tuple[CodeType, int]]:
    return [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def _said(filename: str, line: int, function: str) -> str:
    """The file by its name alone: a journal has the same bits wherever the file lies."""
    path = Path(filename)
    name = path.relative_to(_LIBRARY.parent).as_posix() if _LIBRARY in path.parents else path.name
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
