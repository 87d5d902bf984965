"""A data set in memory: its splits, its class names, and what normalises its pixels."""

from __future__ import annotations

from dataclasses import dataclass

from fedstill.records import Examples


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set ready for use: verified splits, class names, and what normalises its pixels.

    mean, std: one number a channel, for pixels scaled to [0, 1]. Images may be memory-mapped copies-on-write: changing
    them changes no file.
    """

    name: str
    train: Examples
    test: Examples
    validation: Examples | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width
