"""Decodes encoded images into arrays: images in columns of tables, in folders by class, and in
folders without labels.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedstill.core.errors import DataError
from fedstill.core.fields import nfc
from fedstill.data.dataset import FILE, Decoded, ReadRequest, shortened_list
from fedstill.data.encoding import is_missing
from fedstill.data.sources.columns import owners_of, read_frames, schema_of_frames
from fedstill.data.sources.files import (
    FileSplits,
    client_name,
    file_errors,
    file_list,
    split_images,
    split_named,
)
from fedstill.data.sources.images import (
    IMAGE_SUFFIXES,
    TWELVE_BITS,
    BrokenImage,
    Picture,
    Pictures,
    Pixels,
)
from fedstill.data.sources.schema import (
    check_owner,
    class_names,
    image_columns,
    label_column,
    no_column,
)
from fedstill.data.sources.tables import Frame, ImageFrame, LabelledImage
from fedstill.data.sources.verification import RawSplit, checked_label, decoded_with_class_ids

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
class ImageRows:
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


def read_rows(pictures: Pictures, labelled_images: Iterable[LabelledImage]) -> ImageRows:
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
    return ImageRows(
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


# The images of a data set.


def decoded_images(
    source: str,
    splits: Mapping[str, ImageRows],
    request: ReadRequest,
    names: tuple[str, ...] | None,
) -> Decoded:
    """The images of all splits with class ids, and warnings about them.

    names: the names of the classes, if labels are ids. Raises DataError for broken images, unless
    the request leaves them out.
    """
    if request.broken == "refuse":
        broken = [image for rows in splits.values() for image in rows.broken]
        check_broken(source, broken, can_skip=True)
    raw = {split: RawSplit(rows.images, rows.labels) for split, rows in splits.items()}
    data = decoded_with_class_ids(raw, names)
    notes = [
        f"{split}: {rows.unlabelled:,} of {rows.rows:,} images without a label were left out"
        for split, rows in splits.items()
        if rows.unlabelled
    ]
    about = data.about.with_notes(*notes).with_warnings(*image_warnings(source, splits))
    return replace(data, about=about)


def image_warnings(source: str, splits: Mapping[str, ImageRows]) -> list[str]:
    """Warnings about broken and dark images."""
    warnings = [_broken_warning(source, split, rows) for split, rows in splits.items()]
    warnings.append(_dark_warning([rows.largest for rows in splits.values()]))
    return [warning for warning in warnings if warning]


def with_owners(
    source: str, data: Decoded, rows: Mapping[str, ImageRows], owner_tables: Mapping[str, pa.Table]
) -> Decoded:
    """The data with the owners of images. owner_tables: the column of owners of each split."""
    tables = {split: owner_tables[split].take(pa.array(rows[split].positions)) for split in rows}
    (column,) = {name for table in tables.values() for name in table.column_names}
    owners = owners_of(source, tables, column)
    splits = {
        name: replace(split, owners=owners.codes[name]) for name, split in data.splits.items()
    }
    return replace(data, splits=splits, about=replace(data.about, owners=owners.names))


def _broken_warning(source: str, split: str, rows: ImageRows) -> str:
    if not rows.broken:
        return ""
    noun = "images"
    if len(rows.broken) == 1:
        noun = "image"
    return (
        f"left out {len(rows.broken):,} broken {noun} of {rows.rows:,} in {split} "
        f"({_named(source, rows.broken)})"
    )


def _dark_warning(largest_pixels: Sequence[int | None]) -> str:
    """A warning if 16-bit images have no bright pixels, or ""."""
    pixels = [largest for largest in largest_pixels if largest is not None]
    if not pixels or max(pixels) > TWELVE_BITS:
        return ""
    return (
        f"only the upper 8 bits of 16-bit images are read, and no pixel is above {max(pixels):,}, "
        "so the images are nearly black; if they have 12 bits, multiply them by 16"
    )


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
        f"{source}: {len(broken):,} images are broken: {_named(source, broken)}; the first "
        f"{broken[0].reason}; {remedy}"
    )


NAMED_IMAGES = 10
"""The largest number of broken images that a message lists."""


def _named(source: str, broken: Sequence[BrokenImage]) -> str:
    separators = f",: {os.sep}"
    names = [image.name.removeprefix(source).lstrip(separators) for image in broken]
    return shortened_list(names, NAMED_IMAGES)


# Tables, which may have a column of images.


def read_columns(
    source: str, frames: Mapping[str, ImageFrame], request: ReadRequest, within: Path | str
) -> Decoded:
    """The rows of {split: frame} as arrays of images or of other columns.

    within: the folder or the hub data set of the frames; files outside of it are not opened, even
    if a row refers to them. Raises DataError for missing or ambiguous columns, and for values that
    cannot be read.
    """
    data = read_without_images(source, frames, request)
    if data is not None:
        return data

    rows = {}
    names: tuple[str, ...] | None = None
    for split, frame in frames.items():
        check_owner(source, frame.schema.names, request.options)
        image = _image_column(source, frame.schema, request)
        label = label_column(source, frame.schema, request)
        names = names or class_names(frame.schema, label)
        pictures = Pictures(f"{source}, {split}", request, frame.rows, within)
        rows[split] = read_rows(pictures, frame.labelled_images(image, label))
    data = decoded_images(source, rows, request, names)

    owner = request.options.owner
    if not owner:
        return data
    owner_tables = {split: frame.read([owner]) for split, frame in frames.items()}
    return with_owners(source, data, rows, owner_tables)


def read_without_images(
    source: str, frames: Mapping[str, Frame], request: ReadRequest
) -> Decoded | None:
    """The rows of {split: frame} as arrays of columns other than images; None for images."""
    schema = schema_of_frames(source, frames, request)
    if schema is None:
        return None
    check_not_encoded(source, request)
    return read_frames(source, frames, schema)


def _image_column(source: str, schema: pa.Schema, request: ReadRequest) -> str:
    """The column of images; DataError if it is missing or ambiguous."""
    candidates = image_columns(schema)
    name = nfc(request.image)
    if not name and len(candidates) == 1:
        name = candidates[0]
    if name is None or name not in schema.names:
        raise DataError(no_column(source, "image", name, schema.names))
    return name


def check_not_encoded(source: str, request: ReadRequest) -> None:
    """Raise DataError if ``data.mode`` is set although the data are not encoded images."""
    if request.mode is not None:
        raise DataError(
            f"data.mode is only for encoded images, which {source} does not hold; remove it"
        )


# Images in folders named after their class.


HUGGING_FACE_TABLES = frozenset({"metadata.csv", "metadata.jsonl", "metadata.parquet"})
"""The names of label tables in Hugging Face's layout of image folders."""

