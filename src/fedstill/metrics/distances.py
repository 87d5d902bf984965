"""Divergence: how far local weights, labels and gradients are from the global ones and from each
other.
"""

from __future__ import annotations

import numpy as np
import torch

from fedstill.errors import ConfigError
from fedstill.labels import TensorLike
from fedstill.metrics.values import same_classes, values
from fedstill.records import Tensors


def weight_divergence(a: Tensors, b: Tensors) -> tuple[float, float]:
    """The L1 and the Euclidean distance of two models' weights, summed in float64 over all entries
    of ``a``.

    a, b: named tensors of equal shapes. Raises ConfigError if an entry is missing or has another
    shape.

    Source: FedNTD, sec. 5.2 and figure 8.
    Reading: table 3 of the paper is an L1 norm, section 5.2 does not say which; both are given.

    >>> weight_divergence({"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])})
    (7.0, 5.0)
    """
    total = squares = 0.0
    for name, value in a.items():
        if name not in b or b[name].shape != value.shape:
            raise ConfigError(
                f"entry {name!r} is not in both models with one shape: they cannot be compared"
            )
        gap = value.detach().double() - b[name].detach().double()
        total, squares = total + float(gap.abs().sum()), squares + float(gap.square().sum())
    return total, float(np.sqrt(squares))


def distribution_distance(class_accuracy: TensorLike, proportions: TensorLike) -> float:
    """``sum_c |A_c / sum A - p_c|``: how unlike a client's labels are to what a model is good at;
    in [0, 2].

    class_accuracy, proportions: (C,). Classes without accuracy are left out of both; NaN for a
    model right nowhere.

    Source: FedNTD, sec. 5.2 and figure 8.
    Reading: the paper divides accuracies by their mean, which would sum to C; to compare with
    proportions they must sum to 1, so we divide by their sum.

    >>> distribution_distance([0.5, 0.5], [1.0, 0.0])
    1.0
    """
    accuracy, shares = (
        values(class_accuracy, 1, "class accuracies"),
        values(proportions, 1, "label shares"),
    )
    same_classes(accuracy, shares)
    known = ~np.isnan(accuracy)
    total, own = float(accuracy[known].sum()), float(shares[known].sum())
    if total <= 0 or own <= 0:
        return float("nan")
    return float(np.abs(accuracy[known] / total - shares[known] / own).sum())


def gradient_diversity(gradients: list[Tensors]) -> float:
    """``mean_k ||g_k||^2 / ||mean_k g_k||^2``: 1 for clients that agree, more the more they pull
    apart; at least 1.

    gradients: one a client, named tensors of equal shapes, summed in float64. NaN without any, or
    if their mean is 0.

    Source: FedNTD, eq. 8.
    Reading: eq. 20 leaves out 1/K under the sum in the denominator, and would be this over K^2; we
    follow eq. 8.

    >>> gradient_diversity([{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}])
    2.0
    """
    if not gradients:
        return float("nan")
    own = mean = 0.0
    for name in gradients[0]:
        each = [g[name].detach().double() for g in gradients]
        own += sum(float(g.square().sum()) for g in each) / len(each)
        mean += float((torch.stack(each).sum(0) / len(each)).square().sum())
    return own / mean if mean > 0 else float("nan")
