"""What an annotation allows, in words."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Interval, Len

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

    >>> from fedstill.fields import Candidates, Count, PositiveShare
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
