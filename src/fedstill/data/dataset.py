"""Data sets: as arrays, which readers return, and as tensors, which runs use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from fedstill.core.errors import ConfigError
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Examples
from fedstill.data.form import IMAGE_INFO, DatasetInfo

# Arrays.


@dataclass(frozen=True, eq=False)
class Split:
    """The examples of a split as arrays."""

    values: NDArray[Any]
    """Images (N, C, H, W) uint8, numbers (N, …) float32, or token ids (N, L) int64."""
    labels: NDArray[Any]
    """The class ids (N,) int64."""
    owners: NDArray[Any] | None = None
    """The number (N,) int64 of each example's owner, if the split has owners."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Digests:
    """The SHA-256 of a split's values and of its labels."""

    values: str
    labels: str


@dataclass(frozen=True, eq=False)
class Decoded:
    """A data set as arrays."""

    splits: Mapping[str, Split]
    classes: tuple[str, ...] | None
    """The names of the classes, if the data have them."""
    source_digests: Mapping[str, Digests] = field(default_factory=dict)
    """The digests of each split as it was read, before rows were left out or encoded; only of
    tables, series and texts with known checksums.
    """
    about: DatasetInfo = IMAGE_INFO


# Tensors.


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set ready for use: verified splits, class names, and a description of its inputs.

    Values may be memory-mapped copies-on-write: changing them changes no file.
    """

    name: str
    train: Examples
    test: Examples
    validation: Examples | None
    classes: tuple[str, ...]
    """The names of the classes, by label."""
    mean: tuple[float, ...]
    """Of images, the mean of each channel, for pixels scaled to [0, 1]; of other numbers, the mean
    of each column or channel if it is declared, else empty.
    """
    std: tuple[float, ...]
    """The standard deviations, as ``mean``."""
    about: DatasetInfo = IMAGE_INFO
    """What examples are, and what reading left out."""
    backbone_inputs: Mapping[str, Any] | None = None
    """If examples are features that a backbone computed, the description of the backbone's inputs
    (``Inputs.description``).
    """

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
        """The number of token ids; 0 where examples are numbers."""
        return self.about.vocabulary

    @property
    def many(self) -> str:
        """What examples are, for people: "images", "texts"."""
        return self.about.many


def half(channels: int) -> tuple[float, ...]:
    """0.5 for each channel, the mean and std of images of which nothing else is known."""
    return (0.5,) * channels


def as_dataset(
    name: str,
    data: Decoded,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Dataset:
    """Verified arrays as a data set; of images, with mean and std 0.5 for each channel by default.

    Raises ConfigError for a mean or std that the data cannot have.
    """
    splits = {split: _as_examples(arrays) for split, arrays in data.splits.items()}
    size = splits["train"].values.shape[1]
    is_image = data.about.kind == "image"
    default = half(size) if is_image else ()
    means = default if mean is None else tuple(mean)
    stds = default if std is None else tuple(std)
    if data.about.kind == "text" and means:
        raise ConfigError(f"dataset {name!r}: texts have no mean and std; leave them out")
    if is_image or means or stds:
        _check_scale(name, size, means, stds)
    return Dataset(
        name,
        train=splits["train"],
        test=splits["test"],
        validation=splits.get("validation"),
        classes=data.classes or (),
        mean=means,
        std=stds,
        about=data.about,
    )


def _as_examples(split: Split) -> Examples:
    owners = None if split.owners is None else torch.from_numpy(split.owners)
    return Examples(torch.from_numpy(split.values), torch.from_numpy(split.labels), owners)


def _check_scale(name: str, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    if len(mean) == len(std) == size and min(std) > 0:
        return
    raise ConfigError(
        f"dataset {name!r}: mean and std need {size} number(s), std above 0, not {mean} and {std}"
    )


def examples_digest(examples: Examples) -> str:
    """The SHA-256 of values and labels, which does not depend on their device.

    Values on a processor are not copied.
    """
    hasher = hashlib.sha256(f"{tuple(examples.values.shape)} {examples.values.dtype}".encode())
    for tensor in (examples.values, examples.labels):
        hasher.update(tensor.cpu().contiguous().numpy().data)
    return hasher.hexdigest()


def stratified_positions(labels: torch.Tensor, size: int, seed: int) -> torch.Tensor:
    """The positions of ``size`` random examples, in ascending order.

    Each class has its share of them, as nearly as whole numbers allow.
    """
    stream = generator(seed_for(seed, 0, 0, SERVER, "stratified"))
    counts = torch.bincount(labels)
    shares = counts.double() * size / len(labels)
    sizes = shares.floor().long()
    # The classes that lost most by rounding down get one example more.
    remainder = size - int(sizes.sum())
    sizes[(shares - sizes).argsort(descending=True, stable=True)[:remainder]] += 1

    drawn = []
    for label, class_size in enumerate(sizes.tolist()):
        members = (labels == label).nonzero().flatten()
        drawn.append(members[torch.randperm(len(members), generator=stream)[:class_size]])
    return torch.cat(drawn).sort().values
