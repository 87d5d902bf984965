"""The check of a config's values: a schema for each table, and a record for each problem.

A schema is a pydantic class; a *model* is a network everywhere in fedstill. Tables that exist in a
config only are subclasses of ``Table``. Records and functions that other code calls too, such as
``Plan``, methods and networks, stay as they are; ``schema_of`` makes a schema from their fields.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Self, get_type_hints

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

from fedstill.core.errors import ConfigError, cut_reason, on_one_line, suggestion
from fedstill.core.fields import value_text
from fedstill.data.dataset import with_tuples

# Problems.


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem of a config."""

    code: str
    """The kind of problem: pydantic's name for it, or one of the constants below."""
    key: str
    """The dotted key."""
    reason: str = ""
    """The part of the message that follows the key, unless the code is enough for the message."""
    place: str = ""
    """The file and line, or the option, that set the key; empty if Python did."""
    hint: str = ""
    """The advice at the end of the message."""


UNKNOWN_KEY = "extra_forbidden"
MISSING_KEY = "missing"
NOT_A_TABLE = "not_a_table"
NOT_A_NAME = "not_a_name"
UNKNOWN_NAME = "unknown_name"
CONTRADICTION = "contradiction"


def sentence(problem: Problem) -> str:
    """The message about a problem: its place, what is wrong, and advice.

    >>> sentence(Problem(code=UNKNOWN_KEY, key="lr", place="my.toml, line 3", hint="use plan.lr"))
    "my.toml, line 3: unknown key 'lr'; use plan.lr"
    """
    key = cut_reason(problem.key)
    statement = f"{key} {problem.reason}"
    if problem.code == UNKNOWN_KEY:
        statement = f"unknown key {key!r}"
    if problem.code == MISSING_KEY:
        statement = f"{key} is missing, and has no default"
    if problem.code == UNKNOWN_NAME:
        statement = f"{key}: {problem.reason}"
    if problem.place:
        statement = f"{problem.place}: {statement}"
    if problem.hint:
        statement = f"{statement}; {problem.hint}"
    return statement


