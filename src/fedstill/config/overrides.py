"""Where the values of a config come from (a line of its file, an option), and values that override
those of the file: ``key=value`` for one run, ``key=value,value`` for a grid of runs.

Keys are dotted. No value is dropped silently: a key that two options set is an error.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstill.config.named_tables import NAME_KEYS, NAMED
from fedstill.config.tables import NO_STREAM, StreamTable
from fedstill.config.validation import keys_of, parsed_value, split_at_commas
from fedstill.core.errors import ConfigError
from fedstill.core.fields import value_text
from fedstill.core.files import flat, named_path, parse_toml
from fedstill.core.user_modules import ParsedName, split_name

# Origins.


COMMAND_LINE = "command line"
"""The name of the origin of values that ``-s`` sets."""


@dataclass(frozen=True)
class Origin:
    """The source of a value. The values of the config's file have a file; all other values override
    them.
    """

    name: str
    """The name of a file, ``COMMAND_LINE``, an option such as ``--seeds``, or a name that a caller
    in Python chose.
    """
    file_text: str | None = field(default=None, repr=False)
    """The text of a file, in which the line of a key is found; None for all other origins."""

    @property
    def is_file(self) -> bool:
        """Whether the value is in the config's file."""
        return self.file_text is not None

    @property
    def is_command_line(self) -> bool:
        """Whether the value was typed: behind ``-s``, or behind another option of a command."""
        return self.name == COMMAND_LINE or self.is_option

    @property
    def is_option(self) -> bool:
        """Whether the value was typed behind another option than ``-s``."""
        return not self.is_file and self.name.startswith("--")

    def __str__(self) -> str:
        if self.is_file:
            return f"file {self.name}"
        return self.name


Origins = Mapping[str, Origin]
"""The origin of each value, by dotted key. Defaults have none, nor have fields that Python sets."""


def overriding(origins: Origins) -> set[str]:
    """The dotted keys whose values override those of the config's file."""
    return {key for key, origin in origins.items() if not origin.is_file}


def place_of(key: str, origins: Origins) -> str:
    """The file and line, or the option, that set a dotted key; empty for defaults and Python.

    The place of a table is that of its first key.

    >>> file = Origin("my.toml", "seed = 1\\n[plan]\\nlr = 0.1\\n")
    >>> place_of("plan.lr", {"plan.lr": file}), place_of("seed", {"seed": Origin("--seed")})
    ('my.toml, line 3', '--seed')
    """
    key_with_origin = _key_with_origin(key, origins)
    if not key_with_origin:
        return ""
    origin = origins[key_with_origin]
    if origin.file_text is None:
        return origin.name
    # Both keys are in this file. The line of the key itself is the more exact one.
    line = line_of(key, origin.file_text) or line_of(key_with_origin, origin.file_text)
    if not line:
        return origin.name
    return f"{origin.name}, line {line}"


def _key_with_origin(key: str, origins: Origins) -> str:
    """The key of ``origins`` under which a value was set; empty if none was.

    >>> _key_with_origin("plan.train.lr", {"plan.lr": Origin("my.toml")})
    'plan.lr'
    """
    candidates = _possible_keys(without_positions(key), origins)
    return next((candidate for candidate in candidates if candidate in origins), "")


def _possible_keys(key: str, origins: Origins) -> Iterator[str]:
    """The dotted keys that can have set the value of a key, the most exact one first."""
    yield key
    parts = key.split(".")
    if parts[0] == "plan":
        yield f"plan.{parts[-1]}"  # plan.lr sets the rate of every stage
    yield from (inner for inner in origins if inner.startswith(f"{key}."))
    for count in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:count])  # a table, or what stands for it: method = "fedntd"


def origin_text(key: str, origins: Origins) -> str:
    """The origin of the value of a dotted key of a run's settings: ``default``, or what set it.

    >>> origin_text("plan.train.lr", {"plan.lr": Origin(COMMAND_LINE)}), origin_text("seed", {})
    ('command line', 'default')
    """
    table, _, _ = key.partition(".")
    candidates = [key]
    if _with_name_key(table) == key:
        candidates.append(table)  # method = "fedntd" sets method.name
    if table == "plan":
        _, _, field = key.rpartition(".")
        candidates.append(f"plan.{field}")  # plan.lr sets plan.STAGE.lr of every stage
    for candidate in candidates:
        if candidate in origins:
            return str(origins[candidate])
    return "default"


