"""Damaged configs: each is refused by one line that names the key, or it is legal after all;
none takes long.
"""

from __future__ import annotations

import random
import re
import time
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
STRANGE: list[Any] = [
    *(0, -1, 1, 3, 10**6 + 1, 10**12, 2**63, -(2**63), 0.0, -0.5, 1e-300, 1e308),
    *(float("nan"), float("inf"), -float("inf"), True, False),
    *("", " ", "x", "digits", "fedavg", "nan", "0.5", "x" * 3000, "a\nb", "ü∞"),
    *("../../up", "~nobody-here", "C:\\x", "a/b/c"),
    *([], [[]], [1], [1, 2, 3], ["x"], [1, "x"], [0.5], [[1], [2]], [{}]),
    *({}, {"x": 1}, {"x": {"y": {}}}),
]
WORDS = [
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


def leaves(tree: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all keys, tables among them."""
    out: list[tuple[str, ...]] = []
    for key, value in tree.items():
        out.append((*above, key))
        if isinstance(value, dict):
            out += leaves(value, (*above, key))
    return out


def copied(tree: Any) -> Any:
    return {k: copied(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def typo(word: str, draw: random.Random) -> str:
    at = draw.randrange(len(word))
    change = draw.randrange(4)
    letter = draw.choice("aeiouxyz_")
    cut = {
        0: word[:at] + word[at + 1 :],
        1: word[:at] + letter + word[at:],
        2: word[:at] + letter + word[at + 1 :],
    }
    return cut.get(change, word[:at] + word[at : at + 2][::-1] + word[at + 2 :])


def damaged(draw: random.Random) -> tuple[dict[str, Any], set[str]]:
    """A config with one thing wrong, and the words of which the message must hold one."""
    tree = copied(VALID)
    path = draw.choice(leaves(tree))
    table, key = tree, path[-1]
    for name in path[:-1]:
        table = table[name]
    words = {key, *path[:1]} if key in ("name", "kind", "models") else {key}
    match draw.randrange(3):
        case 0:
            wrong = typo(key, draw) or "x"
            table[wrong] = table.pop(key)
            words.add(wrong)
        case 1:
            table[key] = draw.choice(STRANGE)
        case _:
            wrong = draw.choice(WORDS)
            table[wrong] = draw.choice(STRANGE)
            words.add(wrong)
    return tree, words


def mutated(text: str, draw: random.Random) -> str:
    """A valid file with one to three small damages to its text."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(text))
        piece = draw.choice(PIECES)
        match draw.randrange(4):
            case 0:
                text = text[:at] + text[at + draw.randint(1, 6) :]
            case 1:
                text = text[:at] + piece + text[at:]
            case 2:
                text = text[:at] + piece + text[at + 1 :]
            case _:
                lines = text.split("\n")
                one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
                lines[one], lines[other] = lines[other], lines[one]
                text = "\n".join(lines)
    return text


def outcome(text: str, path: Path) -> str:
    """What settling a file says: "" if it is legal. Anything but a ConfigError of one line fails
    the test.
    """
    path.write_text(text)
    began = time.process_time()
    try:
        resolve(load(path))
        said = ""
    except ConfigError as error:
        said = str(error)
    assert time.process_time() - began < 1, text
    assert said.splitlines() in ([], [said]), said
    return said


@pytest.mark.slow
def test_damaged_values_and_keys_are_named(tmp_path: Path) -> None:
    draw = random.Random(31)
    said, nameless = 0, []
    for _ in range(750):
        tree, words = damaged(draw)
        message = outcome(tomli_w.dumps(tree), tmp_path / "c.toml")
        said += bool(message)
        if message and not any(repr(w)[1:-1] in message for w in words if w):
            nameless.append((words, message))
    assert said > 450, "most damages must be noticed"
    assert len(nameless) <= 0.01 * said, nameless


def test_damaged_text_is_refused_by_key_or_by_place(tmp_path: Path) -> None:
    draw = random.Random(32)
    text = tomli_w.dumps(VALID)
    said, nameless = 0, []
    for _ in range(250):
        broken = mutated(text, draw)
        message = outcome(broken, tmp_path / "c.toml")
        said += bool(message)
        keys = set(re.findall(r"[\w-]+", broken)) - {""}
        by_key = any(
            re.search(rf"\b{re.escape(k)}\b", message.removeprefix(str(tmp_path))) for k in keys
        )
        if (
            message
            and not by_key
            and not re.search(r"line \d+, column \d+|end of document", message)
        ):
            nameless.append(message)
    assert said > 150
    assert len(nameless) <= 0.01 * said, nameless
