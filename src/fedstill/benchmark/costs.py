"""What a suite takes on this machine, from rounds that are timed first."""

from __future__ import annotations

import functools
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from fedstill.benchmark.suites import CHOOSING_SEEDS, TEST_SEEDS, Suite, load_suite
from fedstill.core.errors import DataError
from fedstill.core.records import SERVER, Stage
from fedstill.running.explain import local_steps
from fedstill.running.journal import read_journal
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.runner import run

MEAN_METHOD = {"space": 1.2, "time": 1.1, "both": 1.2, "chain": 1.5, "public": 1.0, "peers": 1.3}
"""What a step of the mean row takes, where FedAvg's takes 1, by track: of the entries that ship,
the mean over tiers.

On public data it is not more: a teacher's logits are there before the training begins.
"""

START = 1.0
"""Core-seconds that a run takes beside its rounds."""

LARGER = 4
"""By how much larger the second batch is that is timed: so a step's cost is told from an
example's.
"""


class Seconds(NamedTuple):
    """Core-seconds of a step, of each example in it, and of a round beside its training (testing,
    for the most).
    """

    step: float
    example: float
    rest: float


class Timed(NamedTuple):
    """Some rounds that were run: the steps and examples trained on, core-seconds of training, and
    the rest a round.
    """

    steps: int
    examples: int
    training: float
    rest: float


def core_minutes(suite: Suite) -> tuple[float | None, float | None]:
    """(core-minutes of all runs, core-minutes of choosing all rows) here; None where the data are
    not here.
    """
    try:
        each = seconds_here(suite.tier)
        runs = [_of_run(suite, cell, each) for cell in suite.recipe.cells()]
        own = () if suite.there else suite.competing
        trials = [
            len(suite.tries[row]) * _of_run(suite, (row, suite.column), each, True) for row in own
        ]
    except DataError:
        return None, None
    return len(TEST_SEEDS) * sum(runs) / 60, len(CHOOSING_SEEDS) * sum(trials) / 60


def _of_run(suite: Suite, cell: tuple[str, str], each: Seconds, trial: bool = False) -> float:
    """Core-seconds of a run of a row in a column, or of a trial, by the steps and examples of all
    its rounds.
    """
    changes = suite.trial_settings(cell[0]) if trial else {}
    (variant,) = suite.recipe.variants([cell], TEST_SEEDS[:1], changes, Path())
    prepared = prepare(variant.settings)
    stages = [
        s
        for n in range(1, variant.settings.rounds + 1)
        for s in prepared.settings.schedule(n, prepared.world)
    ]
    steps, examples = map(sum, zip(*(trained_in(prepared, stage) for stage in stages), strict=True))
    training = each.step * steps + each.example * examples
    return START + MEAN_METHOD[suite.track] * training + variant.settings.rounds * each.rest


def trained_in(prepared: Prepared, stage: Stage) -> tuple[int, int]:
    """The steps of all clients of a stage, and the examples in them: each epoch counts.

    A suite's plan is one for all stages: where nothing is trained, only the method's own says so.
    The method is not asked whom it addresses, as that may follow from what clients sent before:
    students from their peers' models.
    """
    plan, own = prepared.world.plans.get(stage.name), prepared.settings.method.plans.get(stage.name)
    if plan is None or (own is not None and not (own.epochs or own.steps)):
        return 0, 0
    steps = examples = 0
    for client in stage.clients:
        public = stage.view == "public" or client == SERVER
        there = (
            len(prepared.sites.public or ())
            if public
            else int(prepared.sites.counts(client, stage.round).sum())
        )
        more = local_steps(prepared, stage, there)
        steps += more
        examples += more * min(plan.batch, there) if plan.steps else plan.epochs * there
    return steps, examples


@functools.cache
def seconds_here(tier: str) -> Seconds:
    """What FedAvg takes here, from some rounds with two sizes of batch; raises DataError where data
    are missing.
    """
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
        (variant,) = suite.recipe.variants(
            [cell], TEST_SEEDS[:1], {"rounds": 4, "plan.batch": batch}, Path(folder)
        )
        run(variant.experiment, variant.folder)
        events = [
            e for e in read_journal(variant.folder / "journal.jsonl") if e.get("round", 0) > 1
        ]
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
