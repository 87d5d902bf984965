"""The serial engine, the reference: one client after another, in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedstill.data.inputs import Inputs
from fedstill.engines.loop import train
from fedstill.engines.memory import Memory
from fedstill.engines.passes import correct_by_class
from fedstill.errors import CorruptFile, FedstillError
from fedstill.models.contract import predictor
from fedstill.records import NOTHING, Examples, Payload, Ran, Reply, Stage, Tensors, View, World
from fedstill.work import ClientWork

log = logging.getLogger("fedstill.engine")


class Sites(Protocol):
    """Where the data are: one view for each client and stage."""

    @property
    def inputs(self) -> Inputs: ...

    @property
    def common_test(self) -> Examples | None:
        """The test set on which, in a simulation, local models are measured."""

    def view(self, client: int, stage: Stage) -> View:
        """What a client sees in a stage."""

    def size(self, client: int) -> int:
        """About how many examples a client has: only the order in which clients begin depends on it."""


@dataclass
class SerialEngine:
    """Runs the clients of a stage in the order of the schedule.

    ``threads``: torch threads in a stage of many clients, and in one of a single client; part of a run's definition,
    because the last bit of a sum depends on them. ``measured``: rounds in which local models are evaluated.
    """

    world: World
    sites: Sites
    memory: Memory = field(default_factory=Memory)
    threads: tuple[int, int] = (1, 1)
    measured: frozenset[int] = frozenset()

    def run(self, work: ClientWork, stage: Stage, downs: Mapping[int, Payload], seed: int) -> list[Reply]:
        """The replies of the clients that were sent something; an exception in a client becomes its reply's failure.

        Raises CorruptFile for a damaged memory: to go on without that client would give other bits than before.
        """
        self._set_up(stage)
        return [self._reply(work, stage, client, downs[client], seed) for client in stage.clients if client in downs]

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what these clients remember of a stage."""
        self.memory.commit(stage, clients)

    def close(self) -> None:
        """Nothing to end."""

    def _set_up(self, stage: Stage) -> None:
        torch.set_num_threads(self.threads[1] if len(stage.clients) == 1 else self.threads[0])
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = False

    def _reply(self, work: ClientWork, stage: Stage, client: int, down: Payload, seed: int) -> Reply:
        try:
            return self._work(work, stage, client, down, seed)
        except CorruptFile:
            raise
        except FedstillError as error:
            reason = str(error)
        except Exception as error:
            log.debug("client %d failed", client, exc_info=True)
            reason = f"{type(error).__name__}: {error}"
        return Reply(client, NOTHING, 0, {}, stage.round, stage.index, failure=" ".join(reason.split()) or "no reason")

    def _work(self, work: ClientWork, stage: Stage, client: int, down: Payload, seed: int) -> Reply:
        began = time.perf_counter()
        view = self.sites.view(client, stage)
        plan = self.world.plans.get(stage.name)
        carry = work.begin(down, self.memory.load(client), view, self.world)
        metrics: dict[str, object] = {}
        params, ran_seconds = carry.params, 0.0
        if plan is not None and carry.params:
            start = time.perf_counter()
            trained = train(work, carry, plan, stage, view, self.sites.inputs, seed)
            params, ran, ran_seconds = trained.params, trained.ran, time.perf_counter() - start
            metrics |= {"loss": dict(trained.losses), "steps": ran.steps, "epochs": trained.epochs}
        else:
            ran = Ran(0, 0.0, carry.trace)
        up, memory = work.end(params, carry, ran, view, self.world)
        self.memory.hold(client, memory)
        metrics["seconds_training"] = ran_seconds
        metrics |= self._measure(stage, view, params)
        metrics["seconds"] = time.perf_counter() - began
        return Reply(client, up, len(view.data), metrics, stage.round, stage.index)

    def _measure(self, stage: Stage, view: View, params: Tensors) -> dict[str, object]:
        if view.test is not None and len(view.test) and params:
            return {"site_accuracy": self._right(view, params, view.test).sum().item() / len(view.test)}
        test = self.sites.common_test
        if stage.round not in self.measured or test is None or not params or view.client < 0:
            return {}
        start = time.perf_counter()
        right = self._right(view, params, test)
        return {
            "label_counts": view.counts.tolist(),
            "correct_by_class": right.tolist(),
            "seconds_measuring": time.perf_counter() - start,
        }

    def _right(self, view: View, params: Tensors, test: Examples) -> Tensor:
        """How many examples of each class these parameters predict right: (C,)."""
        return correct_by_class(predictor(view.model, params), test, self.sites.inputs, self.world.classes)
