"""Robust means: means of models that a few hostile clients can hardly move.

All models have the same weight, because hostile clients could claim any number of examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from statistics import median

import torch
from torch import Tensor

from fedstill.core import trees
from fedstill.core.payload import Tensors


def robust_mean(
    models: Sequence[Tensors], rule: str, start: Tensors | None, suspected: float
) -> dict[str, Tensor]:
    """A robust mean of models with equal names and shapes.

    rule: one of ``aggregation.ROBUST``. start: the model from which the clients started, for
    "norm_clipping"; None: zeros, for changes of models. suspected: the share of hostile models, in
    (0, 0.5); "trimmed_mean" and "krum" round their number down. Integer entries are the first
    model's, and with "krum" those of the chosen model.
    """
    if rule == "norm_clipping":
        return clipped_mean(models, start)
    if rule == "median":
        return coordinate_median(models)
    hostile = rounded_down_share(suspected, len(models))
    if rule == "krum":
        return dict(trees.clone(models[krum(models, hostile)]))
    return trimmed_mean(models, hostile)


def rounded_down_share(share: float, total: int) -> int:
    """A share of a number, rounded down. The share is exact in decimals: 0.29 of 100 is 29."""
    return int(Fraction(str(share)) * total)


def trimmed_mean(models: Sequence[Tensors], trimmed: int) -> dict[str, Tensor]:
    """The mean of each entry without its ``trimmed`` largest and ``trimmed`` smallest values.

    At least one or two values remain; with the largest ``trimmed``, the result is the median of
    each entry.

    Source: Yin et al. (2018), "Byzantine-Robust Distributed Learning", definitions 1 and 2.

    >>> models = [{"a": torch.tensor([x])} for x in (1.0, 2.0, 6.0, 99.0)]
    >>> trimmed_mean(models, 1)["a"].tolist()
    [4.0]
    """
    trimmed = min(trimmed, (len(models) - 1) // 2)
    result = trees.clone(models[0])
    for name in trees.floats(models[0]):
        ordered = torch.stack([model[name] for model in models]).sort(0).values
        result[name] = ordered[trimmed : len(models) - trimmed].mean(0)
    return result


def coordinate_median(models: Sequence[Tensors]) -> dict[str, Tensor]:
    """The median of each entry."""
    return trimmed_mean(models, (len(models) - 1) // 2)


def clipped_mean(models: Sequence[Tensors], start: Tensors | None) -> dict[str, Tensor]:
    """``start`` plus the mean of the models' changes, each scaled down to at most the median of
    their norms.

    Source: Sun et al. (2019), "Can You Really Backdoor Federated Learning?", section 4.
    Reading: the paper's bound is a hyper-parameter; here it is the median norm of the round.
    """
    names = list(trees.floats(models[0]))
    if start is None:
        start = trees.zeros_like(models[0])
    start = trees.only(start, names)
    changes = [trees.sub(trees.only(model, names), start) for model in models]
    norms = [trees.norm(change) for change in changes]
    bound = median(norms)

    clipped = []
    for change, norm in zip(changes, norms, strict=True):
        if norm > bound:
            change = trees.scale(change, bound / norm)
        clipped.append(change)
    mean_change = trees.mean(clipped, [1.0] * len(clipped))
    return {**trees.clone(models[0]), **trees.add(start, mean_change)}


def krum(models: Sequence[Tensors], hostile: int) -> int:
    """The index of the model with the smallest sum of squared distances to its n - hostile - 2
    nearest neighbours; the first in a tie.

    hostile: the assumed number of hostile models, at most (n - 3) / 2.

    Source: Blanchard et al. (2017), "Machine Learning with Adversaries", section 4.
    """
    n = len(models)
    hostile = max(0, min(hostile, (n - 3) // 2))
    squared_distances = torch.zeros(n, n, dtype=torch.float64)
    for name in trees.floats(models[0]):
        values = torch.stack([model[name].flatten() for model in models]).double()
        distances = torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist")
        squared_distances += distances.cpu() ** 2
    # The nearest model of all is the model itself.
    nearest = squared_distances.sort(1).values[:, 1 : 1 + max(1, n - hostile - 2)]
    return int(nearest.sum(1).argmin())
