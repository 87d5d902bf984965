"""Descriptions of registered things: their fields, with types, defaults and sentences.

The sentences are read from docstrings, so that commands and readers of the code see the same text.
The description of a class's field is the string below it, and that of a function's parameter is a
line ``name: Sentence.`` of the docstring. A module's docstring has blocks ``Label: text``, such as
``Symbols:``, and for a method ``State:`` and ``Memory:``, which list groups of tensors.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints

from fedstill.core.errors import ConfigError, on_one_line
from fedstill.core.registry import Entry, short_name

SUPPLIED_PARAMETERS = {
    "partition": {"labels", "clients", "groups", "seed"},
    "model": {"input_shape", "in_channels", "vocabulary", "classes", "num_classes"},
    "dataset": {"folder"},
    "stream": {"labels", "domains", "tasks", "seed", "classes"},
}
"""Parameters that the library supplies, so that a config cannot set them."""

_LABEL = re.compile(r"([A-Z][a-z]+):(?: |$)")


def summary(entry: Entry) -> str:
    """A summary in one line: ``about``, or else the first paragraph of the docstring."""
    first_paragraph = (inspect.getdoc(entry.target) or "").partition("\n\n")[0]
    text = entry.about or " ".join(first_paragraph.split())
    return text.replace("``", "")


@functools.cache
def fields(entry: Entry) -> Mapping[str, tuple[Any, Any]]:
    """The annotation and the default of each field that a config can set, by name. The default of
    a required field is ``...``.

    Raises ConfigError if they cannot be read.
    """
    try:
        parameters = _settable_parameters(entry)
        hints = _hints(entry.target, parameters)
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{entry.kind} {short_name(entry.name)!r} has fields that cannot be read: "
            f"{on_one_line(error)}"
        ) from error
    settable = {}
    for name, parameter in parameters.items():
        default = parameter.default
        if default is parameter.empty:
            default = ...
        settable[name] = (hints.get(name, Any), entry.preset.get(name, default))
    return settable


def _settable_parameters(entry: Entry) -> dict[str, inspect.Parameter]:
    """The parameters that a config can set."""
    supplied = SUPPLIED_PARAMETERS.get(entry.kind, set())
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: parameter
        for name, parameter in inspect.signature(entry.target).parameters.items()
        if name not in supplied and parameter.kind not in variadic
    }


def _hints(target: Any, parameters: Collection[str]) -> Mapping[str, Any]:
    """The annotations of a dataclass, or of some parameters of a function.

    Other annotations of a function may be names that only exist for type checkers.
    """
    annotated = _annotated(target)
    if inspect.isclass(annotated):
        return get_type_hints(annotated, include_extras=True)
    function = inspect.unwrap(annotated)
    annotations = {
        name: hint for name, hint in inspect.get_annotations(function).items() if name in parameters
    }
    return get_type_hints(
        SimpleNamespace(__annotations__=annotations),
        getattr(function, "__globals__", {}),
        include_extras=True,
    )


def _annotated(target: Any) -> Any:
    """The object with the annotations of a callable's parameters."""
    while isinstance(target, functools.partial):
        target = target.func
    if inspect.isclass(target) and not is_dataclass(target):
        return target.__init__
    if inspect.isclass(target) or inspect.isroutine(target):
        return target
    return type(target).__call__


def plain_sentences(target: Callable[..., Any]) -> dict[str, str]:
    """The descriptions of ``sentences`` for the terminal, without the marks of code."""
    return {name: text.replace("``", "") for name, text in sentences(target).items()}


def sentences(target: Callable[..., Any]) -> dict[str, str]:
    """The descriptions of a class's fields, or of a function's parameters, by name.

    A class overrides descriptions of its bases. Fields without a description are left out, and so
    are the fields of a class whose source cannot be read.
    """
    if not inspect.isclass(target):
        return _of_parameters(target)
    descriptions = _of_parameters(target) | _of_parameters(target.__init__)
    for cls in reversed(target.__mro__):
        module = sys.modules.get(cls.__module__)
        if module is not None:
            descriptions |= _of_classes(module).get(cls.__name__, {})
    return descriptions


def blocks(text: str) -> dict[str, list[str]]:
    """The blocks ``Label: text`` of a docstring by label. A block ends at the next label or at an
    empty line.

    >>> blocks("A method.\\n\\nSource: a paper,\\neq. 2.\\nReading: one.\\nReading: another.")
    {'Source': ['a paper, eq. 2.'], 'Reading': ['one.', 'another.']}
    """
    texts: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in inspect.cleandoc(text).splitlines():
        label = _LABEL.match(line)
        if label:
            current = texts.setdefault(label[1], [])
            current.append(line[label.end() :].strip())
        elif current and line.strip():
            current[-1] = f"{current[-1]} {line.strip()}".strip()
        else:
            current = None
    return texts


def _of_parameters(function: Callable[..., Any]) -> dict[str, str]:
    """The descriptions in a docstring's lines ``name: Sentence.`` A description ends at the next
    name or at an empty line.
    """
    names = _parameters(function)
    descriptions: dict[str, str] = {}
    current = ""
    for line in (inspect.getdoc(function) or "").splitlines():
        name, colon, text = line.partition(": ")
        if colon and name in names:
            current = name
            descriptions[name] = text.strip()
        elif current and line.strip():
            descriptions[current] += f" {line.strip()}"
        else:
            current = ""
    return descriptions


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return {}


@functools.cache
def _of_classes(module: ModuleType) -> dict[str, dict[str, str]]:
    """The descriptions of fields by class; empty if the module has no source."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return {}
    return {
        node.name: _below_fields(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }


def _below_fields(node: ast.ClassDef) -> dict[str, str]:
    """The strings below the fields of a class, by field."""
    descriptions = {}
    for field, below in pairwise(node.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = below.value.value
            if isinstance(text, str):
                descriptions[field.target.id] = " ".join(text.split())
    return descriptions
