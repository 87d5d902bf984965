"""What a client that asked for classes gained on them, and what it lost on its own."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedstill.errors import ConfigError
from fedstill.labels import TensorLike
from fedstill.metrics.values import mean_over_classes, same_classes, values


def query_accuracy_gain(before: TensorLike, after: TensorLike, query: Iterable[int]) -> float:
    """The mean gain in accuracy over the queried classes.

    before, after: (C,) class accuracies in [0, 1] of the local model and of the model after the
    query; query: class ids. Gives a number in [-1, 1], higher is better; NaN for an empty query.
    Raises ConfigError for a class id outside [0, C).

    Source: QKT, sec. 4.1 and appendix A.2 (Query Accuracy Gain).

    >>> query_accuracy_gain([0.0, 0.9], [0.5, 0.8], query=[0])
    0.5
    """
    old, new = values(before, 1, "accuracies before"), values(after, 1, "accuracies after")
    same_classes(old, new)
    weights = np.zeros_like(old)
    for c in query:
        if not 0 <= c < len(old):
            raise ConfigError(f"query class {c} is outside [0, {len(old)})")
        weights[c] = 1.0
    return mean_over_classes(new - old, weights)


def query_forgetting(before: TensorLike, after: TensorLike, proportions: TensorLike) -> float:
    """The mean loss of accuracy over the client's own classes; gains do not make up for losses.

    before, after: (C,) class accuracies in [0, 1]; proportions: (C,), own classes are those
    above 0. Gives ``mean min(0, after - before)`` in [-1, 0], higher is better; NaN for a client
    without classes.

    Source: QKT, sec. 4.1 and appendix A.2 (Forgetting).
    Reading: some printed values are positive, which this definition rules out; they are misprints.

    >>> query_forgetting([0.75, 0.5, 0.0], [0.5, 1.0, 0.5], proportions=[0.5, 0.5, 0.0])
    -0.125
    """
    old, new = values(before, 1, "accuracies before"), values(after, 1, "accuracies after")
    shares = values(proportions, 1, "label shares")
    same_classes(old, new, shares)
    return mean_over_classes(np.minimum(0.0, new - old), (shares > 0).astype(np.float64))
