"""Legal ranges of hyper-parameters, written once at the field, where config, constructors and documents read them."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, get_args, get_type_hints

from annotated_types import Interval

from fedstill.errors import ConfigError

Positive = Annotated[float, Interval(gt=0, le=1e9)]
NonNegative = Annotated[float, Interval(ge=0, le=1e9)]
Share = Annotated[float, Interval(ge=0, le=1)]
PositiveShare = Annotated[float, Interval(gt=0, le=1)]
Count = Annotated[int, Interval(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Interval(ge=0, le=1_000_000)]
Seed = Annotated[int, Interval(ge=0, lt=2**63)]


def check_ranges(thing: object) -> None:
    """Raise ConfigError if a field of a dataclass instance lies outside the range written in its annotation."""
    for name, bounds in _ranges(type(thing)).items():  # type: ignore[arg-type]
        value = getattr(thing, name, None)
        for bound in bounds:
            if isinstance(value, (int, float)) and not _inside(value, bound):
                raise ConfigError(f"{type(thing).__name__}.{name} = {value!r} is outside its range {show(bound)}")


def show(bound: Interval) -> str:
    """A range as a reader writes it.

    >>> show(Interval(gt=0, le=1))
    '(0, 1]'
    """
    low = f"({bound.gt}" if bound.gt is not None else f"[{bound.ge}" if bound.ge is not None else "(-inf"
    high = f"{bound.lt})" if bound.lt is not None else f"{bound.le}]" if bound.le is not None else "inf)"
    return f"{low}, {high}"


@lru_cache(maxsize=1024)
def _ranges(kind: type) -> dict[str, list[Interval]]:
    return {name: _bounds(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def _bounds(hint: Any) -> list[Interval]:
    return [m for m in get_args(hint)[1:] if isinstance(m, Interval)] if hasattr(hint, "__metadata__") else []


def _inside(value: float, bound: Interval) -> bool:
    low: Any = bound.ge if bound.gt is None else bound.gt
    high: Any = bound.le if bound.lt is None else bound.lt
    above = low is None or value > low or (bound.gt is None and value == low)
    below = high is None or value < high or (bound.lt is None and value == high)
    return bool(above and below)
