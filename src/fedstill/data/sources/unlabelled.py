"""Images in a folder without labels, such as a user's own for public data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedstill.data.sources.columns import pixels_of
from fedstill.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif"})


def images_in(place: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name: where there are some, the folder has no classes."""
    return sorted(p for p in place.iterdir() if p.is_file() and p.suffix.lower() in SUFFIXES)


def read_unlabelled(place: Path, size: int | None = None) -> Tensor:
    """All images of a folder as (n, C, H, W) uint8, in the order of their names.

    size: the side to resize all to; None: as they are. Raises DataError for a file that is no image, or for one that
    differs from the first in size or kind.
    """
    blocks: list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = []
    for k, path in enumerate(images_in(place)):
        own = pixels_of(str(place), {"bytes": None, "path": str(path)}, k, size)
        if blocks and own.shape != blocks[0].shape:
            raise DataError(
                f"{path} has shape {own.shape}, the first image of the folder {blocks[0].shape}; "
                "set data.public_resize = true, and save all in one kind (grey or RGB)"
            )
        blocks.append(own)
    if not blocks:
        raise DataError(f"{place} holds no images ({', '.join(sorted(SUFFIXES))}); put some in, or name another folder")
    return torch.from_numpy(np.stack(blocks))
