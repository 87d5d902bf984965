"""Distances between local and global models: weights, labels, gradients and units."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedstill.core.errors import ConfigError
from fedstill.core.labels import TensorLike
from fedstill.core.records import Tensors
from fedstill.metrics.values import same_classes, values

# Divergence: how far local weights, labels and gradients are from the global ones and from each
# other.


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
    total = 0.0
    squares = 0.0
    for name, value in a.items():
        if name not in b or b[name].shape != value.shape:
            raise ConfigError(
                f"entry {name!r} is not in both models with one shape: they cannot be compared"
            )
        difference = value.detach().double() - b[name].detach().double()
        total += float(difference.abs().sum())
        squares += float(difference.square().sum())
    return total, float(np.sqrt(squares))


def distribution_distance(class_accuracy: TensorLike, proportions: TensorLike) -> float:
    """``sum_c |A_c / sum A - p_c|``: the distance between a client's label distribution and a
    model's distribution of class accuracies; in [0, 2].

    class_accuracy, proportions: (C,). Classes without accuracy are left out of both; NaN for a
    model right nowhere.

    Source: FedNTD, sec. 5.2 and figure 8.
    Reading: the paper divides accuracies by their mean, which would sum to C; to compare with
    proportions they must sum to 1, so we divide by their sum.

    >>> distribution_distance([0.5, 0.5], [1.0, 0.0])
    1.0
    """
    accuracy = values(class_accuracy, 1, "class accuracies")
    shares = values(proportions, 1, "label shares")
    same_classes(accuracy, shares)
    measured = ~np.isnan(accuracy)
    accuracy = accuracy[measured]
    shares = shares[measured]
    total_accuracy = float(accuracy.sum())
    total_share = float(shares.sum())
    if total_accuracy <= 0 or total_share <= 0:
        return float("nan")
    return float(np.abs(accuracy / total_accuracy - shares / total_share).sum())


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
    clients = len(gradients)
    mean_of_squares = 0.0
    square_of_mean = 0.0
    for name in gradients[0]:
        entries = [gradient[name].detach().double() for gradient in gradients]
        mean_of_squares += sum(float(entry.square().sum()) for entry in entries) / clients
        square_of_mean += float((torch.stack(entries).sum(0) / clients).square().sum())
    if not square_of_mean > 0:
        return float("nan")
    return mean_of_squares / square_of_mean


# Weight alignment: whether the same units of two models still stand for the same classes.


def preferred_classes(activations: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The class at which each unit of a layer is most active on average: (U,) int64.

    activations: (n, U) outputs of a layer; labels: (n,) int64 in [0, C). No unit prefers a class
    without examples; of equal classes the first counts, so a silent unit prefers class 0. Raises
    ConfigError without an example.

    Source: FedNTD, sec. 5.1.
    Reading: the text takes the mean over a class's examples, the definition their sum; on a test
    set with equally many examples of each class, both give the same classes. We take the mean,
    which unequal numbers of examples do not distort.

    >>> preferred_classes(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]), 2)
    tensor([0, 1])
    """
    if not len(labels):
        raise ConfigError("the class of a unit needs at least one example")
    labels = labels.cpu()
    outputs = activations.detach().cpu().double()
    zeros = torch.zeros(classes, outputs.shape[1], dtype=torch.float64)
    sums = zeros.index_add_(0, labels, outputs)
    counts = torch.bincount(labels, minlength=classes).unsqueeze(1)
    means = torch.where(counts > 0, sums / counts.clamp(min=1), -torch.inf)
    return means.argmax(0)


def alignment(a: Tensor, b: Tensor) -> float:
    """The share of units that prefer the same class in two models, in [0, 1].

    a, b: (U,) as ``preferred_classes`` gives them. Raises ConfigError for layers of different
    widths, or of none.

    Source: FedNTD, sec. 5.1 and table 2.

    >>> alignment(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]))
    0.75
    """
    if a.shape != b.shape or not a.numel():
        raise ConfigError(
            f"layers of {tuple(a.shape)} and {tuple(b.shape)} units cannot be compared"
        )
    return float((a == b).double().mean())
