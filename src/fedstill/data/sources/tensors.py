"""Data sets of one's own tensors, and decoded arrays as a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.data.examples import Dataset
from fedstill.data.sources.catalog import HALF
from fedstill.data.sources.decoded import Decoded
from fedstill.data.sources.verify import verified
from fedstill.errors import ConfigError, DataError
from fedstill.records import Examples

WHAT = ("images", "labels")

Array = Tensor | NDArray[Any]
"""A tensor of torch's, or an array of NumPy's."""


def from_tensors(
    name: str,
    train: tuple[Array, Array],
    test: tuple[Array, Array],
    validation: tuple[Array, Array] | None = None,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Dataset:
    """A data set of one's own tensors, or NumPy arrays: (images (N, C, H, W) uint8, labels (N,) of whole numbers) for
    every split.

    mean, std: one number a channel, default 0.5. Raises DataError for other shapes or types, or labels out of range.
    """
    pairs = {"train": train, "test": test} | ({} if validation is None else {"validation": validation})
    arrays = {}
    for split, given in pairs.items():
        images, labels = (_array(f"{name}, {split}: {what}", one) for what, one in zip(WHAT, given, strict=True))
        if images.dtype != np.uint8:
            raise DataError(f"{name}, {split}: images are {images.dtype}, not uint8: give pixels from 0 to 255")
        if images.ndim != 4 or not len(images):
            raise DataError(f"{name}, {split}: images have shape {images.shape}, not (N, C, H, W) with N above 0")
        if labels.dtype.kind not in "iub" or labels.shape != images.shape[:1]:
            raise DataError(
                f"{name}, {split}: labels are {labels.dtype} of shape {labels.shape}, "
                f"not whole numbers of shape ({len(images)},)"
            )
        arrays[split] = (images, labels.astype(np.int64))
    return as_dataset(name, verified(name, Decoded(arrays, tuple(classes) if classes else None)), mean, std)


def _array(what: str, given: object) -> NDArray[Any]:
    """A tensor or an array as an array that torch may read; raises DataError for anything else."""
    if isinstance(given, Tensor):
        own = given.detach().cpu()
        return (own.float() if own.dtype == torch.bfloat16 else own).numpy()
    if isinstance(given, np.ndarray):
        return np.require(given, requirements=["C", "W"])
    raise DataError(f"{what} are a {type(given).__name__}, not a tensor or a NumPy array")


def as_dataset(
    name: str, data: Decoded, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Dataset:
    """Verified arrays as a data set, with mean and std 0.5 for every channel where none are given."""
    splits = {s: Examples(torch.from_numpy(x), torch.from_numpy(y)) for s, (x, y) in data.splits.items()}
    channels = splits["train"].values.shape[1]
    mean = HALF * channels if mean is None else tuple(mean)
    std = HALF * channels if std is None else tuple(std)
    if len(mean) != channels or len(std) != channels or min(std) <= 0:
        raise ConfigError(
            f"dataset {name!r}: mean and std need {channels} number(s), std above 0, not {mean} and {std}"
        )
    classes = data.classes or ()
    return Dataset(name, splits["train"], splits["test"], splits.get("validation"), classes, mean, std)
