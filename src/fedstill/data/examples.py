"""Examples in memory: the images and labels of one split, and the splits of one data set."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled images. images: (N, C, H, W) uint8; labels: (N,) int64, ids of the data set's classes."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set ready for use: verified splits, class names, and what normalises its pixels.

    mean, std: one number a channel, for pixels scaled to [0, 1]. Images may be memory-mapped copies-on-write: changing
    them changes no file.
    """

    name: str
    train: Split
    test: Split
    validation: Split | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width
