"""How much of the library a round of FedNTD with the serial engine loads."""

from __future__ import annotations

import json
import subprocess
import sys

FILES = 33
LINES = 7_180
"""Ceilings, which may fall and not rise. The goal is 40 files and 6,500 lines."""

NEEDED = [
    "core.rounds",
    "losses",
    "models.contract",
    "engines.serial",
    "methods.fedavg",
    "methods.fedntd",
]

LOADED = """
import importlib, json, sys
from pathlib import Path
for name in sys.argv[1:]:
    importlib.import_module(f"fedstill.{name}")
print(json.dumps({
    name: len(Path(module.__file__).read_text(encoding="utf-8").splitlines())
    for name, module in list(sys.modules.items())
    if name.partition(".")[0] == "fedstill" and getattr(module, "__file__", None)
}))
"""
"""A program that imports modules of the library, and prints the lines of all that were loaded."""


def loaded(*modules: str) -> dict[str, int]:
    """The modules of the library that are loaded with some, with their lines."""
    command = [sys.executable, "-c", LOADED, *modules]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines: dict[str, int] = json.loads(output)
    return lines


def test_a_round_of_fedntd_loads_a_small_part_of_the_library() -> None:
    lines = loaded(*NEEDED)
    assert len(lines) <= FILES, sorted(lines)
    assert sum(lines.values()) <= LINES


def test_the_core_imports_no_pydantic() -> None:
    program = (
        "import importlib, pkgutil, sys, fedstill.core as core\n"
        "for info in pkgutil.iter_modules(core.__path__):\n"
        "    importlib.import_module(f'fedstill.core.{info.name}')\n"
        "print('pydantic' in sys.modules)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert output.strip() == "False"


def test_the_core_loads_nothing_but_itself_and_losses() -> None:
    core = ["core.rounds", "core.label_counts", "core.topology", "core.aggregation"]
    known = ("fedstill.core", "fedstill.losses", "fedstill.version")
    others = [name for name in loaded(*core) if not name.startswith(known) and name != "fedstill"]
    assert others == []
