"""What a suite takes on this machine, from rounds that are timed first."""

from __future__ import annotations

import functools
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from fedstill.errors import DataError
from fedstill.experiment.preparing.prepared import prepare
from fedstill.experiment.ranking.suites import CHOOSING_SEEDS, TEST_SEEDS, Suite, load_suite
from fedstill.experiment.round_work import round_work
from fedstill.experiment.run_directory.journal import read_journal
from fedstill.experiment.running.runner import run

MEAN_METHOD = 1.2
"""What the mean method's training takes for as many steps and examples, where FedAvg's takes 1: up to 1.4, in space."""

START = 1.0
"""Core-seconds that a run takes beside its rounds."""

LARGER = 4
"""By how much larger the second batch is that is timed: so a step's cost is told from an example's."""

ROUNDS = 10
"""So many rounds of a run are looked at for its steps: clients of uneven data differ much."""


class Seconds(NamedTuple):
    """Core-seconds of a step, of each example in it, and of a round beside its training (testing, for the most)."""

    step: float
    example: float
    rest: float


class Timed(NamedTuple):
    """Some rounds that were run: the steps and examples trained on, core-seconds of training, and the rest a round."""

    steps: int
    examples: int
    training: float
    rest: float


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


def _of_run(suite: Suite, cell: tuple[str, str], each: Seconds) -> float:
    """Core-seconds of a run of a row in a column, by the steps and examples of its first rounds."""
    (variant,) = suite.recipe.variants([cell], TEST_SEEDS[:1], {}, Path())
    prepared = prepare(variant.settings)
    rounds = prepared.settings.rounds
    some = [round_work(prepared, number) for number in range(1, min(rounds, ROUNDS) + 1)]
    training = statistics.fmean(each.step * one.steps + each.example * one.trained for one in some)
    return START + rounds * (MEAN_METHOD * training + each.rest)


@functools.cache
def seconds_here(tier: str) -> Seconds:
    """What FedAvg takes here, from some rounds with two sizes of batch; raises DataError where data are missing."""
    suite = load_suite(f"{tier}-space")
    batch = suite.recipe.common["plan"]["batch"]
    small, large = (_timed(suite, size) for size in (batch, LARGER * batch))
    step = max(0.0, (small.training - large.training) / max(1, small.steps - large.steps))
    example = max(0.0, small.training - step * small.steps) / max(1, small.examples)
    return Seconds(step, example, small.rest)


def _timed(suite: Suite, batch: int) -> Timed:
    """Three rounds after a slower first."""
    cell = ("FedAvg", next(iter(suite.recipe.columns)))
    with tempfile.TemporaryDirectory(prefix="fedstill-timed-") as folder:
        (variant,) = suite.recipe.variants([cell], TEST_SEEDS[:1], {"rounds": 4, "plan.batch": batch}, Path(folder))
        run(variant.experiment, variant.folder)
        events = [e for e in read_journal(variant.folder / "journal.jsonl") if e.get("round", 0) > 1]
    rounds = [e for e in events if e["event"] == "round"]
    clients = [e for e in events if e["event"] == "client"]
    training = [e["seconds_cpu"] * e["seconds_training"] / e["seconds"] for e in rounds]
    rest = [e["seconds_cpu"] - own for e, own in zip(rounds, training, strict=True)]
    return Timed(
        sum(e["steps"] for e in clients),
        sum(e["examples"] * e["epochs"] for e in clients),
        sum(training),
        statistics.median(rest),
    )
