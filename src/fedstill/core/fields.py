"""Legal values of hyper-parameters and config keys: written once, in a field's annotation, and
checked in one place.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import PurePath
from typing import Annotated, Any, Self, TypeVar, get_args, get_type_hints

from annotated_types import Interval, Len
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from fedstill.core.errors import ConfigError, UnknownKeys, on_one_line, suggestion

Positive = Annotated[float, Interval(gt=0, le=1e9)]
NonNegative = Annotated[float, Interval(ge=0, le=1e9)]
Share = Annotated[float, Interval(ge=0, le=1)]
PositiveShare = Annotated[float, Interval(gt=0, le=1)]
Count = Annotated[int, Interval(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Interval(ge=0, le=1_000_000)]
Candidates = Annotated[tuple[Positive, ...], Len(1, 100)]
"""Values of which a method takes the best."""
Seed = Annotated[int, Interval(ge=0, lt=2**63)]

Fields = dict[str, tuple[Any, Any]]
"""{name: (annotation, default)} of what may be set; a field without default has ``...``."""

R = TypeVar("R")


def problem(hint: Any, value: Any) -> str:
    """What is wrong with a value under an annotation, as "VALUE: reason"; empty if nothing is.

    Types are strict: a whole number is a float, and True is no number. Numbers must be finite. The
    value is checked as ``plain_value`` gives it. Raises ConfigError for an annotation that cannot
    be checked.
    """
    value = plain_value(value)
    try:
        _adapter(hint).validate_python(value)
    except ValidationError as error:
        return _described(error, value)
    return ""


def _described(error: ValidationError, value: Any) -> str:
    """The first problem of a value, with what to write if that should be a list."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "dict_type" and not isinstance(value, (list, tuple)):
        # The annotation takes a table or a list, and a list is easier to write.
        tuples = (problem for problem in problems if problem["type"] == "tuple_type")
        first = next(tuples, first)
    if first["type"] in ("tuple_type", "list_type"):
        return f"{shown(first['input'])}: write a list, {shown(_as_list(value))}"
    message = first["msg"]
    return f"{shown(first['input'])}: {message[0].lower()}{message[1:]}"


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, str):
        return list(_parts(value))
    return [value]


