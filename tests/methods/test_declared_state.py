"""What a method's docstring declares under ``State:`` and ``Memory:`` is what its runs keep, no
more and no less.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from all_methods import METHODS, four_clients_of

import toys
from fedstill.config.resolve import resolve
from fedstill.core import descriptions, registry
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.running.preparation import prepare
from loops import context_of, states_after

GROUPS = re.compile(r"([\w.]+(?:, [\w.]+)*) = (.*)", re.DOTALL)
"""Names of groups, and what they are."""

OVER_TASKS = {"stream": {"kind": "classes", "tasks": 3, "compose": "clients_first"}}
WITHOUT_QUERIES = {"rounds": 3, **OVER_TASKS, "query": {}}

FURTHER_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "fedadkd": [
        {"method": {"phi_timing": "exact"}},
        {"topology": {"kind": "sequential"}},
        {"method": {"phi_timing": "exact"}, "topology": {"kind": "sequential"}},
    ],
    "fedavg_once": [WITHOUT_QUERIES],
    "pfnm": [WITHOUT_QUERIES],
    "fednova": [{"method": {"ccvr": "full"}}],
    "fedlwf": [OVER_TASKS],
    "replay": [{"method": {"alpha": 0.5, "nearest_mean": True}, **OVER_TASKS}],
    "analytic": [OVER_TASKS],
    "fot": [OVER_TASKS],
    "glfc_local": [{"method": {"nearest_mean": True}, **OVER_TASKS}],
    "fedewc": [OVER_TASKS],
    "afl": [{"method": {"balanced": True}, **OVER_TASKS}],
    "cwc": [{"method": {"memory": "sliding"}}],
    "aver": [{"method": {"k": 8}}],
    "sfedkd": [{"method": {"k": 8}}],
    "dsfl": [{"method": {"subset": 10}}],
    "fedmd": [{"method": {"subset": 10}}],
    "hiper_fedkd": [{"method": {"subset": 10}}],
}
"""Settings in which a method keeps groups that it does not keep with its defaults."""

SHORT = {"epochs": 1, "batch": 50, "lr": 0.01}
"""What is kept does not depend on how long clients train."""

OF_CHAINS = {"answered"}
"""Kept by ``run_round``, for every method: how many clients of a chain have replied."""

MODULES = sorted({registry.lookup("method", name).target.__module__ for name in METHODS})


@dataclass
class Groups(NoRecorder):
    """The names of the groups that a run keeps after any stage."""

    engine: Any
    clients: int
    in_state: set[str] = field(default_factory=set)
    in_memory: set[str] = field(default_factory=set)

    def stage(self, result: StageResult) -> None:
        self.in_state.update(result.after.extra)
        for client in range(-1, self.clients):
            self.in_memory.update(self.engine.memory.load(client))


def run_with(name: str, changes: dict[str, Any]) -> Groups:
    """A toy run of a method with some other settings."""
    experiment = four_clients_of(name)
    values: dict[str, Any] = {"plan": SHORT}
    for key, value in changes.items():
        values[key] = value
        if isinstance(value, dict) and value:
            values[key] = {**experiment.table(key), **value}
    topology = values.get("topology", experiment.table("topology"))
    values["topology"] = {**topology, "clients": 4}
    ready = prepare(resolve(replace(experiment, **values)), toys.blobs())

    engine = ready.engine()
    groups = Groups(engine, ready.world.clients)
    groups.in_state.update(ready.settings.method.initial_state(ready.world).extra)
    states_after(context_of(ready, engine, groups), ready.world.rounds)
    engine.close()
    return groups


def without_numbers(names: set[str]) -> set[str]:
    """Names in which the number of a group that ``payload.many`` made is N."""
    return {re.sub(r"\.\d+$", ".N", name) for name in names}


def declared_groups(block: str) -> set[str]:
    """The names of the groups that a ``State:`` or ``Memory:`` block declares."""
    names: set[str] = set()
    for part in block.removesuffix(".").split("; "):
        declaration = GROUPS.fullmatch(part)
        if declaration:
            names.update(declaration[1].split(", "))
    return names


@pytest.mark.parametrize("module", MODULES)
def test_a_method_keeps_exactly_the_groups_that_its_docstring_declares(module: str) -> None:
    """In all settings of all methods of a file together."""
    in_state: set[str] = set()
    in_memory: set[str] = set()
    for name in METHODS:
        if registry.lookup("method", name).target.__module__ == module:
            for changes in [{}, *FURTHER_SETTINGS.get(name, [])]:
                groups = run_with(name, changes)
                in_state |= without_numbers(groups.in_state - OF_CHAINS)
                in_memory |= without_numbers(groups.in_memory)

    blocks = descriptions.blocks(sys.modules[module].__doc__ or "")
    for label, names in {"State": in_state, "Memory": in_memory}.items():
        (block,) = blocks.get(label, [""])
        declared = declared_groups(block)
        assert declared == names, f"{label}: of {module}"
        says_nothing = re.search(r"\bnothing\b.*\.$", block)
        assert declared or says_nothing, f"{label}: of {module} is empty"
