"""The text of a config file: the line that sets a key, and what to write where it is not TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstill.config.named_tables import NAME_KEYS
from fedstill.core.errors import ConfigError
from fedstill.core.fields import shown
from fedstill.core.files import parse_toml

# The line of a key.


def line_of(key: str, text: str) -> int:
    """The line on which a TOML text sets a dotted key, from 1; 0 if it does not.

    >>> line_of("plan.lr", "seed = 1\\n[plan]\\nepochs = 5\\nlr = 0.1\\n")
    4
    """
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
        return f"{shown(line)} is a repetition; remove one of the two"
    for repaired in _repairs(line):
        if _is_toml([*lines_above, repaired]):
            return f"write {repaired}"
    if "Expected newline" in reason:
        return "write one key on a line, and comments after #"
    return f"correct the line {shown(line)}"


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
