"""Forgetting over tasks: the measures that papers compute from an accuracy matrix.

A matrix R is (T, K). A row is the end of a task, oldest first, and a column is a task or a class.
An unknown accuracy, such as that of a future task, is NaN or None. ``tasks`` (K,) is the task of
each column, counted from 0; by default, column j belongs to task j. Columns of tasks that have not
started by the last row are always ignored. Results have the unit of the matrix (shares or
percentages). They are NaN if there is nothing to average.

In formulas, a is the last row, and own(j) is the row of the task of column j. Results by task and
by class differ, because the maximum of a mean over classes is at most the mean of their maxima.

The functions ``stsa`` to ``mfcl`` compute forgetting exactly as published code does, from a matrix
with a column for each task. ``TABLE`` lists all definitions. Commits: STSA Yuqin-G/STSA aaaa006,
Fed-Mammoth aimagelab/fed-mammoth 09a9508, FOT duygunuryldz/Federated_Orthogonal_Training f343e36,
LANDER tmtuan1307/LANDER 44d7acc, MFCL SaraBabakN/MFCL-NeurIPS23 8ab937b.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedstill.core.errors import ConfigError
from fedstill.metrics.accuracy import Values, check_same_classes, float_array, forgetting

if TYPE_CHECKING:
    from fedstill.core.label_counts import TensorLike

Tasks: TypeAlias = "TensorLike | None"


def final_accuracy(matrix: TensorLike, tasks: Tasks = None) -> float:
    """The mean of the last row: mean_j a_j.

    Source: Lopez-Paz and Ranzato 2017, ACC.

    >>> final_accuracy([[0.75, None], [0.25, 0.5]])
    0.375
    """
    return _mean(started_columns(matrix, tasks).accuracy[-1])


def incremental_accuracy(matrix: TensorLike, tasks: Tasks = None) -> float:
    """The mean over the ends of tasks of the accuracy on all tasks so far:
    mean_t mean_{j <= t} R[t, j].

    Source: iCaRL, average incremental accuracy.

    >>> incremental_accuracy([[0.75, None], [0.25, 0.5]])
    0.5625
    """
    columns = started_columns(matrix, tasks)
    so_far = [_mean(row[columns.tasks <= t]) for t, row in enumerate(columns.accuracy)]
    return _mean(np.array(so_far))


def learning_accuracy(matrix: TensorLike, tasks: Tasks = None) -> float:
    """The mean accuracy on a task at the end of that task: mean_j R[own(j), j].

    Source: Riemer et al. 2019, learning accuracy.
    """
    return _mean(started_columns(matrix, tasks).at_own_end)


def forgetting_by_column(matrix: TensorLike, tasks: Tasks = None) -> Values:
    """The forgetting of each column (K,): best accuracy before the last row - a_j; NaN for columns
    of the last task.

    Source: Chaudhry et al. 2018.

    >>> forgetting_by_column([[0.75, None], [0.25, 0.5]])
    array([0.5, nan])
    """
    columns = started_columns(matrix, tasks)
    best = _best(columns.accuracy[:-1])
    return np.where(columns.are_earlier, best - columns.accuracy[-1], np.nan)


def average_forgetting(matrix: TensorLike, tasks: Tasks = None) -> float:
    """The mean over the columns of earlier tasks of (best accuracy before the last row - a_j); NaN
    for a single row.

    A term is negative if the last row is the best one. Source: Chaudhry et al. 2018.

    >>> average_forgetting([[80, None, None], [78, 60, None], [75, 55, 50]])
    5.0
    """
    return _mean(forgetting_by_column(matrix, tasks))


def worst_forgetting(matrix: TensorLike, tasks: Tasks = None) -> tuple[float, int | None]:
    """The largest term of ``average_forgetting`` and its column, counted from 0; (NaN, None)
    without terms.

    >>> worst_forgetting([[70, None, None], [80, 40, None], [60, 50, 90]])
    (20.0, 0)
    """
    losses = forgetting_by_column(matrix, tasks)
    if not np.isfinite(losses).any():
        return float("nan"), None
    return float(np.nanmax(losses)), int(np.nanargmax(losses))


def backward_transfer(matrix: TensorLike, tasks: Tasks = None) -> float:
    """The mean over the columns of earlier tasks of (a_j - R[own(j), j]); positive if later tasks
    helped.

    Source: Lopez-Paz and Ranzato 2017, BWT.

    >>> backward_transfer([[80, None, None], [78, 60, None], [75, 55, 50]])
    -5.0
    """
    columns = started_columns(matrix, tasks)
    transfer = columns.accuracy[-1] - columns.at_own_end
    return _mean(transfer[columns.are_earlier])


def forward_transfer(matrix: TensorLike, initial: TensorLike, tasks: Tasks = None) -> float:
    """The mean over columns of later tasks than the first of (accuracy at the end of the previous
    task - accuracy of an untrained model).

    initial: (K,) accuracies before training. NaN for a matrix without accuracies on future tasks.

    Source: Lopez-Paz and Ranzato 2017, FWT.

    >>> forward_transfer([[70, 30, 20], [80, 60, 35], [75, 65, 90]], [10, 10, 10])
    22.5
    """
    columns = started_columns(matrix, tasks)
    all_columns = float_array(matrix, 2, "an accuracy matrix")
    untrained = float_array(initial, 1, "accuracies of the untrained model")
    check_same_classes(all_columns, untrained)
    untrained = untrained[column_tasks(all_columns, tasks) < len(all_columns)]
    later = np.flatnonzero(columns.tasks > 0)
    one_task_earlier = columns.accuracy[columns.tasks[later] - 1, later]
    return _mean(one_task_earlier - untrained[later])


def learned(matrix: TensorLike, tasks: Tasks = None) -> float:
    """The mean best accuracy: mean_j max_t R[t, j], over the columns with an accuracy a_j.

    Exactly, final_accuracy = learned x kept = learned - lost.
    """
    accuracy = started_columns(matrix, tasks).accuracy
    return _mean(_best(accuracy[:, ~np.isnan(accuracy[-1])]))


def lost(matrix: TensorLike, tasks: Tasks = None) -> float:
    """The part of ``learned`` that is forgotten: learned - final_accuracy, at least 0."""
    return learned(matrix, tasks) - final_accuracy(matrix, tasks)


def kept_share(matrix: TensorLike, tasks: Tasks = None) -> float:
    """The share of ``learned`` that remains: final_accuracy / learned, in [0, 1]; NaN if nothing
    was learned.

    >>> kept_share([[0.75, None], [0.25, 0.25]])
    0.5
    """
    best = learned(matrix, tasks)
    if not best > 0:
        return float("nan")
    return final_accuracy(matrix, tasks) / best


def with_zeros(matrix: TensorLike) -> Values:
    """The matrix (T, K) with 0 instead of unknown accuracies, as many programs store it."""
    return np.nan_to_num(float_array(matrix, 2, "an accuracy matrix"), nan=0.0)


def round_forgetting(previous: TensorLike, current: TensorLike) -> float:
    """The global model's forgetting in one round, without gains: mean_c max(0, previous - current).

    previous, current: (C,) class accuracies of the global model before and after the round.

    Source: follows Flashback, where gains do not offset losses. Reading: we did not have the exact
    formula.

    >>> round_forgetting([0.75, 0.5], [0.5, 0.75])
    0.125
    """
    start = float_array(previous, 1, "class accuracies before")
    end = float_array(current, 1, "class accuracies after")
    check_same_classes(start, end)
    return _mean(_loss(start, end))


def local_forgetting(received: TensorLike, local: TensorLike) -> float:
    """Forgetting in local training: the mean over clients of mean_c max(0, received - local_k).

    received: (C,) class accuracies of the global model; local: (clients, C) class accuracies of the
    clients' models after training.
    """
    start = float_array(received, 1, "class accuracies before")
    models = float_array(local, 2, "class accuracies of local models")
    check_same_classes(start, models)
    return _mean(np.array([_mean(_loss(start, model)) for model in models]))


def aggregation_forgetting(local: TensorLike, aggregated: TensorLike, best: bool = False) -> float:
    """Forgetting in aggregation: the mean over clients of mean_c max(0, local_k - aggregated).

    local: (clients, C); aggregated: (C,). With ``best``, the loss against the best client of each
    class instead of the mean over clients.
    """
    models = float_array(local, 2, "class accuracies of local models")
    end = float_array(aggregated, 1, "class accuracies after")
    check_same_classes(models, end)
    if best:
        return _mean(_loss(_best(models), end))
    return _mean(np.array([_mean(_loss(model, end)) for model in models]))


def by_task(matrix: TensorLike, tasks: TensorLike) -> Values:
    """A matrix by task (T, tasks) from a matrix by class: the means over each task's classes."""
    accuracy = float_array(matrix, 2, "an accuracy matrix")
    task_of = column_tasks(accuracy, tasks)
    groups = [accuracy[:, task_of == t] for t in range(int(task_of.max()) + 1)]
    return np.array([[_mean(group[row]) for group in groups] for row in range(len(accuracy))])


