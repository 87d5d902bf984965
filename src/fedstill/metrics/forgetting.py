"""Forgetting: how much each class has lost of its best accuracy."""

from __future__ import annotations

import numpy as np

from fedstill.labels import TensorLike
from fedstill.metrics.values import Values, mean_over_classes, values


def forgetting(class_accuracy: TensorLike) -> float:
    """Forgetting F: the mean over classes of (best accuracy of an earlier round - accuracy of the
    last round).

    class_accuracy: (rounds, C) in [0, 1], oldest round first. Gives a number in [-1, 1], lower is
    better; a class counts negatively only if its last round is strictly its best. 0 for one round
    or none. Classes without accuracy in the last round, or in all earlier ones, are left out; NaN
    if none is left.

    Source: FedNTD, eq. 5.

    >>> forgetting([[0.75, 0.25], [0.25, 0.5]])    # half a class lost, a quarter of one won
    0.125
    """
    running = running_forgetting(class_accuracy)
    return running[-1] if running else 0.0


def forgetting_by_class(class_accuracy: TensorLike) -> Values:
    """What each class lost: best accuracy of an earlier round - accuracy of the last round, (C,);
    their mean is F.

    class_accuracy: (rounds, C) in [0, 1], oldest round first. Zeros for one round; NaN for a class
    without accuracy in the last round, or in all earlier ones.

    Source: FedNTD, eq. 5.

    >>> forgetting_by_class([[0.75, 0.25], [0.25, 0.5]])
    array([ 0.5 , -0.25])
    """
    accuracy = values(class_accuracy, 2, "class accuracies of all rounds")
    earlier, last = accuracy[:-1] if len(accuracy) > 1 else accuracy, accuracy[-1]
    lost: Values = np.fmax.reduce(earlier, axis=0) - last
    return lost


def running_forgetting(class_accuracy: TensorLike) -> list[float]:
    """Forgetting after each round, each taken as the last: one value a round, 0 for the first.

    class_accuracy: (rounds, C), oldest round first.

    Source: FedADKD, fig. 7.

    >>> running_forgetting([[0.5], [0.25], [0.75]])
    [0.0, 0.25, -0.25]
    """
    accuracy = values(class_accuracy, 2, "class accuracies of all rounds")
    best = np.fmax.accumulate(accuracy, axis=0)  # fmax ignores NaN
    drops = best[:-1] - accuracy[1:]
    weights = np.ones(accuracy.shape[1])
    return [0.0] * min(len(accuracy), 1) + [mean_over_classes(drop, weights) for drop in drops]