LABEL_TABLE_SUFFIXES = frozenset({".csv", ".tsv", ".jsonl", ".xlsx", ".xls", ".parquet"})
"""The suffixes of tables that may hold the labels of images in the same folder."""


def read_image_folder(place: Path, files: Sequence[Path], request: ReadRequest) -> Decoded:
    """Images in folders named after their class, optionally below folders named after splits.

    Raises DataError if there are no images, if an image cannot be read, or if the classes are in a
    table.
    """
    images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
    images.sort(key=lambda path: nfc(path.as_posix()))
    if not images:
        raise DataError(_no_images(place, files))
    warning = _table_warning(place, files, images)
    flat = _without_class([path.relative_to(place) for path in images])
    if flat is not None:
        raise DataError(
            f"{place / flat} is not in the folder of a class; put each image into a folder named "
            "after its class: "
            f"{place.name}/cat/{flat.name}, or {place.name}/train/cat/{flat.name}"
        )

    splits = split_images(place, images)
    rows = {}
    for split, paths in splits.files.items():
        pictures = Pictures(f"{place}, {split}", request, len(paths), place)
        rows[split] = read_rows(pictures, (LabelledImage(path, path.parent.name) for path in paths))
    data = decoded_images(str(place), rows, request, None)
    data = replace(data, about=data.about.with_warnings(warning, *splits.warnings))
    if request.options.owner != FILE:
        return data
    return with_owners(str(place), data, rows, _folder_owners(place, splits))


