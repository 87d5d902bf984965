"""Random batches of logits and labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """What a distillation loss takes."""

    student: Tensor
    teacher: Tensor
    labels: Tensor


def random_batch(
    *shape: int,
    classes: int,
    seed: int = 0,
    scale: float = 3.0,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """Normal logits with this standard deviation, and uniform labels; ``shape`` is that of the
    labels.
    """
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        student=(scale * torch.randn(*shape, classes, generator=generator)).to(dtype),
        teacher=(scale * torch.randn(*shape, classes, generator=generator)).to(dtype),
        labels=torch.randint(classes, shape, generator=generator),
    )
