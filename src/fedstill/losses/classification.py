"""What a model pays for not knowing the label of an example."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cross_entropy(
    logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0, floor: float = 0.0
) -> Tensor:
    """Cross-entropy with the labels, one value per example:
    ``-log(softmax(logits / temperature)[label] + floor)``.

    logits: (B, C) float; labels: (B,) int64 in [0, C); temperature > 0, a number or a () tensor;
    floor >= 0. Gives (B,) of the logits' dtype, in nats. There is no factor for the temperature: a
    small one sharpens and multiplies the gradient. A floor bounds the loss by -log(floor), and
    where the probability is far below it, there is no gradient.

    Source: Malik, "Adaptive Curriculum Learning for Bidirectional Federated Knowledge Distillation"
    (HiPer-FedKD), sec. 3.1.2: local training at the client's own temperature.
    Reading: the paper's formula has no floor, its code 1e-8. Without one we stay in log space,
    which keeps the gradient where a probability underflows.

    >>> cross_entropy(torch.tensor([[0.0, 0.0], [1e4, 0.0]]), torch.tensor([0, 1]))
    tensor([6.9315e-01, 1.0000e+04])
    """
    if isinstance(temperature, Tensor) or temperature != 1:
        logits = logits / temperature
    known = torch.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -(
        torch.logaddexp(known, torch.full_like(known, math.log(floor))) if floor > 0 else known
    )