def without_inner(origins: Origins, key: str) -> dict[str, Origin]:
    """The origins without those of keys in a table, which another value replaces.

    >>> list(without_inner({"plan.lr": Origin("a"), "plan.train.lr": Origin("a")}, "plan.train"))
    ['plan.lr']
    """
    return {inner: origin for inner, origin in origins.items() if not inner.startswith(f"{key}.")}


def without_absent(origins: Origins, table: str, fields: Collection[str]) -> dict[str, Origin]:
    """The origins without those of fields that a table no longer has. ``fields``: those that it
    has.

    >>> origins = {"method.name": Origin("a"), "method.mu": Origin("a"), "seed": Origin("a")}
    >>> list(without_absent(origins, "method", ["name"]))
    ['method.name', 'seed']
    """
    remaining = {}
    for key, origin in origins.items():
        first, _, field = key.partition(".")
        if first != table or field.partition(".")[0] in fields:
            remaining[key] = origin
    return remaining


# Texts of a command line.


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The values of ``key=value`` texts, by key. A value is TOML, or else a text.

    Raises ConfigError for a text without a key or "=", and for a key that is set twice.

    >>> parse_overrides(("method.beta=0.5", "method=fedntd"))
    {'method.beta': 0.5, 'method': 'fedntd'}
    """
    values: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not key or not equals:
            raise ConfigError(
                f"override {text!r} is not of the form key=value, e.g. -s method.beta=0.5"
            )
        if key in values:
            raise ConfigError(f"{key} is set twice by -s; leave one of the two out")
        values[key] = parsed_value(value)
    return values


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The lists of values of ``key=value,value`` texts, by key.

    Commas in brackets, braces and quotes belong to a value. Raises ConfigError for a text without a
    key, for a bracket without its counterpart, and for a key that two texts have.

    >>> parse_grid(("method.beta=0.1,1", "partition=iid,sharding"))
    {'method.beta': [0.1, 1], 'partition': ['iid', 'sharding']}
    >>> parse_grid(("model.hidden=[8],[8, 8]",))
    {'model.hidden': [[8], [8, 8]]}
    >>> parse_grid(("data.columns=[age,ward],[age]",))
    {'data.columns': ['[age,ward]', '[age]']}
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        key = key.strip()
        if not key:
            raise ConfigError(
                f"--grid {text!r} is not of the form key=value,value, e.g. method.beta=0.1,1"
            )
        if key in grid:
            raise ConfigError(
                f"--grid names {key} twice; write its values with commas: --grid {key}=A,B"
            )
        grid[key] = _parsed_list(values)
    return grid


def _parsed_list(text: str) -> list[Any]:
    """Values with commas between them: the items of a list of TOML, or else texts. Raises
    ConfigError for a bracket without its counterpart.
    """
    items = parsed_value(f"[{text}]")
    if isinstance(items, list):
        return items
    return [parsed_value(item) for item in split_at_commas(text)]


PATHS = ("start_from", "data.folder", "data.tokenizer", "flower.federation")
"""Keys whose texts are always paths."""

LONGEST_PATH = 1000
"""Texts of more characters are not paths."""


def with_working_directory_paths(value: Any, base: Path | None, key: str = "") -> Any:
    """Typed values in which files of the working directory have absolute paths.

    Paths are relative to ``base``, the folder of the config, except those of files that only the
    working directory has. A text is taken for a path if it has a slash or a dot, or if its dotted
    key is one of ``PATHS``; ``:Name`` may follow the path. Lists and tables are searched, too.
    ``key``: the dotted key of the value, empty for values by key.
    """
    if isinstance(value, Mapping):
        return {
            name: with_working_directory_paths(item, base, f"{key}.{name}".removeprefix("."))
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(with_working_directory_paths(item, base) for item in value)
    if base is None or not isinstance(value, str):
        return value

    parsed = split_name(value)
    is_path = key in PATHS
    if is_path:
        parsed = ParsedName(value)
    looks_like_path = is_path or "/" in parsed.path or "." in parsed.path
    if not looks_like_path or len(parsed.path) > LONGEST_PATH:
        return value
    try:
        file = named_path(parsed.path)
        is_in_base = (base / file).exists()
        is_in_working_directory = file.exists()
    except (ConfigError, OSError, ValueError):  # no file can have this name
        return value
    if is_in_base or not is_in_working_directory:
        return value
    return type(value)(f"{file.resolve()}{parsed.suffix}")


# Dotted keys.


def is_name(key: str) -> bool:
    """Whether a key holds the name of a table's registered object.

    >>> is_name("method"), is_name("method.name"), is_name("method.beta"), is_name("plan")
    (True, True, False, False)
    """
    table, _, field = key.partition(".")
    return table in NAME_KEYS and field in ("", NAME_KEYS[table])


def leaf_keys(values: Mapping[str, Any]) -> list[str]:
    """The dotted keys that values set. A table stands for the keys in it, and a name for its key.

    >>> leaf_keys({"method": "fedntd", "plan": {"lr": 0.1}, "seed": 1})
    ['method.name', 'plan.lr', 'seed']
    """
    return [_with_name_key(key) for key in flat(values)]


def _with_name_key(key: str) -> str:
    """The dotted key that a key alone stands for: ``method.name`` for ``method``."""
    if key in NAME_KEYS:
        return f"{key}.{NAME_KEYS[key]}"
    return key


# Values that are set more than once.


def overriding_fields(table: str, origins: Origins) -> set[str]:
    """The fields of a table whose values override those of the config's file.

    >>> overriding_fields("method", {"method.beta": Origin("command line"), "seed": Origin("test")})
    {'beta'}
    """
    key_parts = [key.split(".") for key in overriding(origins)]
    return {parts[1] for parts in key_parts if parts[0] == table and len(parts) > 1}


def check_set_once(values: Mapping[str, Any], origins: Origins, origin: Origin) -> None:
    """Raise ConfigError if an option of a command sets a value that another option has set.

    A table that is set replaces all of its keys. In Python, the last value counts, and nothing is
    refused.
    """
    leaves = leaf_keys(values)
    repeated = {key for number, key in enumerate(leaves) if key in leaves[:number]}
    if repeated:
        raise _set_twice(min(repeated), origin, origin)
    if not origin.is_option:
        return
    tables = [key for key, value in values.items() if isinstance(value, Mapping)]
    for key, first_origin in origins.items():
        is_replaced = key in leaves or any(key.startswith(f"{table}.") for table in tables)
        if is_replaced and first_origin.is_command_line:
            raise _set_twice(key, first_origin, origin)


def _set_twice(key: str, first: Origin, second: Origin) -> ConfigError:
    return ConfigError(
        f"{key} is set twice, by {_option(first)} and by {_option(second)}; leave one of them out"
    )


def _option(origin: Origin) -> str:
    """An origin as the user typed it."""
    if origin.name == COMMAND_LINE:
        return "-s"
    return origin.name


COMMON_FIELDS: Mapping[str, Sequence[str]] = {
    "partition": ["clients"],
    "stream": keys_of(StreamTable),
    "topology": ["clients"],
}
"""The fields of a table that do not belong to the object that it names."""


def with_other_name(
    table: str, values: Mapping[str, Any], name: str, origins: Origins
) -> dict[str, Any]:
    """The values of a table in which another registered object, or the same one, is named.

    Fields belong to the object that the table names. If it is named again, all values stay:

    >>> with_other_name("method", {"name": "fedntd", "beta": 0.5}, "fedntd", {})
    {'name': 'fedntd', 'beta': 0.5}

    Another object has other fields, so those of the config's file are left out. Values that
    override the file stay, since they were set for the new object. So do ``COMMON_FIELDS``:

    >>> with_other_name("method", {"name": "fedntd", "beta": 0.5}, "fedavg", {})
    {'name': 'fedavg'}
    >>> typed = {"method.mu": Origin("command line")}
    >>> with_other_name("method", {"name": "fedntd", "beta": 0.5, "mu": 1}, "fedprox", typed)
    {'mu': 1, 'name': 'fedprox'}
    >>> with_other_name("topology", {"kind": "ring", "clients": 9}, "parallel", {})
    {'clients': 9, 'kind': 'parallel'}

    A table without a name does not say what its fields belong to, so all of them stay. Only a
    [partition] without a name is that of the default partition:

    >>> with_other_name("method", {"beta": 0.5}, "fedntd", {})
    {'beta': 0.5, 'name': 'fedntd'}
    >>> with_other_name("partition", {"alpha": 0.5}, "iid", {})
    {'kind': 'iid'}
    """
    key = NAME_KEYS[table]
    name_in_table = values.get(key, name)
    if table == "partition":
        name_in_table = values.get(key, NAMED["partition"].default)
    if name_in_table == name:
        return {**values, key: name}

    kept_fields = overriding_fields(table, origins)
    if name != NO_STREAM:
        kept_fields |= set(COMMON_FIELDS.get(table, ()))
    fields = {field: value for field, value in values.items() if field in kept_fields}
    return {**fields, key: name}


# Lines of a TOML file.


def line_of(key: str, text: str) -> int:
    """The line on which a TOML text sets a dotted key, from 1; 0 if it does not.

    >>> line_of("plan.lr", "seed = 1\\n[plan]\\nepochs = 5\\nlr = 0.1\\n")
    4
    """
    # The text is parsed from its start for each candidate. That is slow, but only errors do it.
    lines = text.split("\n")
    key = without_positions(key)
    last_part = key.rpartition(".")[2]
    for number, line in enumerate(lines, 1):
        if last_part in line and _has(_tree_up_to(lines, number), key):
            return number
    return 0


def _tree_up_to(lines: Sequence[str], number: int) -> Mapping[str, Any]:
    """The tree of the first ``number`` lines. Further lines are read only where the value of the
    last one ends below it.
    """
    for end in range(number, len(lines) + 1):
        try:
            return tomllib.loads("\n".join(lines[:end]))
        except ValueError:
            continue
    return {}


def _has(tree: Any, key: str) -> bool:
    """Whether a tree has a value under a dotted key."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def without_positions(key: str) -> str:
    """A key without the positions of items: an item has the place of its list.

    >>> without_positions("clients.models[1].hidden")
    'clients.models.hidden'
    """
    return re.sub(r"\[\d+\]", "", key)


