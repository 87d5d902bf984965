"""fedstill as a contestant: one round a call."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from fedstill.core.rounds import run_round
from fedstill.engines.passes import correct_by_class
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.extensions import run_context
from fedstill.running.preparation import Prepared


class Ours:
    """The very loop of a run, without evaluation and checkpoint."""

    def __init__(self, ready: Prepared) -> None:
        self.ready, self.engine = ready, ready.engine()
        self.context = run_context(ready, self.engine)
        self.state = ready.settings.method.initial_state(ready.world)
        first = self.context.schedule(0, ready.world)
        if first:
            self.state = run_round(replace(self.state, round=0), first, self.context)

    def run_round(self) -> None:
        """One round."""
        stages = self.context.schedule(self.state.round, self.ready.world)
        self.state = run_round(self.state, stages, self.context)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The global model."""
        return dict(self.state.params)

    def evaluate(self) -> float:
        """Seconds that 10,000 test images take."""
        torch.set_num_threads(self.ready.settings.threads[1])
        (predict,) = self.ready.settings.method.predictors(self.state, self.ready.world).values()
        test = self.ready.sites.common_test
        began = time.perf_counter()
        correct_by_class(predict, test, self.ready.sites.inputs, self.ready.world.classes)
        return (time.perf_counter() - began) * 10_000 / len(test)

    def save(self) -> float:
        """Seconds that a checkpoint takes."""
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(Path(folder) / "checkpoints", "", Path(folder) / "memory")
            began = time.perf_counter()
            checkpoints.save(self.state, dict(self.engine.memory.index), (0, ""))
            return time.perf_counter() - began
