"""What a suite takes on this machine, from rounds that are timed first."""

from __future__ import annotations

import functools
import statistics
import tempfile
from pathlib import Path

from fedstill.errors import DataError
from fedstill.experiment.explain import arithmetic
from fedstill.experiment.preparing.prepared import prepare
from fedstill.experiment.ranking.suites import CHOOSING_SEEDS, TEST_SEEDS, Suite, load_suite
from fedstill.experiment.running.runner import run

MEAN_METHOD = 1.2
"""What the mean method takes for as many steps and examples, where FedAvg takes 1: up to 1.4, on the track space."""

START = 1.0
"""Core-seconds that a run takes beside its training."""

LARGER = 4
"""By how much larger the second batch is that is timed: so a step's cost is told from an example's."""


def core_minutes(suite: Suite) -> tuple[float | None, float | None]:
    """(core-minutes of all runs, core-minutes of choosing all rows) here; None where the data are not here."""
    try:
        each = seconds_here(suite.tier)
        of_cell = {cell: _of_run(suite, cell, each) for cell in suite.recipe.cells()}
    except DataError:
        return None, None
    rounds = suite.recipe.common["rounds"]
    part = (suite.rounds or rounds) / rounds
    tries = {row: 0 if suite.track == "both" else len(suite.tries[row]) for row in suite.competing}
    own = sum(n * part * of_cell.get((row, suite.column), 0.0) for row, n in tries.items())
    return len(TEST_SEEDS) * sum(of_cell.values()) / 60, len(CHOOSING_SEEDS) * own / 60


def _of_run(suite: Suite, cell: tuple[str, str], each: tuple[float, float]) -> float:
    """Core-seconds of a run of a row in a column, by the steps and examples of its round 1."""
    (variant,) = suite.recipe.variants([cell], TEST_SEEDS[:1], {}, Path())
    one = arithmetic(prepare(variant.settings))
    return START + MEAN_METHOD * one.rounds * (each[0] * one.steps + each[1] * one.trained)


@functools.cache
def seconds_here(tier: str) -> tuple[float, float]:
    """Core-seconds of a step, and of each example in it, from FedAvg with two sizes of batch; raises DataError."""
    suite = load_suite(f"{tier}-space")
    batch = suite.recipe.common["plan"]["batch"]
    (steps, trained, small), (fewer, _, large) = (_timed(suite, size) for size in (batch, LARGER * batch))
    step = max(0.0, (small - large) / max(1, steps - fewer))
    return step, max(0.0, small - step * steps) / max(1, trained)


def _timed(suite: Suite, batch: int) -> tuple[int, int, float]:
    """Steps, examples trained on and core-seconds of a round: the middle one of three, after a slower first."""
    cell = ("FedAvg", next(iter(suite.recipe.columns)))
    changes = {"rounds": 4, "plan.batch": batch}
    with tempfile.TemporaryDirectory(prefix="fedstill-timed-") as folder:
        (variant,) = suite.recipe.variants([cell], TEST_SEEDS[:1], changes, Path(folder))
        one, done = arithmetic(prepare(variant.settings)), run(variant.experiment, variant.folder)
    return one.steps, one.trained, statistics.median(float(e["seconds_cpu"]) for e in done.history[-3:])