# Texts that are not TOML. The parser says where it stopped. The advice is found by trial: of a few
# ways to repair that line, the first one with which the text is TOML up to there is shown.


def invalid_file(path: Path, content: bytes, reason: str) -> ConfigError:
    """The error for a config file that is not TOML. ``reason``: the parser's message."""
    text = content.decode("utf-8", "replace")
    repetition = _table_set_twice(text)
    if repetition:
        return ConfigError(f"{path}: {repetition}")
    advice = _advice(text, reason)
    if advice:
        advice = f"; {advice}"
    return ConfigError(f"{path} is not valid TOML: {reason}{advice}")


def _table_set_twice(text: str) -> str:
    """The message about a table that is set by a name and by its fields; empty if none is.

    >>> _table_set_twice('method = "fedntd"\\n[method]\\nbeta = 0.5')
    'method is set twice, as a name and as a table; put the name into [method], as name = ...'
    """
    for table, key in NAME_KEYS.items():
        is_named = re.search(rf"(?m)^[ \t]*{table}[ \t]*=", text)
        has_fields = re.search(rf"(?m)^[ \t]*\[{table}[\].]", text)
        if is_named and has_fields:
            return (
                f"{table} is set twice, as a name and as a table; put the name into [{table}], as "
                f"{key} = ..."
            )
    return ""


