"""What a method's docstring declares under ``State:`` and ``Memory:`` is what its runs keep, no
more and no less.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import pytest
from test_every_method import METHODS, experiment

import toys
from fedstill.config.resolve import resolve
from fedstill.core import descriptions, registry
from fedstill.core.extensions import NoRecorder, StageResult
from fedstill.running.preparation import prepare
from loops import context_of, states_after

GROUPS = re.compile(r"([\w.]+(?:, [\w.]+)*) = (.*)", re.DOTALL)

SPLIT_FIRST = {"kind": "classes", "tasks": 3, "compose": "clients_first"}

OTHERWISE: dict[str, list[dict[str, Any]]] = {
    "fedadkd": [
        {"method": {"phi_timing": "exact"}},
        {"topology": {"kind": "sequential"}},
        {"method": {"phi_timing": "exact"}, "topology": {"kind": "sequential"}},
    ],
    **{
        name: [{"rounds": 3, "stream": SPLIT_FIRST, "query": {}}]
        for name in ("fedavg_once", "pfnm")
    },
    "fednova": [{"method": {"ccvr": "full"}}],
    "fedlwf": [{"stream": SPLIT_FIRST}],
    "replay": [{"method": {"alpha": 0.5, "nearest_mean": True}, "stream": SPLIT_FIRST}],
    "analytic": [{"stream": SPLIT_FIRST}],
    "fot": [{"stream": SPLIT_FIRST}],
    "glfc_local": [{"method": {"nearest_mean": True}, "stream": SPLIT_FIRST}],
    "fedewc": [{"stream": SPLIT_FIRST}],
    "afl": [{"method": {"balanced": True}, "stream": SPLIT_FIRST}],
    "cwc": [{"method": {"memory": "sliding"}}],
    **{name: [{"method": {"k": 8}}] for name in ("aver", "sfedkd")},
    **{name: [{"method": {"subset": 10}}] for name in ("dsfl", "fedmd", "hiper_fedkd")},
}
"""Settings in which a method keeps groups that it does not keep as it is."""

SHORT = {"epochs": 1, "batch": 50, "lr": 0.01}
"""What is kept does not depend on how long is trained."""

OF_CHAINS = {"answered"}
"""Kept by ``run_round``, for every method: how many clients of a chain have replied."""

MODULES = sorted({registry.lookup("method", name).target.__module__ for name in METHODS})


def kept(name: str, changes: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The names of the groups in the state, and in the clients' memories, that a toy run keeps
    after any stage.
    """
    base = experiment(name)
    base = replace(base, plan=SHORT, topology={**base.table("topology"), "clients": 4})
    both = {
        k: {**base.table(k), **v} if isinstance(v, dict) and v else v for k, v in changes.items()
    }
    ready = prepare(resolve(replace(base, **both)), toys.blobs())
    settings, world, engine = ready.settings, ready.world, ready.engine()
    state = settings.method.initial_state(world)
    in_state, in_memory = set(state.extra), set()

    class Groups(NoRecorder):
        def stage(self, result: StageResult) -> None:
            in_state.update(result.after.extra)
            for client in range(-1, world.clients):
                in_memory.update(engine.memory.load(client))

    states_after(context_of(ready, engine, Groups()), world.rounds)
    engine.close()
    return in_state - OF_CHAINS, in_memory


def many(names: set[str]) -> set[str]:
    """Names in which the id of a group that ``payload.many`` made is N."""
    return {re.sub(r"\.\d+$", ".N", name) for name in names}


def declared_groups(block: str) -> dict[str, str]:
    """{name: what it is} of the groups that a ``State:`` or ``Memory:`` block declares; a name
    ``model.N`` is many.
    """
    declared = [m for part in block.removesuffix(".").split("; ") if (m := GROUPS.fullmatch(part))]
    return {name: m[2] for m in declared for name in m[1].split(", ")}


@pytest.mark.parametrize("module", MODULES)
def test_what_is_declared_is_kept_and_nothing_else(module: str) -> None:
    in_state: set[str] = set()
    in_memory: set[str] = set()
    for name in METHODS:
        if registry.lookup("method", name).target.__module__ == module:
            for changes in [{}, *OTHERWISE.get(name, [])]:
                state, memory = kept(name, changes)
                in_state, in_memory = in_state | many(state), in_memory | many(memory)
    blocks = descriptions.blocks(sys.modules[module].__doc__ or "")
    for label, there in (("State", in_state), ("Memory", in_memory)):
        (declared,) = blocks.get(label, [""])
        groups = declared_groups(declared)
        assert set(groups) == there, f"{label}: of {module}"
        assert groups or re.search(r"\bnothing\b.*\.$", declared), (
            f"{label}: of {module} says nothing"
        )
