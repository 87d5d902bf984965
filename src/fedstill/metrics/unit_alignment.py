"""Weight alignment: whether the same units of two models still stand for the same classes."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstill.errors import ConfigError


def preferred_classes(activations: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The class at which each unit of a layer is most active on average: (U,) int64.

    activations: (n, U) outputs of a layer; labels: (n,) int64 in [0, C). No unit prefers a class
    without examples; of equal classes the first counts, so a silent unit prefers class 0. Raises
    ConfigError without an example.

    Source: FedNTD, sec. 5.1.
    Reading: the text takes the mean over a class's examples, the definition their sum; on a test
    set with equally many examples a class both give the same classes. We take the mean, which
    others do not distort.

    >>> preferred_classes(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]), 2)
    tensor([0, 1])
    """
    if not len(labels):
        raise ConfigError("the class of a unit needs at least one example")
    labels, outputs = labels.cpu(), activations.detach().cpu().double()
    sums = torch.zeros(classes, outputs.shape[1], dtype=torch.float64).index_add_(
        0, labels, outputs
    )
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
