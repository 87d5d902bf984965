"""The arrays that metrics compute with: float64, where NaN (or ``None`` in lists) means "not
measured".

A class without test examples has no accuracy. Metrics ignore such classes, and return NaN if there
are no others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.label_counts import TensorLike

Values = NDArray[np.float64]


def values(numbers: TensorLike, dims: int, name: str) -> Values:
    """Numbers as a float64 array with ``dims`` axes, ``None`` as NaN. For another number of axes,
    raises ConfigError, whose message contains ``name``.

    >>> values([0.5, None], 1, "accuracies")
    array([0.5, nan])
    """
    if isinstance(numbers, Tensor):
        numbers = numbers.detach().cpu().double().numpy()
    array = np.array(numbers, dtype=np.float64)
    if array.ndim != dims:
        raise ConfigError(f"{name} must have {dims} axes, but have shape {array.shape}")
    return array


def same_classes(*arrays: Values) -> None:
    """Raise ConfigError unless all arrays have the same number of classes (their last axis)."""
    if len({a.shape[-1] for a in arrays}) > 1:
        raise ConfigError(
            f"arrays have different numbers of classes: shapes {[a.shape for a in arrays]}"
        )


def mean_over_classes(numbers: Values, weights: Values) -> float:
    """The mean of numbers (C,) with weights (C,) >= 0; NaN numbers are ignored. NaN if the sum of
    the weights is 0.

    >>> mean_over_classes(np.array([1.0, np.nan, 0.0]), np.array([1.0, 5.0, 3.0]))
    0.25
    """
    measured = ~np.isnan(numbers)
    weights = weights[measured]
    total = float(weights.sum())
    if not total > 0:
        return float("nan")
    return float(weights @ numbers[measured]) / total
