"""The public set of a run: a share of the training set, another data set, a folder of images, or
noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.config.tables import DataTable
from fedstill.core.errors import ConfigError, DataError
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Examples
from fedstill.data.dataset import IMAGE_INFO, PLURALS, Dataset, DatasetInfo, ReadingOptions
from fedstill.data.encoding import TableInputs
from fedstill.data.partition import public_split
from fedstill.data.sources import load_dataset
from fedstill.data.sources.catalog import KNOWN_FOLDERS
from fedstill.data.sources.image_sets import images_in, read_unlabelled
from fedstill.data.sources.limits import refuse_large

TRAIN = "train"
"""``data.public_from`` of a share of the training set."""

NOISE = "noise"
"""``data.public_from`` of noise."""

RESIZED_AT_ONCE = 1000
"""The number of images that are resized together: meanwhile a pixel takes four bytes."""


@dataclass(frozen=True)
class ExampleForm:
    """What examples must be like to be used beside a run's own.

    shape: of an example. classes: how many there are. mean, std: of pixels. about: the kind of
    examples. reading: how files that hold no images are read, as keywords of ``load_dataset``.
    """

    shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    about: DatasetInfo = IMAGE_INFO
    reading: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plural(self) -> str:
        """What the examples are, for people."""
        return PLURALS[self.about.kind]

    @property
    def are_images(self) -> bool:
        """Whether the examples are images."""
        return self.about.kind == "image"


@dataclass(frozen=True)
class PublicSplit:
    """A training set without the public examples, and these, if the run has any."""

    train: Examples
    public: Examples | None


def set_public_apart(settings: Settings, dataset: Dataset, train: Examples) -> PublicSplit:
    """The public set of a run, and what clients share, as ``[data] public…`` says.

    A label that is missing or hidden is -1. Raises ConfigError or DataError for public examples of
    another shape, or labels of another number of classes.
    """
    data = settings.data
    if data.public_from == TRAIN:
        split = _from_training_set(settings, train)
        return replace(split, public=_with_labels_hidden(settings, split.public))
    form = ExampleForm(
        shape=dataset.input_shape,
        classes=len(dataset.classes),
        mean=dataset.mean,
        std=dataset.std,
        about=dataset.about,
        reading=reading_like(data, dataset.about),
    )
    if data.public_from == NOISE:
        public = _noise(settings, form)
    else:
        public = _from_elsewhere(settings, form, data.public_from, data.folder)
    return PublicSplit(train, _with_labels_hidden(settings, public))


def public_copy(settings: Settings, copy: str, form: ExampleForm) -> Examples | None:
    """The public set at a site, from its copy of what ``[data] public_from`` names; None without a
    copy.

    copy: a folder, or a data set's name. Noise needs none, since it is drawn again. If the server
    takes the public set from its own training data, the copy is the public set itself.
    """
    source = settings.data.public_from
    public: Examples | None = None
    if source == NOISE:
        public = _noise(settings, form)
    elif copy and source == TRAIN:
        public = load_dataset(copy, **form.reading).train
    elif copy:
        public = _from_elsewhere(settings, form, copy, "")
    return _with_labels_hidden(settings, public)


def reading_like(data: DataTable, about: DatasetInfo) -> dict[str, Any]:
    """How a further file is read so that its examples are like the run's: keywords of
    ``load_dataset``, empty for images.

    They have the columns, names and marks of the run's examples. What is known of a data set by its
    name counts, too.
    """
    if about.kind == "image":
        return {}
    known = KNOWN_FOLDERS.get(data.name)
    form = ReadingOptions() if known is None else known.options
    form = replace(form, **data.form)
    form = replace(form, kind=about.kind, owner="")
    if about.kind == "table" and about.columns:
        table = TableInputs.named_by(about.columns, about.features, about.binary_features)
        form = replace(
            form,
            columns=table.columns,
            categorical=tuple(table.categories.items()),
            marks=table.marked or False,
        )
    return {field.name: getattr(form, field.name) for field in fields(form)}


def _with_labels_hidden(settings: Settings, public: Examples | None) -> Examples | None:
    """The public set as methods see it: without labels, if the settings say so."""
    if public is None or settings.data.public_labels:
        return public
    return _unlabelled(public.values)


def _from_training_set(settings: Settings, train: Examples) -> PublicSplit:
    size = settings.data.public
    if size == 0:
        return PublicSplit(train, None)
    if size >= len(train):
        raise ConfigError(f"data.public = {size} leaves nothing of {len(train)} training examples")
    seed = settings.named.partition.values.get("seed")
    if seed is None:
        seed = settings.seed
    pool, public = public_split(len(train), size, seed)
    return PublicSplit(train.take(torch.from_numpy(pool)), train.take(torch.from_numpy(public)))


def _noise(settings: Settings, form: ExampleForm) -> Examples:
    """Noise that is standard normal as the network takes it.

    Noise for images is made of pixels, so it is rounded, and cut off at black and white. In noise
    for texts, every token id is equally likely.
    """
    size = settings.data.public
    if size == 0:
        raise ConfigError(
            "data.public_from = 'noise' needs data.public, the number of examples to make"
        )
    draw = generator(seed_for(settings.seed, 0, 0, SERVER, "public noise"))
    if form.about.vocabulary:
        tokens = torch.randint(1, form.about.vocabulary, (size, *form.shape), generator=draw)
        return _unlabelled(tokens)
    numbers = torch.randn(size, *form.shape, generator=draw)
    if not form.are_images:
        return _unlabelled(numbers)
    mean = torch.tensor(form.mean).view(-1, 1, 1)
    std = torch.tensor(form.std).view(-1, 1, 1)
    pixels = (255 * (mean + std * numbers)).round().clamp(0, 255)
    return _unlabelled(pixels.to(torch.uint8))


def _from_elsewhere(settings: Settings, form: ExampleForm, source: str, folder: str) -> Examples:
    """The public examples of a folder of images, or of what ``load_dataset`` reads.

    folder: where the data set ``source`` lies, if the settings say it.
    """
    data = settings.data
    classes = None
    if form.are_images and images_in(Path(source)):
        is_square = form.shape[1] == form.shape[2]
        side = form.shape[1] if data.public_resize and is_square else None
        public = _unlabelled(read_unlabelled(Path(source), side))
    else:
        with _naming_the_key(data.public_from == source):
            dataset = load_dataset(source, folder=folder or None, **form.reading)
        _check_kind(form, source, dataset)
        public = dataset.train
        classes = len(dataset.classes)

    if data.public_resize:
        bytes_resized = len(public) * math.prod(form.shape)
        refuse_large(f"data.public_from = {source!r}, resized,", bytes_resized)
        public = Examples(_resized(public.values, form.shape), public.labels)
    _check_examples(settings, form, source, public, classes)
    return _drawn(settings, form, source, public)


def _drawn(settings: Settings, form: ExampleForm, source: str, public: Examples) -> Examples:
    """So many of the public examples as the settings ask for, or all."""
    size = settings.data.public
    if size > len(public):
        raise ConfigError(
            f"data.public = {size} is more than the {len(public)} public {form.plural} of {source}"
        )
    if not size:
        return public
    draw = generator(seed_for(settings.seed, 0, 0, SERVER, "public images"))
    positions = torch.randperm(len(public), generator=draw)[:size]
    return public.take(positions.sort().values)


@contextmanager
def _naming_the_key(is_in_config: bool) -> Iterator[None]:
    """Errors of reading data name the key of the config, if the config names the data."""
    try:
        yield
    except ConfigError as error:
        if not is_in_config:
            raise
        kind = type(error) if isinstance(error, DataError) else ConfigError
        raise kind(f"data.public_from: {error}") from error


def _check_kind(form: ExampleForm, source: str, dataset: Dataset) -> None:
    """Raise DataError for examples of another kind or vocabulary than the run's."""
    if dataset.about.kind != form.about.kind or dataset.vocabulary != form.about.vocabulary:
        raise DataError(
            f"the public examples of {source} are {dataset.many}, the run's {form.plural}; name "
            "others"
        )


