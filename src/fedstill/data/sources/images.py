"""Decodes encoded images: a single one, of which the header is read first, and the pixels only if
memory suffices; and the images of a split, in several threads.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import threading
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from fedstill.core.errors import DataError, cut_reason, on_one_line
from fedstill.core.files import shortened_list
from fedstill.data.dataset import ReadRequest
from fedstill.data.encoding import is_missing
from fedstill.data.sources.files import (
    EXAMPLE_BYTES,
    IMAGE_BYTES,
    MAX_PIXELS,
    check_size,
    file_error,
    size_text,
)
from fedstill.data.sources.tables import LabelledImage
from fedstill.data.sources.verification import checked_label

# The supported images, and the modes to which they are decoded.


MODES = {
    "1": "L",
    "L": "L",
    "LA": "L",
    "I": "L",
    "I;16": "L",
    "I;16B": "L",
    "P": "RGB",
    "RGB": "RGB",
    "RGBA": "RGB",
    "CMYK": "RGB",
    "YCbCr": "RGB",
}
"""Pillow's modes of supported images, and the mode to which each is decoded."""

SIXTEEN_BITS = ("I", "I;16", "I;16B")
"""Pillow's modes of grey images with 16 bits per pixel."""

CHANNEL_NAMES = {1: "grey", 3: "RGB"}

PICTURE_CHANNELS = (1, 3, 4)
"""The numbers of channels of grey, RGB and RGBA images; most image libraries put channels last."""

TWELVE_BITS = 4095
"""The largest pixel value with 12 bits. Cameras and scanners often store 12 bits in 16."""

TARGETS = {"grey": "L", "rgb": "RGB"}
"""Pillow's mode for each value of ``data.mode``."""

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""The supported formats. Their headers state the true size of the image. Other formats start
programs (EPS) or may state a false size (ICO).
"""

IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".avif", ".jp2"}
    | {".ppm", ".pgm", ".pbm", ".pnm"}
)
"""The suffixes of files that are read as images."""

TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transpositions for EXIF orientations.

This is the table of ``PIL.ImageOps.exif_transpose``. That function also rewrites all EXIF tags and
fails if they are damaged.
"""

Shape = tuple[int, int, int]
Pixels = NDArray[np.uint8]


# A single image.


@dataclass(frozen=True)
class Picture:
    """A decoded image.

    pixels: (C, H, W) uint8. stored_pixels: the number of pixels before resizing. largest: the
    largest pixel of an image with 16 bits per pixel, before it was reduced to the upper 8 bits.
    """

    name: str
    pixels: Pixels
    stored_pixels: int
    largest: int | None = None


class BrokenImage(DataError):
    """An image that is missing or cannot be decoded."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}; replace it")
        self.name = name
        self.reason = reason


SMALL_PIXELS = MAX_PIXELS // 64
"""Images with at most this many pixels are small: all threads together cannot fill the memory."""


class PixelBudget:
    """Limits the number of pixels that threads decode at the same time. An image above the limit
    is decoded alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._released = threading.Condition()

    @contextlib.contextmanager
    def reserved(self, count: int) -> Iterator[None]:
        """A context that reserves ``count`` pixels; waits until they are available."""
        with self._released:
            self._released.wait_for(lambda: self._used == 0 or self._used + count <= self._limit)
            self._used += count
        try:
            yield
        finally:
            with self._released:
                self._used -= count
                self._released.notify_all()


