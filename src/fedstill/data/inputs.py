"""Turns stored values into the inputs of a network: normalisation of images, and their
augmentation.

Augmentation uses raw pixels. Without a generator, random numbers come from the operating system.

Source: FedNTD's and FedSeq's pipelines: crop, flip and rotation on raw pixels (so that padding is
black), then normalise, then Cutout (so that the hole is 0 after normalisation, the mean colour).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fedstill.core.errors import ConfigError, UnknownName
from fedstill.core.keys import to_device
from fedstill.data.dataset import IMAGE_INFO, DatasetInfo

STEPS = {
    "crop": "pad by 4 black pixels and crop to the original size at random",
    "crop_reflect": "pad by 4 mirrored pixels and crop to the original size at random",
    "flip": "flip horizontally with probability 1/2",
    "rotation": "rotate by up to 15 degrees in both directions, nearest pixel, black outside",
    "cutout": "set a square of side 16, clipped at the borders, to 0 after normalisation",
}
"""The steps of augmentation, in the order in which they are applied."""

PADDING = 4
DEGREES = 15.0
HOLE = 16


@dataclass(frozen=True)
class Inputs:
    """The conversion of stored values to inputs."""

    mean: tuple[float, ...] = ()
    """For images, the mean of each channel; for other numbers, the mean of each column or channel,
    which has already been subtracted.
    """
    std: tuple[float, ...] = ()
    """The standard deviations, like ``mean``."""
    steps: tuple[str, ...] = ()
    """The steps of augmentation: names of ``STEPS``."""
    about: DatasetInfo = IMAGE_INFO
    """The description of examples."""

    def plain(self, values: Tensor) -> Tensor:
        """Values (n, …) as inputs without augmentation: normalised float32 pixels, or unchanged
        numbers and token ids.
        """
        if values.dtype == torch.uint8:
            return normalise(values, self.mean, self.std)
        return values

    def trained_on(self, values: Tensor, generator: torch.Generator | None) -> Tensor:
        """Values as a training batch, augmented with random numbers from the generator."""
        if not self.steps:
            return self.plain(values)
        return augment(values, self.steps, self.mean, self.std, generator)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x / 255 - mean) / std by channel. images: (B, C, H, W) uint8; mean, std: C numbers -> (B, C,
    H, W) float32.
    """
    shift = _by_channel(tuple(mean), images.device)
    scale = _by_channel(tuple(std), images.device)
    return images.to(torch.float32).div_(255).sub_(shift).div_(scale)


@lru_cache(maxsize=32)
def _by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers (C, 1, 1) on a device; cached, so that batches do not wait for a copy."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


def augment(
    images: Tensor,
    steps: Collection[str],
    mean: Sequence[float],
    std: Sequence[float],
    generator: torch.Generator | None,
) -> Tensor:
    """A normalised and augmented training batch (B, C, H, W) float32.

    images: (B, C, H, W) uint8; steps: names in ``STEPS``, which are applied in the order of the
    papers, independent of their order here. Each image has its own random numbers from
    ``generator``. Raises UnknownName or ConfigError, as ``check_steps`` does.
    """
    check_steps(steps)
    sources = PixelSources.identity(images)
    # Sources are computed backwards, from the batch to the raw images, so the last step comes
    # first.
    if "rotation" in steps:
        sources = sources.rotated(generator)
    if "flip" in steps:
        sources = sources.flipped(generator)
    if "crop" in steps or "crop_reflect" in steps:
        sources = sources.cropped(generator, reflect="crop_reflect" in steps)
    batch = normalise(sources.pixels_of(images), mean, std)
    if "cutout" in steps:
        batch = _cutout(batch, generator)
    return batch


def check_steps(steps: Collection[str]) -> None:
    """Raise UnknownName for an unknown step, and ConfigError if both kinds of crop are listed."""
    for step in steps:
        if step not in STEPS:
            raise UnknownName("augmentation", step, STEPS)
    if {"crop", "crop_reflect"} <= set(steps):
        raise ConfigError(
            "augmentations 'crop' and 'crop_reflect' cannot be combined; remove one of them"
        )


