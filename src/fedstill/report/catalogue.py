"""What there is, in a terminal: the names of a kind with their fields, and the card of one
thing.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Interval, Len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedstill.core import docstrings
from fedstill.core.method import Method
from fedstill.core.records import Plan
from fedstill.core.registry import Entry
from fedstill.core.user_code import USER

# What an annotation allows, in words.


_KINDS = {
    bool: "true | false",
    int: "whole number",
    float: "number",
    str: "text",
    dict: "table",
    Mapping: "table",
}


def legal(hint: Any) -> str:
    """What an annotation allows, as a reader writes it.

    >>> from fedstill.core.fields import Candidates, Count, PositiveShare
    >>> legal(PositiveShare), legal(Count | None), legal(Literal["sum", "mean"])
    ('number in (0, 1]', 'whole number in [1, 1e6], or unset', '"sum" | "mean"')
    >>> legal(Candidates)
    'list, each a number in (0, 1e9], 1 to 100 of them'
    """
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return ", or ".join("unset" if one is NoneType else legal(one) for one in inner)
    if kind is Literal:
        return " | ".join(f'"{one}"' if isinstance(one, str) else str(one) for one in inner)
    if kind is Annotated:
        return legal(inner[0]) + "".join(_legal(bound) for bound in inner[1:])
    if kind is tuple and inner[1:] == (...,):
        return f"list, each a {legal(inner[0])}"
    return _KINDS.get(kind or hint) or str(hint)


def _legal(bound: object) -> str:
    if isinstance(bound, Len):
        return f", {bound.min_length} to {bound.max_length} of them"
    if not isinstance(bound, Interval):
        return ""
    low, high = (
        (bound.gt if bound.ge is None else bound.ge),
        (bound.lt if bound.le is None else bound.le),
    )
    left, right = "(" if bound.ge is None else "[", ")" if bound.le is None else "]"
    return f" in {left}{_short(low, '-inf')}, {_short(high, 'inf')}{right}"


def _short(value: Any, none: str) -> str:
    return none if value is None else f"{value:g}".replace("e+0", "e").replace("e+", "e")


ALWAYS = ("epochs", "batch", "optimiser", "lr")
"""What is said of every plan; of the rest, what differs from plain SGD."""


def value(what: object) -> str:
    """A value as a config file writes it."""
    if isinstance(what, bool):
        return str(what).lower()
    if isinstance(what, (tuple, list)):
        return "[" + ", ".join(value(v) for v in what) + "]"
    return "unset" if what is None else f'"{what}"' if isinstance(what, str) else str(what)


def overview(entries: Sequence[Entry]) -> Iterator[RenderableType]:
    """Every thing's name and summary, and below it its fields."""
    name, field = (max([0, *widths]) for widths in zip(*map(_widths, entries), strict=True))
    for entry in entries:
        yield _columns([(Text(entry.name, "bold"), Text(entry.summary))], name)
        yield Padding(_columns(_fields(entry), field), (0, 0, 0, 2))


def card(entry: Entry) -> RenderableType:
    """All that is declared of one thing: paper, symbols, state and memory, topology, needs, plans,
    fields.
    """
    head = Text.assemble((f"{entry.kind} {entry.name}", "bold"), "  ", entry.summary)
    about = _columns([(Text(label, "bold"), Text(text)) for label, text in _about(entry)])
    parts: list[RenderableType] = [head, "", about]
    if fields := _fields(entry):
        parts += ["", Text("fields", "bold"), Padding(_columns(fields), (0, 0, 0, 2))]
    return Group(*parts)


def _about(entry: Entry) -> Iterator[tuple[str, str]]:
    module = inspect.getmodule(entry.target)
    documents = [inspect.getdoc(entry.target) or "", (module and module.__doc__) or ""]
    declared = [
        docstrings.blocks(text) for text in (documents if entry.kind == "method" else documents[:1])
    ]
    for label in ("Source", "Symbols", "State", "Memory"):
        apart = "; " if label == "Source" else "\n"
        for text in (text for texts in declared for text in texts.get(label, [])):
            yield label.lower(), text.replace("``", "").replace("; ", apart)
    if inspect.isclass(entry.target) and issubclass(entry.target, Method):
        yield from _of_method(entry.target, entry)
    name, home = getattr(entry.target, "__qualname__", ""), entry.target.__module__
    yield (
        "code",
        f"{inspect.getsourcefile(entry.target)}, {name}"
        if home.startswith(USER)
        else f"{home}.{name}",
    )


def _of_method(method: type[Method], entry: Entry) -> Iterator[tuple[str, str]]:
    whole = all(default is not ... for _, default in entry.fields.values())
    needs = entry.build().requires() if whole else method.needs
    options = [f"{key} = {value(what)}" for key, what in method.schedule.items()]
    yield "topology", ", ".join([method.topology, *options])
    yield "needs", ", ".join(needs.words) or "nothing"
    yield "permits", ", ".join(method.permits.words) or "nothing"
    for stage, plan in method.plans.items():
        yield f"plan {stage}", _plan(plan)


def _plan(plan: Plan) -> str:
    said = [
        f
        for f in dataclasses.fields(plan)
        if f.name in ALWAYS or getattr(plan, f.name) != f.default
    ]
    return ", ".join(f"{f.name} = {value(getattr(plan, f.name))}" for f in said)


def _fields(entry: Entry) -> list[tuple[Text, Text]]:
    """For each field its default, and its sentence with what is legal."""
    sentences = entry.sentences
    return [
        (
            Text(name if default is ... else f"{name} = {value(default)}"),
            Text.assemble(sentences.get(name, ""), " ", (f"({legal(hint)})", "dim")),
        )
        for name, (hint, default) in entry.fields.items()
    ]


def _widths(entry: Entry) -> tuple[int, int]:
    return len(entry.name), max((len(left) for left, _ in _fields(entry)), default=0)


def _columns(rows: Sequence[tuple[Text, Text]], width: int = 0) -> Table:
    """Two columns; the first as wide as it must be, and at least so wide."""
    out = Table.grid(padding=(0, 2))
    out.add_column(min_width=width, no_wrap=True)
    out.add_column(overflow="fold")
    for row in rows:
        out.add_row(*row)
    return out