@dataclass(frozen=True)
class Pictures:
    """Decodes the images of a split. It is safe to use in several threads."""

    source: str
    """The name of the split for messages."""
    request: ReadRequest = field(default_factory=ReadRequest)
    """The size and mode of the images, and the treatment of broken ones."""
    rows: int = 0
    """The number of rows; 0 if it is unknown."""
    within: Path | str = ""
    """The folder (a path) or the hub data set (a name) of the images; files outside of it are not
    opened, even if a table refers to them.
    """
    size_remedy: str = "set data.size = SIDE to resize all"
    """The advice for images of different sizes."""
    _budget: PixelBudget = field(default_factory=lambda: PixelBudget(MAX_PIXELS), repr=False)

    def decoded(self, image: Any, index: int) -> Picture:
        """Decode image number ``index`` of the split.

        image: a PIL image, the path of a file, or a table's {"bytes": …, "path": …}. Raises
        BrokenImage for an image that is missing or cannot be decoded, and DataError for an image
        that is too large, has an unsupported mode or several pages, or is outside of the data set.
        """
        name = f"{self.source}: example {index}"
        if isinstance(image, Path):
            name = str(image)
        try:
            if isinstance(image, Image.Image):
                with decoding_errors(name):
                    return self._checked(name, image, index)
            with (
                self._file(name, image) as file,
                decoding_errors(name),
                Image.open(file, formats=_formats()) as picture,
            ):
                return self._checked(name, picture, index)
        except (OSError, MemoryError) as error:
            raise file_error(name, error) from error

    def _checked(self, name: str, picture: Image.Image, index: int) -> Picture:
        """Check the header of an image, and decode it."""
        _check_header(name, picture)
        width, height = picture.size
        if index == 0 or index >= self.rows:
            # All images have the shape of the first one, so one check suffices if their number is
            # known. Rotation does not change the number of pixels, so the header suffices.
            self.check_total(index + 1, self._bytes(picture))
        if width * height <= SMALL_PIXELS:
            return self._read(name, picture)
        with self._budget.reserved(width * height):
            return self._read(name, picture)

    def check_total(self, count: int, image_bytes: int) -> None:
        """Raise DataError if ``count`` images of this size exceed the limit together."""
        check_size(self.source, max(self.rows, count) * (image_bytes + EXAMPLE_BYTES))

    def mismatch(self, name: str, shape: Shape, first: Shape) -> DataError:
        """The error for an image whose shape differs from that of the first image."""
        remedies = []
        if shape[1:] != first[1:]:
            remedies.append(self.size_remedy.replace("SIDE", str(first[1])))
        if shape[0] != first[0]:
            remedies.append("set data.mode = 'rgb' (or 'grey') to convert all")
        return DataError(
            f"{name} is {_shape_text(shape)}, but the first is {_shape_text(first)}; "
            f"{', and '.join(remedies)}"
        )

    def _bytes(self, picture: Image.Image) -> int:
        width, height = picture.size
        if self.request.size is not None:
            width = height = self.request.size
        return width * height * len(self._mode(picture))

    def _mode(self, picture: Image.Image) -> str:
        """The mode to which an image is converted, "L" or "RGB"; each letter is a channel."""
        if self.request.mode is None:
            return MODES[picture.mode]
        return TARGETS[self.request.mode]

    def _read(self, name: str, picture: Image.Image) -> Picture:
        """Read the pixels of an image whose header has been checked."""
        # Decoding may change the mode, so the mode in the header is used.
        stored_mode = picture.mode
        mode = self._mode(picture)
        picture.load()
        plain: Image.Image = picture
        largest = None
        if stored_mode in SIXTEEN_BITS:
            values = np.asarray(picture)
            largest = _checked_largest(name, values)
            plain = Image.fromarray((values >> 8).astype(np.uint8))

        # Transparency is dropped first, so that hidden pixels do not depend on the mode.
        for target in (MODES[stored_mode], mode):
            if plain.mode != target:
                plain = plain.convert(target)
        turn = TURNS.get(_orientation(picture))
        if turn is not None:
            plain = plain.transpose(turn)
        side = self.request.size
        if side is not None and plain.size != (side, side):
            plain = plain.resize((side, side), Image.Resampling.BICUBIC)

        stored_pixels = picture.width * picture.height
        return Picture(name, _pixels_of(plain), stored_pixels, largest)

    def _file(self, name: str, image: Any) -> contextlib.AbstractContextManager[IO[bytes]]:
        if image is None:
            raise BrokenImage(name, "has no image")
        if isinstance(image, Path):
            return _plain_file(name, image)
        data = image.get("bytes")
        if data is not None:
            _check_file_size(name, len(data))
            return io.BytesIO(data)
        path = image.get("path")
        if not isinstance(path, str) or not path:
            raise BrokenImage(name, "has neither bytes nor a path")
        if isinstance(self.within, str) and _on_hub(path, self.within):
            return _hub_file(name, path)
        return _plain_file(name, _inside(name, path, self.within))


def _pixels_of(picture: Image.Image) -> Pixels:
    """The pixels of an image of mode "L" or "RGB", (C, H, W) uint8."""
    # This is faster than np.asarray(picture) for small images.
    values = np.frombuffer(picture.tobytes(), dtype=np.uint8)
    return values.reshape(picture.height, picture.width, -1).transpose(2, 0, 1)


def _inside(name: str, path: str, within: Path | str) -> Path:
    """A file to which a table refers; DataError if, after resolving links, it is outside of the
    data set's folder.
    """
    if isinstance(within, Path) and "\0" not in path:
        real = Path(os.path.realpath(within / path))
        if real.is_relative_to(os.path.realpath(within)):
            return real
    raise DataError(
        f"{name} refers to the file {cut_reason(path, 200)!r}, which is not in {within}; move it "
        "there, or store its bytes in the table"
    )


