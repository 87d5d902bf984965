"""Users' code: the line that raised an error, misspelt hooks and names, and declarations that are
not flags.

Runs load this module only for users' classes and for errors.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import cache, cached_property, partialmethod
from pathlib import Path
from types import CodeType
from typing import Any

from fedstill.core.capabilities import Addition, Declared, Need, Permit
from fedstill.core.errors import (
    MAX_REASON,
    USER,
    BadReturn,
    ConfigError,
    FedstillError,
    cut_reason,
    suggestion,
)
from fedstill.core.fields import value_text
from fedstill.core.user_modules import is_library_module, is_neighbour

_LIBRARY = Path(__file__).parents[1]
_METHODS = _LIBRARY / "methods"
_LIBRARY_CODE = (lambda: None).__code__


def reason(error: BaseException, author: Any = None) -> str:
    """An exception of a method's code on one line: its type, its text, and the line that raised it
    (as in ``definition``).

    ``author``: the object whose code was called. If no line of a user's file raised the exception,
    the message names the class of this object, if it is a user's.
    """
    is_ours = isinstance(error, FedstillError)
    text = str(error)
    if not is_ours:
        text = f"{type(error).__name__}: {text}"

    line = ""
    if not isinstance(error, BadReturn):  # its text has a line already
        line = _users_line(error)
    if not line and not is_ours:
        line = _users_class(author) or _methods_line(error)
    if line:
        line = f" ({line})"
    return (cut_reason(text, MAX_REASON - len(line)) + line) or "no reason"


def is_users(error: BaseException) -> bool:
    """Whether a line of a user's file raised an exception, directly or in a call to a library."""
    return bool(_users_line(error))


def definition(function: Callable[..., Any]) -> str:
    """The place of a user's function, such as "mine.py, line 31, in terms"; empty for functions of
    the library.
    """
    code = getattr(function, "__code__", None)
    if code is None or not is_users_file(code.co_filename):
        return ""
    return _line_text(code.co_filename, code.co_firstlineno, code.co_name)


def _users_line(error: BaseException) -> str:
    """The innermost line of a user's file: it calls only libraries."""
    lines = [
        _line_text(code.co_filename, line, code.co_name)
        for code, line in _frames(error)
        if is_users_file(code.co_filename)
    ]
    if not lines:
        return ""
    return lines[-1]


def _methods_line(error: BaseException) -> str:
    """The innermost line of a method of the library; if there is none, of any of its modules."""
    frames = [(code, line) for code, line in _frames(error) if _is_in(_LIBRARY, code)]
    frames = [(code, line) for code, line in frames if _is_in(_METHODS, code)] or frames
    if not frames:
        return ""
    code, line = frames[-1]
    return _line_text(code.co_filename, line, code.co_name)


def _is_in(folder: Path, code: CodeType) -> bool:
    return folder in Path(code.co_filename).parents


def _users_class(author: Any) -> str:
    """The place of a user's class; empty for classes of the library.

    The library itself may raise an error on a value that a function of the class returned.
    """
    for kind in type(author).__mro__:
        codes = [getattr(function, "__code__", _LIBRARY_CODE) for function in vars(kind).values()]
        users_codes = [code for code in codes if is_users_file(code.co_filename)]
        if users_codes:
            first = min(users_codes, key=lambda code: code.co_firstlineno)
            file = Path(first.co_filename).name
            return f"{file}, from line {first.co_firstlineno}, class {kind.__name__}"
    return ""


