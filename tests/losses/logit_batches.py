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

    def __getitem__(self, index: int | slice) -> Batch:
        """The batch of a client in a stack, or some examples of a batch."""
        return Batch(self.student[index], self.teacher[index], self.labels[index])


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
    student = scale * torch.randn(*shape, classes, generator=generator)
    teacher = scale * torch.randn(*shape, classes, generator=generator)
    labels = torch.randint(classes, shape, generator=generator)
    return Batch(student.to(dtype), teacher.to(dtype), labels)
