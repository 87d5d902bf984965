"""An experiment as the user wrote it: a config file, overrides, and the origin of each value."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import itertools
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor, nn

from fedstill import manifest
from fedstill.config.named_tables import NAME_KEYS
from fedstill.config.overrides import (
    COMMAND_LINE,
    Origin,
    Origins,
    check_set_once,
    invalid_file,
    is_name,
    leaf_keys,
    parse_overrides,
    with_other_name,
    with_working_directory_paths,
    without_absent,
    without_inner,
)
from fedstill.config.tables import TopKeys
from fedstill.config.validation import NOT_A_NAME, NOT_A_TABLE, WrongConfig, wrong_value
from fedstill.core import registry
from fedstill.core.errors import USER, ConfigError
from fedstill.core.fields import as_table, kind_text, plain_value, value_text
from fedstill.core.files import digest, named_path, parse_toml, read_file
from fedstill.core.method import Method
from fedstill.core.user_modules import is_library_module

Values = Mapping[str, Any]
"""The values of a table, by key."""

Class = TypeVar("Class", bound=type)


def _with_package_fields(experiment: Class) -> Class:
    """Add a field for each table that an outer package has in a config.

    The manifest lists them, so that ``Experiment`` need not know the packages. It runs below
    ``@dataclass``, which makes arguments of the fields.
    """
    for part in manifest.config_tables():
        experiment.__annotations__[part.name] = "Values"
        setattr(experiment, part.name, field(default_factory=dict))
    return experiment


@dataclass(frozen=True)
@_with_package_fields
class Experiment(TopKeys):
    """The config of a run, with the values that differ from the defaults.

    The keys are those of a config file; ``method = "fedntd"`` stands for
    ``method = {"name": "fedntd"}``. ``method``, ``model`` and ``partition``, and the names in these
    tables, can also be Python objects: a class, a method with its fields, a network, a function.
    NumPy's numbers and pathlib's paths become plain values. Values are checked when the run starts.

    ``origins``: where the values came from, by dotted key. ``base``: the folder that paths are
    relative to; None for the working directory. ``unknown``: keys that no config has; they are
    reported together with everything else that is wrong when the run starts.
    """

    data: str | Values = field(default_factory=dict)
    model: str | Values | Callable[..., nn.Module] = field(default_factory=dict)
    method: str | Values | Method | type[Method] = field(default_factory=dict)
    partition: str | Values | Callable[..., Any] = field(default_factory=dict)
    topology: str | Values = field(default_factory=dict)
    plan: Values = field(default_factory=dict)
    clients: Values = field(default_factory=dict)
    flower: Values = field(default_factory=dict)
    stream: str | Values = field(default_factory=dict)
    stop: Values = field(default_factory=dict)
    origins: Origins = field(default_factory=dict, compare=False)
    base: Path | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)

    if TYPE_CHECKING:
        # _with_package_fields adds these fields. Editors and type checkers read them here.
        privacy: Values = field(default_factory=dict)
        query: Values = field(default_factory=dict)
        unlearning: Values = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in KEYS:
            object.__setattr__(self, key, plain_value(getattr(self, key)))

    def table(self, name: str) -> dict[str, Any]:
        """A table as a mapping. A name alone becomes {key: name}; a Python object is replaced by
        its name. Raises ConfigError for a value that is not a table.
        """
        value = _with_object_name(name, getattr(self, name))
        value = _with_name_as_table(name, value)
        if not isinstance(value, Mapping):
            raise _not_a_table(name, value)
        return dict(value)

    @property
    def tree(self) -> dict[str, Any]:
        """All keys and their values, as a config file has them."""
        return {**{key: getattr(self, key) for key in KEYS}, **self.unknown}

    def with_values(self, values: Mapping[str, Any], origin: str) -> Experiment:
        """The experiment with other values for some dotted keys, e.g. ``{"method.beta": 0.5}``.

        ``origin``: the name of their source, such as an option of a command. A value that names
        another object, such as ``{"method": "fedntd"}``, is set before all fields, and removes the
        fields of the former object as ``with_other_name`` says. A table replaces the whole former
        one, and is set before the values in it. Values that are removed have no origin any more.
        Another engine removes ``engine_reason``, which explains the former one. Raises ConfigError
        if the origin is an option, and another option has set the key.
        """
        source = Origin(origin)
        check_set_once(values, self.origins, source)
        tree = self.tree
        origins = dict(self.origins)
        for key in sorted(values, key=lambda key: (not is_name(key), key.count("."))):
            value = values[key]
            table = key.partition(".")[0]
            if not is_name(key) or not isinstance(value, str):
                _set(tree, key, value)
                origins = without_inner(origins, key)
            elif table == "data":
                # [data] is the exception: its other keys, such as sizes, are for any data set.
                _set(tree, "data.name", value)
            else:
                tree[table] = from_tree(tree, origins, self.base)._renamed(table, value)
                origins = without_absent(origins, table, _fields_in(tree[table]))
            origins |= dict.fromkeys(leaf_keys({key: value}), source)
        if "engine" in values and "engine_reason" not in values:
            tree["engine_reason"] = ""
            origins.pop("engine_reason", None)
        return from_tree(tree, origins, self.base)

    def _renamed(self, table: str, name: str) -> str | dict[str, Any]:
        """A table with another name, or with the same one again."""
        if not isinstance(getattr(self, table), (str, Mapping)):
            return name  # an object is replaced, with its fields
        return with_other_name(table, self.table(table), name, self.origins)


KEYS = tuple(f.name for f in fields(Experiment) if f.name not in ("origins", "base", "unknown"))
"""All keys outside tables, and the names of all tables."""


def load(file: Path | str | None, overrides: tuple[str, ...] = ()) -> Experiment:
    """Load the experiment in a TOML file, with overrides.

    ``file``: None for the defaults. Paths in it are relative to its folder. ``overrides``: texts
    ``key=value``; a value is TOML, or else a text, and may also name a file in the working
    directory. Raises ConfigError for a file that cannot be read or is not TOML, and for texts that
    are not overrides.
    """
    experiment = Experiment()
    if file is not None:
        experiment = _experiment_in(named_path(file))
    values = with_working_directory_paths(parse_overrides(overrides), experiment.base)
    return experiment.with_values(values, COMMAND_LINE)


def _experiment_in(path: Path) -> Experiment:
    """The experiment in a TOML file. Raises ConfigError if it cannot be read or is not TOML."""
    try:
        content = read_file(path)
    except OSError as error:
        remedy = "name a TOML file; its path is relative to the current folder"
        raise ConfigError(f"cannot read the config {path}: {error.strerror}; {remedy}") from error
    try:
        tree = parse_toml(content)
    except ValueError as error:
        raise invalid_file(path, content, str(error)) from error

    origin = Origin(path.name, content.decode("utf-8-sig", "replace"))
    return from_tree(tree, dict.fromkeys(_dotted_keys(tree), origin), path.parent)


def from_tree(tree: Mapping[str, Any], origins: Origins, base: Path | None) -> Experiment:
    """The experiment of a parsed config. ``base``: the folder that paths are relative to."""
    known = {key: value for key, value in tree.items() if key in KEYS}
    unknown = {key: value for key, value in tree.items() if key not in KEYS}
    return Experiment(**known, origins=origins, base=base, unknown=unknown)


def check_is_experiment(value: object) -> None:
    """Raise ConfigError for a value that is not an experiment, such as the path of a config."""
    if isinstance(value, Experiment):
        return
    advice = "fedstill.load('my.toml')"
    if isinstance(value, (str, Path)):
        advice = f"fedstill.load({str(value)!r})"
    if isinstance(value, Mapping):
        advice = "fedstill.Experiment(**it)"
    raise ConfigError(
        f"expected an Experiment, not {kind_text(value)}; pass an Experiment, or {advice}"
    )


def _with_name_as_table(name: str, value: Any) -> Any:
    """A table as a mapping. A name alone becomes {key: name}; other values are returned as they
    are.
    """
    if isinstance(value, str) and name in NAME_KEYS:
        return {NAME_KEYS[name]: value}
    return value


def _not_a_table(name: str, value: Any) -> WrongConfig:
    """The error for a value in the place of a table."""
    reason = f"= {value_text(value)} must be a table, [{name}]"
    if name not in NAME_KEYS:
        return wrong_value(name, reason, f"write its keys below [{name}]", code=NOT_A_TABLE)
    text = "NAME"
    if isinstance(value, (int, float)):
        text = str(value)
    hint = f'a name is a text: write {name} = "{text}"'
    return wrong_value(name, reason, hint, code=NOT_A_NAME)


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key in a tree. The tables above it are made, or copied."""
    table_names = key.split(".")
    last_part = table_names.pop()
    table = tree
    for depth, name in enumerate(table_names):
        inner = table.get(name, {})
        if depth == 0:
            inner = _with_name_as_table(name, inner)
        if not isinstance(inner, Mapping):
            above = ".".join(table_names[: depth + 1])
            raise ConfigError(
                f"override {key}: {above} is a value, not a table; write {above}=VALUE"
            )
        table[name] = dict(inner)
        table = table[name]
    table[last_part] = value


