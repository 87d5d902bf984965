"""What a row of the scorecard is, and what measuring it gave."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.config.experiment import Experiment

STEADY = ("fedavg", "fedntd", "scaffold", "feddyn", "moon", "fedseq", "fedadkd", "fedrep")
"""Methods that rows with one round or run a method take in turn: with and without memory, parallel
and in a chain.
"""


@dataclass(frozen=True)
class Trials:
    """How many trials there were, how many passed, and what is said: of those that failed, or
    results.
    """

    trials: int
    passed: int
    says: tuple[str, ...] = ()

    @staticmethod
    def of(problems: Mapping[str, str]) -> Trials:
        """The outcome of trials by name, each with what was wrong; empty where nothing was."""
        bad = [f"{name}: {why}" for name, why in problems.items() if why]
        return Trials(len(problems), len(problems) - len(bad), tuple(bad))


@dataclass(frozen=True)
class PromiseRow:
    """A row: its id and promise, what a trial is, the probe, and how many trials are asked of it,
    quick and whole.
    """

    id: str
    promise: str
    trial: str
    probe: Callable[[int], Trials]
    quick: int
    whole: int


def small_run(method: str, **changes: Any) -> Experiment:
    """A run of seconds: a part of the digits, four clients, two rounds."""
    values: dict[str, Any] = {
        "method": method,
        "rounds": 2,
        "data": {"train_size": 300, "test_size": 60},
        "topology": {"clients": 4},
        "partition": {"kind": "dirichlet", "alpha": 1.0},
        "model": {"name": "mlp", "hidden": [16]},
        "plan": {"epochs": 1, "batch": 20, "lr": 0.05},
        "measure": (),
        "reuse": False,
    }
    return Experiment(**{**values, **changes})


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="fedstill-scorecard-") as place:
        yield Path(place)


@contextmanager
def without_log() -> Iterator[None]:
    """What is wrong on purpose is not logged."""
    logger = logging.getLogger("fedstill")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
