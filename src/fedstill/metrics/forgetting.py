"""Forgetting of classes, and consistency of the classes that a model is good at."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from fedstill.core.labels import TensorLike
from fedstill.metrics.values import Values, mean_over_classes, same_classes, values

# Forgetting: how much each class has lost of its best accuracy.


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
    if not running:
        return 0.0
    return running[-1]


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
    earlier = accuracy
    if len(accuracy) > 1:
        earlier = accuracy[:-1]
    lost: Values = np.fmax.reduce(earlier, axis=0) - accuracy[-1]
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


# Prediction consistency: whether a model is still good at the same classes as one before it.


def consistency(previous: TensorLike, current: TensorLike) -> float:
    """The cosine of two models' class accuracies: 1 for equal profiles, 0 for models with no class
    in common.

    previous, current: (C,) in [0, 1]. Classes without accuracy in either are left out; NaN for a
    model that is right nowhere.

    Source: FedNTD, fig. 2(b) (consecutive rounds); SFedKD, fig. 1(b) (consecutive clients).

    >>> consistency([0.6, 0.0], [0.3, 0.0])
    1.0
    """
    old = values(previous, 1, "accuracies before")
    new = values(current, 1, "accuracies after")
    same_classes(old, new)
    measured = ~(np.isnan(old) | np.isnan(new))
    old = old[measured]
    new = new[measured]
    lengths = float(np.linalg.norm(old) * np.linalg.norm(new))
    if not lengths > 0:
        return float("nan")
    return float(old @ new) / lengths


def running_consistency(class_accuracy: TensorLike) -> list[float]:
    """The consistency of each round with the one before: one value a round, NaN for the first.

    class_accuracy: (rounds, C), oldest round first.

    >>> running_consistency([[1.0, 0.0], [0.0, 1.0], [0.0, 0.5]])
    [nan, 0.0, 1.0]
    """
    accuracy = values(class_accuracy, 2, "class accuracies of all rounds")
    return [float("nan")] * min(len(accuracy), 1) + [
        consistency(a, b) for a, b in pairwise(accuracy)
    ]
