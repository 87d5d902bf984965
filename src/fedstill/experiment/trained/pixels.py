"""What a run's images are, and what normalises them: as its journal says; of older runs, the catalogue or the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.data.examples import Dataset
from fedstill.data.sources import catalog
from fedstill.data.sources.catalog import Known
from fedstill.errors import ConfigError, CorruptFile, DataError, UnknownName
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.prepared import read_data, with_pixels

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pixels:
    """An image's shape (channels, height, width), the type of its numbers, the mean and spread of each channel."""

    shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]
    type: str = "uint8"


def pixels_of(folder: Path, settings: Settings, start: Mapping[str, Any], data: Dataset | None = None) -> Pixels:
    """What a run's images are, as its event ``start`` says.

    Versions before 0.1.0 was released did not write it down. Then it is that of ``data``, or of the catalogue's data
    set of that name, or of the data set that the run names, if it is here. Raises ConfigError where none of them is;
    CorruptFile for a malformed event.
    """
    if (stored := start.get("inputs")) is not None:
        return _stored(folder, stored)
    if data is None and (known := _known(settings)) is not None:
        own = settings.data
        mean, std = (_each(v, u, known.shape[0]) for v, u in ((own.mean, known.mean), (own.std, known.std)))
        return Pixels(known.shape, mean, std)
    try:
        dataset = with_pixels(data or read_data(settings), settings.data)
    except (DataError, UnknownName) as error:
        raise ConfigError(
            f"{folder} was begun by an earlier version, which did not store what normalises its images, and its data "
            f"are not here; give them: load_model(run, data=...) ({error})"
        ) from error
    kind = str(dataset.train.values.dtype).removeprefix("torch.")
    return Pixels(dataset.input_shape, dataset.mean, dataset.std, kind)


def _stored(folder: Path, stored: Any) -> Pixels:
    try:
        channels, height, width = (int(n) for n in stored["shape"])
        mean, std = (tuple(float(v) for v in stored[k]) for k in ("mean", "std"))
        if not len(mean) == len(std) == channels or min(channels, height, width, *std) <= 0:
            raise ValueError(f"a mean and a spread above 0 for each of {channels} channels are needed")
        return Pixels((channels, height, width), mean, std, str(stored["pixels"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"{folder / 'journal.jsonl'}: the start event's inputs are malformed: {error}") from error


def _known(settings: Settings) -> Known | None:
    """The catalogue's entry of the run's data set; None for another, or one that was read by its columns' names."""
    if settings.data.image_column or settings.data.label_column:
        return None
    named = {known.name: known for known in vars(catalog).values() if isinstance(known, Known)}
    return {**named, **catalog.FOLDERS}.get(settings.data.name)


def _each(own: tuple[float, ...] | None, known: tuple[float, ...], channels: int) -> tuple[float, ...]:
    values = known if own is None else own
    return tuple(values) * (channels if len(values) == 1 else 1)
