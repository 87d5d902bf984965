"""Legal ranges of hyper-parameters, written once at the field, where config, constructors and documents read them."""

from __future__ import annotations

from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval, Len

from fedstill.errors import ConfigError

Positive = Annotated[float, Interval(gt=0, le=1e9)]
NonNegative = Annotated[float, Interval(ge=0, le=1e9)]
Share = Annotated[float, Interval(ge=0, le=1)]
PositiveShare = Annotated[float, Interval(gt=0, le=1)]
Count = Annotated[int, Interval(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Interval(ge=0, le=1_000_000)]
Candidates = Annotated[tuple[Positive, ...], Len(1, 100)]
"""Values of which a method takes the best."""
Seed = Annotated[int, Interval(ge=0, lt=2**63)]


def check_ranges(thing: object) -> None:
    """Raise ConfigError if a field of a dataclass instance lies outside the range written in its annotation.

    Of a tuple, each value must lie in the range, and there must be as many as are allowed.
    """
    for name, bounds in _ranges(type(thing)).items():  # type: ignore[arg-type]
        value = getattr(thing, name, None)
        for bound in bounds:
            if isinstance(bound, Len):
                _check_length(thing, name, value, bound)
                continue
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, (int, float)) and not _inside(one, bound):
                    raise ConfigError(f"{type(thing).__name__}.{name} = {one!r} is outside its range {show(bound)}")


def _check_length(thing: object, name: str, value: Any, bound: Len) -> None:
    if isinstance(value, tuple) and not bound.min_length <= len(value) <= (bound.max_length or len(value)):
        wanted = f"{bound.min_length} to {bound.max_length}"
        raise ConfigError(f"{type(thing).__name__}.{name} has {len(value)} values, it must have {wanted}")


def show(bound: Interval) -> str:
    """A range as a reader writes it.

    >>> show(Interval(gt=0, le=1)), show(Interval(ge=0, lt=1e9))
    ('(0, 1]', '[0, 1e9)')
    """
    low = (
        f"({_short(bound.gt)}" if bound.gt is not None else f"[{_short(bound.ge)}" if bound.ge is not None else "(-inf"
    )
    high = (
        f"{_short(bound.lt)})" if bound.lt is not None else f"{_short(bound.le)}]" if bound.le is not None else "inf)"
    )
    return f"{low}, {high}"


def _short(value: Any) -> str:
    return f"{value:g}".replace("e+0", "e").replace("e+", "e")


_KINDS = {bool: "true | false", int: "whole number", float: "number", str: "text", dict: "table"}


def legal(hint: Any) -> str:
    """What an annotation allows, as a reader writes it.

    >>> legal(Share), legal(Count | None), legal(Literal["sum", "mean"])
    ('number in [0, 1]', 'whole number in [1, 1e6], or unset', '"sum" | "mean"')
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
    return f" in {show(bound)}" if isinstance(bound, Interval) else ""


@lru_cache(maxsize=1024)
def _ranges(kind: type) -> dict[str, list[Interval | Len]]:
    return {name: _bounds(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _bounds(hint: Any) -> list[Interval | Len]:
    annotated = hasattr(hint, "__metadata__")
    own = [m for m in get_args(hint)[1:] if isinstance(m, (Interval, Len))] if annotated else []
    inner = get_args(hint)[0] if annotated else hint
    return [*own, *(_bounds(get_args(inner)[0]) if get_origin(inner) is tuple else [])]


def _inside(value: float, bound: Interval) -> bool:
    low: Any = bound.ge if bound.gt is None else bound.gt
    high: Any = bound.le if bound.lt is None else bound.lt
    above = low is None or value > low or (bound.gt is None and value == low)
    below = high is None or value < high or (bound.lt is None and value == high)
    return bool(above and below)
