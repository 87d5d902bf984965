"""The tables of docs/configuration.md: each key of a config, from the model that checks it."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Len, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedstill.config.named_tables import NAMED
from fedstill.config.tables import StreamTable, TopKeys, record_tables
from fedstill.config.validation import Table, key_descriptions, schema_of_record
from fedstill.core.descriptions import sentences
from fedstill.core.records import Plan

TYPES: Mapping[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "`true` or `false`",
    Any: "any value",
}


@dataclass(frozen=True)
class Section:
    """A table of a config with its keys: a heading, a sentence, the model and what its keys are."""

    heading: str
    sentence: str
    model: type[BaseModel]
    descriptions: Mapping[str, str]


def tables() -> str:
    """All tables of keys, in Markdown."""
    return "\n\n".join(_written(section) for section in sections())


def sections() -> Iterator[Section]:
    """The tables of a config that have keys of their own, in the order of a run's config.toml."""
    yield _of_record("Outside the tables", TopKeys)
    models: dict[str, type[Table]] = {**record_tables(), "stream": StreamTable}
    for name, model in models.items():
        heading = f"`[{name}]`"
        if name in NAMED:
            heading += f", beside `{NAMED[name].key}` and its fields"
        yield Section(heading, _about(model), model, key_descriptions(model))
    yield _of_record("`[plan]` and `[plan.STAGE]`", Plan)


def _of_record(heading: str, record: type) -> Section:
    return Section(heading, _about(record), schema_of_record(record), sentences(record))


def _about(model: type) -> str:
    """The first paragraph of a docstring, without the name of the table."""
    paragraph = (model.__doc__ or "").partition("\n\n")[0]
    sentence = " ".join(paragraph.split()).replace("``", "`")
    return sentence.partition("]`: ")[2] or sentence


def _written(section: Section) -> str:
    sentence = section.sentence[:1].upper() + section.sentence[1:]
    lines = [f"### {section.heading}", "", sentence, ""]
    lines += ["| key | type | default | description |", "|---|---|---|---|"]
    for name, field in section.model.model_fields.items():
        key = field.alias or name
        description = section.descriptions[key].replace("|", "\\|")
        cells = [f"`{key}`", _type(field), _default(field), description]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "unset"
    return f"`{json.dumps(default)}`"  # TOML writes these values as JSON does


def _type(field: FieldInfo) -> str:
    """The type and the range of a key in words."""
    hint: Any = field.annotation
    if field.metadata:
        hint = Annotated[(hint, *field.metadata)]
    return _words(hint).replace("|", "\\|")


def _words(hint: Any) -> str:
    kind = get_origin(hint) or hint
    arguments = get_args(hint)
    if kind is Annotated:
        return f"{_words(arguments[0])}{_range(arguments[1:])}"
    if kind in (Union, types.UnionType):
        return _any_of([_words(part) for part in arguments if part is not type(None)])
    if kind is Literal:
        return _any_of([f'`"{choice}"`' for choice in arguments])
    if kind is tuple and arguments[1:] != (...,):
        return f"list of {len(arguments)} ({_words(arguments[0])})"
    if kind is tuple:
        return f"list ({_words(arguments[0])})"
    if kind in TYPES:
        return TYPES[kind]
    return f"table ({_words(arguments[1])})"


def _any_of(choices: Sequence[str]) -> str:
    *first, last = choices
    if not first:
        return last
    return f"{', '.join(first)} or {last}"


def _range(notes: Sequence[Any]) -> str:
    """The bounds of a number or of a list's length, in words."""
    bounds: list[str] = []
    for note in notes:
        if isinstance(note, Interval | Len):
            bounds += map(_bound, note)
        else:
            bounds.append(_bound(note))
    return "".join(f" {bound}" for bound in bounds if bound)


def _bound(note: Any) -> str:
    if isinstance(note, Ge):
        return f"from {_number(note.ge)}"
    if isinstance(note, Gt):
        return f"above {_number(note.gt)}"
    if isinstance(note, Le):
        return f"to {_number(note.le)}"
    if isinstance(note, Lt):
        return f"and below {_number(note.lt)}"
    if isinstance(note, MinLen) and note.min_length > 0:
        return f"of {_number(note.min_length)}"
    if isinstance(note, MaxLen):
        return f"to {_number(note.max_length)} items"
    return ""


def _number(value: Any) -> str:
    """A bound as a person reads it."""
    if value == 2**63:
        return "2^63"
    return f"{value:,}".removesuffix(".0")
