"""From stored values to what a network sees: images normalised, and augmented where the run asks
for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedstill.core.errors import ConfigError, UnknownName
from fedstill.core.keys import resident
from fedstill.data.form import IMAGES, MANY, About

# Batches made of raw images: augmented and normalised on tensors, with every draw from the
# generator given.
#
# Source: FedNTD's and FedSeq's pipelines: crop, flip and rotation on raw pixels (so that padding is
# black), then normalise, then Cutout (so that the hole is 0 after normalisation, the mean colour).


STEPS = {
    "crop": "pad by 4 black pixels and cut out the old size at random",
    "crop_reflect": "pad by 4 mirrored pixels and cut out the old size at random",
    "flip": "mirror left and right, every other image on average",
    "rotation": "turn by up to 15 degrees either way, nearest pixel, black outside",
    "cutout": "set one square of side 16, clipped at the borders, to 0 after normalisation",
}
PADDING = 4
DEGREES = 15.0
HOLE = 16


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x / 255 - mean) / std by channel. images: (B, C, H, W) uint8; mean, std: C numbers -> (B, C,
    H, W) float32.
    """
    shift, scale = (_by_channel(tuple(v), images.device) for v in (mean, std))
    return images.to(torch.float32).div_(255).sub_(shift).div_(scale)


def augment(
    images: Tensor,
    steps: Collection[str],
    mean: Sequence[float],
    std: Sequence[float],
    generator: torch.Generator,
) -> Tensor:
    """A training batch: the named steps in the papers' order, whatever order they are listed in,
    and normalisation.

    images: (B, C, H, W) uint8; steps: names of ``STEPS``, none for ``normalise`` alone -> (B, C, H,
    W) float32. Every image has draws of its own, all from ``generator``. Raises UnknownName or
    ConfigError for ``check_steps``.
    """
    check_steps(steps)
    count, _, height, width = images.shape
    device = images.device
    rows, columns = _grid(count, height, width, device)
    inside = torch.ones(1, dtype=torch.bool, device=device)
    # From the batch back to the raw images: the step applied last is undone first.
    if "rotation" in steps:
        rows, columns, inside = _rotation(
            rows, columns, resident(_draw_angles(count, generator), device), height, width
        )
    if "flip" in steps:
        mirrored = resident(torch.rand(count, generator=generator) < 0.5, device).view(-1, 1, 1)
        columns = torch.where(mirrored, width - 1 - columns, columns)
    if "crop" in steps or "crop_reflect" in steps:
        offsets = (
            resident(torch.randint(2 * PADDING + 1, (count, 2), generator=generator), device)
            - PADDING
        )
        rows, columns = rows + offsets[:, 0].view(-1, 1, 1), columns + offsets[:, 1].view(-1, 1, 1)
        if "crop_reflect" in steps:
            rows, columns = _mirror(rows, height), _mirror(columns, width)
        inside = inside & (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    batch = normalise(_gather(images, rows, columns, inside), mean, std)
    return _cutout(batch, generator) if "cutout" in steps else batch


def check_steps(steps: Collection[str]) -> None:
    """Raise UnknownName for a step that does not exist, ConfigError for both kinds of crop at
    once.
    """
    for step in steps:
        if step not in STEPS:
            raise UnknownName("augmentation", step, STEPS)
    if {"crop", "crop_reflect"} <= set(steps):
        raise ConfigError(
            "augmentations 'crop' and 'crop_reflect' exclude each other; leave one out"
        )


@lru_cache(maxsize=32)
def _by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(C, 1, 1) numbers on a device, sent there once: a batch must not wait for them."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


def _grid(count: int, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of every pixel: (B, H, W) int64 each."""
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    return rows.view(1, -1, 1).expand(count, height, width), columns.view(1, 1, -1).expand(
        count, height, width
    )


def _draw_angles(count: int, generator: torch.Generator) -> Tensor:
    """(B, 1, 1) angles in radians, uniform in ± DEGREES."""
    unit = torch.rand(count, generator=generator)
    return ((2 * unit - 1) * math.radians(DEGREES)).view(-1, 1, 1)


def _rotation(
    rows: Tensor, columns: Tensor, angles: Tensor, height: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the pixels of images turned about their centre come from, and whether that is
    inside.
    """
    y, x = rows + 0.5 - height / 2, columns + 0.5 - width / 2
    cos, sin = angles.cos(), angles.sin()
    source_rows = (cos * y - sin * x + height / 2).floor().long()
    source_columns = (sin * y + cos * x + width / 2).floor().long()
    inside = (
        (source_rows >= 0)
        & (source_rows < height)
        & (source_columns >= 0)
        & (source_columns < width)
    )
    return source_rows, source_columns, inside


def _mirror(index: Tensor, size: int) -> Tensor:
    """Positions reflected at the border pixels, which are not repeated; those far outside stay
    outside.
    """
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)


def _gather(images: Tensor, rows: Tensor, columns: Tensor, inside: Tensor) -> Tensor:
    """Pixels of each image at its own positions, 0 where they are outside: (B, C, H, W)."""
    count, channels, height, width = images.shape
    flat = (rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)).view(count, 1, -1)
    taken = images.flatten(2).gather(2, flat.expand(-1, channels, -1)).view_as(images)
    return taken * inside.expand(count, height, width).unsqueeze(1)


