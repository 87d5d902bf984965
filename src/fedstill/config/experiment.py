"""An experiment as it was asked for: a config file, its overrides, and where each value came
from.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from fedstill import manifest
from fedstill.config.named_tables import NAMED
from fedstill.config.overrides import (
    COMMAND_LINE,
    from_here,
    is_name,
    leaf_keys,
    parse_overrides,
    refuse_set_twice,
    renamed,
)
from fedstill.config.tables import TopKeys
from fedstill.config.validation import NOT_A_NAME, NOT_A_TABLE, FileOrigin, Problem, WrongConfig
from fedstill.core import registry
from fedstill.core.errors import ConfigError
from fedstill.core.fields import as_table, plain_value, shown
from fedstill.core.files import digest, named_path, parse_toml
from fedstill.core.method import Method
from fedstill.core.user_code import USER, of_kind

# Classes, functions and networks that are handed over from Python: their name in a config, and what
# they are.
#
# What can be imported again is named by its file or its import path. The rest (a class of a
# notebook, a lambda, a network that exists) is bound to a name ``python:Name`` that only this
# process knows.


_binding = threading.Lock()


def name_for(kind: str, thing: Any) -> str:
    """The name of a class, a function, a network or another object that can be called, as a config
    writes it.
    """
    with _binding:
        given = _given(thing)
        if again := _importable(kind, given):
            return again
        first = name = f"{registry.LIVE}{_called(given)}"
        number = 1
        while (there := registry.bound(kind, name)) is not None and _given(there) is not given:
            number += 1
            name = f"{first}-{number}"
        if there is None:
            _bind(kind, name, given)
        return name


def bind(kind: str, name: str, thing: Any) -> None:
    """Say what a name ``python:Name`` of a run's config stands for; what is bound already in this
    process stays.
    """
    with _binding:
        if registry.bound(kind, name) is None:
            _bind(kind, name, _given(thing))


def fingerprint(kind: str, name: str) -> str:
    """The SHA-256 of what a name ``python:Name`` stands for: its source, a network's weights;
    "unknown" without any.
    """
    return _fingerprint(registry.bound(kind, name))


def _fingerprint(target: Any) -> str:
    thing = _given(target)
    parts = []
    while isinstance(thing, functools.partial):
        parts.append(repr((thing.args, sorted(thing.keywords.items()))))
        thing = thing.func
    if isinstance(thing, nn.Module):
        parts += [
            f"{k} {digest(v.detach().cpu().contiguous().numpy().tobytes())}"
            for k, v in _state(thing)
        ]
    try:
        parts.append(inspect.getsource(_defined(thing)))
    except (OSError, TypeError):
        return digest("\n".join(parts).encode()) if parts else "unknown"
    return digest("\n".join(parts).encode())


class Copies:
    """Makes copies of one network, its weights included; it takes neither an image's shape nor the
    classes.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.__doc__ = (
            f"A {type(network).__name__} that was handed over from Python, with its weights."
        )

    def __call__(self) -> nn.Module:
        """A copy of its own."""
        return copy.deepcopy(self.network)


def _given(thing: Any) -> Any:
    """What the user handed over: a network where ``thing`` makes copies of it."""
    return thing.network if isinstance(thing, Copies) else thing


def _bind(kind: str, name: str, thing: Any) -> None:
    if not callable(thing):
        raise ConfigError(f"{kind} = {thing!r:.60} is no name, class or function")
    registry.enter(
        registry.Entry(kind, name, Copies(thing) if isinstance(thing, nn.Module) else thing)
    )


def _importable(kind: str, thing: Any) -> str:
    """Under which name a class or function is found again in any process; empty where there is
    none.
    """
    name, home = getattr(thing, "__qualname__", ""), getattr(thing, "__module__", "")
    module = sys.modules.get(home)
    if module is None or getattr(module, name, None) is not thing:
        return ""
    if home.startswith("fedstill."):
        return registry.registered_as(kind, thing)
    if home.startswith(USER):
        return f"{module.__file__}:{name}"
    return f"{home}:{name}" if home != "__main__" and getattr(module, "__spec__", None) else ""


def _called(thing: Any) -> str:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return str(getattr(thing, "__name__", type(thing).__name__)).strip("<>")


def _defined(thing: Any) -> Any:
    return thing if inspect.isclass(thing) or inspect.isroutine(thing) else type(thing)


def _state(network: nn.Module) -> list[tuple[str, Any]]:
    return sorted(network.state_dict().items())


Table = Mapping[str, Any]

Class = TypeVar("Class", bound=type)


def _with_package_tables(experiment: Class) -> Class:
    """Add a field for each table that an outer package has in a config."""
    for part in manifest.config_tables():
        experiment.__annotations__[part.name] = "Table"
        setattr(experiment, part.name, field(default_factory=dict))
    return experiment


