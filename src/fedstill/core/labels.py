"""Label histograms of clients: label shares, their skew, and distances between them.

Floating tensors keep their dtype; everything else (lists, arrays, integer tensors) becomes float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedstill.core.errors import DataError

TensorLike = Tensor | ArrayLike
Metric = Literal["l1", "l2", "kl", "js"]

SMOOTHING = 1e-4
"""Added to shares before a KL divergence, and to distances before a division; SFedKD's only
constant.
"""


def as_floats(values: TensorLike) -> Tensor:
    """The numbers as a floating tensor: a floating tensor unchanged, anything else as float64."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            return values
        return values.to(torch.float64)
    return torch.from_numpy(np.array(values, dtype=np.float64))


def counts(labels: TensorLike, classes: int) -> Tensor:
    """The label histogram: how often each class occurs.

    labels: (n,) integers in [0, classes). Gives (classes,) int64. Raises DataError for other
    labels.

    >>> counts([2, 0, 2], classes=4)
    tensor([1, 0, 2, 0])
    """
    ids = labels
    if not isinstance(ids, Tensor):
        ids = torch.from_numpy(np.array(ids))
    if ids.numel() == 0:
        return torch.zeros(classes, dtype=torch.int64)
    if ids.is_floating_point() or ids.is_complex() or ids.dim() != 1:
        raise DataError(
            f"labels must be a list of class ids, not {ids.dtype} of shape {tuple(ids.shape)}"
        )
    for label in (int(ids.min()), int(ids.max())):
        if not 0 <= label < classes:
            raise DataError(f"label {label} is outside [0, {classes}): check the number of classes")
    return torch.bincount(ids.to(torch.int64), minlength=classes)


def means_by_class(values: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean of each class's values, and how many examples each has.

    values: (n, V) float; labels: (n,) int64 in [0, classes). Gives (classes, V) of the values'
    dtype, summed in float64, zeros for a class without examples; and (classes,) int64. Raises
    DataError for other labels.

    >>> means_by_class(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([2, 2, 0]), classes=3)
    (tensor([[5.],
            [0.],
            [2.]]), tensor([1, 0, 2]))
    """
    size = counts(labels, classes)
    zeros = torch.zeros(classes, values.shape[1], dtype=torch.float64)
    sums = zeros.index_add_(0, labels, values.double())
    return (sums / size.clamp(min=1).unsqueeze(1)).to(values.dtype), size


def proportions(counts: TensorLike) -> Tensor:
    """Label shares from label histograms: each histogram divided by its sum.

    counts: (..., C) >= 0, at least one label each. Gives (..., C) float, summing to 1. Raises
    DataError for a client without labels, which has no shares.

    >>> proportions([1, 0, 3])
    tensor([0.2500, 0.0000, 0.7500], dtype=torch.float64)
    """
    numbers = as_floats(counts)
    total = numbers.sum(-1, keepdim=True)
    if not bool((total > 0).all()) or not bool((numbers >= 0).all()):
        raise DataError(
            "label counts must be >= 0 with at least one label for each client; leave empty "
            "clients out"
        )
    return numbers / total


def gini_index(proportions: TensorLike) -> Tensor:
    """The Gini index of label shares, ``1 - sum_c p_c²``: 0 for one class, 1 - 1/C for equal
    shares.

    proportions: (..., C) summing to 1. Gives (...,) in [0, 1 - 1/C].

    Source: FedADKD, eq. 5.

    >>> gini_index([[1.0, 0.0], [0.5, 0.5]])
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    return (1 - as_floats(proportions).square().sum(-1)).clamp(min=0)


def distance(p: TensorLike, q: TensorLike, metric: Metric, smoothing: float = SMOOTHING) -> Tensor:
    """The distance between two label distributions, over the last axis.

    p, q: (..., C) summing to 1, broadcast against each other; metric: "l1" (sum of differences),
    "l2" (Euclidean), "kl" (KL(p || q), each first smoothed to ``(D + s) / (1 + C s)``), "js" (mean
    KL to the midpoint, not smoothed). In nats where there is a logarithm. Gives (...,) >= 0;
    symmetric except "kl".

    Source: SFedKD, sec. 3.2.
    Reading: the paper does not say what to do where q is 0 and KL infinite; we smooth both with its
    only constant.

    >>> distance([1.0, 0.0], [0.0, 1.0], "l1")
    tensor(2., dtype=torch.float64)
    """
    return DISTANCES[metric](as_floats(p), as_floats(q), smoothing)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1).clamp(min=0)


def _smooth_kl(p: Tensor, q: Tensor, s: float) -> Tensor:
    return _kl((p + s) / (1 + p.shape[-1] * s), (q + s) / (1 + q.shape[-1] * s))


def _js(p: Tensor, q: Tensor) -> Tensor:
    middle = (p + q) / 2
    return (_kl(p, middle) + _kl(q, middle)) / 2


DISTANCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "l1": lambda p, q, s: (p - q).abs().sum(-1),
    "l2": lambda p, q, s: (p - q).square().sum(-1).sqrt(),
    "kl": _smooth_kl,
    "js": lambda p, q, s: _js(p, q),
}
"""The distances by name; the last argument is the smoothing of "kl"."""
