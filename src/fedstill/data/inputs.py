"""From stored images to what a network sees: normalised, and augmented where the run asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedstill.data.augment import augment, normalise

SHARD = 100
"""Examples in one evaluation pass; fixed, because results in float32 depend on it in the last bit. With many
more, the outputs of a convolution no longer fit into a core's cache."""


@dataclass(frozen=True)
class Inputs:
    """How images become inputs: the mean and spread of each channel, and the augmentation steps of training."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    steps: tuple[str, ...] = ()

    def plain(self, images: Tensor) -> Tensor:
        """Images (n, channels, H, W) as inputs in float32; images that are floats already are left as they are."""
        return normalise(images, self.mean, self.std) if images.dtype == torch.uint8 else images

    def stored(self, images: Tensor) -> dict[str, Any]:
        """What makes the same inputs of such images again: shape and type of one, mean and spread of each channel."""
        kind = str(images.dtype).removeprefix("torch.")
        return {"shape": list(images.shape[1:]), "pixels": kind, "mean": self.mean, "std": self.std}

    def trained_on(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Images as one training batch, augmented with draws from the generator."""
        if not self.steps:
            return self.plain(images)
        return augment(images, self.steps, self.mean, self.std, generator)


def channels_last(tensor: Tensor) -> Tensor:
    """A four-dimensional tensor in channels-last order, which the CPU's convolutions prefer; others as they are."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
