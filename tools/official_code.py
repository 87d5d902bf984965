"""The table of docs/papers.md on the code of methods' authors, from the numbers which that code
gave.

``tools.docs_check`` compares it with the page; ``tests/methods/test_official_numbers.py`` compares
the numbers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUMBERS = Path(__file__).parents[1] / "tests" / "methods" / "official_numbers.toml"
HEAD = ("| method | executed code | comparison with ours |", "|---|---|---|")


def row(entry: Mapping[str, Any]) -> str:
    """The line of the table about one entry; a dash where no code could be executed."""
    executed = "-"
    if "norm" in entry:
        link = (
            f"https://github.com/{entry['repository']}/blob/{entry['commit'][:7]}/{entry['file']}"
        )
        functions = ", ".join(f"`{name}`" for name in entry["ran"].split(", "))
        executed = f"[{entry['repository']}]({link}), {functions}"
    return f"| `{entry['method']}` | {executed} | {entry['says']} |"


def table() -> str:
    """The table, in Markdown."""
    entries = tomllib.loads(NUMBERS.read_text(encoding="utf-8"))["number"]
    return "\n".join([*HEAD, *(row(entry) for entry in entries)])
