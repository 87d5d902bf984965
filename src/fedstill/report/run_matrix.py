"""The accuracy matrices of runs with tasks: of a run, or of all runs in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedstill.errors import ConfigError
from fedstill.metrics.values import Values, values
from fedstill.report.matrix_file import AccuracyMatrix
from fedstill.report.runs import Run, find


def run_matrices(directory: Path) -> list[AccuracyMatrix]:
    """The matrix of each run in a directory, by task, and by class where tasks differ in these.

    Raises ConfigError where no run in it has tasks that ended, CorruptFile for a run that cannot be
    read.
    """
    runs = [run for run in find([directory]) if any(end["task"] for end in run.task_ends)]
    if not runs:
        raise ConfigError(
            f"{directory}: no run in it has ended a task; give a run with [stream], or a CSV file "
            "with a row for each "
            "task's end"
        )
    return [_matrix(run, str(run.named)) for run in runs]


def _matrix(run: Run, name: str) -> AccuracyMatrix:
    ends = [end for end in run.task_ends if end["task"]]
    before = run.task_ends[0] if not run.task_ends[0]["task"] else None
    by_task = 100 * values([e["row"] for e in ends], 2, "rows of task ends")
    initial = (
        None if before is None else 100 * values(before["row"], 1, "the untrained model's row")
    )
    columns = tuple(f"task {t + 1}" for t in range(by_task.shape[1]))
    tasks = AccuracyMatrix(name, by_task, columns, initial=initial)
    told: Sequence[Sequence[int]] = run.start["stream"]["classes"]
    if len(ends[0].get("totals", ())) != 1 or len({tuple(own) for own in told}) < len(told):
        return tasks
    own = {c: t for t, classes in enumerate(told) for c in classes}
    return AccuracyMatrix(
        name,
        np.array([_of_classes(e) for e in ends]),
        tuple(run.classes),
        tuple(own[c] for c in range(len(run.classes))),
        None if before is None else _of_classes(before),
        joined=tasks,
    )


def _of_classes(end: dict[str, list[list[float]]]) -> Values:
    """The accuracy of each class at a task's end (C,), in percent; NaN without test examples."""
    right, totals = (np.array(end[k][0], dtype=np.float64) for k in ("correct", "totals"))
    return 100 * np.divide(right, totals, out=np.full_like(right, np.nan), where=totals > 0)