def _frames(error: BaseException) -> list[tuple[CodeType, int]]:
    return [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def _line_text(filename: str, line: int, function: str) -> str:
    """A line for messages. It has no folder, so that a journal has the same bits wherever the file
    is.
    """
    path = Path(filename)
    name = path.name
    if _LIBRARY in path.parents:
        name = path.relative_to(_LIBRARY.parent).as_posix()
    return f"{name}, line {line}, in {function}"


@cache
def is_users_file(filename: str) -> bool:
    """Whether a file is a user's: not part of this library, of Python, or of an installed package,
    and a real file or an interactive input.
    """
    path = Path(filename)
    if filename.startswith("<") and not filename.startswith(("<stdin>", "<ipython")):
        return False
    standard = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return not (
        {"site-packages", "dist-packages"} & set(path.parts)
        or {_LIBRARY, *standard} & set(path.parents)
    )


def is_identified(target: Any) -> bool:
    """Whether its file identifies the present code of a class or function.

    What was typed in a notebook has no file. A module that a user's program imported may be older
    than its file.
    """
    module = str(target.__module__)
    if is_library_module(module):
        return True
    try:
        file = inspect.getfile(target)
    except TypeError:
        return False
    is_imported_by_us = module.startswith(USER) or is_neighbour(Path(file))
    return is_imported_by_us or not is_users_file(file)


# ---- misspelt hooks ------------------------------------------------------------------------------
#
# A misspelt hook raises an error when its class is defined. Otherwise nothing would call it, and
# the run would train FedAvg.
#
# The hooks of a class are the public methods of its base class: ``aggregate`` of a ``Method``,
# ``terms`` of a ``ClientWork``, ``look`` of a ``Measure``. A declaration is a class variable of the
# base class, such as ``needs``.


CUTOFF = 0.8
"""Two names resemble each other if ``difflib`` gives them at least this ratio, in [0, 1]."""

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
"""Former names of hooks of ``METHOD_CLASSES``, with their current names."""

METHOD_CLASSES = ("Method", "ClientWork")
"""The two base classes of a method, in ``fedstill.core.method``. A hook of one has no effect in the
other.
"""

_METHOD_LIKE = (property, cached_property, classmethod, staticmethod, partialmethod)


def reject_misspelt_hooks(cls: type) -> None:
    """Raise ConfigError for a public name in a class body that resembles a hook or a declaration of
    a base class.

    Methods are compared with hooks, and class variables with declarations. Names that a base class
    has are overrides. Fields, and names that begin with an underscore, are not checked. Also
    rejected is a method with a former name of a hook (``FORMER_NAMES``), or with the name of a hook
    of the other class of ``METHOD_CLASSES``.
    """
    library_bases = [base for base in cls.__mro__[1:] if is_library_module(base.__module__)]
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)}

    for name, value in _public(cls):
        if name in inherited:
            continue
        is_method = _is_method(value)
        successor = FORMER_NAMES.get(name, "")
        if is_method and successor in inherited:
            _reject(cls, name, value, f"{name} is now called {successor}. Rename it")
        base_names: set[str] = set().union(*(_names(base, is_method) for base in library_bases))
        similar = resembled(name, base_names)
        if similar:
            _reject(cls, name, value, f"did you mean {similar}? Rename it")
        owner = _owner_elsewhere(cls, name)
        if is_method and owner is not None:
            _reject(cls, name, value, f"{name} belongs in the {owner.__name__}. Move it there")


def resembled(name: str, hooks: Collection[str]) -> str:
    """The hook that a name resembles most; empty if it resembles none.

    Two names resemble each other if they differ only in capitals, underscores or a plural "s", if
    they have the same letters in another order, or if ``difflib`` gives them a ratio of at least
    ``CUTOFF``.

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
        is_same_but_plural = plain.removesuffix("s") == plain_hook.removesuffix("s")
        if is_same_but_plural or sorted(plain) == sorted(plain_hook):
            return hook
    matches = difflib.get_close_matches(plain, by_plain_name, n=1, cutoff=CUTOFF)
    if not matches:
        return ""
    return by_plain_name[matches[0]]


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _public(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and class variables in a class body, without fields and nested classes."""
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
    """The other class of ``METHOD_CLASSES``, if it has a hook of this name; else None."""
    # The module of the base classes may not be imported completely.
    if is_library_module(cls.__module__):
        return None
    module = importlib.import_module("fedstill.core.method")
    bases = [getattr(module, base) for base in METHOD_CLASSES]
    if not issubclass(cls, tuple(bases)):
        return None
    for base in bases:
        if not issubclass(cls, base) and name in _names(base, methods=True):
            return base  # type: ignore[no-any-return]
    return None


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
    function: Any = getattr(value, "__func__", getattr(value, "func", value))
    if callable(function):
        function = inspect.unwrap(function)
    return function  # type: ignore[no-any-return]


