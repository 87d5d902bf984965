"""Which columns hold image and label, and their rows as arrays."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedstill.data.sources.decoded import Decoded
from fedstill.errors import DataError

ROWS_AT_ONCE = 1000
USUAL_LABELS = ("label", "fine_label")
MODES = {"1": "L", "L": "L", "LA": "L", "P": "RGB", "RGB": "RGB", "RGBA": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}
"""What a kind of image is decoded to; a kind that is not listed has no 8-bit form to be read in."""


@dataclass(frozen=True)
class Columns:
    """What to read: the columns by name (None: find them), and the side to resize images to (None: as they are)."""

    image: str | None = None
    label: str | None = None
    size: int | None = None


def decoded_splits(what: str, streams: Mapping[str, Any], columns: Columns) -> Decoded:
    """All rows of {split: streaming dataset} as arrays; labels that are text become ids in alphabetical order.

    Raises DataError for columns that are not there, an image that differs from the first in size or kind, or a label
    that is missing.
    """
    raw, names = {}, None
    for split, stream in streams.items():
        image, label, own_names = _find(what, stream, columns)
        names = names or own_names
        raw[split] = _rows(f"{what}, {split}", stream, image, label, columns.size)
    every = [value for _, labels in raw.values() for value in labels]
    if any(isinstance(value, str) for value in every):
        names = tuple(sorted(set(map(str, every))))
        ids = {name: k for k, name in enumerate(names)}
        splits = {s: (x, np.array([ids[str(v)] for v in y], dtype=np.int64)) for s, (x, y) in raw.items()}
    else:
        splits = {s: (x, np.array(y, dtype=np.int64)) for s, (x, y) in raw.items()}
    return Decoded(splits, names)


def _find(what: str, stream: Any, columns: Columns) -> tuple[str, str, tuple[str, ...] | None]:
    """The image column, the label column, and the class names written in the file."""
    import datasets

    features = stream.features or {}
    images = [k for k, f in features.items() if isinstance(f, datasets.Image) or _is_encoded(f)]
    labels = [k for k, f in features.items() if isinstance(f, datasets.ClassLabel)]
    image = columns.image or (images[0] if len(images) == 1 else None)
    usual = [name for name in USUAL_LABELS if name in features]
    label = columns.label or next(iter(usual or labels[:1]), None)
    for role, name in (("image", image), ("label", label)):
        if name is None or name not in features:
            asked = f"no column {name!r}" if name else f"not one clear {role} column"
            raise DataError(f"{what} has {asked} among {', '.join(features) or 'none'}; set {role}_column")
    feature = features[label]
    return str(image), str(label), tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None


def _is_encoded(feature: Any) -> bool:
    return isinstance(feature, Mapping) and {"bytes", "path"} <= set(feature)


def _rows(what: str, stream: Any, image: str, label: str, size: int | None) -> tuple[NDArray[np.uint8], list[Any]]:
    import datasets

    stream = stream.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
    blocks: list[NDArray[np.uint8]] = []
    labels: list[Any] = []
    for batch in stream.iter(batch_size=ROWS_AT_ONCE):
        first = blocks[0][0] if blocks else None
        blocks.append(_stack(what, batch[image], len(labels), first, size))
        labels += batch[label]
    if not blocks:
        raise DataError(f"{what} holds no examples; leave the file out or download it again")
    for k, value in enumerate(labels):
        if value is None or isinstance(value, float):
            raise DataError(f"{what}: example {k} has the label {value!r}; labels are class ids or names")
    return np.concatenate(blocks), labels


def _stack(
    what: str, cells: Iterable[Any], start: int, first: NDArray[np.uint8] | None, size: int | None
) -> NDArray[np.uint8]:
    """(B, C, H, W) of encoded images, each as the first one of the split."""
    pixels = []
    for k, cell in enumerate(cells, start):
        own = pixels_of(what, cell, k, size)
        first = own if first is None else first
        if own.shape != first.shape:
            raise DataError(
                f"{what}: example {k} is {_shape(own)}, the first {_shape(first)}; "
                f"set size = {first.shape[1]} to resize all, and save all in one kind (grey or RGB)"
            )
        pixels.append(own)
    return np.stack(pixels)


def pixels_of(what: str, cell: Any, k: int, size: int | None) -> NDArray[np.uint8]:
    """One encoded image as (C, H, W); DataError naming it if it cannot be decoded."""
    if cell is None:
        raise DataError(f"{what}: example {k} has no image; leave it out")
    try:
        with _open(cell) as file, Image.open(file) as picture:
            if picture.mode not in MODES:
                raise DataError(f"{what}: example {k} is an image of kind {picture.mode}; save it as 8-bit grey or RGB")
            plain = picture.convert(MODES[picture.mode])
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{what}: example {k} cannot be decoded as an image ({error}); replace it") from error
    if size is not None and plain.size != (size, size):
        plain = plain.resize((size, size), Image.Resampling.BICUBIC)
    array = np.asarray(plain)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _open(cell: Mapping[str, Any]) -> contextlib.AbstractContextManager[IO[bytes]]:
    if cell["bytes"] is not None:
        return io.BytesIO(cell["bytes"])
    if "://" in cell["path"]:  # a folder of images on the hub
        import fsspec  # type: ignore[import-untyped]

        return cast("contextlib.AbstractContextManager[IO[bytes]]", fsspec.open(cell["path"], "rb"))
    return Path(cell["path"]).open("rb")


def _shape(pixels: NDArray[np.uint8]) -> str:
    channels, height, width = pixels.shape
    return f"{width}×{height} {'grey' if channels == 1 else 'RGB'}"
