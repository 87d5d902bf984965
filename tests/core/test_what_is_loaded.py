"""How much of the library a round of FedNTD with the serial engine loads."""

from __future__ import annotations

import json
import subprocess
import sys

FILES = 34
LINES = 6_500
"""Ceilings, which may fall and not rise."""

FILES_OF_ROUND = 48
LINES_OF_ROUND = 9_994
"""The same for a round that is executed. It builds its network, so it also loads all models."""

NEEDED = [
    "core.rounds",
    "losses",
    "models.contract",
    "engines.serial",
    "methods.fedavg",
    "methods.fedntd",
]

IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"fedstill.{name}")
"""
"""A program that imports modules of the library."""

ROUND = """
import torch
from fedstill.core.records import Examples, Plan, View
from fedstill.core.rounds import RunContext, Schedule, run_round
from fedstill.core.stream import Stream
from fedstill.core.topology import Parallel
from fedstill.data.inputs import Inputs
from fedstill.engines.serial import SerialEngine
from fedstill.methods.fedntd import FedNTD
from fedstill.models import contract

SPEC = contract.spec_for("mlp", (4,), 3)

class ToyWorld:
    clients = 2
    classes = 3
    rounds = 1
    seed = 0
    plans = {"train": Plan(epochs=1, batch=4)}
    stream = Stream()

    def initial(self, client):
        return contract.initial(SPEC, 0)

class ToySites:
    inputs = Inputs()

    def view(self, client, stage):
        labels = torch.arange(10) % 3
        values = torch.randn(10, 4, generator=torch.Generator().manual_seed(client))
        return View(
            client=client,
            model=SPEC,
            data=Examples(values, labels),
            counts=torch.bincount(labels),
            public=None,
            validation=None,
            test=None,
            passes=None,
        )

world = ToyWorld()
method = FedNTD()
schedule = Schedule(method, Parallel())
context = RunContext(schedule, world, SerialEngine(world, ToySites()))
start = method.initial_state(world)
end = run_round(start, schedule(1, world), context)
assert end.round == 2
assert not any(torch.equal(start.params[name], end.params[name]) for name in start.params)
"""
"""A program that runs a round of FedNTD with two clients."""

COUNTS = """
import json, sys
from pathlib import Path
print(json.dumps({
    name: len(Path(module.__file__).read_text(encoding="utf-8").splitlines())
    for name, module in list(sys.modules.items())
    if name.partition(".")[0] == "fedstill" and getattr(module, "__file__", None)
}))
"""
"""A program that prints the lines of all modules of the library that are loaded."""


def loaded(program: str, *arguments: str) -> dict[str, int]:
    """The modules of the library that a program loads, with their lines."""
    command = [sys.executable, "-c", program + COUNTS, *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines: dict[str, int] = json.loads(output)
    return lines


def test_fedntd_imports_a_small_part_of_the_library() -> None:
    lines = loaded(IMPORTS, *NEEDED)
    assert len(lines) <= FILES, sorted(lines)
    assert sum(lines.values()) <= LINES


def test_a_round_of_fedntd_loads_a_small_part_of_the_library() -> None:
    lines = loaded(ROUND)
    assert len(lines) <= FILES_OF_ROUND, sorted(lines)
    assert sum(lines.values()) <= LINES_OF_ROUND
    assert "fedstill.core.extensions" not in lines
    assert "fedstill.losses.several_teachers" not in lines


def test_a_lookup_imports_only_the_module_of_a_methods_name() -> None:
    program = "from fedstill.core.registry import lookup\nlookup('method', 'fedntd')\n"
    methods = [name for name in loaded(program) if name.startswith("fedstill.methods.")]
    assert set(methods) <= {"fedstill.methods.fedntd", "fedstill.methods.fedavg"}


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
    allowed = ("fedstill.core", "fedstill.losses", "fedstill.version")
    names = loaded(IMPORTS, *core)
    outside = [name for name in names if not name.startswith(allowed) and name != "fedstill"]
    assert outside == []
