"""Membership inference: how well an attack distinguishes training examples from other examples.

An attack assigns a score to every example; a higher score means that the example is more likely to
be a member of the training set. Both attacks use the model's confidence in the true class,
``phi = log(p_y / (1 - p_y))``:

- The loss threshold uses phi itself. The loss is ``log(1 + exp(-phi))``, which decreases with phi,
  so both have the same ROC curve; but losses close to 0 would round to the same number.
- The likelihood ratio compares phi with the phis of models that were not trained on the example
  ("out" models).

Sources: loss threshold: Yeom et al., "Privacy Risk in Machine Learning: Analyzing the Connection to
Overfitting" (2018). Offline likelihood ratio with Gaussians, and true positive rates at low false
positive rates: Carlini et al., "Membership Inference Attacks From First Principles" (2022),
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
from fedstill.metrics.accuracy import Values, float_array

RATES = (0.001, 0.01)
"""The false positive rates at which true positive rates are computed."""

GRID = tuple(round(10 ** (-3 + i / 8), 6) for i in range(25))
"""The false positive rates of a curve for drawing: eight per power of ten."""

LEAST_OUT = 3
"""The smallest number of "out" models for a likelihood ratio."""

MANY_OUT = 64
"""The smallest number of "out" models for a separate variance of each example."""

LEVEL = 0.95
"""The confidence level of intervals."""

_TINY = 1e-9


def confidences(logits: Tensor, labels: Tensor) -> Values:
    """``log(p_y / (1 - p_y))`` (n,) of the true class, from (n, C) logits and (n,) labels, in
    float64.

    It is 0 for a row with a logit that is not finite.

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
    """The z-scores (n,) of a model's confidences (n,) among the confidences (m, n) of m "out"
    models.

    ``(phi - mean) / std`` orders examples like the offline likelihood ratio, but does not round to
    1 in the tail. With fewer than 64 models, all examples share one variance, as in the source; it
    then does not affect the order.
    """
    phi = float_array(target, 1, "confidences")
    out_phi = float_array(out, 2, "confidences of other models")
    variance = out_phi.var(0, ddof=1)
    if len(variance) and len(out_phi) < MANY_OUT:
        variance = np.full_like(variance, variance.mean())
    ratios: Values = (phi - out_phi.mean(0)) / np.maximum(np.sqrt(variance), _TINY)
    return ratios


def auc_interval(members: TensorLike, nonmembers: TensorLike) -> tuple[float, float, float]:
    """The area under the ROC curve, and the ends of its interval.

    The area is the share of pairs in which the member's score is higher; ties count half (Mann &
    Whitney).
    Reading: we use DeLong's variance. Hanley & McNeil's assumes a distribution of the scores, and a
    bootstrap is random. Examples are assumed to be independent. For an area of 0 or 1, the interval
    has width 0.

    >>> auc_interval([3.0, 2.0], [2.0, 1.0])[0]
    0.875
    """
    from scipy.special import ndtri

    inside = float_array(members, 1, "scores")
    outside = float_array(nonmembers, 1, "scores")
    m = len(inside)
    n = len(outside)
    ranks = _ranks(np.concatenate([inside, outside]))
    # For each member, the share of nonmembers below it; for each nonmember, that of members above.
    below = (ranks[:m] - _ranks(inside)) / n
    above = 1 - (ranks[m:] - _ranks(outside)) / m
    area = float(below.mean())
    if m < 2 or n < 2:
        return area, 0.0, 1.0
    error = float(np.sqrt(below.var(ddof=1) / m + above.var(ddof=1) / n))
    half_width = float(ndtri(0.5 + LEVEL / 2)) * error
    return area, max(0.0, area - half_width), min(1.0, area + half_width)


def _ranks(scores: Values) -> Values:
    """Ranks from 1; equal scores have the mean of their ranks."""
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks: Values = (np.cumsum(counts) - (counts - 1) / 2)[which.reshape(-1)]
    return ranks


def hits(members: TensorLike, nonmembers: TensorLike, rates: Sequence[float]) -> list[int]:
    """The number of true positives (members above the threshold) at each of some false positive
    rates.

    Each threshold is a score, and the false positive rate is at most the given rate. Examples with
    equal scores are on the same side of a threshold, and there is no interpolation between
    thresholds. With fewer than 1 / rate nonmembers, no false positive is allowed.

    >>> hits([9.0, 5.0, 5.0, 1.0], [5.0, 2.0, 0.0, 0.0], [0.1, 0.25])
    [1, 3]
    """
    inside = np.sort(float_array(members, 1, "scores"))
    outside = np.sort(float_array(nonmembers, 1, "scores"))
    thresholds = np.unique(np.concatenate([inside, outside]))[::-1]
    true = np.concatenate([[0], len(inside) - np.searchsorted(inside, thresholds)])
    false = np.concatenate([[0], len(outside) - np.searchsorted(outside, thresholds)])
    false_rates = false / len(outside)
    return [int(true[false_rates <= rate][-1]) for rate in rates]


def rate_interval(count: int, total: int) -> tuple[float, float]:
    """The exact interval of a proportion (Clopper & Pearson).

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
    """The ROC curve of an attack in numbers, from the scores of at least one member and at least
    one nonmember.

    Returns ``auc`` and ``auc_interval``; ``tpr_at_0.001`` and ``tpr_at_0.01``, the true positive
    rates at these false positive rates, with ``..._interval``; and ``roc``, the true positive rates
    at all false positive rates of ``GRID``. The intervals of rates assume a fixed threshold.
    """
    inside = float_array(members, 1, "scores")
    area, *ends = auc_interval(inside, nonmembers)
    out: dict[str, Any] = {"auc": _short(area), "auc_interval": [_short(v) for v in ends]}
    for rate, count in zip(RATES, hits(inside, nonmembers, RATES), strict=True):
        out[f"tpr_at_{rate}"] = _short(count / len(inside))
        out[f"tpr_at_{rate}_interval"] = [_short(v) for v in rate_interval(count, len(inside))]
    out["roc"] = [_short(count / len(inside)) for count in hits(inside, nonmembers, GRID)]
    return out


def _short(value: float) -> float:
    return round(value, 5)
