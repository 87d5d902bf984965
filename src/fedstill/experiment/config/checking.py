"""Checks a table of a config against the fields it may have: one line that names every key at fault and its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, PydanticUserError, ValidationError, create_model

from fedstill.errors import ConfigError, suggestion

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Fields = dict[str, tuple[Any, Any]]
"""{name: (annotation, default)}; a field without default has ``...``."""


def checked(fields: Fields, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Every field's value, given or by default; raises ConfigError with one line for all that is wrong."""
    slots = {f"field{i}": (hint, Field(default, alias=k)) for i, (k, (hint, default)) in enumerate(fields.items())}
    lists_as_tuples = {str(k): tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    try:
        model = create_model("Table", __config__=STRICT, **slots)  # type: ignore[call-overload]
        found = model.model_validate(lists_as_tuples)
    except PydanticUserError as error:
        raise ConfigError(f"{where}: a field has a type that a config cannot hold: {on_one_line(error)}") from error
    except ValidationError as error:
        problems = {str(e["loc"][0]): _problem(e, fields, where) for e in reversed(error.errors())}
        raise ConfigError("; ".join(reversed(problems.values()))) from None
    return {k: getattr(found, slot) for slot, k in zip(slots, fields, strict=True)}


def _problem(error: Any, fields: Fields, where: str) -> str:
    key = str(error["loc"][0])
    name = f"{where}.{key}" if where else key
    if error["type"] == "extra_forbidden":
        return f"unknown key {name!r}; {suggestion(key, fields)}"
    if error["type"] == "missing":
        return f"{name} is missing, and has no default"
    return f"{name} = {shown(error['input'])}: {error['msg'][0].lower()}{error['msg'][1:]}"


def shown(value: Any) -> str:
    """A value as an error message shows it: on one line, and not longer than that."""
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or tables in tables in tables
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def on_one_line(error: Exception) -> str:
    """Another library's error, or a user's: its type and its text, cut to a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
