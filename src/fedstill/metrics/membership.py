"""Membership inference: how well it can be told which examples a model was trained on.

An attack gives every example a score, the higher the more likely it is a member. Both scores here
are made of the model's confidence in the true class, ``phi = log(p_y / (1 - p_y))``:

- the loss threshold takes phi itself. The loss is ``log(1 + exp(-phi))``, which falls as phi grows,
  so both have the same curve; phi does not round to one number where the loss is almost 0.
- the likelihood ratio compares phi with the phis of models that did not see the example ("out"
  models).

Sources: loss threshold: Yeom et al., "Privacy Risk in Machine Learning: Analyzing the Connection to
Overfitting" (2018). Likelihood ratio, its offline form with Gaussians, and true positives at few
false positives: Carlini et al., "Membership Inference Attacks From First Principles" (2022),
section VI. Interval of the AUC: DeLong, DeLong & Clarke-Pearson, "Comparing the Areas under Two or
More Correlated Receiver Operating Characteristic Curves" (1988). Interval of a rate: Clopper &
Pearson (1934).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedstill.core.label_counts import TensorLike
from fedstill.metrics.values import Values, values

RATES = (0.001, 0.01)
"""The shares of false positives at which true positives are counted."""

GRID = tuple(round(10 ** (-3 + i / 8), 6) for i in range(25))
"""False positives at which a curve is kept for drawing: eight steps to each power of ten."""

LEAST_OUT = 3
"""The number of "out" models from which on there is a likelihood ratio."""

MANY_OUT = 64
"""The number of "out" models from which on each example has a variance of its own."""

LEVEL = 0.95
"""How sure intervals are."""

_TINY = 1e-9


def confidences(logits: Tensor, labels: Tensor) -> Values:
    """``log(p_y / (1 - p_y))`` (n,) of the true class, from (n, C) logits and (n,) labels, in
    float64.

    A row that is not finite says nothing and gets 0.

    >>> confidences(torch.tensor([[2.0, 0.5], [1.0, 1.0]]), torch.tensor([0, 1])).round(6)
    array([1.5, 0. ])
    """
    wide = logits.detach().cpu().double()
    is_label = torch.nn.functional.one_hot(labels.cpu(), wide.shape[1]).bool()
    other_classes = wide.masked_fill(is_label, -torch.inf).logsumexp(1)
    phi = wide[is_label] - other_classes
    finite: Values = torch.where(wide.isfinite().all(1), phi, 0.0).numpy()
    return finite


def likelihood_ratios(target: TensorLike, out: TensorLike) -> Values:
    """How far a model's confidences (n,) are above those of m models (m, n) that did not see
    the examples: (n,).

    ``(phi - mean) / deviation``: as a normal distribution's deviate it orders examples as the
    offline likelihood ratio does, and does not round to 1 in the tail. Below 64 models one variance
    is taken for all examples, as in the source; the deviation then does not change the order.
    """
    phi = values(target, 1, "confidences")
    out_phi = values(out, 2, "confidences of other models")
    variance = out_phi.var(0, ddof=1)
    if len(variance) and len(out_phi) < MANY_OUT:
        variance = np.full_like(variance, variance.mean())
    ratios: Values = (phi - out_phi.mean(0)) / np.maximum(np.sqrt(variance), _TINY)
    return ratios


def auc_interval(members: TensorLike, nonmembers: TensorLike) -> tuple[float, float, float]:
    """The area under the curve, and the ends of its interval.

    The area is the share of pairs in which the member's score is higher, ties counted half (Mann &
    Whitney).
    Reading: DeLong's variance and not Hanley & McNeil's, which supposes how scores are distributed;
    nor a bootstrap, which draws. All examples count as independent. Where the area is 0 or 1, this
    interval has no width.

    >>> auc_interval([3.0, 2.0], [2.0, 1.0])[0]
    0.875
    """
    from scipy.special import ndtri

    inside = values(members, 1, "scores")
    outside = values(nonmembers, 1, "scores")
    m = len(inside)
    n = len(outside)
    ranks = _ranks(np.concatenate([inside, outside]))
    # For each member the share of the nonmembers below it; for each nonmember, of members above it.
    below = (ranks[:m] - _ranks(inside)) / n
    above = 1 - (ranks[m:] - _ranks(outside)) / m
    area = float(below.mean())
    if m < 2 or n < 2:
        return area, 0.0, 1.0
    error = float(np.sqrt(below.var(ddof=1) / m + above.var(ddof=1) / n))
    half_width = float(ndtri(0.5 + LEVEL / 2)) * error
    return area, max(0.0, area - half_width), min(1.0, area + half_width)


def _ranks(scores: Values) -> Values:
    """Ranks from 1, equal scores sharing their mean."""
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks: Values = (np.cumsum(counts) - (counts - 1) / 2)[which.reshape(-1)]
    return ranks


def hits(members: TensorLike, nonmembers: TensorLike, rates: Sequence[float]) -> list[int]:
    """How many members are found where at most these shares of the nonmembers are taken for
    members.

    A threshold is one of the scores, and all examples with that score are on one side of it. A
    group of ties that would take in too many nonmembers is left out as a whole; there is no
    interpolation between two thresholds. With fewer than 1 / rate nonmembers, none of them may be
    taken in.

    >>> hits([9.0, 5.0, 5.0, 1.0], [5.0, 2.0, 0.0, 0.0], [0.1, 0.25])
    [1, 3]
    """
    inside = np.sort(values(members, 1, "scores"))
    outside = np.sort(values(nonmembers, 1, "scores"))
    thresholds = np.unique(np.concatenate([inside, outside]))[::-1]
    true = np.concatenate([[0], len(inside) - np.searchsorted(inside, thresholds)])
    false = np.concatenate([[0], len(outside) - np.searchsorted(outside, thresholds)])
    false_rates = false / len(outside)
    return [int(true[false_rates <= rate][-1]) for rate in rates]


def rate_interval(count: int, total: int) -> tuple[float, float]:
    """The exact interval of a share that was counted (Clopper & Pearson).

    >>> [round(end, 4) for end in rate_interval(0, 10)]
    [0.0, 0.3085]
    """
    from scipy.special import betaincinv

    tail = (1 - LEVEL) / 2
    low = 0.0
    high = 1.0
    if count > 0:
        low = float(betaincinv(count, total - count + 1, tail))
    if count < total:
        high = float(betaincinv(count + 1, total - count, 1 - tail))
    return low, high


def attack(members: TensorLike, nonmembers: TensorLike) -> dict[str, Any]:
    """An attack's curve in numbers, from the scores of members and of nonmembers; at least one of
    each.

    ``auc`` with ``auc_interval``; ``tpr_at_0.001`` and ``tpr_at_0.01``, the share of members that
    is found at these shares of false positives, with ``..._interval``; ``roc``, the same at every
    share of ``GRID``. An interval of a share takes the threshold as given.
    """
    inside = values(members, 1, "scores")
    area, *ends = auc_interval(inside, nonmembers)
    out: dict[str, Any] = {"auc": _short(area), "auc_interval": [_short(v) for v in ends]}
    for rate, count in zip(RATES, hits(inside, nonmembers, RATES), strict=True):
        out[f"tpr_at_{rate}"] = _short(count / len(inside))
        out[f"tpr_at_{rate}_interval"] = [_short(v) for v in rate_interval(count, len(inside))]
    out["roc"] = [_short(count / len(inside)) for count in hits(inside, nonmembers, GRID)]
    return out


def _short(value: float) -> float:
    return round(value, 5)
