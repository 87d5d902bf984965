"""Encoded images as arrays: the header first, the pixels only if there is room for them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedstill.core.errors import DataError, on_one_line
from fedstill.data.sources.limits import (
    EXAMPLE_BYTES,
    IMAGE_BYTES,
    PIXELS,
    in_one_line,
    refuse_large,
    size_text,
)

# Encoded images as arrays: the header first, the pixels only if there is room for them.


MODES = {
    "1": "L",
    "L": "L",
    "LA": "L",
    "P": "RGB",
    "RGB": "RGB",
    "RGBA": "RGB",
    "CMYK": "RGB",
    "YCbCr": "RGB",
}
"""What a kind of image is decoded to; a kind that is not listed has no 8-bit form to be read in."""

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""What is read: formats whose header states the size that decoding gives. Others start programs
(EPS) or lie (ICO).
"""

IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".avif", ".jp2"}
    | {".ppm", ".pgm", ".pbm", ".pnm"}
)
"""How the names of files that are read as images end."""

Shape = tuple[int, int, int]
Pixels = NDArray[np.uint8]


@dataclass
class Pictures:
    """Decodes the images of one split, each of them as large as the first.

    what: the split, for messages; side: resize to side × side (None: as they are); rows: how many
    there are to be, if that is known; within: the folder (a path), or the data set on the hub (a
    name), outside of which no file is opened because a table names it; remedy: what to do about
    images of several sizes.
    """

    what: str
    side: int | None = None
    rows: int = 0
    within: Path | str = ""
    remedy: str = "set data.size = SIDE to resize all"
    _first: Shape | None = field(default=None, repr=False)

    def decoded(self, cell: Any, k: int) -> Pixels:
        """Image ``k`` as (C, H, W) uint8; DataError naming it if it cannot be decoded, or is too
        large to be.

        cell: the path of a file that we found, or a table's {"bytes": …, "path": …}.
        """
        if cell is None:
            raise DataError(f"{self.what}: example {k} has no image; leave it out")
        name = str(cell) if isinstance(cell, Path) else f"{self.what}: example {k}"
        with in_one_line(name), self._file(name, cell) as file, self._opened(name, file) as picture:
            shape = _shape(picture, self.side)
            self._check(name, shape, k)
            return self._pixels(picture)

    def _check(self, name: str, shape: Shape, k: int) -> None:
        """Raise DataError for an image that differs from the first, or if all of them are too
        many.
        """
        if self._first is None:
            self._first = shape
        if shape != self._first:
            size = (
                self.remedy.replace("SIDE", str(self._first[1]))
                if shape[1:] != self._first[1:]
                else ""
            )
            kind = "save all in one kind (grey or RGB)" if shape[0] != self._first[0] else ""
            todo = ", and ".join(filter(None, [size, kind]))
            raise DataError(f"{name} is {_said(shape)}, the first {_said(self._first)}; {todo}")
        count = max(self.rows, k + 1)
        if k == 0 or count > self.rows:
            refuse_large(self.what, count * (int(np.prod(shape)) + EXAMPLE_BYTES))

    @contextlib.contextmanager
    def _opened(self, name: str, file: IO[bytes]) -> Iterator[Image.Image]:
        """An image whose header has been read, and is of a kind and size that we decode."""
        with warnings.catch_warnings():
            # what a decoder thinks of the file; Pillow's own limit of pixels
            warnings.simplefilter("ignore")
            with (
                _decoding(name),
                contextlib.closing(Image.open(file, formats=_formats())) as picture,
            ):
                if picture.mode not in MODES:
                    raise DataError(
                        f"{name} is an image of kind {picture.mode}; save it as 8-bit grey or RGB"
                    )
                width, height = picture.size
                if width * height > PIXELS:
                    raise DataError(
                        f"{name} is an image of {width} × {height} pixels, and at most {PIXELS:,} "
                        "are read; "
                        "make it smaller"
                    )
                yield picture

    def _pixels(self, picture: Image.Image) -> Pixels:
        plain = picture.convert(MODES[picture.mode])
        if self.side is not None and plain.size != (self.side, self.side):
            plain = plain.resize((self.side, self.side), Image.Resampling.BICUBIC)
        array = np.asarray(plain)
        return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)

    def _file(
        self, name: str, cell: Path | Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[IO[bytes]]:
        if isinstance(cell, Path):
            return _plain_file(name, cell)
        data = cell.get("bytes")
        if data is not None:
            _refuse_heavy(name, len(data))
            return io.BytesIO(data)
        path = cell.get("path")
        if not isinstance(path, str) or not path:
            raise DataError(f"{name} has neither bytes nor a path; leave it out")
        if isinstance(self.within, str) and _on_hub(path, self.within):
            import fsspec  # type: ignore[import-untyped]

            return cast("contextlib.AbstractContextManager[IO[bytes]]", fsspec.open(path, "rb"))
        return _plain_file(name, _inside(name, path, self.within))


def _inside(name: str, path: str, within: Path | str) -> Path:
    """The file that a table names, if it lies in the data set's folder after links are followed."""
    said = path if len(path) <= 200 else path[:200] + "…"
    if isinstance(within, Path) and "\0" not in path:
        real = Path(os.path.realpath(within / path))
        if real.is_relative_to(os.path.realpath(within)):
            return real
    raise DataError(
        f"{name} names the file {said!r}, not in {within}; put it there, or its bytes in the table"
    )


def _on_hub(path: str, dataset: str) -> bool:
    """Whether a path is a file of a data set on the hub, or in a zip archive there."""
    pattern = rf"(zip://[^:]*::)?hf://datasets/{re.escape(dataset)}[@/][^:]*"
    return bool(dataset) and ".." not in path and re.fullmatch(pattern, path) is not None


def _plain_file(name: str, path: Path) -> IO[bytes]:
    if not path.is_file():
        raise DataError(f"{name}: there is no file {path}; put it there, or leave the example out")
    _refuse_heavy(name, path.stat().st_size)
    return path.open("rb")


def _refuse_heavy(name: str, size: int) -> None:
    if size > IMAGE_BYTES:
        raise DataError(
            f"{name} is {size_text(size)}; an image may have at most {size_text(IMAGE_BYTES)}; "
            "make it smaller"
        )


def _formats() -> tuple[str, ...]:
    """The formats that this Pillow can read."""
    if not all(name in Image.OPEN for name in FORMATS):
        Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@contextlib.contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Turn what decoders raise on bytes that lie into a DataError."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{name} is a larger image than any that is read ({error}); make it smaller"
        ) from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"{name} cannot be decoded as an image: it is none of {', '.join(FORMATS)}; replace it"
        ) from error
    except Exception as error:  # many kinds, by format and version; all mean that there is no image
        raise DataError(
            f"{name} cannot be decoded as an image ({on_one_line(error)}); replace it"
        ) from error


def _shape(picture: Image.Image, side: int | None) -> Shape:
    width, height = picture.size if side is None else (side, side)
    return 1 if MODES[picture.mode] == "L" else 3, height, width


def _said(shape: Shape) -> str:
    channels, height, width = shape
    return f"{width}×{height} {'grey' if channels == 1 else 'RGB'}"


# Images in a folder without labels, such as a user's own for public data.


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