def _advice(text: str, reason: str) -> str:
    """The advice about a text that the parser refuses for a reason; empty if the reason has it.

    >>> _advice("method = fedavg", "Invalid value (at line 1, column 10)")
    'write method = "fedavg"'
    """
    if "; " in reason:  # a message of fedstill's own has advice
        return ""
    if "codec" in reason:
        return "save it as UTF-8"
    if "at end of document" in reason:
        return "complete its last value"
    if "Unclosed array" in reason:
        return "close the list with ]"
    place = re.search(r"line (\d+)", reason)
    if place is None:
        # Only numbers that Python refuses to read have a message without a line.
        return "make that value smaller"
    *lines_above, line = text.split("\n")[: int(place[1])]
    return _advice_on_line(line.strip(), lines_above, reason)


def _advice_on_line(line: str, lines_above: list[str], reason: str) -> str:
    """The advice about the line at which the parser stopped."""
    if "overwrite" in reason or "twice" in reason:
        return f"{value_text(line)} is a repetition; remove one of the two"
    for repaired in _repairs(line):
        if _is_toml([*lines_above, repaired]):
            return f"write {repaired}"
    if "Expected newline" in reason:
        return "write one key on a line, and comments after #"
    return f"correct the line {value_text(line)}"


def _repairs(line: str) -> list[str]:
    """The lines that a line was perhaps meant to be, the likeliest first.

    >>> _repairs("rate = 0,1")[2:4]
    ['rate = 0,1', 'rate = 0.1']
    """
    key, equals, value = (part.strip() for part in line.partition("="))
    repairs = [f"[{line.strip('[] ')}]", line.replace(":", " =", 1)]
    if not equals or not value:
        return repairs
    repairs += [
        f"{key} = {value.lower()}",  # true and false have no capitals
        f"{key} = {value.replace(',', '.')}",  # a decimal comma
        f"{key} = 0{value}",  # .5
    ]
    if not value[0].isdigit():
        text = value.strip("'\"“”‘’„")
        repairs.append(f'{key} = "{text}"')
    return repairs


def _is_toml(lines: list[str]) -> bool:
    try:
        parse_toml("\n".join(lines).encode())
    except ValueError:
        return False
    return True
