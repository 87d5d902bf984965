"""From stored values to what a network sees: images normalised, and augmented where the run asks for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.data.augment import augment, normalise
from fedstill.data.form import IMAGES, About

SHARD = 100
"""Examples in one evaluation pass; fixed, because results in float32 depend on it in the last bit. With many
more, the outputs of a convolution no longer fit into a core's cache."""


@dataclass(frozen=True)
class Inputs:
    """How stored values become inputs: of images the mean and spread of each channel, and the augmentation steps.

    ``mean``, ``std`` of other numbers, one a column or channel, are those by which they are standardised already.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    steps: tuple[str, ...] = ()
    about: About = IMAGES

    def plain(self, values: Tensor) -> Tensor:
        """Values (n, …) as inputs: pixels normalised, in float32; other numbers, and token ids, as they are."""
        return normalise(values, self.mean, self.std) if values.dtype == torch.uint8 else values

    def stored(self, values: Tensor) -> dict[str, Any]:
        """What makes the same inputs of such values again: shape, type, mean, spread, kind, and what names became."""
        type_ = str(values.dtype).removeprefix("torch.")
        told = {"shape": list(values.shape[1:]), "pixels": type_, "mean": self.mean, "std": self.std}
        if self.about.kind == "image":
            return told
        more = {k: v for k, v in asdict(self.about).items() if k not in ("notes", "owners", "kind") and v}
        return {**told, "kind": self.about.kind, **more}

    def trained_on(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Values as one training batch, augmented with draws from the generator."""
        if not self.steps:
            return self.plain(values)
        return augment(values, self.steps, self.mean, self.std, generator)


def channels_last(tensor: Tensor) -> Tensor:
    """A four-dimensional tensor in channels-last order, which the CPU's convolutions prefer; others as they are."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
