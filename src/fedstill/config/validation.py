"""What is wrong with a config: the models that check its tables, and a record for each problem.

Tables that only a config makes are subclasses of ``Table``. Records and functions that other code
calls too, such as ``Plan``, methods and models, keep their form; ``model_of`` makes a model from
their fields.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Self, get_type_hints

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic_core import ErrorDetails

from fedstill.core.errors import ConfigError, on_one_line, suggestion
from fedstill.core.fields import shown

# One problem as a record, and its sentence.


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a config.

    ``code``: pydantic's name for the kind of error, or one of ours. ``key``: the dotted key.
    ``reason``: what follows the key in a message, where the code does not say it. ``place``: the
    file and line, or the option, that set the key; empty in Python. ``hint``: what to do.
    """

    code: str
    key: str
    reason: str = ""
    place: str = ""
    hint: str = ""


UNKNOWN_KEY = "extra_forbidden"
MISSING_KEY = "missing"
NOT_A_TABLE = "not_a_table"
NOT_A_NAME = "not_a_name"
UNKNOWN_NAME = "unknown_name"
NO_EFFECT = "no_effect"
CONTRADICTION = "contradiction"


def sentence(problem: Problem) -> str:
    """A problem in words: where it is, what is wrong, and what to do.

    >>> sentence(Problem(code=UNKNOWN_KEY, key="lr", place="my.toml, line 3", hint="use plan.lr"))
    "my.toml, line 3: unknown key 'lr'; use plan.lr"
    """
    statement = f"{problem.key} {problem.reason}"
    if problem.code == UNKNOWN_KEY:
        statement = f"unknown key {problem.key!r}"
    if problem.code == MISSING_KEY:
        statement = f"{problem.key} is missing, and has no default"
    if problem.code == UNKNOWN_NAME:
        statement = f"{problem.key}: {problem.reason}"
    if problem.place:
        statement = f"{problem.place}: {statement}"
    if problem.hint:
        statement = f"{statement}; {problem.hint}"
    return statement


class WrongConfig(ConfigError):
    """A config that cannot be run as it is written, with one record for each problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(sentence, problems)))


def contradiction(key: str, reason: str, hint: str = "") -> WrongConfig:
    """The error for a value that other values rule out. ``reason``: what follows the key in the
    message; ``hint``: what to do.
    """
    return WrongConfig([Problem(code=CONTRADICTION, key=key, reason=reason, hint=hint)])


# Where a key was set.


class FileOrigin(str):
    """The origin of a value in a file, such as ``file my.toml``.

    ``text``: what the file holds, from which the line of a key is found.
    """

    text: str

    @classmethod
    def of(cls, name: str, text: str) -> Self:
        """The origin of the values in a file of a name and a text."""
        origin = cls(f"file {name}")
        origin.text = text
        return origin


def place_of(key: str, origins: Mapping[str, str]) -> str:
    """The file and line, or the option, that set a dotted key; empty for defaults and Python.

    Of a table, the place of its first key.
    """
    written = _written(key, origins)
    if not written:
        return ""
    origin = origins[written]
    if not isinstance(origin, FileOrigin):
        return origin
    name = origin.removeprefix("file ")
    # Both are in the same file; the key itself is the more exact.
    line = line_of(key, origin.text) or line_of(written, origin.text)
    return f"{name}, line {line}" if line else name


def _written(key: str, origins: Mapping[str, str]) -> str:
    """The key with an origin that set another key, such as ``plan.lr`` for ``plan.train.lr``."""
    key = re.sub(r"\[\d+\]", "", key)  # an item of a list stands where the list does
    parts = key.split(".")
    above = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    candidates = [key]
    if parts[0] == "plan":
        candidates.append(f"plan.{parts[-1]}")
    candidates += [written for written in origins if written.startswith(f"{key}.")]
    candidates += above
    return next((candidate for candidate in candidates if candidate in origins), "")


def line_of(key: str, text: str) -> int:
    """The line on which a TOML text sets a dotted key, from 1; 0 if it does not.

    >>> line_of("plan.lr", "seed = 1\\n[plan]\\nepochs = 5\\nlr = 0.1\\n")
    4
    """
    lines = text.split("\n")
    key = re.sub(r"\[\d+\]", "", key)
    last = key.rpartition(".")[2]
    for number, line in enumerate(lines, 1):
        if last in line and _has(_shortest_valid(lines, number), key):
            return number
    return 0


def _shortest_valid(lines: Sequence[str], start: int) -> Mapping[str, Any]:
    """The first ``start`` lines as TOML, with as many more as their last value needs."""
    for end in range(start, len(lines) + 1):
        try:
            return tomllib.loads("\n".join(lines[:end]))
        except ValueError:
            continue
    return {}


def _has(tree: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


# Values of a command line.


class Typed(str):
    """A text of a command line. With commas it can stand for a list."""

    @property
    def parts(self) -> tuple[Any, ...]:
        """The list that it can stand for.

        >>> Typed("a,1").parts
        ('a', 1)
        """
        return tuple(map(_parsed, parts_of(self)))


def parts_of(text: str) -> list[str]:
    """The items of a list that is written with commas, and perhaps in brackets."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    return [part.strip() for part in inner.split(",") if part.strip()]


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except ValueError:
        return text


