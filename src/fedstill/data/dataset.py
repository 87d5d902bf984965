"""A data set in memory: its splits, its class names, what normalises its inputs; and a fair part of
some examples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Examples
from fedstill.data.form import IMAGES, About


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set ready for use: verified splits, class names, and what is known of its inputs.

    mean, std: of images, one number a channel, for pixels scaled to [0, 1]; of other numbers, one a
    column or channel where the data set declares them, else none. ``about``: what examples are, and
    what reading left out. Values may be memory-mapped copies-on-write: changing them changes no
    file. ``before``: of features of a backbone, what this was given, as ``Inputs.stored`` tells it.
    """

    name: str
    train: Examples
    test: Examples
    validation: Examples | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    about: About = IMAGES
    before: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        splits = {"train": self.train, "test": self.test, "validation": self.validation}
        counts = ", ".join(f"{len(e):,} {split}" for split, e in splits.items() if e is not None)
        return (
            f"<Dataset {self.name}: {counts}; {self.many} of {self.input_shape}, "
            f"{len(self.classes)} classes>"
        )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of each example: of an image (C, H, W), of a vector (D,), of a series (C, L),
        of token ids (L,).
        """
        return tuple(self.train.values.shape[1:])

    @property
    def vocabulary(self) -> int:
        """How many token ids there are; 0 where examples are numbers."""
        return self.about.vocabulary

    @property
    def many(self) -> str:
        """What examples are, for people: "images", "texts"."""
        return self.about.many


def examples_digest(examples: Examples) -> str:
    """The SHA-256 of values and labels, the same on whatever device they are; nothing is copied on
    a processor.
    """
    sum_ = hashlib.sha256(f"{tuple(examples.values.shape)} {examples.values.dtype}".encode())
    for tensor in (examples.values, examples.labels):
        sum_.update(tensor.cpu().contiguous().numpy().data)
    return sum_.hexdigest()


def stratified(labels: torch.Tensor, size: int, seed: int) -> torch.Tensor:
    """Positions of ``size`` examples, in order, with the classes' shares kept as near as whole
    numbers allow.
    """
    draw = generator(seed_for(seed, 0, 0, SERVER, "stratified"))
    counts = torch.bincount(labels)
    exact = counts.double() * size / len(labels)
    take = exact.floor().long()
    short = size - int(take.sum())
    take[(exact - take).argsort(descending=True, stable=True)[:short]] += 1
    picked = []
    for c, k in enumerate(take.tolist()):
        own = (labels == c).nonzero().flatten()
        picked.append(own[torch.randperm(len(own), generator=draw)[:k]])
    return torch.cat(picked).sort().values
