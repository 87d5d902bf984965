"""The loop over rounds of fedstill, as a contestant: one round for each call."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.turns import seconds_of
from fedstill.core.rounds import run_round
from fedstill.engines.passes import correct_by_class
from fedstill.running.checkpoint import Checkpoints
from fedstill.running.extensions import run_context
from fedstill.running.journal import JournalMark
from fedstill.running.preparation import Prepared

EVALUATED_IMAGES = 10_000
"""The number of test images that the seconds of an evaluation refer to."""


class FedstillLoop:
    """The rounds of a run, without evaluation and checkpoints."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.engine = prepared.engine()
        self.context = run_context(prepared, self.engine)
        self.state = prepared.settings.method.initial_state(prepared.world)
        census = self.context.schedule(0, prepared.world)
        if census:
            self.state = run_round(replace(self.state, round=0), census, self.context)

    def run_round(self) -> None:
        """Train one round."""
        stages = self.context.schedule(self.state.round, self.prepared.world)
        self.state = run_round(self.state, stages, self.context)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The global model."""
        return dict(self.state.params)

    def evaluation_seconds(self) -> float:
        """The seconds that the evaluation of 10,000 test images takes."""
        settings = self.prepared.settings
        world = self.prepared.world
        sites = self.prepared.sites
        torch.set_num_threads(settings.threads[1])
        (predict,) = settings.method.predictors(self.state, world).values()
        examples = sites.common_test
        assert examples is not None  # workloads have a common test set
        seconds = seconds_of(
            lambda: correct_by_class(predict, examples, sites.inputs, world.classes)
        )
        return seconds * EVALUATED_IMAGES / len(examples)

    def checkpoint_seconds(self) -> float:
        """The seconds that a checkpoint takes."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            checkpoints = Checkpoints(folder / "checkpoints", "", folder / "memory")
            client_states = dict(self.engine.memory.index)
            return seconds_of(
                lambda: checkpoints.save(self.state, client_states, JournalMark(0, ""))
            )
