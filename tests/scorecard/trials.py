"""Rows of the scorecard, and the outcome of their trials."""

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
"""Methods for rows whose trials are rounds or runs of methods in turn: with and without memory,
parallel and sequential.
"""


@dataclass(frozen=True)
class Trials:
    """The number of trials, the number that passed, and remarks: problems of trials that failed, or
    results.
    """

    trials: int
    passed: int
    remarks: tuple[str, ...] = ()

    @staticmethod
    def of(problems: Mapping[str, str]) -> Trials:
        """The outcome of trials by name, each with its problem; an empty text if it passed."""
        remarks = [f"{name}: {problem}" for name, problem in problems.items() if problem]
        return Trials(len(problems), len(problems) - len(remarks), tuple(remarks))


def problem_unless(holds: bool, problem: str) -> str:
    """The problem of a trial; empty if the promise holds."""
    if holds:
        return ""
    return problem


@dataclass(frozen=True, kw_only=True)
class PromiseRow:
    """A row: its id and promise, a description of a trial, the function that carries trials out,
    and the numbers of trials with and without ``--quick``.
    """

    id: str
    promise: str
    trial: str
    probe: Callable[[int], Trials]
    quick: int
    complete: int


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
    """A temporary folder."""
    with tempfile.TemporaryDirectory(prefix="fedstill-scorecard-") as folder:
        yield Path(folder)


@contextmanager
def without_log() -> Iterator[None]:
    """Errors and warnings, which trials cause on purpose, are not logged."""
    logger = logging.getLogger("fedstill")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