def column_tasks(accuracy: Values, tasks: Tasks) -> NDArray[np.int64]:
    """The task of each column (K,), counted from 0; raises ConfigError for invalid tasks."""
    if tasks is None:
        return np.arange(accuracy.shape[1])
    numbers = float_array(tasks, 1, "the tasks of columns")
    are_counted = all(t >= 0 and t == int(t) for t in numbers.tolist())
    if len(numbers) != accuracy.shape[1] or not are_counted:
        raise ConfigError(
            f"a matrix of {accuracy.shape[1]} columns needs {accuracy.shape[1]} tasks, counted "
            f"from 0, but tasks is {numbers}"
        )
    return numbers.astype(np.int64)


@dataclass(frozen=True)
class StartedColumns:
    """The columns of a matrix whose task has started by the last row.

    ``accuracy``: (T, k); ``tasks``: the task of each column, (k,).
    """

    accuracy: Values
    tasks: NDArray[np.int64]

    @property
    def are_earlier(self) -> NDArray[np.bool_]:
        """Whether each column's task ended before the last row, (k,)."""
        return self.tasks < len(self.accuracy) - 1

    @property
    def at_own_end(self) -> Values:
        """The accuracy of each column at the end of its task, (k,)."""
        return self.accuracy[self.tasks, np.arange(len(self.tasks))]