class WrongConfig(ConfigError):
    """The error for a config that cannot be run. ``problems`` has a record for each problem.

    The problems of all parts of a config are collected in one error. Another ConfigError, such as
    one about a file that cannot be imported, is only reported once there are none of these.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(sentence, problems)))


def wrong_value(key: str, reason: str, hint: str = "", *, code: str = CONTRADICTION) -> WrongConfig:
    """The error for a value, by default for one that other values rule out.

    ``reason``: the part of the message that follows the key; ``hint``: the advice at its end.
    """
    return WrongConfig([Problem(code=code, key=key, reason=reason, hint=hint)])


def unknown_name(key: str, kind: str, name: object, hint: str) -> WrongConfig:
    """The error about a key with a name that does not exist, such as that of a metric."""
    return wrong_value(key, f"unknown {kind} {value_text(name)}", hint, code=UNKNOWN_NAME)


@contextlib.contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """A context that adds the problems of a WrongConfig to a list instead of raising it."""
    try:
        yield
    except WrongConfig as error:
        problems += error.problems


# Texts of a command line.


class CommandLineText(str):
    """A value of a command line that is not TOML. If it has commas, it can stand for a list."""


QUOTED_TEXT_OR_MARK = re.compile(
    r"""
    (?<![^\s,=\[{])                           # a quote begins a text where a value can begin,
    (?: "(?:\\.|[^"\\])*" | '[^']*' )         # so the one in it's is an apostrophe
    | [\[\]{},]
    """,
    re.VERBOSE,
)

CLOSING = {"[": "]", "{": "}"}


def split_at_commas(text: str) -> list[str]:
    """The parts of a text between commas that are outside brackets, braces and quotes.

    Raises ConfigError for a bracket or a brace without its counterpart.

    >>> split_at_commas("[a, b],[c]"), split_at_commas("'a, b',c")
    (['[a, b]', '[c]'], ["'a, b'", 'c'])
    """
    parts = []
    start = 0
    expected_closings: list[str] = []
    for match in QUOTED_TEXT_OR_MARK.finditer(text):
        mark = match.group()
        if mark in CLOSING:
            expected_closings.append(CLOSING[mark])
        elif mark in CLOSING.values():
            if not expected_closings or expected_closings.pop() != mark:
                raise _unbalanced(text, mark)
        elif mark == "," and not expected_closings:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    if expected_closings:
        raise _unbalanced(text, expected_closings[-1])
    return [*parts, text[start:].strip()]


def _unbalanced(text: str, closing: str) -> ConfigError:
    """The error for a text in which a bracket or a brace has no counterpart."""
    (opening,) = (mark for mark, counterpart in CLOSING.items() if counterpart == closing)
    return ConfigError(
        f"{value_text(text)} has more {opening} than {closing}, or the reverse; close every "
        "bracket, or put a text with brackets in quotes"
    )


def list_items(text: str) -> list[str]:
    """The items of a list that is written with commas, with or without brackets.

    Raises ConfigError for a bracket or a brace without its counterpart.

    >>> list_items("[a, b]"), list_items("a,b"), list_items("[a],[b]")
    (['a', 'b'], ['a', 'b'], ['[a]', '[b]'])
    """
    items = split_at_commas(text)
    if len(items) == 1 and text.strip().startswith("[") and text.strip().endswith("]"):
        items = split_at_commas(text.strip()[1:-1])
    return list(filter(None, items))


@dataclass(frozen=True)
class ListReadings:
    """The lists that a text with commas can stand for."""

    values: tuple[Any, ...]
    """Its items as values of TOML, or else as texts."""
    texts: tuple[str, ...]
    """Its items as texts, also those that are numbers."""

    @property
    def both(self) -> list[tuple[Any, ...]]:
        """Both lists, the likeliest first."""
        return [self.values, self.texts]


def lists_for(text: str) -> ListReadings:
    """The lists that a text with commas can stand for. Raises ConfigError as ``list_items`` does.

    >>> lists_for("a,1")
    ListReadings(values=('a', 1), texts=('a', '1'))
    """
    values = []
    texts = []
    for item in list_items(text):
        value = _plain(with_tuples(parsed_value(item)))
        values.append(value)
        texts.append(value if isinstance(value, str) else item)
    return ListReadings(tuple(values), tuple(texts))


def parsed_value(text: str) -> Any:
    """A value of TOML, or else the text itself. In braces, the texts of a table need no quotes.

    >>> parsed_value("0.5"), parsed_value(" fedntd"), parsed_value("{name = fedntd, beta = 1}")
    (0.5, 'fedntd', {'name': 'fedntd', 'beta': 1})
    """
    try:
        tree = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return _table_for(text.strip()) or CommandLineText(text.strip())
    if len(tree) > 1:  # a text with a line break can hold further keys
        return CommandLineText(text.strip())
    return tree["v"]


def _table_for(text: str) -> dict[str, Any]:
    """The table that a text in braces stands for; empty if it stands for none."""
    if not (text.startswith("{") and text.endswith("}")):
        return {}
    table = {}
    try:
        for entry in split_at_commas(text[1:-1]):
            key, equals, value = entry.partition("=")
            if not equals:
                return {}
            table[key.strip().strip("\"'")] = parsed_value(value)
    except (ConfigError, RecursionError):
        return {}
    return table


# Schemas.


STRICT = ConfigDict(
    frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
)
"""How strict schemas are: a whole number is legal for a float, and True is no number. Numbers are
finite. Unknown keys are errors.
"""

Fields = Mapping[str, tuple[Any, Any]]
"""The keys of a schema that ``schema_of`` makes: {key: (annotation, default)}, with ``...`` for no
default.
"""

Schema = type[BaseModel]
"""The pydantic class that checks the values of a table."""


class Table(BaseModel):
    """A table of a config. Each field is a key, with its type, range, default and description.

    ``read`` keeps values as they are written: a whole number in a field of floats stays a whole
    number, so that a run's ``config.toml`` keeps its bytes.
    """

    model_config = STRICT

    is_suggested: ClassVar[bool] = True
    """Whether a key of this table may be suggested for an unknown key elsewhere."""

    @classmethod
    def read(cls, values: Mapping[str, Any], name: str) -> Self:
        """The table with these values, with tuples for lists. ``name``: the table's name in
        messages. Raises WrongConfig.
        """
        immutable = {key: with_tuples(value) for key, value in values.items()}
        return cls.model_construct(**validated(cls, immutable, name))

    def changed(self, **values: Any) -> Self:
        """A copy with other values, which are checked."""
        return self.read({**self.table, **values}, type(self).__name__)

    @property
    def table(self) -> dict[str, Any]:
        """All keys and their values, in the order of a run's ``config.toml``."""
        return dict(self)


def schema_of(name: str, keys: Fields) -> Schema:
    """A schema with these keys. Raises ConfigError for an annotation that a config cannot hold.

    A key is the alias of its field, because a user's key may have the name of a method of
    pydantic's.
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
    """Whether a config can hold values with an annotation."""
    try:
        TypeAdapter(hint, config=STRICT)
    except PydanticUserError:
        return False
    return True


@functools.cache
def schema_of_record(record: type) -> Schema:
    """The schema of a dataclass."""
    return schema_of(record.__name__, fields_of_record(record))


def fields_of_record(record: type) -> Fields:
    """The fields of a dataclass, with their annotations and defaults."""
    hints = get_type_hints(record, include_extras=True)
    keys = {}
    for field in fields(record):
        default = ... if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        keys[field.name] = (hints[field.name], default)
    return keys


def keys_of(schema: Schema) -> list[str]:
    """The keys of a schema."""
    return [field.alias or name for name, field in schema.model_fields.items()]


def key_descriptions(table: type[Table]) -> dict[str, str]:
    """The description of each key of a table."""
    return {key: field.description or "" for key, field in table.model_fields.items()}


def defaults_of(schema: Schema) -> dict[str, Any]:
    """The defaults of a schema's keys, without the keys that have none."""
    return {
        field.alias or name: with_tuples(field.get_default(call_default_factory=True))
        for name, field in schema.model_fields.items()
        if not field.is_required()
    }


# Values that are checked against a schema.


MOST_UNKNOWN = 20
"""How many unknown keys of a table an error names; a hostile file may have a million."""


def validated(schema: Schema, entries: Mapping[str, Any], table: str) -> dict[str, Any]:
    """The value of every key of a schema: the one in ``entries``, or the default. Lists become
    tuples.

    ``table``: the name that messages put before each key; empty for the keys outside all tables.
    Raises WrongConfig with all values that are wrong, missing keys, and at most MOST_UNKNOWN
    unknown keys.
    """
    known = set(keys_of(schema))
    unknown = [key for key in entries if key not in known]
    unchecked = set(unknown[MOST_UNKNOWN:])
    values = {}
    for key, value in entries.items():
        if key not in unchecked:
            values[str(key)] = tuple(value) if isinstance(value, list) else value

    errors = _errors(schema, values)
    lists = _legal_lists(schema, values, errors)
    values |= lists
    errors = {key: details for key, details in errors.items() if key not in lists}
    if errors:
        report = _Report(schema, values, table)
        raise WrongConfig([report.problem(key, details) for key, details in errors.items()])

    values = {**defaults_of(schema), **values}
    return {key: _plain(values[key]) for key in keys_of(schema)}


def _plain(value: Any) -> Any:
    """A value, with an ordinary text for a text of a command line: strict checks of other records
    accept no subclass of ``str``.
    """
    if isinstance(value, CommandLineText):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value


def _legal_lists(
    schema: Schema, values: Mapping[str, Any], errors: Collection[str]
) -> dict[str, Any]:
    """The lists of legal types for lists of other types, and the lists that texts of a command line
    stand for, by key. A table can hold such lists and texts, too.

    A text is read as a list only where the text itself is refused (its key is among ``errors``) and
    the list is not: ``-s data.name=a,b`` names the file "a,b", and ``-s data.columns=a,b`` two
    columns.
    """
    lists = {}
    for key in errors:
        for reading in _readings_with_lists(values.get(key)):
            if key not in _errors(schema, {**values, key: reading}):
                lists[key] = reading
                break
    return lists


def _readings_with_lists(value: Any) -> list[Any]:
    """The values that a value can stand for, with tuples or lists for its lists, and with lists for
    its texts of a command line.

    >>> _readings_with_lists({"age": CommandLineText("0,9")})[:2]
    [{'age': (0, 9)}, {'age': ('0', '9')}]
    """
    readings = [value]
    with contextlib.suppress(ConfigError):  # the message about the key then says what is wrong
        if isinstance(value, CommandLineText):
            readings = list(lists_for(value).both)
        elif isinstance(value, Mapping):
            lists = {
                key: lists_for(item)
                for key, item in value.items()
                if isinstance(item, CommandLineText)
            }
            of_values = {key: readings.values for key, readings in lists.items()}
            of_texts = {key: readings.texts for key, readings in lists.items()}
            readings = [{**value, **of_values}, {**value, **of_texts}]
    return [*map(with_tuples, readings), *map(_with_lists, readings)]


def _with_lists(value: Any) -> Any:
    """A value with lists for tuples, also in lists and tables.

    >>> _with_lists({"sizes": ((1, 2), 3)})
    {'sizes': [[1, 2], 3]}
    """
    if isinstance(value, Mapping):
        return {key: _with_lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_with_lists, value))
    return value