# Models, and values that are checked against them.


STRICT = ConfigDict(
    frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
)
"""A whole number is a float, and True is no number; numbers are finite; unknown keys are errors."""

Fields = Mapping[str, tuple[Any, Any]]
"""{key: (annotation, default)}; a key without default has ``...``."""

Model = type[BaseModel]


class Table(BaseModel):
    """A table of a config. A field is a key, with its type, range, default and description.

    ``read`` keeps values as they are written: a whole number in a field of floats stays one, so
    that a run's ``config.toml`` keeps its bytes.
    """

    model_config = STRICT

    @classmethod
    def read(cls, values: Mapping[str, Any], name: str) -> Self:
        """The table of these values, with tuples for lists. ``name``: that of the table, for
        messages. Raises WrongConfig.
        """
        written = {key: tuples(value) for key, value in values.items()}
        return cls.model_construct(**validated(cls, written, name))

    def changed(self, **values: Any) -> Self:
        """A copy with other values, which are checked."""
        return self.read({**self.table, **values}, type(self).__name__)

    @property
    def table(self) -> dict[str, Any]:
        """All keys and their values, in the order of a run's ``config.toml``."""
        return dict(self)


class PackageTable(Table):
    """A table of a config that belongs to an outer package. The defaults change nothing."""

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


