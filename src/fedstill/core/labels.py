"""What label histograms say of a client: its shares, how skewed they are, how far from another's.

Floating tensors keep their dtype; everything else (lists, arrays, integer tensors) is taken as
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedstill.core.errors import ConfigError, DataError, UnknownName

TensorLike = Tensor | ArrayLike
Metric = Literal["l1", "l2", "kl", "js"]
Schedule = Literal["linear", "exponential"]

SMOOTHING = 1e-4
"""What is added to shares before a KL divergence, and to distances before they divide; SFedKD's
only constant.
"""


def as_floats(values: TensorLike) -> Tensor:
    """The numbers as a floating tensor: a floating tensor as it is, anything else as float64."""
    if isinstance(values, Tensor):
        return values if values.is_floating_point() else values.to(torch.float64)
    return torch.from_numpy(np.array(values, dtype=np.float64))


def counts(labels: TensorLike, classes: int) -> Tensor:
    """The label histogram: how often each class occurs.

    labels: (n,) integers in [0, classes). Gives (classes,) int64. Raises DataError for other
    labels.

    >>> counts([2, 0, 2], classes=4)
    tensor([1, 0, 2, 0])
    """
    ids = labels if isinstance(labels, Tensor) else torch.from_numpy(np.array(labels))
    if ids.numel() == 0:
        return torch.zeros(classes, dtype=torch.int64)
    if ids.is_floating_point() or ids.is_complex() or ids.dim() != 1:
        raise DataError(
            f"labels must be a list of class ids, not {ids.dtype} of shape {tuple(ids.shape)}"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"label {low if low < 0 else high} is outside [0, {classes}): check the number of "
            "classes"
        )
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
    sums = torch.zeros(classes, values.shape[1], dtype=torch.float64).index_add_(
        0, labels, values.double()
    )
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


def adaptive_weights(gini: TensorLike, delta: float) -> Tensor:
    """The weights phi of one cohort's true-class distillation: in proportion to
    ``log(1 + delta G)``, mean 1.

    gini: (n,) in [0, 1], one per client of the cohort; delta > 0, larger = more equal weights.
    Gives (n,) >= 0; ones if all are 0. Raises ConfigError if delta <= 0.

    Source: FedADKD, eq. 6 and 7.
    Reading: eq. 7 prints G where Algorithm 1 asks for f(G) of eq. 6; we use f(G). A cohort of
    single-class clients alone has f(G) = 0 throughout, and gets phi = 1.

    >>> adaptive_weights([0.0, 0.5, 0.5], delta=1.0)
    tensor([0.0000, 1.5000, 1.5000], dtype=torch.float64)
    """
    if not delta > 0:
        raise ConfigError(f"delta = {delta!r} must be > 0; it spreads the weights of the cohort")
    spread = torch.log1p(delta * as_floats(gini))
    total = spread.sum()
    some = total > 0
    shares = spread / torch.where(some, total, torch.ones_like(total))
    return torch.where(some, len(spread) * shares, torch.ones_like(spread))


def distance(p: TensorLike, q: TensorLike, metric: Metric, smoothing: float = SMOOTHING) -> Tensor:
    """How far two label distributions are apart, over the last axis.

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


def discrepancy_weights(
    teachers: TensorLike, student: TensorLike, metric: Metric = "kl", smoothing: float = SMOOTHING
) -> tuple[Tensor, Tensor]:
    """The weights of K teachers for one student: g for the other classes, h for the true class,
    each summing to 1.

    teachers: (K, C), student: (C,) label shares; smoothing: as in ``distance``. With d_k =
    distance(teacher k, student): ``g_k = d_k / sum d`` (1/K if all are 0), ``h_k`` in proportion to
    ``1 / (d_k + 1e-4)``. Gives (g, h), each (K,) >= 0.

    Source: SFedKD, eq. 5.
    Reading: for KL the teacher comes first, both smoothed. A teacher with the student's own labels
    gets g = 0.

    >>> g, h = discrepancy_weights([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0])
    >>> g.round(decimals=3), h.round(decimals=3)
    (tensor([0., 1.], dtype=torch.float64), tensor([1., 0.], dtype=torch.float64))
    """
    d = distance(teachers, student, metric, smoothing)
    total = d.sum()
    apart = total > 0
    g = torch.where(
        apart,
        d / torch.where(apart, total, torch.ones_like(total)),
        torch.ones_like(d) / max(len(d), 1),
    )
    near = 1 / (d + SMOOTHING)
    return g, near / near.sum()


def heterogeneity_score(
    proportions: TensorLike, global_proportions: TensorLike, count_absent: bool = False
) -> float:
    """How far a client's labels are from the global ones: the mean relative deviation of its
    classes, at most 1.

    proportions: (C,) of the client; global_proportions: (C,), the mean over clients, here floored
    at 0.01 and renormalised. Gives ``min(1, (1/C) sum_c |p_c / g_c - 1|)`` in [0, 1], over the
    classes the client has.

    Source: HiPer-FedKD, sec. 3.1.1.
    Reading: the text's sum holds absent classes too, each worth 1; the code that made the tables
    leaves them out but divides by C all the same. ``count_absent`` follows the text.

    >>> heterogeneity_score([0.5, 0.5], [0.5, 0.5])
    0.0
    """
    own, everybody = (
        as_floats(proportions).to(torch.float64),
        as_floats(global_proportions).to(torch.float64),
    )
    everybody = everybody.clamp(min=0.01)
    deviation = (own / (everybody / everybody.sum()) - 1).abs()
    present = torch.ones_like(own) if count_absent else (own > 0).to(own.dtype)
    return min(1.0, float((deviation * present).sum()) / len(own))


def client_temperature(
    score: float, schedule: Schedule, low: float = 0.01, high: float = 0.99, decay: float = 3.0
) -> float:
    """The temperature of a client's local training: the more its labels differ, the lower.

    score: in [0, 1], of ``heterogeneity_score``; "linear" is ``0.99 - 0.98 score``, "exponential"
    is ``0.99 exp(-decay score)``; clamped to [low, high]. Raises UnknownName for another schedule.

    Source: HiPer-FedKD, sec. 3.1.2 (linear) and its Improvement 2.1 (exponential).
    Reading: the text clamps at 0.05, the notebook whose numbers are printed at 0.01; ``low=0.05``
    follows the text.

    >>> client_temperature(0.5, "linear"), client_temperature(1.0, "linear", low=0.05)
    (0.5, 0.05)
    """
    if schedule == "linear":
        value = 0.99 - 0.98 * score
    elif schedule == "exponential":
        value = 0.99 * math.exp(-decay * score)
    else:
        raise UnknownName("temperature schedule", schedule, ["linear", "exponential"])
    return min(max(value, low), high)


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
