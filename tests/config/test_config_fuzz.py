"""Damaged configs: each is either legal or refused by one line that names the key, and within a
second.
"""

from __future__ import annotations

import random
import re
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedstill.config.experiment import load
from fedstill.config.resolve import resolve
from fedstill.core.errors import ConfigError

VALID: dict[str, Any] = {
    "seed": 3,
    "rounds": 7,
    "threads": [1, 2],
    "measure": ["local"],
    "measure_every": 5,
    "data": {"name": "digits", "public": 50, "augment": ["flip"], "train_size": 100},
    "method": {"name": "fedntd", "beta": 0.5, "temperature": 2.0},
    "model": {"name": "mlp", "hidden": [16]},
    "partition": {"kind": "dirichlet", "alpha": 0.3, "min_size": 5},
    "topology": {"kind": "parallel", "clients": 12, "sampled": 4},
    "plan": {
        "epochs": 2,
        "lr": 0.05,
        "optimiser": "adam",
        "train": {"batch": 25, "shuffle": False},
    },
    "clients": {"quorum": 0.75, "norm_limit": 5.0, "models": ["mlp"]},
}
NUMBERS: list[Any] = [0, -1, 1, 3, 10**6 + 1, 10**12, 2**63, -(2**63), 0.0, -0.5, 1e-300, 1e308]
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]
TEXTS = ["", " ", "x", "digits", "fedavg", "nan", "0.5", "x" * 3000, "a\nb", "ü∞"]
PATHS = ["../../up", "~nobody-here", "C:\\x", "a/b/c"]
LISTS: list[Any] = [[], [[]], [1], [1, 2, 3], ["x"], [1, "x"], [0.5], [[1], [2]], [{}]]
TABLES: list[Any] = [{}, {"x": 1}, {"x": {"y": {}}}]
VALUES = [*NUMBERS, *NOT_FINITE, True, False, *TEXTS, *PATHS, *LISTS, *TABLES]
"""Values that replace the value of a key."""
KEYS = [
    "",
    "x",
    "seed",
    "method",
    "name",
    "kind",
    "lr",
    "train",
    "clients",
    "privacy",
    "a.b",
    "a b",
    "ü",
    "x" * 500,
]
"""Keys that are added to a table."""
PIECES = [
    '"',
    "'",
    "[",
    "]",
    "=",
    "\n",
    "#",
    ".",
    "-",
    "9",
    "e",
    "nan",
    "true",
    "[x]\n",
    "\0",
    "ü",
    ", ",
    "{}",
]
"""Texts that are inserted into a file."""


@dataclass(frozen=True)
class DamagedConfig:
    """A config with one damage. A message about it must contain one of the ``names``."""

    tree: dict[str, Any]
    names: set[str]

    def is_named_in(self, message: str) -> bool:
        """Whether a message contains one of the names, escaped as in a Python string."""
        escaped_names = [repr(name)[1:-1] for name in self.names if name]
        return any(name in message for name in escaped_names)


def key_paths(tree: dict[str, Any], parents: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all keys, including those of tables."""
    paths: list[tuple[str, ...]] = []
    for key, value in tree.items():
        path = (*parents, key)
        paths.append(path)
        if isinstance(value, dict):
            paths += key_paths(value, path)
    return paths


def typo(word: str, draw: random.Random) -> str:
    """The word with a letter left out, inserted or replaced, or with two letters swapped."""
    position = draw.randrange(len(word))
    change = draw.randrange(4)
    letter = draw.choice("aeiouxyz_")

    start = word[:position]
    end = word[position + 1 :]
    match change:
        case 0:
            return start + end
        case 1:
            return start + letter + word[position:]
        case 2:
            return start + letter + end
        case _:
            pair = word[position : position + 2]
            return start + pair[::-1] + word[position + 2 :]


def damaged(draw: random.Random) -> DamagedConfig:
    """The valid config with a misspelt key, a drawn value, or an additional key."""
    tree = deepcopy(VALID)
    path = draw.choice(key_paths(tree))
    key = path[-1]
    table = tree
    for name in path[:-1]:
        table = table[name]

    names = {key}
    if key in ("name", "kind", "models"):
        names.add(path[0])
    match draw.randrange(3):
        case 0:
            misspelt_key = typo(key, draw) or "x"
            table[misspelt_key] = table.pop(key)
            names.add(misspelt_key)
        case 1:
            table[key] = draw.choice(VALUES)
        case _:
            additional_key = draw.choice(KEYS)
            table[additional_key] = draw.choice(VALUES)
            names.add(additional_key)
    return DamagedConfig(tree, names)


def with_swapped_lines(text: str, draw: random.Random) -> str:
    """The text with two lines swapped."""
    lines = text.split("\n")
    first = draw.randrange(len(lines))
    second = draw.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    return "\n".join(lines)


def mutated(text: str, draw: random.Random) -> str:
    """A valid file with one to three small damages to its text."""
    for _ in range(draw.randint(1, 3)):
        position = draw.randrange(len(text))
        piece = draw.choice(PIECES)
        start = text[:position]
        match draw.randrange(4):
            case 0:
                text = start + text[position + draw.randint(1, 6) :]
            case 1:
                text = start + piece + text[position:]
            case 2:
                text = start + piece + text[position + 1 :]
            case _:
                text = with_swapped_lines(text, draw)
    return text


def refusal(text: str, path: Path) -> str:
    """The message that refuses a config; empty if the config is legal.

    Fails if another error is raised, if the message has several lines, or after a second.
    """
    path.write_text(text)
    start = time.process_time()
    message = ""
    try:
        resolve(load(path))
    except ConfigError as error:
        message = str(error)

    assert time.process_time() - start < 1, text
    assert message.splitlines() in ([], [message]), message
    return message


@pytest.mark.slow
def test_damaged_values_and_keys_are_named(tmp_path: Path) -> None:
    """At most 1 % of the messages may leave out the damaged key."""
    draw = random.Random(31)
    refusals = 0
    nameless = []

    for _ in range(750):
        config = damaged(draw)
        message = refusal(tomli_w.dumps(config.tree), tmp_path / "c.toml")
        if message:
            refusals += 1
            if not config.is_named_in(message):
                nameless.append((config.names, message))

    assert refusals > 450, "most damages must be noticed"
    assert len(nameless) <= 0.01 * refusals, nameless


def names_a_key(message: str, text: str) -> bool:
    """Whether a message contains a word of the config that could be a key."""
    words = set(re.findall(r"[\w-]+", text))
    return any(re.search(rf"\b{re.escape(word)}\b", message) for word in words)


def test_damaged_text_is_refused_by_key_or_by_place(tmp_path: Path) -> None:
    """At most 1 % of the messages may contain neither a key nor a line and a column."""
    draw = random.Random(32)
    valid_text = tomli_w.dumps(VALID)
    place = re.compile(r"line \d+, column \d+|end of document")
    refusals = 0
    nameless = []

    for _ in range(250):
        text = mutated(valid_text, draw)
        message = refusal(text, tmp_path / "c.toml")
        if message:
            refusals += 1
            without_folder = message.removeprefix(str(tmp_path))
            if not (names_a_key(without_folder, text) or place.search(message)):
                nameless.append(message)

    assert refusals > 150
    assert len(nameless) <= 0.01 * refusals, nameless