def _on_hub(path: str, dataset: str) -> bool:
    """Whether a path is a file of a data set on the hub, or in a zip archive there."""
    pattern = rf"(zip://[^:]*::)?hf://datasets/{re.escape(dataset)}[@/][^:]*"
    return bool(dataset) and ".." not in path and re.fullmatch(pattern, path) is not None


def _hub_file(name: str, path: str) -> IO[bytes]:
    """A file of the hub, read completely, so that a network error is not mistaken for a broken
    image.
    """
    import fsspec  # type: ignore[import-untyped]

    with fsspec.open(path, "rb") as file:
        data: bytes = file.read(IMAGE_BYTES + 1)
    _check_file_size(name, len(data))
    return io.BytesIO(data)


def _plain_file(name: str, path: Path) -> IO[bytes]:
    if not path.is_file():
        raise BrokenImage(name, f"has no image: there is no file {path}")
    _check_file_size(name, path.stat().st_size)
    return path.open("rb")


def _check_file_size(name: str, size: int) -> None:
    if size > IMAGE_BYTES:
        raise DataError(
            f"{name} has {size_text(size)}, above the limit of {size_text(IMAGE_BYTES)}; "
            "make it smaller"
        )


@functools.cache
def _formats() -> tuple[str, ...]:
    """The formats that the installed Pillow can read."""
    if not all(name in Image.OPEN for name in FORMATS):
        Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _check_header(name: str, picture: Image.Image) -> None:
    """Raise DataError for an image with an unsupported mode or size."""
    if picture.mode not in MODES:
        raise DataError(f"{name} is an image of mode {picture.mode}; save it as 8-bit grey or RGB")
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{name} is an image of {width} × {height} pixels, above the limit of {MAX_PIXELS:,}; "
            "make it smaller"
        )
    check_single_page(name, picture)


def check_single_page(name: str, picture: Image.Image) -> None:
    """Raise DataError for an image with several pages or frames.

    Phones write JPEG files of the format MPO, whose additional images are previews and depth maps.
    """
    if picture.format != "MPO" and getattr(picture, "is_animated", False):
        raise DataError(
            f"{name} has several pages or frames, but an example must be one image; save each page "
            "as a file, or only the page that you need"
        )


def _orientation(picture: Image.Image) -> int:
    """The EXIF orientation of a loaded image, from 1 to 8; 1 if the tags are damaged.

    Pillow rotates TIFF files itself and then removes their tag.
    """
    try:
        orientation: int = picture.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # The type depends on the version. Viewers ignore damaged tags, too.
        return 1
    if orientation not in range(1, 9):
        return 1
    return orientation


def _checked_largest(name: str, values: NDArray[Any]) -> int:
    """The largest pixel; DataError for pixels that do not fit into 16 bits."""
    smallest = int(values.min())
    largest = int(values.max())
    if smallest < 0 or largest > 65535:
        raise DataError(
            f"{name} has pixels from {smallest:,} to {largest:,}, but 16-bit grey images must have "
            "pixels from 0 to 65,535; save it as 8-bit or 16-bit grey"
        )
    return largest


@contextlib.contextmanager
def decoding_errors(name: str) -> Iterator[None]:
    """A context that turns exceptions of a decoder into BrokenImage, unless memory or a disk
    failed.

    Decoders raise many types of exceptions for damaged bytes, depending on format and version.
    """
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"{name} is too large for an image ({error}); make it smaller") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # the disk or the network failed; the image may be intact
        reason = on_one_line(error)
        if isinstance(error, UnidentifiedImageError):
            reason = f"its format is none of {', '.join(FORMATS)}"
        raise BrokenImage(name, f"cannot be decoded as an image ({reason})") from error


def _shape_text(shape: Shape) -> str:
    channels, height, width = shape
    return f"{width}×{height} {CHANNEL_NAMES[channels]}"


# The images of a split. Large images are decoded in several threads. Results and errors are used in
# the order of the rows, so that they do not depend on the number of threads.


THREADS = min(8, os.cpu_count() or 1)
"""The number of threads that decode images."""

THREAD_PIXELS = 1 << 13
"""Images with at least this many pixels are decoded in threads.

Decoding smaller images mostly executes Python code, which runs in one thread at a time.
"""

TASKS_AHEAD = 2 * THREADS
"""The number of tasks that threads start before their results are needed."""

