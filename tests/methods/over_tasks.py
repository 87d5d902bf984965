"""Toy runs over three tasks, each of which lasts a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import toys
from double import in_double
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.core.records import State
from fedstill.engines.serial import Memory
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run
from loops import context_of, states_after
from run_bits import bits

THREE_TASKS = {"kind": "classes", "tasks": 3}


@dataclass(frozen=True)
class RunOverTasks:
    """What a run in this process ends with."""

    ready: Prepared
    states: list[State]
    """The state after each round, which is the end of a task."""
    memory: Memory
    """What clients remember."""

    @property
    def final(self) -> State:
        """The state after the last round."""
        return self.states[-1]


def experiment_over_tasks(method: Any, **changes: Any) -> Experiment:
    """An experiment over three tasks, whose classes all clients have."""
    values = {"partition": {"kind": "iid"}, "stream": THREE_TASKS, **changes}
    return toys.toy(method, **values)


def run_over_tasks(
    method: Any,
    *,
    until: int | None = None,
    precision_of: Callable[[Prepared], Prepared] = in_double,
    **changes: Any,
) -> RunOverTasks:
    """Have the serial engine run the rounds until this one, or all of them.

    precision_of: float64, or ``in_float32``.
    """
    experiment = experiment_over_tasks(method, engine="serial", **changes)
    ready = precision_of(prepare(resolve(experiment), toys.blobs()))
    engine = ready.engine()
    states = states_after(context_of(ready, engine), until or ready.world.rounds)
    return RunOverTasks(ready, states[1:], engine.memory)


def in_float32(ready: Prepared) -> Prepared:
    """A run as it is."""
    return ready


def model_hash(folder: Path, method: Any, **changes: Any) -> str:
    """The SHA-256 of the final model of a run over three tasks."""
    run(experiment_over_tasks(method, **changes), folder, toys.blobs())
    return str(bits(folder)["model.safetensors"])
