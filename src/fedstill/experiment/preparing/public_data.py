"""The public set of a run: a share of the training set, another data set, a folder of images, or noise."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from fedstill.data.examples import Dataset
from fedstill.data.partition import public_split
from fedstill.data.sources import load_dataset
from fedstill.data.sources.limits import refuse_large
from fedstill.data.sources.unlabelled import images_in, read_unlabelled
from fedstill.errors import ConfigError, DataError
from fedstill.experiment.config.settings import Settings
from fedstill.keys import generator, seed_for
from fedstill.records import SERVER, Examples

Floats = tuple[float, ...]

TRAIN, NOISE = "train", "noise"

RESIZED_AT_ONCE = 1000
"""Images, so that not all of them are numbers of four bytes at once."""


def set_apart(settings: Settings, dataset: Dataset, train: Examples) -> tuple[Examples, Examples | None]:
    """(what clients share, the public set), as ``[data] public…`` says. A label that is missing or hidden is -1.

    Raises ConfigError or DataError for public images of another shape, or labels of another number of classes.
    """
    data, public = settings.data, None
    source = data.public_from
    if source == TRAIN:
        train, public = _share(settings, train, data.public)
    elif source == NOISE:
        public = _noise(settings, dataset.input_shape, dataset.mean, dataset.std)
    else:
        public = _fitting(settings, dataset.input_shape, len(dataset.classes), source, data.folder)
    return train, _as_shown(settings, public)


def copied(
    settings: Settings, copy: str, shape: tuple[int, ...], classes: int, mean: Floats, std: Floats
) -> Examples | None:
    """The public set at a site, from its own copy of what ``[data] public_from`` names; None without a copy.

    ``copy``: a folder, or a data set's name. Noise needs none: it is drawn again. Of a set that the server takes from
    its own training data, the copy is the public set itself.
    """
    source = settings.data.public_from
    public: Examples | None = None
    if source == NOISE:
        public = _noise(settings, shape, mean, std)
    elif copy:
        public = load_dataset(copy).train if source == TRAIN else _fitting(settings, shape, classes, copy, "")
    return _as_shown(settings, public)


def _as_shown(settings: Settings, public: Examples | None) -> Examples | None:
    hide = public is not None and not settings.data.public_labels
    return _unlabelled(public.values) if public is not None and hide else public


def _share(settings: Settings, train: Examples, size: int) -> tuple[Examples, Examples | None]:
    if size == 0:
        return train, None
    if size >= len(train):
        raise ConfigError(f"data.public = {size} leaves nothing of {len(train)} training examples")
    own = settings.named.partition.values.get("seed")
    pool, public = public_split(len(train), size, settings.seed if own is None else own)
    return train.take(torch.from_numpy(pool)), train.take(torch.from_numpy(public))


def _noise(settings: Settings, shape: tuple[int, ...], mean: Floats, std: Floats) -> Examples:
    """Standard normal after normalisation, except that pixels are rounded and cut at black and white: uint8."""
    size = settings.data.public
    if size == 0:
        raise ConfigError("data.public_from = 'noise' needs data.public, the number of images to make")
    draw = generator(seed_for(settings.seed, 0, 0, SERVER, "public noise"))
    centre, spread = (torch.tensor(v).view(-1, 1, 1) for v in (mean, std))
    values = centre + spread * torch.randn(size, *shape, generator=draw)
    return _unlabelled((255 * values).round().clamp(0, 255).to(torch.uint8))


def _fitting(settings: Settings, shape: tuple[int, ...], classes: int, source: str, folder: str) -> Examples:
    """``source``: a folder of images, or what ``load_dataset`` reads, with what is in ``folder``."""
    data, size, place = settings.data, settings.data.public, Path(source)
    if images_in(place):
        side = shape[1] if data.public_resize and shape[1] == shape[2] else None
        public, theirs = _unlabelled(read_unlabelled(place, side)), None
    else:
        other = load_dataset(source, folder=folder or None)
        public, theirs = other.train, len(other.classes)
    if data.public_resize:
        refuse_large(f"data.public_from = {source!r}, resized,", len(public) * math.prod(shape))
        public = Examples(_resized(public.values, shape), public.labels)
    if tuple(public.values.shape[1:]) != shape:
        raise DataError(
            f"the public images of {source} have shape {tuple(public.values.shape[1:])}, the run's {shape}; "
            "set data.public_resize = true, or name other images with data.public_from"
        )
    if data.public_labels and theirs is not None and theirs != classes:
        raise DataError(
            f"the public images of {source} have {theirs} classes, the run's data {classes}; "
            "set data.public_labels = false to use the images alone"
        )
    if size > len(public):
        raise ConfigError(f"data.public = {size} is more than the {len(public)} public images of {source}")
    if not size:
        return public
    draw = generator(seed_for(settings.seed, 0, 0, SERVER, "public images"))
    return public.take(torch.randperm(len(public), generator=draw)[:size].sort().values)


def _unlabelled(images: Tensor) -> Examples:
    return Examples(images, torch.full((len(images),), -1, dtype=torch.int64))


def _resized(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images at another size, bilinear; grey becomes RGB by repetition, RGB grey by its mean."""
    starts = range(0, max(1, len(images)), RESIZED_AT_ONCE)
    return torch.cat([_block_resized(images[i : i + RESIZED_AT_ONCE], shape) for i in starts])


def _block_resized(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    channels, height, width = shape
    out = images.float()
    if out.shape[1] != channels:
        out = out.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if tuple(out.shape[2:]) != (height, width):
        out = torch.nn.functional.interpolate(out, (height, width), mode="bilinear", antialias=True)
    return out.round().clamp(0, 255).to(torch.uint8)