TASK_PIXELS = 1 << 19
"""The number of pixels per task; it keeps threads from waiting for each other at every image."""

TASK_ROWS = 64
"""The largest number of rows in a task."""

ENCODED_BYTES = 1 << 26
"""The bytes of encoded images that may wait for threads; a larger image waits alone."""


@dataclass(frozen=True)
class DecodedImages:
    """The decoded images of a split."""

    images: Pixels
    """The images, (N, C, H, W) uint8."""
    labels: list[int | str]
    """The N labels in the form in which they were read."""
    positions: NDArray[np.int64]
    """The row of each image in the split, (N,), including rows that were left out."""
    rows: int
    """The number of all rows, including those that were left out."""
    broken: tuple[BrokenImage, ...] = ()
    unlabelled: int = 0
    """The number of images without a label, which were left out."""
    largest: int | None = None
    """The largest pixel of images with 16 bits per pixel, if there are any."""


def decode_images(pictures: Pictures, labelled_images: Iterable[LabelledImage]) -> DecodedImages:
    """Decode the images of a split and check their labels.

    Broken images are left out, and rows without a label if the request allows it. Raises DataError
    if no image is left, and for the first row with an unusable label or image.
    """
    stack = _Stack(pictures)
    labels: list[int | str] = []
    positions: list[int] = []
    broken: list[BrokenImage] = []
    unlabelled = 0
    count = 0
    # Decoders warn about irregular files. The filter applies to all threads.
    with catch_warnings(), contextlib.closing(_decoded(pictures, labelled_images)) as rows:
        simplefilter("ignore")
        for row in rows:
            count += 1
            if isinstance(row.error, BrokenImage):
                broken.append(row.error)
            elif row.error is not None:
                raise row.error
            elif pictures.request.options.unlabelled == "drop" and is_missing(row.label):
                unlabelled += 1
            else:
                assert row.picture is not None
                labels.append(checked_label(pictures.source, row.index, row.label))
                positions.append(row.index)
                stack.add(row.picture)
    if not count:
        raise DataError(
            f"{pictures.source} holds no examples; remove the file or download it again"
        )
    if not positions:
        check_broken(pictures.source, broken, can_skip=False)
        raise DataError(f"{pictures.source}: no example has a label; add labels")
    return DecodedImages(
        images=stack.images(),
        labels=labels,
        positions=np.array(positions, dtype=np.int64),
        rows=count,
        broken=tuple(broken),
        unlabelled=unlabelled,
        largest=stack.largest,
    )


@dataclass(slots=True)
class _Row:
    """A row of a split: its encoded image, its label and, once decoded, a picture or an error."""

    index: int
    image: Any
    """As in ``LabelledImage``; None once it is decoded."""
    label: Any
    picture: Picture | None = None
    error: Exception | None = None
    """BrokenImage, or an error that ends the reading when this row is reached."""

    @property
    def encoded_bytes(self) -> int:
        """The bytes of the encoded image or PIL image, if they are in memory."""
        if isinstance(self.image, Image.Image):
            return self.image.width * self.image.height * len(self.image.getbands())
        if isinstance(self.image, Mapping):
            return len(self.image.get("bytes") or b"")
        return 0

    def decode(self, pictures: Pictures) -> None:
        """Replace the encoded image by a picture or an error."""
        if self.error is None:
            try:
                self.picture = pictures.decoded(self.image, self.index)
            except BrokenImage as broken:
                # A new exception, because the traceback of the old one keeps the bytes.
                self.error = BrokenImage(broken.name, broken.reason)
            except Exception as error:
                self.error = error
        self.image = None


def _decoded(pictures: Pictures, labelled_images: Iterable[LabelledImage]) -> Generator[_Row]:
    """The decoded rows of a split, in order.

    The size of the first image decides whether the others are decoded in threads.
    """
    rows = _numbered(labelled_images)
    for row in rows:
        row.decode(pictures)
        yield row
        if row.picture is not None and row.picture.stored_pixels >= THREAD_PIXELS:
            row_count = TASK_PIXELS // row.picture.stored_pixels
            yield from _decoded_by_threads(pictures, rows, min(TASK_ROWS, max(1, row_count)))


def _numbered(labelled_images: Iterable[LabelledImage]) -> Iterator[_Row]:
    """The rows. A reading error becomes a row, so that it is raised after the rows before it."""
    index = -1
    try:
        for index, (image, label) in enumerate(labelled_images):
            yield _Row(index, image, label)
    except Exception as error:
        yield _Row(index + 1, None, None, error=error)