def started_columns(matrix: TensorLike, tasks: Tasks) -> StartedColumns:
    """The columns whose task has started by the last row. Raises ConfigError for an empty
    matrix.
    """
    accuracy = float_array(matrix, 2, "an accuracy matrix")
    if not accuracy.size:
        raise ConfigError("an accuracy matrix needs at least one row and one column")
    task_of = column_tasks(accuracy, tasks)
    has_started = task_of < len(accuracy)
    return StartedColumns(accuracy[:, has_started], task_of[has_started])


def _best(accuracy: Values) -> Values:
    best: Values = np.fmax.reduce([np.full(accuracy.shape[1], np.nan), *accuracy], axis=0)
    return best


def _loss(previous: Values, current: Values) -> Values:
    return np.maximum(0.0, previous - current)  # NaN stays NaN


def _mean(numbers: Values) -> float:
    measured = numbers[~np.isnan(numbers)]
    if not measured.size:
        return float("nan")
    return float(measured.mean())


def stsa(matrix: TensorLike) -> float:
    """STSA: mean_{j < T} (max_{l <= T} R[l, j] - a_j). The maximum includes the last row, so the
    result is at least 0.

    Source: STSA's main.py.
    """
    accuracy = _square(matrix)
    return _earlier_mean(np.fmax.reduce(accuracy, axis=0) - accuracy[-1])


def fed_mammoth(matrix: TensorLike) -> float:
    """Fed-Mammoth: (1/T) sum_j (R[j, j] - a_j), which is -backward_transfer (T - 1) / T.

    Source: Fed-Mammoth's utils/training.py.
    """
    accuracy = _square(matrix)
    return float(np.mean(np.diagonal(accuracy) - accuracy[-1]))


def fot(matrix: TensorLike) -> float:
    """FOT: mean_{j < T} (R[j, j] - a_j), which its code calls "BWT": backward transfer with the
    opposite sign.

    Source: FOT's FedAVGAggregator.py.
    """
    accuracy = _square(matrix)
    return _earlier_mean(np.diagonal(accuracy) - accuracy[-1])


def lander(matrix: TensorLike) -> float:
    """LANDER: (1/T) sum_t (max_j R[t, j] - R[T, t]) with 0 for unknown accuracies. The maximum is
    over tasks, not over time.

    Source: LANDER's forgetting_cal.py.
    """
    accuracy = with_zeros(_square(matrix))
    return float(np.mean(accuracy.max(axis=1) - accuracy[-1]))


def mfcl(matrix: TensorLike) -> float:
    """MFCL: (1/T) (R[1, 1]/100 - a_1 + sum_{j >= 2} (R[j, j] - a_j)). Its first term is a share
    minus a percentage.

    Source: MFCL's main.py. Reading: we apply the formula to shares as it is.
    """
    accuracy = _square(matrix)
    at_end = np.diagonal(accuracy).copy()
    at_end[0] /= 100
    return float(np.mean(at_end - accuracy[-1]))