def plain_value(value: Any) -> Any:
    """A value as a config holds it: NumPy's numbers become Python's, and paths become texts, also
    in lists and tables.

    A path without an ending could be a name, so its text begins with a dot.

    >>> plain_value({"columns": PurePath("a.csv"), "name": PurePath("digits")})
    {'columns': 'a.csv', 'name': './digits'}
    """
    if isinstance(value, Mapping):
        return {key: plain_value(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(plain_value, value))
    if isinstance(value, PurePath):
        is_clear = value.suffix or value.is_absolute() or str(value).startswith((".", "~"))
        return str(value) if is_clear else f"./{value}"
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    return value


class Typed(str):
    """A text of a command line. With commas it can stand for a list."""

    def fitting(self, hint: Any) -> str | tuple[Any, ...]:
        """The list if an annotation takes only a list, else the text.

        >>> Typed("a,1").fitting(tuple[str | int, ...]), Typed("a,1").fitting(str)
        (('a', 1), 'a,1')
        """
        text = str(self)
        parts = tuple(_part(part) for part in _parts(text))
        if problem(hint, text) and not problem(hint, parts):
            return parts
        return text


def _parts(text: str) -> list[str]:
    """The items of a list that is written with commas, and perhaps in brackets."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    return [part.strip() for part in inner.split(",") if part.strip()]


def _part(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except ValueError:
        return text


def check_ranges(thing: object) -> None:
    """Raise ConfigError if a field of a dataclass instance is not what the range in its annotation
    allows.
    """
    for name, hint in _with_ranges(type(thing)).items():  # type: ignore[arg-type]
        reason = ""
        if hasattr(thing, name):
            reason = problem(hint, getattr(thing, name))
        if reason:
            raise ConfigError(f"{type(thing).__name__}.{name} = {reason}")


def checked(fields: Fields, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Every field's value: the given one, as ``plain_value`` and with tuples for lists, or the
    default.

    ``where``: the table, which messages put before each key. Raises ConfigError with one line for
    everything that is wrong: values, missing fields, and unknown keys with the nearest known one
    (then UnknownKeys).
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, (hint, default) in fields.items():
        name = f"{where}.{key}" if where else key
        try:
            _adapter(hint)
        except ConfigError as error:
            raise ConfigError(f"{name} {error}") from error
        if key not in given:
            values[key] = tuple(default) if isinstance(default, list) else default
            if default is ...:
                problems.append(f"{name} is missing, and has no default")
            continue
        values[key] = _fitted(given[key], hint)
        reason = problem(hint, values[key])
        if reason:
            problems.append(f"{name} = {reason}{_meant(hint, given[key])}")

    unknown = [
        (where, key, suggestion(key, fields)) for key in map(str, given) if key not in fields
    ]
    if unknown:
        raise UnknownKeys(problems, unknown)
    if problems:
        raise ConfigError("; ".join(problems))
    return values


def _fitted(value: Any, hint: Any) -> Any:
    """A given value as a field with an annotation holds it."""
    value = plain_value(value)
    if isinstance(value, Typed):
        value = value.fitting(hint)
    if isinstance(value, list):
        return tuple(value)
    return value


def _meant(hint: Any, typed: Any) -> str:
    """What to write where a number or a truth value was typed in another way than TOML's.

    >>> _meant(float, Typed(".5")), _meant(bool, Typed("False")), _meant(int, Typed("x"))
    ('; write 0.5', '; write false', '')
    """
    if isinstance(typed, Typed):
        if typed.lower() in ("true", "false") and not problem(hint, typed.lower() == "true"):
            return f"; write {typed.lower()}"
        for kind in (int, float):
            with suppress(ValueError):
                if not problem(hint, kind(typed)):
                    return f"; write {kind(typed)}"
    return ""


def held(hint: Any, default: Any) -> bool:
    """Whether a config can hold what an annotation allows, and a default.

    >>> held(int, 3), held(Any, print), held(Iterator[TypeAdapter], None)
    (True, False, False)
    """
    if isinstance(default, (tuple, list)):
        return all(held(Any, one) for one in default) and held(hint, None)
    try:
        _adapter(hint)
    except ConfigError:
        return False
    return default is ... or default is None or isinstance(default, (bool, int, float, str))


def fields_of_record(record: type) -> Fields:
    """What may be set of a dataclass: its fields with their annotations and defaults."""
    return {f.name: (_hints(record)[f.name], _default(f)) for f in fields(record)}


def read_record(record: type[R], given: Mapping[str, Any], where: str) -> R:
    """A dataclass made of what a table of a config says; raises ConfigError as ``checked`` does."""
    return record(**checked(fields_of_record(record), given, where))


class PackageTable:
    """A table of a config that belongs to an outer package: a frozen dataclass derives from it.

    The defaults change nothing.
    """

    @classmethod
    def read(cls, given: Mapping[str, Any], name: str) -> Self:
        """The table that a config gives under its name; raises ConfigError as ``checked`` does."""
        return read_record(cls, given, name)

    @property
    def top_defaults(self) -> Mapping[str, Any]:
        """Keys outside all tables that have another default with this table, and which."""
        return {}

    @property
    def exchange_each_round(self) -> bool:
        """Whether every round is a whole exchange between clients, which measures look at."""
        return False

    @property
    def hides_client_models(self) -> bool:
        """Whether the server sees no single client's model."""
        return False


def as_table(record: Any) -> dict[str, Any]:
    """The fields of a dataclass instance by name: the table of a config that says the same."""
    return {f.name: getattr(record, f.name) for f in fields(record)}


def shown(value: Any) -> str:
    """A value as an error message shows it: on one line, and not longer than that."""
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)
    except (
        ValueError,
        RecursionError,
    ):  # an integer of thousands of digits, or tables in tables in tables
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        hash(hint)
    except (
        TypeError
    ):  # an annotation may hold a dict or a list, and then it cannot be a key of the cache
        return _new_adapter(hint)
    return _known_adapter(hint)


def _new_adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))
    except PydanticUserError as error:
        raise ConfigError(f"has a type that a config cannot hold: {on_one_line(error)}") from error


_known_adapter = lru_cache(maxsize=1024)(_new_adapter)


@lru_cache(maxsize=1024)
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@lru_cache(maxsize=1024)
def _with_ranges(kind: type) -> dict[str, Any]:
    def ranged(hint: Any) -> bool:
        return any(isinstance(part, (Interval, Len)) for part in _inside(hint))

    return {name: hint for name, hint in _hints(kind).items() if ranged(hint)}


def _inside(hint: Any) -> Iterator[Any]:
    """What an annotation is made of, ranges among it."""
    for part in get_args(hint):
        yield part
        yield from _inside(part)


def _default(field: Any) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return ... if field.default is MISSING else field.default
