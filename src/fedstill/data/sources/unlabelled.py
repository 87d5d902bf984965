"""Images in a folder without labels, such as a user's own for public data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedstill.data.sources.limits import in_one_line
from fedstill.data.sources.pictures import IMAGE_SUFFIXES, Pictures
from fedstill.errors import DataError


def images_in(place: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name: where there are some, the folder has no
    classes.

    None if there is no such folder.
    """
    with in_one_line(place):
        if not place.is_dir():
            return []
        return sorted(
            p for p in place.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file()
        )


def read_unlabelled(place: Path, size: int | None = None) -> Tensor:
    """All images of a folder as (n, C, H, W) uint8, in the order of their names.

    size: the side to resize all to; None: as they are. Raises DataError for a file that is no
    image, or for one that differs from the first in size or kind.
    """
    paths = images_in(place)
    if not paths:
        kinds = ", ".join(sorted(IMAGE_SUFFIXES))
        raise DataError(f"{place} holds no images ({kinds}); put some in, or name another folder")
    pictures = Pictures(str(place), size, len(paths), place, "set data.public_resize = true")
    with in_one_line(place):
        return torch.from_numpy(
            np.stack([pictures.decoded(path, k) for k, path in enumerate(paths)])
        )
