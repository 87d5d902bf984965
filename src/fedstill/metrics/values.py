"""The numbers that measures work on: float64 arrays in which NaN (or ``None``) means "not
measured".

A class without a test example has no accuracy. Every measure leaves such classes out, as if the
data set did not have them, and gives NaN where nothing is left.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.label_counts import TensorLike

Values = NDArray[np.float64]


def values(numbers: TensorLike, dims: int, name: str) -> Values:
    """The numbers as a float64 array of ``dims`` axes, ``None`` as NaN; raises ConfigError, which
    has the numbers' name, for another shape.

    >>> values([0.5, None], 1, "accuracies")
    array([0.5, nan])
    """
    if isinstance(numbers, Tensor):
        numbers = numbers.detach().cpu().double().numpy()
    array = np.array(numbers, dtype=np.float64)
    if array.ndim != dims:
        raise ConfigError(f"{name} must be {dims}-dimensional, not of shape {array.shape}")
    return array


def same_classes(*arrays: Values) -> None:
    """Raise ConfigError unless all arrays have equally many classes (their last axis)."""
    if len({a.shape[-1] for a in arrays}) > 1:
        raise ConfigError(
            f"these disagree on the number of classes: shapes {[a.shape for a in arrays]}"
        )


def mean_over_classes(numbers: Values, weights: Values) -> float:
    """The mean of (C,) numbers under (C,) weights >= 0 over those that are not NaN; NaN if they
    weigh nothing.

    >>> mean_over_classes(np.array([1.0, np.nan, 0.0]), np.array([1.0, 5.0, 3.0]))
    0.25
    """
    measured = ~np.isnan(numbers)
    weights = weights[measured]
    total = float(weights.sum())
    if not total > 0:
        return float("nan")
    return float(weights @ numbers[measured]) / total
