"""What released codes print as forgetting, each as it is computed there; ``TABLE`` puts all
definitions side by side.

A matrix is as in ``metrics.tasks``, with a column for each task. Commits: STSA Yuqin-G/STSA
aaaa006, Fed-Mammoth aimagelab/fed-mammoth 09a9508, FOT duygunuryldz/Federated_Orthogonal_Training
f343e36, LANDER tmtuan1307/LANDER 44d7acc, MFCL SaraBabakN/MFCL-NeurIPS23 8ab937b.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedstill.core.labels import TensorLike
from fedstill.metrics import tasks as over
from fedstill.metrics.forgetting import forgetting
from fedstill.metrics.values import Values, values


def stsa(matrix: TensorLike) -> float:
    """STSA: mean_{j < T} (max_{l <= T} R[l, j] - a_j). The last row counts as a best one, so it is
    never below 0.

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
    """FOT: mean_{j < T} (R[j, j] - a_j), printed there as "BWT": backward transfer with the other
    sign.

    Source: FOT's FedAVGAggregator.py.
    """
    accuracy = _square(matrix)
    return _earlier_mean(np.diagonal(accuracy) - accuracy[-1])


def lander(matrix: TensorLike) -> float:
    """LANDER: (1/T) sum_t (max_j R[t, j] - R[T, t]) with blanks as 0: a maximum over tasks, not
    over time.

    Source: LANDER's forgetting_cal.py.
    """
    accuracy = over.with_zeros(_square(matrix))
    return float(np.mean(accuracy.max(axis=1) - accuracy[-1]))


def mfcl(matrix: TensorLike) -> float:
    """MFCL: (1/T) (R[1, 1]/100 - a_1 + sum_{j >= 2} (R[j, j] - a_j)): a share minus a percentage in
    its first term.

    Source: MFCL's main.py. Reading: of shares, the same with all numbers a hundred times smaller.
    """
    accuracy = _square(matrix)
    at_end = np.diagonal(accuracy).copy()
    at_end[0] /= 100
    return float(np.mean(at_end - accuracy[-1]))


def _square(matrix: TensorLike) -> Values:
    """The tasks that have come, (T, T)."""
    accuracy = values(matrix, 2, "an accuracy matrix")
    return accuracy[:, : len(accuracy)]


def _earlier_mean(lost: Values) -> float:
    return float(np.mean(lost[:-1])) if len(lost) > 1 else float("nan")


@dataclass(frozen=True)
class Definition:
    """One way to take a number from a matrix: its name, its formula in words, its source, and the
    function.

    ``of``: from (matrix, tasks of its columns). ``by_class``: whether it has a meaning where
    columns are classes.
    ``differs``: for a published variant, in which way it is not Chaudhry's.
    """

    name: str
    says: str
    source: str
    of: Callable[[TensorLike, over.Tasks], float]
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
        over.final_accuracy,
    ),
    Definition(
        "incremental_accuracy",
        "mean over task ends of the mean over tasks so far",
        "iCaRL",
        over.incremental_accuracy,
    ),
    Definition(
        "learning_accuracy",
        "mean of the diagonal: each task at its own end",
        "Riemer et al. 2019",
        over.learning_accuracy,
    ),
    Definition(
        "average_forgetting",
        "best row before the last - last row; earlier tasks",
        "Chaudhry et al. 2018",
        over.average_forgetting,
    ),
    Definition(
        "backward_transfer",
        "last row - diagonal; earlier tasks",
        "Lopez-Paz & Ranzato 2017, BWT",
        over.backward_transfer,
    ),
    Definition(
        "worst_forgetting",
        "the largest term of average_forgetting",
        "fedstill",
        lambda m, own: over.worst_forgetting(m, own)[0],
    ),
    Definition(
        "learned",
        "best row of each column, the last among them: what was ever known",
        "fedstill",
        over.learned,
    ),
    Definition("lost", "learned - final_accuracy", "fedstill", over.lost),
    Definition("kept", "final_accuracy / learned", "fedstill", over.kept_share),
    Definition(
        "forgetting",
        "best earlier row - last row; columns with an earlier row",
        "FedNTD, eq. 5",
        lambda matrix, own: forgetting(over.come(matrix, own)[0]),
        differs="columns of the last task count, too, where an earlier row has them",
    ),
    Definition(
        "forgetting, blanks as 0",
        "the same, over all columns",
        "a trap",
        lambda matrix, own: forgetting(over.with_zeros(over.come(matrix, own)[0])),
        differs="a task that had not come counts as one on which the accuracy was 0",
    ),
    _published(
        "published.stsa",
        "best row, the last among them - last row; earlier tasks",
        "STSA, main.py",
        stsa,
        "the last row counts as a best one, so a gain counts as 0",
    ),
    _published(
        "published.fed_mammoth",
        "diagonal - last row; the mean over all tasks",
        "Fed-Mammoth, utils/training.py",
        fed_mammoth,
        "the diagonal in place of the best row, and the last task's 0 is in the mean",
    ),
    _published(
        "published.fot",
        "diagonal - last row; earlier tasks; printed as BWT",
        "FOT, FedAVGAggregator.py",
        fot,
        "the diagonal in place of the best row: backward transfer with the other sign",
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
"""All definitions, as they are shown. ``forward_transfer`` needs the untrained model, too, and is
not among them.
"""