def _square(matrix: TensorLike) -> Values:
    """The columns of the tasks so far, (T, T). Raises ConfigError if there are fewer columns."""
    accuracy = started_columns(matrix, tasks=None).accuracy
    rows, columns = accuracy.shape
    if columns < rows:
        raise ConfigError(
            f"a matrix with the ends of {rows} tasks needs a column for each task, but has "
            f"{columns}; by class, use average_forgetting with tasks"
        )
    return accuracy


def _earlier_mean(losses: Values) -> float:
    if len(losses) < 2:
        return float("nan")
    return float(np.mean(losses[:-1]))


@dataclass(frozen=True)
class Definition:
    """A definition of a number from an accuracy matrix: its name, formula in words, source, and
    function.

    ``of``: the function of the matrix and the tasks of its columns. ``by_class``: whether it is
    meaningful for columns that are classes. ``differs``: how it differs from the definition of
    Chaudhry et al.
    """

    name: str
    says: str
    source: str
    of: Callable[[TensorLike, Tasks], float]
    by_class: bool = True
    differs: str = ""


def _published(
    name: str, says: str, source: str, of: Callable[[TensorLike], float], differs: str
) -> Definition:
    return Definition(
        name, says, source, lambda matrix, _: of(matrix), by_class=False, differs=differs
    )


TABLE: tuple[Definition, ...] = (
    Definition(
        "final_accuracy",
        "mean of the last row",
        "Lopez-Paz & Ranzato 2017, ACC",
        final_accuracy,
    ),
    Definition(
        "incremental_accuracy",
        "mean over task ends of the mean over tasks so far",
        "iCaRL",
        incremental_accuracy,
    ),
    Definition(
        "learning_accuracy",
        "mean of the diagonal: each task at its own end",
        "Riemer et al. 2019",
        learning_accuracy,
    ),
    Definition(
        "average_forgetting",
        "best row before the last - last row; earlier tasks",
        "Chaudhry et al. 2018",
        average_forgetting,
    ),
    Definition(
        "backward_transfer",
        "last row - diagonal; earlier tasks",
        "Lopez-Paz & Ranzato 2017, BWT",
        backward_transfer,
    ),
    Definition(
        "worst_forgetting",
        "the largest term of average_forgetting",
        "fedstill",
        lambda matrix, tasks: worst_forgetting(matrix, tasks)[0],
    ),
    Definition(
        "learned",
        "best row of each column, including the last row",
        "fedstill",
        learned,
    ),
    Definition("lost", "learned - final_accuracy", "fedstill", lost),
    Definition("kept", "final_accuracy / learned", "fedstill", kept_share),
    Definition(
        "forgetting",
        "best earlier row - last row; columns with an earlier row",
        "FedNTD, eq. 5",
        lambda matrix, tasks: forgetting(started_columns(matrix, tasks).accuracy),
        differs="includes columns of the last task if an earlier row has them",
    ),
    Definition(
        "forgetting, blanks as 0",
        "best earlier row - last row; all columns, unknown accuracies are 0",
        "a common mistake",
        lambda matrix, tasks: forgetting(with_zeros(started_columns(matrix, tasks).accuracy)),
        differs="future tasks have accuracy 0",
    ),
    _published(
        "published.stsa",
        "best row, including the last row - last row; earlier tasks",
        "STSA, main.py",
        stsa,
        "the maximum includes the last row, so a gain counts as 0",
    ),
    _published(
        "published.fed_mammoth",
        "diagonal - last row; the mean over all tasks",
        "Fed-Mammoth, utils/training.py",
        fed_mammoth,
        "the diagonal instead of the best row, and the mean includes the last task's 0",
    ),
    _published(
        "published.fot",
        "diagonal - last row; earlier tasks; printed as BWT",
        "FOT, FedAVGAggregator.py",
        fot,
        "the diagonal instead of the best row: backward transfer with the opposite sign",
    ),
    _published(
        "published.lander",
        "best task of row t - last row of task t; blanks as 0",
        "LANDER, forgetting_cal.py",
        lander,
        "a maximum over tasks, not over time",
    ),
    _published(
        "published.mfcl",
        "diagonal - last row, the first diagonal / 100; all tasks",
        "MFCL, main.py",
        mfcl,
        "its first term is a share minus a percentage",
    ),
)
"""All definitions in the order of the report, without ``forward_transfer``, which also needs an
untrained model.
"""
