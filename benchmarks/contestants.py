"""Contestants in processes of their own, which take turns: one round each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.fedstill_loop import FedstillLoop
from benchmarks.memory import peak_memory
from benchmarks.peers.tasks import task_of
from benchmarks.plain import PlainLoop
from benchmarks.turns import seconds_of
from benchmarks.workloads import WORKLOADS, flops
from fedstill.config.resolve import resolve
from fedstill.core.records import SERVER
from fedstill.engines.hardware import cores
from fedstill.models import contract
from fedstill.running.preparation import prepare


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training of a contestant.

    ``changes``: the experiment's fields that differ from the workload's; None for the plain loop.
    ``rounds``: the largest number of rounds.
    """

    workload: str
    method: str
    changes: Mapping[str, Any] | None
    rounds: int


class Contestant:
    """A process that trains, one round for each request.

    ``seconds``: of its rounds so far, without the warm-up.
    """

    def __init__(self, name: str, training: Training) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.training = training
        self.seconds: list[float] = []
        self._connection, child_connection = context.Pipe()
        self._process = context.Process(
            target=serve, args=(child_connection, training), daemon=True
        )
        self._process.start()
        child_connection.close()

    def request(self, name: str) -> Any:
        """Send a request, and return the answer; ``answers_of`` lists the requests."""
        self._connection.send(name)
        return self._connection.recv()

    def warm_up(self) -> None:
        """Train a round that is not counted."""
        self.request("round")

    def run_round(self) -> None:
        """Train a round, and record its seconds."""
        self.seconds.append(self.request("round"))

    def end(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join()


def run_in_turns(contestants: Sequence[Contestant], turns: int) -> None:
    """Let every contestant train one round in each turn."""
    for _ in range(turns):
        for contestant in contestants:
            contestant.run_round()


def serve(connection: Connection, training: Training) -> None:
    """Run a contestant in this process, and answer the requests of the parent process."""
    answers = answers_of(training)
    while request := connection.recv():
        connection.send(answers[request]())


def answers_of(training: Training) -> Mapping[str, Callable[[], Any]]:
    """Prepare a training; return the functions that answer the requests, by name."""
    workload = WORKLOADS[training.workload]
    changes = training.changes or {}
    experiment = workload.experiment(training.method, **changes)
    prepared = prepare(resolve(experiment), workload.dataset())
    torch.set_num_threads(cores())
    answers: dict[str, Callable[[], Any]] = {
        "peak memory": peak_memory,
        "operations": partial(flops, workload, prepared),
    }

    if training.changes is None:
        network = contract.build(prepared.world.model(SERVER))
        plain = PlainLoop(task_of(prepared, training.rounds), network)
        answers["round"] = partial(seconds_of, plain.run_round)
        answers["parameters"] = plain.parameters
        return answers

    loop = FedstillLoop(prepared)
    answers["round"] = partial(seconds_of, loop.run_round)
    answers["parameters"] = loop.parameters
    answers["evaluation"] = loop.evaluation_seconds
    answers["checkpoint"] = loop.checkpoint_seconds
    return answers