@dataclass(frozen=True)
@_with_package_tables
class Experiment(TopKeys):
    """One run as it was asked for: it holds only what differs from the defaults.

    The keys are those of a config file; ``method = "fedntd"`` stands for
    ``method = {"name": "fedntd"}``. Values are checked when the run is settled, not here.
    ``method``, ``model`` and ``partition`` also take what they name: a class, a method with its
    fields, a network, a function; so does the name in their table. NumPy's numbers and pathlib's
    paths become plain ones. ``origins`` says where a dotted key came from, ``base`` is the folder
    that paths are relative to. ``unknown``: keys of a file or a command line that there are not,
    which are reported when the run is settled, with everything else that is wrong.
    """

    data: str | Table = field(default_factory=dict)
    model: str | Table | Callable[..., nn.Module] = field(default_factory=dict)
    method: str | Table | Method | type[Method] = field(default_factory=dict)
    partition: str | Table | Callable[..., Any] = field(default_factory=dict)
    topology: str | Table = field(default_factory=dict)
    plan: Table = field(default_factory=dict)
    clients: Table = field(default_factory=dict)
    flower: Table = field(default_factory=dict)
    stream: str | Table = field(default_factory=dict)
    stop: Table = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    base: Path | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)

    if TYPE_CHECKING:  # the manifest has these; they are written here for editors and type checkers
        privacy: Table = field(default_factory=dict)
        query: Table = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in KEYS:
            object.__setattr__(self, key, plain_value(getattr(self, key)))

    def table(self, name: str) -> dict[str, Any]:
        """A table as a mapping; raises ConfigError if it is something else."""
        value = getattr(self, name)
        if name in LIVING and _is_living(name, value):
            value = _by_name(name, value)
        if isinstance(value, str) and name in (*NAMED, "data"):
            return {NAMED.get(name, ("name", ""))[0]: value}
        if not isinstance(value, Mapping):
            raise WrongConfig([_not_a_table(name, value)])
        return dict(value)

    @property
    def tree(self) -> dict[str, Any]:
        """Everything that it says, as a config file has it."""
        return {**{key: getattr(self, key) for key in KEYS}, **self.unknown}

    def with_values(self, values: Mapping[str, Any], origin: str) -> Experiment:
        """The experiment with some dotted keys set, e.g. ``{"method.beta": 0.5}``.

        A name, as in ``{"method": "fedntd"}``, comes before fields. It leaves out fields of the
        config that belong to another thing, and keeps those that override the config. ``origin``:
        what sets the values. Raises ConfigError for a key that something else has overridden.
        """
        leaves = leaf_keys(values)
        refuse_set_twice(values, self.origins, origin)
        tree = self.tree
        for key in sorted(values, key=lambda key: not is_name(key)):
            # The other keys of [data], such as sizes, do not belong to the data set that is named.
            names_thing = is_name(key) and key != "data.name"
            if names_thing and isinstance(values[key], str):
                table = key.partition(".")[0]
                tree[table] = self._renamed(table, values[key])
            else:
                _set(tree, key, values[key])
        return from_tree(tree, {**self.origins, **dict.fromkeys(leaves, origin)}, self.base)

    def _renamed(self, table: str, name: str) -> Any:
        """A table in which another thing is named, or the same one again."""
        current = self.tree[table]
        if not isinstance(current, (str, Mapping)):
            return name
        return renamed(table, self.table(table), name, self.origins)


def _not_a_table(name: str, value: Any) -> Problem:
    problem = Problem(
        code=NOT_A_TABLE, key=name, reason=f"= {shown(value)} must be a table, [{name}]"
    )
    if name not in (*NAMED, "data"):
        return problem
    text = "NAME"
    if isinstance(value, (int, float)):
        text = str(value)
    return replace(problem, code=NOT_A_NAME, hint=f'a name is a text: write {name} = "{text}"')


LIVING = ("method", "model", "partition")
"""Tables that also take what they name: a class, a function, or an object that can be called."""

KEYS = tuple(f.name for f in fields(Experiment) if f.name not in ("origins", "base", "unknown"))
"""Everything that a config may say: keys outside tables, and tables."""