def _cutout(batch: Tensor, generator: torch.Generator) -> Tensor:
    """One hole an image, its centre uniform over the pixels; the hole reaches HOLE / 2 up and left,
    less one down.
    """
    count, _, height, width = batch.shape
    draws = [torch.randint(size, (count, 1), generator=generator) for size in (height, width)]
    centre_row, centre_column = (resident(draw, batch.device) for draw in draws)
    rows = torch.arange(height, device=batch.device).view(1, -1) - centre_row + HOLE // 2
    columns = torch.arange(width, device=batch.device).view(1, -1) - centre_column + HOLE // 2
    in_rows, in_columns = (rows >= 0) & (rows < HOLE), (columns >= 0) & (columns < HOLE)
    hole = in_rows.unsqueeze(2) & in_columns.unsqueeze(1)
    return batch.masked_fill(hole.unsqueeze(1), 0.0)


MOST_FEATURES = 12
"""Features that are named; the others are counted."""


@dataclass(frozen=True)
class Inputs:
    """How stored values become inputs: of images the mean and spread of each channel, and the
    augmentation steps.

    ``mean``, ``std`` of other numbers, one a column or channel, are those by which they are
    standardised already.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    steps: tuple[str, ...] = ()
    about: About = IMAGES

    def plain(self, values: Tensor) -> Tensor:
        """Values (n, …) as inputs: pixels normalised, in float32; other numbers, and token ids, as
        they are.
        """
        return normalise(values, self.mean, self.std) if values.dtype == torch.uint8 else values

    def stored(self, values: Tensor) -> dict[str, Any]:
        """What makes the same inputs of such values again: shape, type, mean, spread, kind, and
        what names became.
        """
        type_ = str(values.dtype).removeprefix("torch.")
        told = {
            "shape": list(values.shape[1:]),
            "pixels": type_,
            "mean": self.mean,
            "std": self.std,
        }
        if self.about.kind == "image":
            return told
        more = {
            k: v
            for k, v in asdict(self.about).items()
            if k not in ("notes", "cautions", "owners", "kind") and v
        }
        return {**told, "kind": self.about.kind, **more}

    def trained_on(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Values as one training batch, augmented with draws from the generator."""
        if not self.steps:
            return self.plain(values)
        return augment(values, self.steps, self.mean, self.std, generator)


def examples_are(inputs: Mapping[str, Any]) -> str:
    """One sentence on what examples are, of the field ``inputs`` of a journal's event ``start``;
    empty for images.

    >>> examples_are({"kind": "series", "shape": [9, 128]})
    'examples are series: 9 channels of 128 steps'
    """
    kind, shape = inputs.get("kind", "image"), list(inputs.get("shape", ()))
    if kind == "table":
        names = [str(name) for name in inputs.get("features", ())]
        more = f" and {len(names) - MOST_FEATURES} more" if len(names) > MOST_FEATURES else ""
        of = f": {', '.join(names[:MOST_FEATURES])}{more}" if names else ""
        return f"examples are {MANY['table']}, {shape[0]} features{of}"
    if kind == "series":
        return f"examples are {MANY['series']}: {shape[0]} channels of {shape[1]} steps"
    if kind == "text":
        by = f" by {tokenizer}" if (tokenizer := inputs.get("tokenizer")) else ""
        return (
            f"examples are {MANY['text']} as {shape[0]} token ids{by}, of "
            f"{inputs.get('vocabulary', 0):,}"
        )
    if kind == "vector":
        return f"examples are {MANY['vector']} of {' x '.join(map(str, shape))} numbers"
    return ""
