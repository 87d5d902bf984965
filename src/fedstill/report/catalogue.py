"""Registered methods, models and so on in the terminal: the entries of a kind with their fields,
and the card of a single entry.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Interval, Len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedstill.core import descriptions
from fedstill.core.checks import users_definition
from fedstill.core.errors import USER
from fedstill.core.method import Method
from fedstill.core.records import Plan
from fedstill.core.registry import Entry

# The legal values of an annotation, in words.


_KINDS = {
    NoneType: "unset",
    bool: "true | false",
    int: "whole number",
    float: "number",
    str: "text",
    dict: "table",
    Mapping: "table",
}


def legal_values(hint: Any) -> str:
    """The legal values of an annotation, in words.

    >>> from fedstill.core.fields import Candidates, Count, PositiveShare
    >>> legal_values(PositiveShare), legal_values(Count | None)
    ('number in (0, 1]', 'whole number in [1, 1e6], or unset')
    >>> legal_values(Literal["sum", "mean"])
    '"sum" | "mean"'
    >>> legal_values(Candidates)
    'list, each a number in (0, 1e9], 1 to 100 entries'
    >>> legal_values(Sequence[int])
    'list, each a whole number'
    """
    kind = get_origin(hint)
    arguments = get_args(hint)
    if kind in (Union, UnionType):
        return ", or ".join(map(legal_values, arguments))
    if kind is Literal:
        return " | ".join(map(value, arguments))
    if kind is Annotated:
        bounds = [_bound(bound) for bound in arguments[1:]]
        return "".join([legal_values(arguments[0]), *bounds])
    if kind is Sequence or (kind is tuple and arguments[1:] == (...,)):
        return f"list, each a {legal_values(arguments[0])}"
    return _KINDS.get(kind or hint, str(hint))


def _bound(bound: object) -> str:
    """The legal values of a bound of an annotation, in words; empty for an internal bound."""
    if isinstance(bound, Len):
        return f", {bound.min_length} to {bound.max_length} entries"
    if isinstance(bound, Interval):
        return f" in {_lower_end(bound)}, {_upper_end(bound)}"
    return ""


def _lower_end(interval: Interval) -> str:
    if interval.ge is not None:
        return f"[{_short(interval.ge)}"
    if interval.gt is not None:
        return f"({_short(interval.gt)}"
    return "(-inf"


def _upper_end(interval: Interval) -> str:
    if interval.le is not None:
        return f"{_short(interval.le)}]"
    if interval.lt is not None:
        return f"{_short(interval.lt)})"
    return "inf)"


def _short(number: Any) -> str:
    """A number without unnecessary digits in its exponent: 1e6."""
    return f"{number:g}".replace("e+0", "e").replace("e+", "e")


# The card of an entry, and the list of all entries of a kind.


ALWAYS = ("epochs", "batch", "optimiser", "lr")
"""The fields of a plan that are always shown; others are shown if they differ from plain SGD."""

LABELS = ("Source", "Symbols", "State", "Memory")
"""The blocks of docstrings that a card shows."""


@dataclass(frozen=True)
class Line:
    """A line of two columns."""

    left: Text
    right: Text


def value(setting: object) -> str:
    """A value as a config file writes it."""
    if setting is None:
        return "unset"
    if isinstance(setting, bool):
        return str(setting).lower()
    if isinstance(setting, str):
        return f'"{setting}"'
    if isinstance(setting, (tuple, list)):
        return f"[{', '.join(map(value, setting))}]"
    return str(setting)


def overview(entries: Sequence[Entry]) -> Iterator[RenderableType]:
    """The name and summary of each entry, followed by its fields."""
    names = max((len(entry.name) for entry in entries), default=0)
    lines = [line for entry in entries for line in _fields(entry)]
    fields = max((len(line.left) for line in lines), default=0)
    for entry in entries:
        yield _columns([Line(Text(entry.name, "bold"), Text(descriptions.summary(entry)))], names)
        yield Padding(_columns(_fields(entry), fields), (0, 0, 0, 2))


def card(entry: Entry) -> RenderableType:
    """All declarations of an entry: paper, symbols, state and memory, topology, needs, plans and
    fields.
    """
    head = Text.assemble((f"{entry.kind} {entry.name}", "bold"), "  ", descriptions.summary(entry))
    parts: list[RenderableType] = [head, "", _columns(list(_about(entry)))]
    fields = _fields(entry)
    if fields:
        parts += ["", Text("fields", "bold"), Padding(_columns(fields), (0, 0, 0, 2))]
    return Group(*parts)


def _about(entry: Entry) -> Iterator[Line]:
    """The blocks of an entry's docstrings, a method's declarations, and the place of the code."""
    yield from _of_docstrings(entry)
    if inspect.isclass(entry.target) and issubclass(entry.target, Method):
        yield from _of_method(entry.target, entry)
    yield _line("code", _home(entry))


def _of_docstrings(entry: Entry) -> Iterator[Line]:
    """The blocks of an entry's docstring; for a method, also those of its file's docstring."""
    documents = [inspect.getdoc(entry.target) or ""]
    module = inspect.getmodule(entry.target)
    if entry.kind == "method" and module is not None:
        documents.append(module.__doc__ or "")
    declared = [descriptions.blocks(document) for document in documents]
    for label in LABELS:
        separator = "\n"
        if label == "Source":
            separator = "; "
        for blocks in declared:
            for text in blocks.get(label, []):
                yield _line(label.lower(), text.replace("``", "").replace("; ", separator))


def _home(entry: Entry) -> str:
    """The place of an entry's code: the file of a user's entry, or else the dotted name."""
    name = getattr(entry.target, "__qualname__", "")
    module = entry.target.__module__
    if module.startswith(USER):
        return f"{inspect.getsourcefile(entry.target)}, {name}"
    return f"{module}.{name}"


def _of_method(method: type[Method], entry: Entry) -> Iterator[Line]:
    """The topology, needs and plans of a method."""
    needs = method.needs
    if all(default is not ... for _, default in descriptions.fields(entry).values()):
        needs = entry.build().requires()
    options = [f"{key} = {value(setting)}" for key, setting in method.schedule.items()]
    yield _line("topology", ", ".join([method.topology, *options]))
    yield _line("needs", ", ".join(needs.words) or "nothing")
    yield _line("permits", ", ".join(method.permits.words) or "nothing")
    for stage, plan in method.plans.items():
        yield _line(f"plan {stage}", _plan(plan))


def _plan(plan: Plan) -> str:
    parts = []
    for field in dataclasses.fields(plan):
        setting = getattr(plan, field.name)
        if field.name in ALWAYS or setting != field.default:
            parts.append(f"{field.name} = {value(setting)}")
    return ", ".join(parts)


def _fields(entry: Entry) -> list[Line]:
    """For each field, its default, and its description with the legal values.

    A config cannot set the arguments of a user's function that returns data.
    """
    if entry.kind == "dataset" and users_definition(entry.target):
        return []
    lines = []
    sentences = descriptions.plain_sentences(entry.target)
    for name, (hint, default) in descriptions.fields(entry).items():
        left = name
        if default is not ...:
            left = f"{name} = {value(default)}"
        sentence = sentences.get(name, "")
        right = Text.assemble(sentence, " ", (f"({legal_values(hint)})", "dim"))
        lines.append(Line(Text(left), right))
    return lines


def _line(label: str, text: str) -> Line:
    return Line(Text(label, "bold"), Text(text))


def _columns(lines: Sequence[Line], width: int = 0) -> Table:
    """A table of two columns. ``width``: the minimum width of the first column."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row(line.left, line.right)
    return grid