@dataclass(frozen=True)
class _Task:
    """Rows that one thread decodes, and the bytes of their encoded images."""

    rows: Future[list[_Row]]
    encoded_bytes: int


def _decoded_by_threads(
    pictures: Pictures, rows: Iterator[_Row], row_count: int
) -> Generator[_Row]:
    """The decoded rows, in order. TASKS_AHEAD and ENCODED_BYTES limit the number of tasks that are
    started in advance.

    row_count: the number of rows in a task.
    """

    def decode(batch: list[_Row]) -> list[_Row]:
        for row in batch:
            row.decode(pictures)
        return batch

    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="images")
    tasks: deque[_Task] = deque()
    try:
        for batch in _batches(rows, row_count):
            encoded_bytes = sum(row.encoded_bytes for row in batch)
            tasks.append(_Task(pool.submit(decode, batch), encoded_bytes))
            while _are_too_many(tasks):
                yield from tasks.popleft().rows.result()
        while tasks:
            yield from tasks.popleft().rows.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _are_too_many(tasks: Collection[_Task]) -> bool:
    """Whether more tasks or bytes wait for threads than the limits permit."""
    encoded_bytes = sum(task.encoded_bytes for task in tasks)
    return len(tasks) > TASKS_AHEAD or encoded_bytes > ENCODED_BYTES


def _batches(rows: Iterator[_Row], row_count: int) -> Iterator[list[_Row]]:
    """The rows of each task. Tasks with large encoded images have fewer rows."""
    batch: list[_Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += row.encoded_bytes
        if len(batch) == row_count or size > TASK_PIXELS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


class _Stack:
    """An array of images of one shape, which grows if their number is unknown."""

    def __init__(self, pictures: Pictures) -> None:
        self.largest: int | None = None
        self._pictures = pictures
        self._array: Pixels | None = None
        self._count = 0

    def add(self, picture: Picture) -> None:
        """Add an image; DataError if its shape differs from that of the first image."""
        array = self._array_for(picture)
        if picture.pixels.shape != array.shape[1:]:
            raise self._pictures.mismatch(picture.name, picture.pixels.shape, array.shape[1:])
        array[self._count] = picture.pixels
        self._count += 1
        if picture.largest is not None:
            self.largest = max(self.largest or 0, picture.largest)

    def images(self) -> Pixels:
        """All images (N, C, H, W); no image may be added afterwards."""
        assert self._array is not None
        self._array.resize((self._count, *self._array.shape[1:]), refcheck=False)
        return self._array

    def _array_for(self, picture: Picture) -> Pixels:
        """The array, with room for one more image."""
        if self._array is None:
            self._pictures.check_total(1, picture.pixels.nbytes)
            rows = max(self._pictures.rows, 1)
            self._array = np.empty((rows, *picture.pixels.shape), dtype=np.uint8)
        elif self._count == len(self._array):
            # The operating system moves large arrays without copying them.
            rows = self._count + self._count // 4 + 1
            self._array.resize((rows, *self._array.shape[1:]), refcheck=False)
        return self._array


# Errors about broken images.


def check_broken(source: str, broken: Sequence[BrokenImage], *, can_skip: bool) -> None:
    """Raise DataError if there are broken images.

    can_skip: whether ``data.broken`` could leave them out.
    """
    if not broken:
        return
    pronoun = "them"
    if len(broken) == 1:
        pronoun = "it"
    remedy = f"replace {pronoun}"
    if can_skip:
        remedy += f", or set data.broken = 'skip' to leave {pronoun} out"
    if len(broken) == 1:
        raise DataError(f"{broken[0].name} {broken[0].reason}; {remedy}")
    raise DataError(
        f"{source}: {len(broken):,} images are broken: {broken_names(source, broken)}; the first "
        f"{broken[0].reason}; {remedy}"
    )


NAMED_IMAGES = 10
"""The largest number of broken images that a message lists."""


def broken_names(source: str, broken: Sequence[BrokenImage]) -> str:
    """The names of broken images for a message, without that of their source."""
    return shortened_list([_name_within(source, image.name) for image in broken], NAMED_IMAGES)


def _name_within(source: str, name: str) -> str:
    """The name of an image without that of its source, which may be a split of it.

    >>> _name_within("photos, train", "photos/cat/1.png")
    'cat/1.png'
    """
    for place in (source, source.rpartition(", ")[0]):
        if place and name.startswith(place):
            return name.removeprefix(place).lstrip(f",: {os.sep}")
    return name