def _fields_in(table: str | Mapping[str, Any]) -> Collection[str]:
    """The fields in a table, which has none if it is a name alone."""
    if isinstance(table, str):
        return ()
    return table.keys()


def _dotted_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a parsed file. An empty table is a key: it was written, too."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted_keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key


# Objects that Python hands over to an experiment: classes, functions and networks.
#
# A config names an object that another process can import by its file or its import path. All other
# objects, such as a class of a notebook, a lambda or a network, are *live*: they get a name
# ``python:NAME``, which is bound to them in this process only.


OBJECT_TABLES = ("method", "model", "partition")
"""The tables that also take the object itself: a class, a function, or an object that can be
called.
"""

_lock = threading.Lock()
"""Held while a name is chosen and bound: threads may make experiments at the same time."""


class Copies:
    """A constructor of copies of one network, with its weights. It takes neither the shape of the
    inputs nor the number of classes, which the network fixes.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.__doc__ = (
            f"A {type(network).__name__} that was handed over from Python, with its weights."
        )

    def __call__(self) -> nn.Module:
        """A new copy."""
        return copy.deepcopy(self.network)


def _with_object_name(table: str, value: Any) -> Any:
    """A table in which an object stands by its name. A method's fields become the table's; values
    without an object are returned as they are.
    """
    if table not in OBJECT_TABLES:
        return value
    key = NAME_KEYS[table]
    handed_over = value
    if isinstance(value, Mapping):
        handed_over = value.get(key)
    if not callable(handed_over) and not isinstance(handed_over, Method):
        return value

    if isinstance(value, Method):
        return {key: name_for(table, type(value)), **plain_value(as_table(value))}
    if isinstance(value, Mapping):
        return {**value, key: name_for(table, handed_over)}
    return {key: name_for(table, value)}


def name_for(kind: str, user_object: Any) -> str:
    """The name of an object in a config. A live object is bound to its name.

    Raises ConfigError for an object that cannot be called.
    """
    original = _unwrapped(user_object)
    with _lock:
        importable = _importable_name(kind, original)
        if importable:
            return importable
        name = _live_name(kind, original)
        if registry.bound(kind, name) is None:
            _bind(kind, name, original)
        return name


def bind(kind: str, name: str, user_object: Any) -> None:
    """Bind an object to the live name in a run's config. An equal object that is bound to this name
    stays so. Raises ConfigError if an object with other code or weights is bound to it.
    """
    original = _unwrapped(user_object)
    with _lock:
        present = _unwrapped(registry.bound(kind, name))
        if present is None:
            _bind(kind, name, original)
        elif present is not original and _digest(present) != _digest(original):
            raise ConfigError(
                f"{kind} {name!r} has other code or weights in this process; resume the run in a "
                "new process"
            )


def fingerprint(kind: str, name: str) -> str:
    """The SHA-256 of a live object: of its source, of the arguments of a partial function, and of
    a network's weights. "unknown" for an object without any of these.
    """
    return _digest(_unwrapped(registry.bound(kind, name)))


def _digest(user_object: Any) -> str:
    """The SHA-256 of an object, as in ``fingerprint``."""
    parts = []
    while isinstance(user_object, functools.partial):
        parts += _argument_parts(user_object)
        user_object = user_object.func
    if isinstance(user_object, nn.Module):
        parts += _weight_digests(user_object)
    try:
        parts.append(_source(_source_owner(user_object)))
    except (OSError, TypeError):
        # Code that was typed at a prompt has no source.
        if not parts:
            return "unknown"
    return digest("\n".join(parts).encode())


def _argument_parts(function: functools.partial[Any]) -> list[str]:
    """The arguments of a partial function, and the SHA-256 of functions, arrays and weights, of
    which ``repr`` omits most.
    """
    keywords = sorted(function.keywords.items())
    # The address of an object in memory differs in another process.
    parts = [re.sub(r" at 0x[0-9A-Fa-f]+", "", repr((function.args, keywords)))]
    for argument in [*function.args, *dict(keywords).values()]:
        if inspect.isroutine(argument):
            parts.append(_digest(argument))
        if isinstance(argument, nn.Module):
            parts += _weight_digests(argument)
        if isinstance(argument, Tensor):
            argument = argument.detach().cpu().numpy()
        if isinstance(argument, np.ndarray):
            parts.append(digest(argument.tobytes()))
    return parts


def _weight_digests(network: nn.Module) -> list[str]:
    """The name and the SHA-256 of each entry of a network, sorted by name."""
    entries = sorted(network.state_dict().items())
    return [
        f"{name} {digest(entry.detach().cpu().contiguous().numpy().tobytes())}"
        for name, entry in entries
    ]


def _unwrapped(user_object: Any) -> Any:
    """The object that the user handed over: a network, where ``user_object`` makes copies of it."""
    if isinstance(user_object, Copies):
        return user_object.network
    return user_object


def _bind(kind: str, name: str, user_object: Any) -> None:
    """Register an object under a live name. A network is registered by a constructor of copies."""
    if not callable(user_object):
        raise ConfigError(f"{kind} = {user_object!r:.60} is not a name, class or function")
    target = user_object
    if isinstance(user_object, nn.Module):
        target = Copies(user_object)
    registry.enter(registry.Entry(kind, name, target))


def _importable_name(kind: str, user_object: Any) -> str:
    """The name by which any process can import a class or function: a registered name, a file or
    an import path. Empty if there is none.
    """
    qualified_name = getattr(user_object, "__qualname__", "")
    module_name = getattr(user_object, "__module__", "")
    module = sys.modules.get(module_name)
    if module is None or getattr(module, qualified_name, None) is not user_object:
        return ""
    if is_library_module(module_name):
        return registry.registered_as(kind, user_object)
    if module_name.startswith(USER):
        return f"{module.__file__}:{qualified_name}"
    if module_name == "__main__" or not getattr(module, "__spec__", None):
        return ""
    return f"{module_name}:{qualified_name}"


def _live_name(kind: str, user_object: Any) -> str:
    """The live name that is bound to an object, or else the first one that is free:
    ``python:Net``, ``python:Net-2``, …
    """
    first = f"{registry.LIVE}{_display_name(user_object)}"
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(name for name in names if _can_stand_for(kind, name, user_object))


def _can_stand_for(kind: str, name: str, user_object: Any) -> bool:
    """Whether a live name is free, or is bound to this object."""
    target = registry.bound(kind, name)
    return target is None or _unwrapped(target) is user_object


def _display_name(user_object: Any) -> str:
    """The name of a class or function, or of an object's class."""
    while isinstance(user_object, functools.partial):
        user_object = user_object.func
    return str(getattr(user_object, "__name__", type(user_object).__name__)).strip("<>")


def _source(definition: Any) -> str:
    """The source of a class or function. Raises OSError or TypeError if there is none."""
    try:
        return inspect.getsource(definition)
    except (OSError, TypeError):
        if not inspect.isclass(definition):
            raise
    return _source_in_notebook(definition)


def _source_in_notebook(definition: type) -> str:
    """The source of a class in the cell of a notebook, where ``inspect`` only finds functions.

    Raises OSError for a class without functions.
    """
    for function in filter(inspect.isfunction, vars(definition).values()):
        with contextlib.suppress(OSError):  # @dataclass adds functions that have no source
            lines, _ = inspect.findsource(function)
            cell = "".join(lines)
            for node in ast.walk(ast.parse(cell)):
                if isinstance(node, ast.ClassDef) and node.name == definition.__name__:
                    return str(ast.get_source_segment(cell, node))
    raise OSError(f"the source of {definition.__name__} was not found")


def _source_owner(user_object: Any) -> Any:
    """The class or function in whose source an object is defined."""
    if inspect.isclass(user_object) or inspect.isroutine(user_object):
        return user_object
    return type(user_object)