@dataclass(frozen=True)
class PixelSources:
    """The source of each pixel of a batch: a pixel of the raw image."""

    rows: Tensor
    """(B, H, W) int64."""
    columns: Tensor
    """(B, H, W) int64."""
    inside: Tensor
    """(B, H, W) bool: whether the source is inside the image; pixels outside are black."""

    @staticmethod
    def identity(images: Tensor) -> PixelSources:
        """The sources of a batch without augmentation, for images (B, C, H, W)."""
        count, _, height, width = images.shape
        shape = (count, height, width)
        rows = torch.arange(height, device=images.device).view(1, -1, 1)
        columns = torch.arange(width, device=images.device).view(1, 1, -1)
        inside = torch.ones((1, 1, 1), dtype=torch.bool, device=images.device)
        return PixelSources(rows.expand(shape), columns.expand(shape), inside.expand(shape))

    def rotated(self, generator: torch.Generator | None) -> PixelSources:
        """The sources after a random rotation of each image about its centre by up to DEGREES."""
        count, height, width = self.rows.shape
        angles = (2 * _uniform(count, generator) - 1) * math.radians(DEGREES)
        angles = to_device(angles, self.rows.device).view(-1, 1, 1)

        y = self.rows + 0.5 - height / 2
        x = self.columns + 0.5 - width / 2
        cos = angles.cos()
        sin = angles.sin()
        rows = (cos * y - sin * x + height / 2).floor().long()
        columns = (sin * y + cos * x + width / 2).floor().long()
        return self._moved(rows, columns)

    def flipped(self, generator: torch.Generator | None) -> PixelSources:
        """The sources after a horizontal flip of about half of the images."""
        count, _, width = self.rows.shape
        is_mirrored = to_device(_uniform(count, generator) < 0.5, self.rows.device).view(-1, 1, 1)
        columns = torch.where(is_mirrored, width - 1 - self.columns, self.columns)
        return replace(self, columns=columns)

    def cropped(self, generator: torch.Generator | None, *, reflect: bool) -> PixelSources:
        """The sources after padding by PADDING pixels and a random crop.

        reflect: whether the padding mirrors the image; otherwise it is black.
        """
        count, height, width = self.rows.shape
        draws = _integers(2 * PADDING + 1, (count, 2), generator)
        offsets = to_device(draws, self.rows.device) - PADDING
        rows = self.rows + offsets[:, 0].view(-1, 1, 1)
        columns = self.columns + offsets[:, 1].view(-1, 1, 1)
        if reflect:
            rows = _mirrored(rows, height)
            columns = _mirrored(columns, width)
        return self._moved(rows, columns)

    def pixels_of(self, images: Tensor) -> Tensor:
        """The pixels (B, C, H, W) of the batch, from raw images of the same shape."""
        count, channels, height, width = images.shape
        rows = self.rows.clamp(0, height - 1)
        columns = self.columns.clamp(0, width - 1)
        flat = (rows * width + columns).view(count, 1, height * width)
        pixels = images.flatten(2).gather(2, flat.expand(-1, channels, -1)).view_as(images)
        return pixels * self.inside.unsqueeze(1)

    def _moved(self, rows: Tensor, columns: Tensor) -> PixelSources:
        _, height, width = self.rows.shape
        is_inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        return PixelSources(rows, columns, self.inside & is_inside)


def _uniform(count: int, generator: torch.Generator | None) -> Tensor:
    """Uniform random numbers in [0, 1), (count,)."""
    if generator is None:
        return torch.tensor([random.SystemRandom().random() for _ in range(count)])
    return torch.rand(count, generator=generator)


def _integers(end: int, shape: tuple[int, int], generator: torch.Generator | None) -> Tensor:
    """Random integers in [0, end)."""
    if generator is None:
        draws = [random.SystemRandom().randrange(end) for _ in range(math.prod(shape))]
        return torch.tensor(draws, dtype=torch.int64).view(shape)
    return torch.randint(end, shape, generator=generator)


def _mirrored(index: Tensor, size: int) -> Tensor:
    """Positions reflected at the border pixels, which are not repeated. Positions far outside stay
    outside.
    """
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)


def _cutout(batch: Tensor, generator: torch.Generator | None) -> Tensor:
    """A batch with a hole in each image. The centre is uniform over the pixels; the hole covers
    HOLE / 2 pixels before the centre, and HOLE / 2 - 1 after it.
    """
    _, _, height, width = batch.shape
    in_rows = _hole_along(height, batch, generator)
    in_columns = _hole_along(width, batch, generator)
    hole = in_rows.unsqueeze(2) & in_columns.unsqueeze(1)
    return batch.masked_fill(hole.unsqueeze(1), 0.0)


def _hole_along(size: int, batch: Tensor, generator: torch.Generator | None) -> Tensor:
    """Whether positions along an axis are in the hole of each image: (B, size) bool."""
    centres = to_device(_integers(size, (len(batch), 1), generator), batch.device)
    distances = torch.arange(size, device=batch.device).view(1, -1) - centres + HOLE // 2
    return (distances >= 0) & (distances < HOLE)
