"""What a run's model takes, and what normalises it: as its journal says; of older runs, the
catalogue or the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedstill.data.examples import Dataset
from fedstill.data.form import IMAGES, MANY, About
from fedstill.data.sources.catalog import KNOWN, Known
from fedstill.data.sources.decoded import about_of
from fedstill.errors import ConfigError, CorruptFile, DataError, UnknownName
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.preparing.prepared import read_data, with_pixels

Shape = tuple[int, ...]

ENCODING = tuple(field.name for field in fields(About) if field.name not in ("owners", "notes"))
"""What the event says of other examples than images, so that new ones can be made as the run's
were.
"""


@dataclass(frozen=True)
class StoredInputs:
    """An example's shape, the type of its numbers, the mean and spread of each channel or column,
    and what it is.

    ``mean``, ``std``: none where numbers go in as they are, or where each client standardised its
    own.
    """

    shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]
    type: str = "uint8"
    about: About = IMAGES
    standardise: str = ""


def inputs_of(
    folder: Path,
    settings: Settings,
    start: Mapping[str, Any],
    data: Dataset | None = None,
    client: int | None = None,
) -> StoredInputs:
    """What a run's examples are, as its event ``start`` says; where clients have their own mean and
    spread, a client's.

    Versions before 0.1.0 was released did not write it down. Then it is that of ``data``, or of the
    catalogue's data set of that name, or of the data set that the run names, if it is here. Raises
    ConfigError where none of them is; CorruptFile for a malformed event.
    """
    if (stored := start.get("inputs")) is not None:
        return stored_inputs(folder, stored, client)
    if data is None and (known := _known(settings)) is not None:
        own = settings.data
        mean, std = (
            _each(v, u, known.shape[0]) for v, u in ((own.mean, known.mean), (own.std, known.std))
        )
        return StoredInputs(known.shape, mean, std)
    try:
        dataset = with_pixels(data or read_data(settings), settings.data)
    except (DataError, UnknownName) as error:
        raise ConfigError(
            f"{folder} was begun by an earlier version, which did not store what normalises its "
            "images, and its data "
            f"are not here; give them: load_model(run, data=...) ({error})"
        ) from error
    kind = str(dataset.train.values.dtype).removeprefix("torch.")
    return StoredInputs(dataset.input_shape, dataset.mean, dataset.std, kind, dataset.about)


def stored_inputs(folder: Path, stored: Any, client: int | None = None) -> StoredInputs:
    """The field of an event ``start`` that ``Inputs.stored`` made; raises CorruptFile where it is
    malformed.
    """
    try:
        shape = tuple(int(n) for n in stored["shape"])
        about = about_of({k: stored[k] for k in ENCODING if k in stored})
        own = stored.get("by_client", {}).get(str(client), stored)
        mean, std = (tuple(float(v) for v in own[k]) for k in ("mean", "std"))
        given = bool(mean or std) or about.kind == "image"
        if about.kind not in MANY or len(shape) != (
            3 if about.kind == "image" else len(shape) or 1
        ):
            raise ValueError(f"{about.kind!r} of shape {shape} is unknown")
        if (given and not len(mean) == len(std) == shape[0]) or min(*shape, *std, 1) <= 0:
            raise ValueError(
                f"a mean and a spread above 0 for each of {shape[0]} channels or columns are needed"
            )
        return StoredInputs(
            shape, mean, std, str(stored["pixels"]), about, str(stored.get("standardise", ""))
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptFile(
            f"{folder / 'journal.jsonl'}: the start event's inputs are malformed: {error}"
        ) from error


def _known(settings: Settings) -> Known | None:
    """The catalogue's entry of the run's data set; None for another, or one that was read by its
    columns' names.
    """
    if settings.data.image_column or settings.data.label_column:
        return None
    return KNOWN.get(settings.data.name)


def _each(
    own: tuple[float, ...] | None, known: tuple[float, ...], channels: int
) -> tuple[float, ...]:
    values = known if own is None else own
    return tuple(values) * (channels if len(values) == 1 else 1)
