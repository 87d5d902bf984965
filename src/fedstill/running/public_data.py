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
from fedstill.data.dataset import Dataset
from fedstill.data.form import IMAGES, MANY, About, Form
from fedstill.data.partition import public_split
from fedstill.data.sources import load_dataset
from fedstill.data.sources.catalog import FOLDERS
from fedstill.data.sources.images import images_in, read_unlabelled
from fedstill.data.sources.limits import refuse_large
from fedstill.data.table_encoding import TableInputs

# How a further file is read, so that its examples are like the run's: a public set's, or a site's
# own.


def form_like(data: DataTable, about: About) -> dict[str, Any]:
    """Keywords of ``load_dataset``, as ``[data]`` says, with the columns, names and marks that the
    run's examples have.

    None for images, which are read as they are. What is known of a data set by its name counts,
    too.
    """
    if about.kind == "image":
        return {}
    known = FOLDERS.get(data.name)
    form = replace(known.form if known else Form(), **data.form)
    form = replace(form, kind=about.kind, owner="")
    if about.kind == "table" and about.columns:
        table = TableInputs.named_by(about.columns, about.features, about.marks)
        form = replace(
            form,
            columns=table.columns,
            categorical=tuple(table.categories.items()),
            marks=table.marked or False,
        )
    return {field.name: getattr(form, field.name) for field in fields(form)}


Floats = tuple[float, ...]

TRAIN, NOISE = "train", "noise"

RESIZED_AT_ONCE = 1000
"""Images, so that not all of them are numbers of four bytes at once."""


@dataclass(frozen=True)
class Wanted:
    """What public examples must be like: those of the run. ``mean``, ``std``: of pixels.

    ``form``: how files that hold no images are read, as keywords of ``load_dataset``.
    """

    shape: tuple[int, ...]
    classes: int
    mean: Floats = ()
    std: Floats = ()
    about: About = IMAGES
    form: Mapping[str, Any] = field(default_factory=dict)

    @property
    def many(self) -> str:
        """What they are, for people."""
        return MANY[self.about.kind]

    @property
    def images(self) -> bool:
        """Whether they are images."""
        return self.about.kind == "image"


def set_apart(
    settings: Settings, dataset: Dataset, train: Examples
) -> tuple[Examples, Examples | None]:
    """(what clients share, the public set), as ``[data] public…`` says. A label that is missing or
    hidden is -1.

    Raises ConfigError or DataError for public examples of another shape, or labels of another
    number of classes.
    """
    data, public = settings.data, None
    if data.public_from == TRAIN:
        train, public = _share(settings, train, data.public)
    else:
        form = form_like(data, dataset.about)
        like = Wanted(
            dataset.input_shape,
            len(dataset.classes),
            dataset.mean,
            dataset.std,
            dataset.about,
            form,
        )
        public = _made(settings, like, data.public_from, data.folder)
    return train, _as_shown(settings, public)


def copied(settings: Settings, copy: str, wanted: Wanted) -> Examples | None:
    """The public set at a site, from its own copy of what ``[data] public_from`` names; None
    without a copy.

    ``copy``: a folder, or a data set's name. Noise needs none: it is drawn again. Of a set that the
    server takes from its own training data, the copy is the public set itself.
    """
    source = settings.data.public_from
    public: Examples | None = None
    if source == NOISE:
        public = _noise(settings, wanted)
    elif copy:
        public = (
            load_dataset(copy, **wanted.form).train
            if source == TRAIN
            else _made(settings, wanted, copy, "")
        )
    return _as_shown(settings, public)


def _as_shown(settings: Settings, public: Examples | None) -> Examples | None:
    hide = public is not None and not settings.data.public_labels
    return _unlabelled(public.values) if public is not None and hide else public


def _share(settings: Settings, train: Examples, size: int) -> tuple[Examples, Examples | None]:
    if size == 0:
        return train, None
    if size >= len(train):
        raise ConfigError(f"data.public = {size} leaves nothing of {len(train)} training examples")
    own = settings.named.partition.values.get("seed")
    pool, public = public_split(len(train), size, settings.seed if own is None else own)
    return train.take(torch.from_numpy(pool)), train.take(torch.from_numpy(public))


def _made(settings: Settings, wanted: Wanted, source: str, folder: str) -> Examples:
    return (
        _noise(settings, wanted) if source == NOISE else _fitting(settings, wanted, source, folder)
    )


