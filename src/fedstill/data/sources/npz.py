"""NPZ: the archive of arrays that MedMNIST is published in."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from fedstill.data.sources.decoded import Arrays, Decoded
from fedstill.errors import DataError

SPLITS = {"train": "train", "validation": "val", "test": "test"}


def read_npz(path: Path) -> Decoded:
    """The splits of an archive with ``train_images``, ``train_labels``, ``val_…`` and ``test_…``; no pickles are read.

    Images are (N, H, W) or (N, H, W, C) uint8, labels (N,) or (N, 1). Raises DataError if it is anything else.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            stored = {s: k for s, k in SPLITS.items() if f"{k}_images" in archive.files}
            splits = {s: _split(archive[f"{k}_images"], archive[f"{k}_labels"]) for s, k in stored.items()}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path} is damaged or not an archive of images and labels ({error}); download it again"
        ) from error
    return Decoded(splits, None)


def _split(images: np.ndarray, labels: np.ndarray) -> Arrays:
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.dtype != np.uint8 or labels.size != len(images):
        raise ValueError(f"images of shape {images.shape} and {images.dtype}, {labels.size} labels")
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels.reshape(-1).astype(np.int64)
