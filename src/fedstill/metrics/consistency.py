"""Prediction consistency: whether a model is still good at the same classes as one before it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from fedstill.labels import TensorLike
from fedstill.metrics.values import same_classes, values


def consistency(before: TensorLike, after: TensorLike) -> float:
    """The cosine of two models' class accuracies: 1 for equal profiles, 0 for models with no class
    in common.

    before, after: (C,) in [0, 1]. Classes without accuracy in either are left out; NaN for a model
    that is right nowhere.

    Source: FedNTD, fig. 2(b) (consecutive rounds); SFedKD, fig. 1(b) (consecutive clients).

    >>> consistency([0.6, 0.0], [0.3, 0.0])
    1.0
    """
    old, new = values(before, 1, "accuracies before"), values(after, 1, "accuracies after")
    same_classes(old, new)
    known = ~(np.isnan(old) | np.isnan(new))
    lengths = float(np.linalg.norm(old[known]) * np.linalg.norm(new[known]))
    return float(old[known] @ new[known]) / lengths if lengths > 0 else float("nan")


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