def load(file: Path | str | None, overrides: tuple[str, ...] = ()) -> Experiment:
    """The experiment in a TOML file (none: the defaults), with ``key=value`` overrides: TOML, or
    else strings.

    Paths are relative to the file's folder; an override may also name a file in the working
    directory.
    """
    if file is None:
        return Experiment().with_values(parse_overrides(overrides), COMMAND_LINE)
    path = named_path(file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    try:
        tree = parse_toml(data)
    except ValueError as error:
        raise ConfigError(_why_invalid(path, data, str(error))) from error
    origin = FileOrigin.of(path.name, data.decode("utf-8-sig", "replace"))
    experiment = from_tree(tree, dict.fromkeys(_dotted(tree), origin), path.parent)
    if not overrides:
        return experiment
    values = from_here(parse_overrides(overrides), path.parent)
    return experiment.with_values(values, COMMAND_LINE)


def refuse_no_experiment(given: object) -> None:
    """Raise ConfigError for what is no experiment: a config's path, or its tables."""
    if not isinstance(given, Experiment):
        whole = (
            "fedstill.Experiment(**it)"
            if isinstance(given, Mapping)
            else "fedstill.load('my.toml')"
        )
        todo = f"fedstill.load({str(given)!r})" if isinstance(given, (str, Path)) else whole
        raise ConfigError(
            f"an experiment is wanted, not {of_kind(given)}; give an Experiment, or {todo}"
        )


def _why_invalid(path: Path, data: bytes, error: str) -> str:
    """A message for a file that a parser of TOML refuses with an error."""
    text = data.decode("utf-8", "replace")
    set_twice = _set_twice(text)
    if set_twice:
        return f"{path}: {set_twice}"
    return f"{path} is not valid TOML: {error}{_repair(text, error)}"


def _set_twice(text: str) -> str:
    """What is wrong with a file that sets a table by a name and by its fields; empty if none is."""
    for table, (key, _) in {**NAMED, "data": ("name", "")}.items():
        is_named = re.search(rf"(?m)^[ \t]*{table}[ \t]*=", text)
        has_fields = re.search(rf"(?m)^[ \t]*\[{table}[\].]", text)
        if is_named and has_fields:
            return (
                f"{table} is set twice, as a name and as a table; put the name into [{table}], as "
                f"{key} = ..."
            )
    return ""


def _repair(text: str, error: str) -> str:
    """How to write the line that a parser's error names, where that is known, else which line it
    is.

    >>> _repair("method = fedavg", "Invalid value (at line 1, column 10)")
    '; write method = "fedavg"'
    """
    place = re.search(r"line (\d+)", error)
    if "; " in error:  # the parser of our own has advice already
        return ""
    if "codec" in error:
        return "; save it as UTF-8"
    if "at end of document" in error:
        return "; complete its last value"
    if "Unclosed array" in error:
        return "; close the list with ]"
    if not place:
        return "; make that value smaller"
    *above, line = text.split("\n")[: int(place[1])]
    line = line.strip()
    if "overwrite" in error or "twice" in error:
        return f"; {shown(line)} is a repetition; remove one of the two"
    for repaired in _repairs(line):
        try:
            parse_toml("\n".join([*above, repaired]).encode())
        except ValueError:
            continue
        return f"; write {repaired}"
    if "Expected newline" in error:
        return "; write one key on a line, and comments after #"
    return f"; correct the line {shown(line)}"


def _repairs(line: str) -> list[str]:
    """What a line of a file was perhaps meant to be."""
    key, equals, value = (part.strip() for part in line.partition("="))
    repairs = [f"[{line.strip('[] ')}]", line.replace(":", " =", 1)]
    if equals and value:
        text = value.strip("'\"“”‘’„")
        repairs += [
            f"{key} = {value.lower()}",  # true and false are small
            f"{key} = {value.replace(',', '.')}",  # a decimal comma
            f"{key} = 0{value}",  # .5
        ]
        if not value[0].isdigit():
            repairs.append(f'{key} = "{text}"')
    return repairs


def from_tree(tree: Mapping[str, Any], origins: Mapping[str, str], base: Path | None) -> Experiment:
    """The experiment of a parsed config."""
    known = {key: value for key, value in tree.items() if key in KEYS}
    unknown = {key: value for key, value in tree.items() if key not in KEYS}
    return Experiment(**known, origins=origins, base=base, unknown=unknown)


def _is_living(table: str, value: Any) -> bool:
    """Whether a table is, or names, what was handed over in Python."""
    if isinstance(value, Mapping):
        value = value.get(NAMED[table][0])
    return callable(value) or isinstance(value, Method)


def _by_name(table: str, value: Any) -> dict[str, Any]:
    """A table in which what was handed over in Python stands by its name."""
    key = NAMED[table][0]
    if isinstance(value, Method):
        return {key: name_for(table, type(value)), **plain_value(as_table(value))}
    if isinstance(value, Mapping):
        return {**value, key: name_for(table, value[key])}
    return {key: name_for(table, value)}


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    head, _, rest = key.partition(".")
    if not rest:
        kept = (
            {k: v for k, v in tree[head].items() if k == "clients"}
            if isinstance(tree.get(head), Mapping)
            else {}
        )
        tree[head] = (
            {**kept, NAMED[head][0]: value} if head in NAMED and isinstance(value, str) else value
        )
        return
    inner = tree.get(head, {})
    if isinstance(inner, str) and head in (*NAMED, "data"):
        inner = {NAMED.get(head, ("name", ""))[0]: inner}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"override {key}: {head} is a value, not a table; write {head}=VALUE")
    tree[head] = dict(inner)
    if "." in rest:
        tree[head].setdefault(rest.partition(".")[0], {})
    _set(tree[head], rest, value)


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key
