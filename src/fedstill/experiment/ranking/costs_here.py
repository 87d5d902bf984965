"""What a suite takes on this machine, from one round that is timed first."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from fedstill.errors import DataError
from fedstill.experiment.explain import arithmetic
from fedstill.experiment.preparing.prepared import prepare
from fedstill.experiment.ranking.suites import CHOOSING_SEEDS, TEST_SEEDS, Suite, load_suite
from fedstill.experiment.running.runner import run

MEAN_METHOD = 1.3
"""What the mean method takes, where FedAvg takes 1."""

START = 1.0
"""Core-seconds until a run's first round."""


def core_minutes(suite: Suite) -> tuple[float | None, float | None]:
    """(core-minutes of all runs, core-minutes of choosing all rows) here; None where the data are not here."""
    try:
        per_example = seconds_an_example(suite.tier)
        of_column = {column: _of_run(suite, column, per_example) for column in suite.recipe.columns}
    except DataError:
        return None, None
    test = sum(of_column[c] for row in suite.recipe.rows for c in suite.columns(row)) * len(TEST_SEEDS)
    rounds = suite.recipe.common["rounds"]
    part = (suite.rounds or rounds) / rounds
    tries = sum(len(suite.tries[row]) for row in suite.competing) * len(CHOOSING_SEEDS)
    own = 0.0 if suite.track == "both" else tries * part * of_column.get(suite.column, 0.0)
    return test / 60, own / 60


def _of_run(suite: Suite, column: str, per_example: float) -> float:
    """Core-seconds of a run in a column: the examples that the row trains that differences are to."""
    (variant,) = suite.recipe.variants([(suite.against, column)], TEST_SEEDS[:1], {}, Path())
    one = arithmetic(prepare(variant.settings))
    exchange = 3.0 if suite.track == "peers" else 1.0  # the fit, and what peers then teach
    return START + MEAN_METHOD * exchange * one.trained * one.rounds * per_example


@functools.cache
def seconds_an_example(tier: str) -> float:
    """Core-seconds for an example that is trained on once, from one round of FedAvg here; raises DataError."""
    suite = load_suite(f"{tier}-space")
    cell = ("FedAvg", next(iter(suite.recipe.columns)))
    with tempfile.TemporaryDirectory(prefix="fedstill-timed-") as folder:
        (variant,) = suite.recipe.variants([cell], TEST_SEEDS[:1], {"rounds": 2}, Path(folder))
        one, done = arithmetic(prepare(variant.settings)), run(variant.experiment, variant.folder)
    return float(done.history[-1]["seconds_cpu"]) / max(1, one.trained)