def _noise(settings: Settings, wanted: Wanted) -> Examples:
    """Standard normal as the network takes it; of images pixels, so rounded and cut at black
    and white: uint8.

    Of texts, every token id is equally likely.
    """
    size, shape = settings.data.public, wanted.shape
    if size == 0:
        raise ConfigError(
            "data.public_from = 'noise' needs data.public, the number of examples to make"
        )
    draw = generator(seed_for(settings.seed, 0, 0, SERVER, "public noise"))
    if wanted.about.vocabulary:
        return _unlabelled(
            torch.randint(1, wanted.about.vocabulary, (size, *shape), generator=draw)
        )
    numbers = torch.randn(size, *shape, generator=draw)
    if not wanted.images:
        return _unlabelled(numbers)
    centre, spread = (torch.tensor(v).view(-1, 1, 1) for v in (wanted.mean, wanted.std))
    return _unlabelled((255 * (centre + spread * numbers)).round().clamp(0, 255).to(torch.uint8))


def _fitting(settings: Settings, wanted: Wanted, source: str, folder: str) -> Examples:
    """``source``: a folder of images, or what ``load_dataset`` reads, with what is in
    ``folder``.
    """
    data, place, shape = settings.data, Path(source), wanted.shape
    if wanted.images and images_in(place):
        side = shape[1] if data.public_resize and shape[1] == shape[2] else None
        public, theirs = _unlabelled(read_unlabelled(place, side)), None
    else:
        with _named(data.public_from == source):
            other = load_dataset(source, folder=folder or None, **wanted.form)
        public, theirs = other.train, len(other.classes)
        if (other.about.kind, other.vocabulary) != (wanted.about.kind, wanted.about.vocabulary):
            raise DataError(
                f"the public examples of {source} are {other.many}, the run's {wanted.many}; name "
                "others"
            )
    if data.public_resize:
        refuse_large(f"data.public_from = {source!r}, resized,", len(public) * math.prod(shape))
        public = Examples(_resized(public.values, shape), public.labels)
    _refuse_unlike(settings, wanted, source, public, theirs)
    size = data.public
    if size > len(public):
        raise ConfigError(
            f"data.public = {size} is more than the {len(public)} public {wanted.many} of {source}"
        )
    if not size:
        return public
    draw = generator(seed_for(settings.seed, 0, 0, SERVER, "public images"))
    return public.take(torch.randperm(len(public), generator=draw)[:size].sort().values)


@contextmanager
def _named(in_config: bool) -> Iterator[None]:
    """Errors of reading data that the config names, with the key that does."""
    try:
        yield
    except ConfigError as error:
        kind = type(error) if isinstance(error, DataError) else ConfigError
        raise (kind(f"data.public_from: {error}") if in_config else error) from error


def _refuse_unlike(
    settings: Settings, wanted: Wanted, source: str, public: Examples, theirs: int | None
) -> None:
    many, own = wanted.many, tuple(public.values.shape[1:])
    if own != wanted.shape:
        remedy = "set data.public_resize = true, or " if wanted.images else ""
        raise DataError(
            f"the public {many} of {source} have shape {own}, the run's {wanted.shape}; "
            f"{remedy}name other {many} with data.public_from"
        )
    if settings.data.public_labels and theirs is not None and theirs != wanted.classes:
        raise DataError(
            f"the public {many} of {source} have {theirs} classes, the run's data "
            f"{wanted.classes}; "
            f"set data.public_labels = false to use the {many} alone"
        )


def _unlabelled(values: Tensor) -> Examples:
    return Examples(values, torch.full((len(values),), -1, dtype=torch.int64))


def _resized(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images at another size, bilinear; grey becomes RGB by repetition, RGB grey by its mean."""
    starts = range(0, max(1, len(images)), RESIZED_AT_ONCE)
    return torch.cat([_block_resized(images[i : i + RESIZED_AT_ONCE], shape) for i in starts])


def _block_resized(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    channels, height, width = shape
    out = images.float()
    if out.shape[1] != channels:
        out = out.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if tuple(out.shape[2:]) != (height, width):
        out = torch.nn.functional.interpolate(out, (height, width), mode="bilinear", antialias=True)
    return out.round().clamp(0, 255).to(torch.uint8)
