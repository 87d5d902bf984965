"""fedstill as a contestant: one round a call."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from fedstill.core.census import run_census
from fedstill.core.rounds import Unwatched, run_round
from fedstill.engines.passes import correct_by_class
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.preparation import Prepared


class Ours:
    """The very loop of a run, without evaluation and checkpoint."""

    def __init__(self, ready: Prepared) -> None:
        self.ready, self.engine = ready, ready.engine()
        method, rules = ready.settings.method, ready.settings.rules
        self.state = method.initial_state(ready.world)
        if "label_counts" in method.requires():
            self.state = run_census(self.state, ready.world, self.engine, Unwatched(), rules)

    def run_round(self) -> None:
        """One round."""
        settings = self.ready.settings
        stages = settings.topology(self.state.round, self.ready.world)
        self.state = run_round(
            settings.method,
            self.state,
            stages,
            self.ready.world,
            self.engine,
            Unwatched(),
            settings.rules,
        )

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