def _errors(schema: Schema, values: Mapping[str, Any]) -> dict[str, list[ErrorDetails]]:
    """pydantic's errors by key."""
    errors: dict[str, list[ErrorDetails]] = {}
    try:
        schema.model_validate(values)
    except ValidationError as error:
        for details in error.errors(include_url=False, include_context=False):
            errors.setdefault(str(details["loc"][0]), []).append(details)
    return errors


@dataclass(frozen=True)
class _Report:
    """Converts pydantic's errors about some values into problems."""

    schema: Schema
    values: Mapping[str, Any]
    table: str

    def problem(self, key: str, errors: Sequence[ErrorDetails]) -> Problem:
        """The problem of a key, by the first of its errors."""
        problem = Problem(code=errors[0]["type"], key=f"{self.table}.{key}".removeprefix("."))
        if problem.code == UNKNOWN_KEY:
            return replace(problem, hint=self._other_key(key))
        if problem.code == MISSING_KEY:
            return replace(problem, hint=f"write {key} = ...")

        error = self._simplest(key, errors)
        inner_key = self._inner_key(key, error)
        if inner_key:
            problem = replace(problem, key=f"{problem.key}.{inner_key}")
        if error["type"] in LIST_EXPECTED:
            return self._list_problem(problem, key, inner_key, error["input"])
        value = value_text(error["input"])
        message = error["msg"]
        return replace(
            problem,
            code=error["type"],
            reason=f"= {value}: {message[0].lower()}{message[1:]}",
            hint=self._other_type(key),
        )

    def _inner_key(self, key: str, error: ErrorDetails) -> str:
        """The key of a wrong value in a table that is the value of ``key``; empty for others."""
        value = self.values[key]
        if not isinstance(value, Mapping):
            return ""
        return next((str(part) for part in error["loc"][1:] if part in value), "")

    def _list_problem(self, problem: Problem, key: str, inner_key: str, value: Any) -> Problem:
        """The problem of a value that must be a list, with the list to write.

        If a text with commas would be a wrong list, too, that is the problem.
        """
        problem = replace(problem, code="tuple_type", reason=f"= {value_text(value)}")
        try:
            lists = _lists_to_write(value)
        except ConfigError as error:
            return replace(problem, reason=f"= {error}")
        for items in lists:
            if self._is_legal(key, self._with_inner_value(key, inner_key, items)):
                return replace(problem, hint=f"write a list, {value_text(items)}")
        items = lists[0]
        if isinstance(value, str) and len(items) > 1:
            values = {**self.values, key: self._with_inner_value(key, inner_key, items)}
            report = replace(self, values=values)
            return report.problem(key, _errors(self.schema, values)[key])
        return replace(problem, hint=f"write a list, {value_text(items)}")

    def _with_inner_value(self, key: str, inner_key: str, value: Any) -> Any:
        """The value of a key if another value replaces it, or one value in its table."""
        if not inner_key:
            return value
        return {**self.values[key], inner_key: value}

    def _other_key(self, key: str) -> str:
        """Advice to write another key of the table, or none."""
        keys = keys_of(self.schema)
        if not keys:
            return "leave it out"
        return suggestion(key, keys)

    def _simplest(self, key: str, errors: Sequence[ErrorDetails]) -> ErrorDetails:
        """The error to show. Where a key takes a table or a list, that is the one about the list,
        which is easier to write. Where it takes a list or something else, and the value would be
        wrong in a list, that is the first one about something else.
        """
        first = errors[0]
        preferred: Iterable[ErrorDetails] = ()
        if first["type"] == "dict_type" and not isinstance(self.values[key], tuple):
            preferred = (error for error in errors if error["type"] == "tuple_type")
        elif first["type"] in LIST_EXPECTED and not self._is_legal_as_list(key):
            preferred = (error for error in errors if error["type"] not in LIST_EXPECTED)
        return next(iter(preferred), first)

    def _is_legal_as_list(self, key: str) -> bool:
        """Whether a key could have its value as a list."""
        with contextlib.suppress(ConfigError):  # a bracket has no counterpart
            return any(self._is_legal(key, items) for items in _lists_to_write(self.values[key]))
        return False

    def _is_legal(self, key: str, value: Any) -> bool:
        """Whether a key could have another value."""
        return key not in _errors(self.schema, {**self.values, key: value})

    def _other_type(self, key: str) -> str:
        """Advice to write the same value with a type that is legal; empty if there is none."""
        for reading in _readings(self.values[key]):
            if self._is_legal(key, reading):
                return f"write {_as_toml(reading)}"
        return ""


LIST_EXPECTED = ("tuple_type", "list_type")
"""pydantic's errors about a value that must be a list."""


def _lists_to_write(value: Any) -> list[tuple[Any, ...]]:
    """The lists that can be written instead of a value, the likeliest first. Raises ConfigError as
    ``list_items`` does.
    """
    if isinstance(value, tuple):
        return [value]
    if isinstance(value, str):
        return lists_for(value).both
    return [(value,)]


LARGEST_READ = 10**15
"""The largest number that is read as another type."""


def _readings(value: Any) -> list[Any]:
    """The values of other types that a value can be read as, the likeliest first.

    >>> _readings("False"), _readings(".5"), _readings(1), _readings((3,))
    ([False], [0.5], [True, '1'], [3])
    """
    if isinstance(value, str):
        return _readings_of_text(value)
    if isinstance(value, tuple) and len(value) == 1:
        return list(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return []
    if abs(value) > LARGEST_READ:
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