# ---- misspelt names ------------------------------------------------------------------------------


LISTED = 12
"""The most names that a message lists."""


def name_advice(kind: str, name: str, names: Sequence[str]) -> str:
    """What to write instead of an unknown method, model and so on: the name that it misspells, or
    how to list all names.

    Published methods have similar names, and a user may mean a method that fedstill lacks. So a
    name only counts as a misspelling if it differs in capitals and hyphens, in two neighbouring
    letters that are swapped, or in one letter of at least six.

    >>> name_advice("method", "fedtnd", ["fedavg", "fedntd"])
    "did you mean 'fedntd'?"
    >>> name_advice("model", "mlp3", ["cnn", "mlp"])
    'choose one of cnn, mlp'
    """
    for correct in names:
        if _is_misspelt(name, correct):
            return f"did you mean {correct!r}?"
    if len(names) <= LISTED:
        return f"choose one of {', '.join(names)}"
    return f"`fedstill list {kind}` lists the names"


def _is_misspelt(name: str, correct: str) -> bool:
    """Whether a name is the correct one with a small mistake (``name_advice``)."""
    name = _letters(name)
    correct = _letters(correct)
    opcodes = difflib.SequenceMatcher(None, name, correct, autojunk=False).get_opcodes()
    changes = [opcode for opcode in opcodes if opcode[0] != "equal"]
    if not changes:
        return True

    # The parts of both names from the first difference to the last one.
    _, name_start, _, correct_start, _ = changes[0]
    _, _, name_end, _, correct_end = changes[-1]
    wrong_part = name[name_start:name_end]
    right_part = correct[correct_start:correct_end]
    if len(wrong_part) == 2 and wrong_part == right_part[::-1]:
        return True
    is_one_letter = len(wrong_part) <= 1 and len(right_part) <= 1
    return is_one_letter and max(len(name), len(correct)) >= 6


def _letters(name: str) -> str:
    return re.sub(r"[-_ .]", "", name.lower())


# ---- declarations that are not flags -------------------------------------------------------------


DECLARATIONS: Mapping[str, type[Declared]] = {"needs": Need, "permits": Permit, "adds": Addition}
"""The class variables of a method that hold flags."""

FORMER_FLAGS = {
    "linear_fold": "LINEAR_AGGREGATE",
    "robust_fold": "ROBUST_AGGREGATE",
}
"""Names that flags had when they were strings and the hook ``aggregate`` was called ``fold``."""


def check_declarations(cls: type) -> None:
    """Raise ConfigError if a class declares anything but flags, such as a set of strings.

    Without this check, a method with a set of strings would seem to need nothing.
    """
    for name, kind in DECLARATIONS.items():
        value = vars(cls).get(name, kind(0))
        if not isinstance(value, kind):
            raise ConfigError(
                f"{cls.__name__}.{name} = {value_text(value)} must be fedstill.{kind.__name__} "
                f"flags: {_remedy(value, kind)}"
            )


def _remedy(value: object, kind: type[Declared]) -> str:
    """What to write instead of a value: the flags that its strings name, or a similar flag."""
    values: Collection[object] = [value]
    if isinstance(value, (Set, tuple, list)):
        values = value
    strings = sorted(item for item in values if isinstance(item, str))
    flags = []
    for string in strings:
        name = FORMER_FLAGS.get(string, string.upper())
        if name not in kind.__members__:
            return f"there is no flag {string!r}; {suggestion(name, kind.__members__)}"
        flags.append(f"{kind.__name__}.{name}")
    if not flags:
        return f"{kind.__name__}.NOTHING stands for none"
    return f"write {' | '.join(flags)}"
