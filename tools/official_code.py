"""The table of docs/papers.md on the published code of papers, and its comparison with ours.

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
    """The line of an entry."""
    return f"| `{entry['method']}` | {executed_code(entry)} | {entry['says']} |"


def executed_code(entry: Mapping[str, Any]) -> str:
    """A link to the executed code, and its functions; a dash if no code could be executed."""
    if "norm" not in entry:
        return "-"
    repository = entry["repository"]
    commit = entry["commit"][:7]
    link = f"https://github.com/{repository}/blob/{commit}/{entry['file']}"
    functions = ", ".join(f"`{name}`" for name in entry["ran"].split(", "))
    return f"[{repository}]({link}), {functions}"


def table() -> str:
    """The table, in Markdown."""
    entries = tomllib.loads(NUMBERS.read_text(encoding="utf-8"))["number"]
    return "\n".join([*HEAD, *(row(entry) for entry in entries)])
