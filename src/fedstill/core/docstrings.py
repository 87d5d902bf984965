"""What docstrings declare: it is written once, in the code, for readers and for commands.

A class's field has its sentence in a string below it, a function's parameter in a line
``name: Sentence.`` of the docstring. A module's docstring has blocks ``Label: text``, among them a
method's ``State:`` and ``Memory:``, which list groups as ``Symbols:`` lists symbols.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

_LABEL = re.compile(r"([A-Z][a-z]+):(?: |$)")


def sentences(thing: Callable[..., Any]) -> dict[str, str]:
    """{name: sentence} of a class's fields, its own before its bases', or of a function's
    parameters.

    What has no sentence is left out, and so is everything in a class whose source cannot be read.
    """
    if not inspect.isclass(thing):
        return _of_parameters(thing)
    out = _of_parameters(thing) | _of_parameters(thing.__init__)
    for kind in reversed(thing.__mro__):
        module = sys.modules.get(kind.__module__)
        out |= _of_classes(module).get(kind.__name__, {}) if module else {}
    return out


def blocks(text: str) -> dict[str, list[str]]:
    """The blocks ``Label: text`` of a docstring, by label; each goes on to the next label or an
    empty line.

    >>> blocks("A method.\\n\\nSource: a paper,\\neq. 2.\\nReading: one.\\nReading: another.")
    {'Source': ['a paper, eq. 2.'], 'Reading': ['one.', 'another.']}
    """
    out: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in inspect.cleandoc(text).splitlines():
        label = _LABEL.match(line)
        if label:
            current = out.setdefault(label[1], [])
            current.append(line[label.end() :].strip())
        elif current and line.strip():
            current[-1] = f"{current[-1]} {line.strip()}".strip()
        else:
            current = None
    return out


def _of_parameters(function: Callable[..., Any]) -> dict[str, str]:
    """The sentences of the docstring's lines ``name: Sentence.``; each goes on to the next name or
    an empty line.
    """
    names = _parameters(function)
    out: dict[str, str] = {}
    current = ""
    for line in (inspect.getdoc(function) or "").splitlines():
        name, colon, rest = line.partition(": ")
        if colon and name in names:
            current = name
            out[name] = rest.strip()
        elif current and line.strip():
            out[current] += f" {line.strip()}"
        else:
            current = ""
    return out


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in, or not meant to be read
        return {}


@functools.cache
def _of_classes(module: ModuleType) -> dict[str, dict[str, str]]:
    """{class: {field: sentence}} of a module; empty if it has no source."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return {}
    return {
        node.name: _below_fields(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }


def _below_fields(node: ast.ClassDef) -> dict[str, str]:
    out = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
        ):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                out[field.target.id] = " ".join(text.split())
    return out