def tuples(value: Any) -> Any:
    """A value with tuples for lists, also in lists and tables."""
    if isinstance(value, Mapping):
        return {str(key): tuples(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(tuples, value))
    return value


def model_of(name: str, keys: Fields) -> Model:
    """A model with these keys. Raises ConfigError for an annotation that a config cannot hold.

    A key is the alias of its field, because a user's may be called as a method of pydantic's is.
    """
    definitions: dict[str, Any] = {}
    for key, (hint, default) in keys.items():
        definitions[f"field_{key}"] = (hint, Field(default, alias=key))
    try:
        return create_model(name, __config__=STRICT, **definitions)
    except PydanticUserError as error:
        wrong = next(key for key, (hint, _) in keys.items() if not is_legal(hint))
        raise ConfigError(
            f"{name}.{wrong} has a type that a config cannot hold: {on_one_line(error)}"
        ) from error


def is_legal(hint: Any) -> bool:
    """Whether a config can hold values of an annotation."""
    try:
        TypeAdapter(hint, config=STRICT)
    except PydanticUserError:
        return False
    return True


@functools.cache
def model_of_record(record: type) -> Model:
    """The model of a dataclass."""
    return model_of(record.__name__, fields_of_record(record))


def fields_of_record(record: type) -> Fields:
    """What may be set of a dataclass: its fields with their annotations and defaults."""
    hints = get_type_hints(record, include_extras=True)
    keys = {}
    for field in fields(record):
        default = ... if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        keys[field.name] = (hints[field.name], default)
    return keys


def keys_of(model: Model) -> list[str]:
    """The keys that a model takes."""
    return [field.alias or name for name, field in model.model_fields.items()]


def descriptions(table: type[Table]) -> dict[str, str]:
    """What each key of a table is."""
    return {key: field.description or "" for key, field in table.model_fields.items()}


def defaults_of(model: Model) -> dict[str, Any]:
    """The defaults of the keys that a model takes and that have one."""
    return {
        field.alias or name: tuples(field.get_default(call_default_factory=True))
        for name, field in model.model_fields.items()
        if not field.is_required()
    }


def validated(model: Model, entries: Mapping[str, Any], table: str) -> dict[str, Any]:
    """The value of every key: that of the entries, with a tuple for a list, or the default.

    ``table``: its name, which messages put before each key; empty for the keys outside all tables.
    Raises WrongConfig with all values that are wrong, missing keys and unknown keys.
    """
    values = {}
    for key, value in entries.items():
        values[str(key)] = tuple(value) if isinstance(value, list) else value

    errors = _errors(model, values)
    lists = {key: value.parts for key in errors if isinstance(value := values.get(key), Typed)}
    if lists:
        still_wrong = _errors(model, {**values, **lists})
        fitting = {key: parts for key, parts in lists.items() if key not in still_wrong}
        values |= fitting
        errors = {key: error for key, error in errors.items() if key not in fitting}
    if errors:
        report = _Report(model, values, table)
        raise WrongConfig([report.problem(key, details) for key, details in errors.items()])

    values = {**defaults_of(model), **values}
    return {key: values[key] for key in keys_of(model)}


def _errors(model: Model, values: Mapping[str, Any]) -> dict[str, list[ErrorDetails]]:
    """pydantic's errors by key."""
    errors: dict[str, list[ErrorDetails]] = {}
    try:
        model.model_validate(values)
    except ValidationError as error:
        for details in error.errors(include_url=False, include_context=False):
            errors.setdefault(str(details["loc"][0]), []).append(details)
    return errors


@dataclass(frozen=True)
class _Report:
    """Values that a model has refused, of which each error becomes a problem."""

    model: Model
    values: Mapping[str, Any]
    table: str

    def problem(self, key: str, errors: Sequence[ErrorDetails]) -> Problem:
        """The problem of a key, by the first of its errors."""
        problem = Problem(code=errors[0]["type"], key=f"{self.table}.{key}".removeprefix("."))
        if problem.code == UNKNOWN_KEY:
            return replace(problem, hint=suggestion(key, keys_of(self.model)))
        if problem.code == MISSING_KEY:
            return replace(problem, hint=f"write {key} = ...")
        value = self.values[key]
        error = self._simplest(value, errors)
        problem = replace(problem, code=error["type"])
        if error["type"] in ("tuple_type", "list_type"):
            items = value if isinstance(value, tuple) else _items(value)
            return replace(
                problem, reason=f"= {shown(error['input'])}", hint=f"write a list, {shown(items)}"
            )
        message = error["msg"]
        reason = f"= {shown(error['input'])}: {message[0].lower()}{message[1:]}"
        return replace(problem, reason=reason, hint=self._retyped(key))

    def _simplest(self, value: Any, errors: Sequence[ErrorDetails]) -> ErrorDetails:
        """The error to show: a list is easier to write than a table, where a key takes both."""
        if errors[0]["type"] == "dict_type" and not isinstance(value, tuple):
            of_lists = (error for error in errors if error["type"] == "tuple_type")
            return next(of_lists, errors[0])
        return errors[0]

    def _retyped(self, key: str) -> str:
        """How to write the same value with a type that is legal; empty if there is none."""
        for other in _readings(self.values[key]):
            if key not in _errors(self.model, {**self.values, key: other}):
                return f"write {_as_toml(other)}"
        return ""


def _items(value: Any) -> tuple[Any, ...]:
    """The list that a single value stands for."""
    if isinstance(value, str):
        return tuple(parts_of(value))
    return (value,)


MOST_READ = 10**15
"""The largest number that is read as another type."""


def _readings(value: Any) -> list[Any]:
    """Values of other types that a value was perhaps meant to be.

    >>> _readings("False"), _readings(".5"), _readings(1), _readings((3,))
    ([False], [0.5], [True, '1'], [3])
    """
    if isinstance(value, str):
        return _readings_of_text(value)
    if isinstance(value, tuple):
        return list(value[:1]) if len(value) == 1 else []
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return []
    if abs(value) > MOST_READ:
        return []
    readings: list[Any] = [str(value)]
    if isinstance(value, float) and value.is_integer():
        readings.insert(0, int(value))
    if value in (0, 1):
        readings.insert(0, bool(value))
    return readings


def _readings_of_text(text: str) -> list[Any]:
    if text.lower() in ("true", "false"):
        return [text.lower() == "true"]
    readings: list[Any] = []
    for kind in (int, float):
        try:
            readings.append(kind(text))
        except ValueError:
            continue
    return readings


def _as_toml(value: Any) -> str:
    """A value as a config file has it."""
    return tomli_w.dumps({"v": value}).partition("=")[2].strip()
