"""Ranges of hyper-parameters, which a field's annotation declares.

``check_ranges`` checks them when a record is made in Python. ``config.validation`` checks the
values of a config by the same annotations.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import date
from functools import lru_cache
from inspect import isclass
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval, Len

from fedstill.core.errors import ConfigError

Positive = Annotated[float, Interval(gt=0, le=1e9)]
NonNegative = Annotated[float, Interval(ge=0, le=1e9)]
Share = Annotated[float, Interval(ge=0, le=1)]
PositiveShare = Annotated[float, Interval(gt=0, le=1)]
Count = Annotated[int, Interval(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Interval(ge=0, le=1_000_000)]
Candidates = Annotated[tuple[Positive, ...], Len(1, 100)]
"""Values among which a method chooses the best."""
Seed = Annotated[int, Interval(ge=0, lt=2**63)]

Name = TypeVar("Name")

TYPES: Mapping[Any, str] = {
    bool: "a valid boolean",
    int: "a valid integer",
    float: "a valid number",
    str: "a valid string",
    NoneType: "None",
}
"""Types of single values, and their names in messages."""


def check_ranges(thing: object) -> None:
    """Raise ConfigError if a field of a dataclass instance is outside of its annotated range."""
    for name, hint in _with_ranges(type(thing)).items():  # type: ignore[arg-type]
        reason = ""
        if hasattr(thing, name):
            reason = problem(hint, getattr(thing, name))
        if reason:
            raise ConfigError(f"{type(thing).__name__}.{name} = {reason}")


def problem(hint: Any, value: Any) -> str:
    """Why a value does not match an annotation, as "VALUE: reason"; empty if it does.

    Types are strict: an integer is a valid float, and True is not a number. Numbers must be finite.
    The value is first converted by ``plain_value``. Only numbers, texts, literals, unions, tuples
    and classes are checked; all values match any other annotation.
    """
    value = plain_value(value)
    reason = _reason(hint, value)
    if not reason:
        return ""
    return f"{value_text(value)}: input should {reason}"


def _reason(hint: Any, value: Any) -> str:
    """The requirement that a value does not meet, such as "be a valid integer"; empty if it meets
    all.
    """
    kind = get_origin(hint) or hint
    if kind is Annotated:
        return _reason(hint.__origin__, value) or _outside(hint.__metadata__, value)
    if kind in (Union, UnionType):
        reasons = [_reason(part, value) for part in get_args(hint)]
        if not all(reasons):
            return ""
        return reasons[0]
    if kind is Literal:
        is_choice = any(
            type(value) is type(choice) and value == choice for choice in get_args(hint)
        )
        if is_choice:
            return ""
        return f"be one of {value_text(get_args(hint))}"
    if kind is tuple:
        return _item_reason(get_args(hint), value)
    if kind in TYPES:
        return _type_reason(kind, value)
    if isclass(kind) and not isinstance(value, kind):
        return f"be of type {kind.__name__}"
    return ""


def _type_reason(kind: type, value: Any) -> str:
    """The requirement that a value of a type of ``TYPES`` does not meet."""
    legal = {kind}
    if kind is float:
        legal.add(int)
    if type(value) not in legal:
        return f"be {TYPES[kind]}"
    if kind is float and not math.isfinite(value):
        return "be a finite number"
    return ""


def _item_reason(hints: tuple[Any, ...], value: Any) -> str:
    """The requirement that a list does not meet; hints: the arguments of ``tuple[...]``."""
    if not isinstance(value, (tuple, list)):
        return f"be a list, {value_text([value])}"
    if hints[1:] == (...,):
        hints = hints[:1] * len(value)
    if len(hints) != len(value):
        return f"have {len(hints)} items"
    reasons = (_reason(hint, item) for hint, item in zip(hints, value, strict=True))
    return next(filter(None, reasons), "")


def _outside(bounds: tuple[Any, ...], value: Any) -> str:
    """The bound that a value violates; bounds: the metadata of an annotation."""
    for bound in bounds:
        reason = ""
        if isinstance(bound, Interval):
            reason = _outside_interval(bound, value)
        if isinstance(bound, Len) and len(value) < bound.min_length:
            reason = f"have at least {bound.min_length} items"
        if isinstance(bound, Len) and bound.max_length and len(value) > bound.max_length:
            reason = f"have at most {bound.max_length} items"
        if reason:
            return reason
    return ""


def _outside_interval(interval: Interval, value: Any) -> str:
    if interval.gt is not None and not value > interval.gt:
        return f"be greater than {interval.gt}"
    if interval.ge is not None and not value >= interval.ge:
        return f"be greater than or equal to {interval.ge}"
    if interval.lt is not None and not value < interval.lt:
        return f"be less than {interval.lt}"
    if interval.le is not None and not value <= interval.le:
        return f"be less than or equal to {interval.le}"
    return ""


def plain_value(value: Any) -> Any:
    """A value as a config can hold it: numbers of Python instead of NumPy's, and texts instead of
    paths, also inside lists and tables.

    A path without a suffix could be mistaken for a name, so its text begins with "./".

    >>> plain_value({"columns": PurePath("a.csv"), "name": PurePath("digits")})
    {'columns': 'a.csv', 'name': './digits'}
    """
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(plain_value, value))
    if isinstance(value, PurePath):
        is_path = value.suffix or value.is_absolute() or str(value).startswith((".", "~"))
        if is_path:
            return str(value)
        return f"./{value}"
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    return value


def nfc(name: Name) -> Name:
    """A name in Unicode's composed form (NFC), in which equal names have equal characters.

    macOS writes file names in decomposed form. Values that are not texts do not change.
    """
    if isinstance(name, str):
        return unicodedata.normalize("NFC", name)  # type: ignore[return-value]
    return name


def as_table(record: Any) -> dict[str, Any]:
    """The fields of a dataclass instance by name, as in the table of a config."""
    return {f.name: getattr(record, f.name) for f in fields(record)}


def value_text(value: Any) -> str:
    """A value for an error message: on one line, and cut if it is long."""
    if isinstance(value, date):  # as TOML has it
        return value.isoformat()
    if isinstance(value, tuple):
        value = list(value)
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # An integer of thousands of digits, or tables in tables in tables.
        text = f"a huge {type(value).__name__}"
    if len(text) > 80:
        return f"{text[:60]}… ({len(text)} characters)"
    return text


def kind_text(value: object) -> str:
    """The type of a value in words: None, a Tensor, an int, the class TrainingStart itself."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if value is None:
        return "None"
    name = type(value).__name__
    if name[0] in "aeiou":
        return f"an {name}"
    return f"a {name}"


@lru_cache(maxsize=1024)
def _with_ranges(kind: type) -> dict[str, Any]:
    def is_ranged(hint: Any) -> bool:
        return any(isinstance(part, (Interval, Len)) for part in _inside(hint))

    hints = get_type_hints(kind, include_extras=True)
    return {name: hint for name, hint in hints.items() if is_ranged(hint)}


def _inside(hint: Any) -> Iterator[Any]:
    """All parts of an annotation, including its ranges."""
    for part in get_args(hint):
        yield part
        yield from _inside(part)