def _check_examples(
    settings: Settings, form: ExampleForm, source: str, public: Examples, classes: int | None
) -> None:
    """Raise DataError for examples of another shape, or labels of another number of classes."""
    plural = form.plural
    shape = tuple(public.values.shape[1:])
    if shape != form.shape:
        remedy = "set data.public_resize = true, or " if form.are_images else ""
        raise DataError(
            f"the public {plural} of {source} have shape {shape}, the run's {form.shape}; "
            f"{remedy}name other {plural} with data.public_from"
        )
    if settings.data.public_labels and classes is not None and classes != form.classes:
        raise DataError(
            f"the public {plural} of {source} have {classes} classes, the run's data "
            f"{form.classes}; set data.public_labels = false to use the {plural} alone"
        )


def _unlabelled(values: Tensor) -> Examples:
    return Examples(values, torch.full((len(values),), -1, dtype=torch.int64))


def _resized(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images at another size, bilinear; grey becomes RGB by repetition, RGB grey by its mean."""
    starts = range(0, max(1, len(images)), RESIZED_AT_ONCE)
    return torch.cat([_block_resized(images[i : i + RESIZED_AT_ONCE], shape) for i in starts])


def _block_resized(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    channels, height, width = shape
    block = images.float()
    if block.shape[1] != channels:
        block = block.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if tuple(block.shape[2:]) != (height, width):
        block = torch.nn.functional.interpolate(
            block, (height, width), mode="bilinear", antialias=True
        )
    return block.round().clamp(0, 255).to(torch.uint8)
