"""Data sets of one's own tensors, and decoded arrays as a data set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedstill.data.examples import Dataset
from fedstill.data.sources.catalog import HALF
from fedstill.data.sources.decoded import Decoded
from fedstill.data.sources.verify import verified
from fedstill.errors import ConfigError, DataError
from fedstill.records import Examples


def from_tensors(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor] | None = None,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Dataset:
    """A data set of one's own tensors: (images (N, C, H, W) uint8, labels (N,) of whole numbers) for every split.

    mean, std: one number a channel, default 0.5. Raises DataError for other shapes or types, or labels out of range.
    """
    pairs = {"train": train, "test": test} | ({} if validation is None else {"validation": validation})
    arrays = {}
    for split, (images, labels) in pairs.items():
        if images.dtype != torch.uint8 or images.ndim != 4 or not len(images):
            raise DataError(
                f"{name}, {split}: images are {images.dtype} of shape {tuple(images.shape)}, not uint8 (N, C, H, W)"
            )
        if labels.is_floating_point() or labels.is_complex() or labels.shape != images.shape[:1]:
            raise DataError(
                f"{name}, {split}: labels are {labels.dtype} of shape {tuple(labels.shape)}, "
                f"not whole numbers of shape ({len(images)},)"
            )
        arrays[split] = (images.cpu().numpy(), labels.cpu().numpy().astype(np.int64))
    return as_dataset(name, verified(name, Decoded(arrays, tuple(classes) if classes else None)), mean, std)


def as_dataset(
    name: str, data: Decoded, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Dataset:
    """Verified arrays as a data set, with mean and std 0.5 for every channel where none are given."""
    splits = {s: Examples(torch.from_numpy(x), torch.from_numpy(y)) for s, (x, y) in data.splits.items()}
    channels = splits["train"].images.shape[1]
    mean = HALF * channels if mean is None else tuple(mean)
    std = HALF * channels if std is None else tuple(std)
    if len(mean) != channels or len(std) != channels or min(std) <= 0:
        raise ConfigError(
            f"dataset {name!r}: mean and std need {channels} number(s), std above 0, not {mean} and {std}"
        )
    classes = data.classes or ()
    return Dataset(name, splits["train"], splits["test"], splits.get("validation"), classes, mean, std)