def _no_images(place: Path, files: Sequence[Path]) -> str:
    kinds = Counter(path.suffix.lower() for path in files if path.suffix)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3)) or "nothing else"
    return (
        f"{place} holds no images (it holds {counts}); images need one folder per class, "
        "for example train/cat/1.png. To read other files, such as sounds, write a function: "
        "data.name = 'mine.py:data'"
    )


def _table_warning(place: Path, files: Sequence[Path], images: Sequence[Path]) -> str:
    """A warning about tables next to images, or "" if there are none.

    Raises DataError if the table probably holds the labels: either images are not in folders of
    several classes, or the table has one of the names of Hugging Face's layout.
    """
    tables = [path for path in files if path.suffix.lower() in LABEL_TABLE_SUFFIXES]
    if not tables:
        return ""
    metadata = [path for path in tables if path.name in HUGGING_FACE_TABLES]
    classes = {path.parent.name for path in images}
    is_flat = _without_class([path.relative_to(place) for path in images]) is not None
    if metadata or is_flat or len(classes) == 1:
        raise DataError(labels_in_table(next(iter(metadata or tables))))
    return (
        f"not read: {file_list(tables)}; the classes of images are taken from the names of their "
        "folders"
    )


def labels_in_table(table: Path) -> str:
    """The error for image files whose labels are in a table."""
    return (
        f"{table} cannot be used, because labels of image files are not read from tables; put each "
        "image into a folder named after its class, or write parquet files of images and labels"
    )


def _folder_owners(place: Path, splits: FileSplits) -> dict[str, pa.Table]:
    """The owner of each image: the name of its client's folder."""
    tables = {}
    for split, paths in splits.files.items():
        clients = [client_name(place, path, class_folders=True) for path in paths]
        tables[split] = pa.table({FILE: clients})
    return tables


def _without_class(images: Sequence[Path]) -> Path | None:
    """An image that is not in the folder of a class, but in no folder or in the folder of a split.

    In the layout split/image.png, all folders of images are splits. In the layout class/image.png,
    a folder may have the name of a split, such as "test", but is a class.
    """
    folders = {path.parts[0].lower() for path in images if len(path.parts) == 2}
    has_class_folders = not all(map(split_named, folders))
    for path in images:
        in_split = len(path.parts) == 2 and not has_class_folders
        if len(path.parts) == 1 or in_split:
            return path
    return None


# Images in a folder without labels, for example a user's public data.


def images_in(place: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name; empty if the folder does not exist.

    A folder with such files has no folders of classes.
    """
    with file_errors(place):
        if not place.is_dir():
            return []
        return sorted(
            p for p in place.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file()
        )


@dataclass(frozen=True, eq=False)
class UnlabelledImages:
    """The images of a folder, sorted by name, and warnings about them."""

    images: Tensor
    """The images, (n, C, H, W) uint8."""
    warnings: tuple[str, ...]


def read_unlabelled(place: Path, request: ReadRequest | None = None) -> UnlabelledImages:
    """Read all images of a folder.

    Raises DataError for a file that is not an image, unless such files are skipped, and for an
    image that differs from the first one in size or mode.
    """
    request = request or ReadRequest()
    paths = images_in(place)
    if not paths:
        kinds = ", ".join(sorted(IMAGE_SUFFIXES))
        raise DataError(f"{place} holds no images ({kinds}); add images, or choose another folder")
    pictures = Pictures(
        source=str(place),
        request=request,
        rows=len(paths),
        within=place,
        size_remedy="set data.public_resize = true to resize all",
    )
    with file_errors(place):
        rows = read_rows(pictures, (LabelledImage(path, 0) for path in paths))
    if request.broken == "refuse":
        check_broken(str(place), rows.broken, can_skip=True)
    warnings = image_warnings(str(place), {"the public set": rows})
    return UnlabelledImages(torch.from_numpy(rows.images), tuple(warnings))
