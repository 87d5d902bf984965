"""Encoded images as one array: those of a split, of columns, of folders by class, and without
labels.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.errors import DataError
from fedstill.core.fields import nfc
from fedstill.data.dataset import FILE, Decoded, ReadingOptions, ReadRequest, shortened_list
from fedstill.data.encoding import is_missing
from fedstill.data.sources.encode import owners_of, read_frames, schema_of
from fedstill.data.sources.images import (
    IMAGE_SUFFIXES,
    TWELVE_BITS,
    BrokenImage,
    Picture,
    Pictures,
    Pixels,
)
from fedstill.data.sources.limits import file_errors
from fedstill.data.sources.schema import (
    class_names,
    image_columns,
    label_column,
    no_column,
    no_owner,
)
from fedstill.data.sources.splits import (
    NAMED_FILES,
    FileSplits,
    client_name,
    split_images,
    split_named,
)
from fedstill.data.sources.tables import ImageFrame
from fedstill.data.sources.verify import RawSplit, checked_label, decoded_with_class_ids

# The images of a split. Large images are decoded by several threads; results and errors are used in
# the order of the rows, so that neither depends on the number of threads.


THREADS = min(8, os.cpu_count() or 1)
"""The threads that decode images."""

THREAD_PIXELS = 1 << 13
"""The pixels of an image from which on threads decode it.

Decoding a smaller one is mostly Python code, which runs in one thread at a time.
"""

TASKS_AHEAD = 2 * THREADS
"""The tasks of threads that are started before their turn comes."""

TASK_PIXELS = 1 << 19
"""The pixels that a task decodes, so that threads do not wait for each other at every image."""

TASK_ROWS = 64
"""The most rows of a task."""

ENCODED_BYTES = 1 << 26
"""The bytes of encoded images that wait for threads; a larger image waits alone."""


@dataclass(frozen=True)
class ImageRows:
    """The images of a split that could be decoded."""

    images: Pixels
    """(N, C, H, W) uint8."""
    labels: list[int | str]
    """The N labels as they were read."""
    positions: NDArray[np.int64]
    """The rows (N,) of the split that the images are in, before any was left out."""
    rows: int
    """The number of all rows, with those that were left out."""
    broken: tuple[BrokenImage, ...] = ()
    unlabelled: int = 0
    """The number of images that were left out because they have no label."""
    largest: int | None = None
    """The largest pixel of images with 16 bits a pixel, if there are any."""


def read_rows(pictures: Pictures, cells: Iterable[tuple[Any, Any]]) -> ImageRows:
    """The images of a split and their labels, from (image, label) of each row.

    Broken images, and rows without a label if these are left out, are not among them. Raises
    DataError if no image is left, and for a label or an image that cannot be used: the first in
    the order of the rows.
    """
    stack = _Stack(pictures)
    labels: list[int | str] = []
    positions: list[int] = []
    broken: list[BrokenImage] = []
    unlabelled = 0
    count = 0
    # Decoders warn of what they find in a file. The filter holds for all threads.
    with catch_warnings(), contextlib.closing(_decoded(pictures, cells)) as rows:
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
            f"{pictures.source} holds no examples; leave the file out or download it again"
        )
    if not positions:
        check_broken(pictures.source, broken, can_skip=False)
        raise DataError(f"{pictures.source}: no example has a label; give them labels")
    return ImageRows(
        images=stack.images(),
        labels=labels,
        positions=np.array(positions, dtype=np.int64),
        rows=count,
        broken=tuple(broken),
        unlabelled=unlabelled,
        largest=stack.largest,
    )


@dataclass(frozen=True)
class _Row:
    """A row of a split: its encoded image and its label."""

    index: int
    cell: Any
    """The encoded image, an exception if the row could not be read."""
    label: Any

    @property
    def bytes(self) -> int:
        """The bytes of the encoded image, if they are in memory."""
        if not isinstance(self.cell, Mapping):
            return 0
        return len(self.cell.get("bytes") or b"")


@dataclass(frozen=True)
class _DecodedRow:
    """A row's label, and its image or the reason why there is none."""

    index: int
    label: Any
    picture: Picture | None = None
    error: Exception | None = None
    """BrokenImage, or an error that ends the reading when the row's turn comes."""


def _decoded(pictures: Pictures, cells: Iterable[tuple[Any, Any]]) -> Generator[_DecodedRow]:
    """The rows of a split with their decoded images, in order.

    The first image tells whether threads decode the others.
    """
    rows = _numbered(cells)
    for row in rows:
        decoded = _decoded_row(pictures, row)
        yield decoded
        if decoded.picture is not None and decoded.picture.stored_pixels >= THREAD_PIXELS:
            row_count = TASK_PIXELS // decoded.picture.stored_pixels
            yield from _decoded_by_threads(pictures, rows, min(TASK_ROWS, max(1, row_count)))


def _numbered(cells: Iterable[tuple[Any, Any]]) -> Iterator[_Row]:
    """The rows. An error in reading them becomes a row, so that it waits for those before it."""
    index = -1
    try:
        for index, (cell, label) in enumerate(cells):
            yield _Row(index, cell, label)
    except Exception as error:
        yield _Row(index + 1, error, None)


def _decoded_row(pictures: Pictures, row: _Row) -> _DecodedRow:
    if isinstance(row.cell, Exception):
        return _DecodedRow(row.index, row.label, error=row.cell)
    try:
        picture = pictures.decoded(row.cell, row.index)
    except BrokenImage as broken:
        # A new exception: the traceback of this one holds the bytes of the image.
        error = BrokenImage(broken.name, broken.reason)
        return _DecodedRow(row.index, row.label, error=error)
    except Exception as error:
        return _DecodedRow(row.index, row.label, error=error)
    return _DecodedRow(row.index, row.label, picture)


@dataclass(frozen=True)
class _Task:
    """Rows that a thread decodes, and the bytes of their encoded images."""

    rows: Future[list[_DecodedRow]]
    bytes: int


def _decoded_by_threads(
    pictures: Pictures, rows: Iterator[_Row], row_count: int
) -> Generator[_DecodedRow]:
    """The decoded rows, in order. As many tasks as TASKS_AHEAD and ENCODED_BYTES allow are started
    before their turn comes.

    row_count: the rows of a task.
    """

    def decode(batch: Sequence[_Row]) -> list[_DecodedRow]:
        return [_decoded_row(pictures, row) for row in batch]

    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="images")
    tasks: deque[_Task] = deque()
    try:
        for batch in _batches(rows, row_count):
            tasks.append(_Task(pool.submit(decode, batch), sum(row.bytes for row in batch)))
            while len(tasks) > TASKS_AHEAD or sum(task.bytes for task in tasks) > ENCODED_BYTES:
                yield from tasks.popleft().rows.result()
        while tasks:
            yield from tasks.popleft().rows.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(rows: Iterator[_Row], row_count: int) -> Iterator[list[_Row]]:
    """The rows by task. Large encoded images make a task of fewer rows."""
    batch: list[_Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += row.bytes
        if len(batch) == row_count or size > TASK_PIXELS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


class _Stack:
    """Images of one shape in one array, which grows where their number is unknown."""

    def __init__(self, pictures: Pictures) -> None:
        self.largest: int | None = None
        self._pictures = pictures
        self._array: Pixels | None = None
        self._count = 0

    def add(self, picture: Picture) -> None:
        """Add an image; DataError if its shape is not that of the first."""
        array = self._array_for(picture)
        if picture.pixels.shape != array.shape[1:]:
            raise self._pictures.mismatch(picture.name, picture.pixels.shape, array.shape[1:])
        array[self._count] = picture.pixels
        self._count += 1
        if picture.largest is not None:
            self.largest = max(self.largest or 0, picture.largest)

    def images(self) -> Pixels:
        """All images (N, C, H, W); nothing may be added afterwards."""
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
            # The system moves large arrays without copying them.
            rows = self._count + self._count // 4 + 1
            self._array.resize((rows, *self._array.shape[1:]), refcheck=False)
        return self._array


# The images of a data set.


def labelled_images(
    source: str,
    splits: Mapping[str, ImageRows],
    request: ReadRequest,
    names: tuple[str, ...] | None,
) -> Decoded:
    """The images of all splits with class ids, and warnings about them.

    names: of the classes, if labels are ids. Raises DataError for broken images, unless they are
    left out.
    """
    if request.broken == "refuse":
        broken = [image for rows in splits.values() for image in rows.broken]
        check_broken(source, broken, can_skip=True)
    raw = {split: RawSplit(rows.images, rows.labels) for split, rows in splits.items()}
    data = decoded_with_class_ids(raw, names)
    notes = [
        f"{split}: {rows.unlabelled:,} of {rows.rows:,} images were left out, as they have no label"
        for split, rows in splits.items()
        if rows.unlabelled
    ]
    about = data.about.with_notes(*notes).with_warnings(*image_warnings(source, splits))
    return replace(data, about=about)


def image_warnings(source: str, splits: Mapping[str, ImageRows]) -> list[str]:
    """Warnings about broken and dark images."""
    warnings = [_broken_warning(source, split, rows) for split, rows in splits.items()]
    warnings.append(_dark_warning([rows.largest for rows in splits.values()]))
    return warnings


def with_owners(
    source: str, data: Decoded, rows: Mapping[str, ImageRows], owner_tables: Mapping[str, pa.Table]
) -> Decoded:
    """Images with their owners. owner_tables: the single column of owners of each split."""
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
    return (
        f"left out, because they are broken: {len(rows.broken):,} of {rows.rows:,} images in "
        f"{split} ({_named(source, rows.broken)})"
    )


def _dark_warning(largest_pixels: Sequence[int | None]) -> str:
    """A warning about 16-bit images none of which has a bright pixel, or ""."""
    pixels = [largest for largest in largest_pixels if largest is not None]
    if not pixels or max(pixels) > TWELVE_BITS:
        return ""
    return (
        f"the upper 8 bits of 16-bit images are read, and no pixel is above {max(pixels):,}, so "
        "that they are nearly black; if they have 12 bits, multiply them by 16"
    )


def check_broken(source: str, broken: Sequence[BrokenImage], *, can_skip: bool) -> None:
    """Raise DataError for broken images, if there are any.

    can_skip: whether ``data.broken`` would leave them out.
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
"""The number of broken images that a message names."""


def _named(source: str, broken: Sequence[BrokenImage]) -> str:
    separators = f",: {os.sep}"
    names = [image.name.removeprefix(source).lstrip(separators) for image in broken]
    return shortened_list(names, NAMED_IMAGES)


# Columns of a table, of which one may hold images.


def read_columns(
    source: str, frames: Mapping[str, ImageFrame], request: ReadRequest, within: Path | str
) -> Decoded:
    """The rows of {split: frame} as arrays, of images or of other columns.

    within: the folder, or the data set on the hub, outside of which no file is opened because a row
    names it. Raises DataError for absent or unclear columns, and for what cannot be read in them.
    """
    schema = schema_of(source, frames, request)
    if schema is not None:
        check_not_encoded(source, request)
        return read_frames(source, frames, schema)

    rows = {}
    names: tuple[str, ...] | None = None
    for split, frame in frames.items():
        _check_owner(source, frame.schema.names, request.options)
        image = _image_column(source, frame.schema, request)
        label = label_column(source, frame.schema, request)
        names = names or class_names(frame.schema, label)
        pictures = Pictures(f"{source}, {split}", request, frame.rows, within)
        rows[split] = read_rows(pictures, frame.cells(image, label))
    data = labelled_images(source, rows, request, names)

    owner = request.options.owner
    if not owner:
        return data
    owner_tables = {split: frame.read([owner]) for split, frame in frames.items()}
    return with_owners(source, data, rows, owner_tables)


def _image_column(source: str, schema: pa.Schema, request: ReadRequest) -> str:
    """The column of images; DataError if it is not there, or not clear which it is."""
    candidates = image_columns(schema)
    name = nfc(request.image)
    if not name and len(candidates) == 1:
        name = candidates[0]
    if name is None or name not in schema.names:
        raise DataError(no_column(source, "image", name, schema.names))
    return name


def _check_owner(source: str, columns: Sequence[str], options: ReadingOptions) -> None:
    if options.owner and options.owner not in (FILE, *columns):
        raise DataError(no_owner(source, options, columns))


def check_not_encoded(source: str, request: ReadRequest) -> None:
    """Raise DataError for a mode of images where the data are no encoded images."""
    if request.mode is not None:
        raise DataError(f"{source} holds no encoded images, which data.mode is for; leave it out")


# Images in folders named by their class.


HUGGING_FACE_TABLES = frozenset({"metadata.csv", "metadata.jsonl", "metadata.parquet"})
"""The names of tables of labels beside images in the layout of Hugging Face."""

LABEL_TABLE_SUFFIXES = frozenset({".csv", ".tsv", ".jsonl", ".xlsx", ".xls", ".parquet"})
"""How the names of tables end that may hold the labels of images beside them."""


def read_image_folder(place: Path, files: Sequence[Path], request: ReadRequest) -> Decoded:
    """Images in folders named by their class, with folders named by the split above them or
    without.

    Raises DataError if there are no images, if a file is none, or if their classes are in a table.
    """
    images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
    images.sort(key=lambda path: nfc(path.as_posix()))
    if not images:
        raise DataError(_no_images(place, files))
    warning = _table_warning(place, files, images)
    flat = _without_class([path.relative_to(place) for path in images])
    if flat is not None:
        raise DataError(
            f"{place / flat} is in no folder of its class; put each image into a folder named by "
            "its class: "
            f"{place.name}/cat/{flat.name}, or {place.name}/train/cat/{flat.name}"
        )

    splits = split_images(place, images)
    rows = {}
    for split, paths in splits.files.items():
        pictures = Pictures(f"{place}, {split}", request, len(paths), place)
        rows[split] = read_rows(pictures, ((path, path.parent.name) for path in paths))
    data = labelled_images(str(place), rows, request, None)
    data = replace(data, about=data.about.with_warnings(warning, *splits.warnings))
    if request.options.owner != FILE:
        return data
    return with_owners(str(place), data, rows, _folder_owners(place, splits))


def _no_images(place: Path, files: Sequence[Path]) -> str:
    kinds = Counter(path.suffix.lower() for path in files if path.suffix)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3)) or "nothing else"
    return (
        f"{place} holds no images (it holds {counts}); a folder of images holds one folder a "
        "class, e.g. train/cat/1.png. Other files, such as sounds, are read by a function of yours:"
        " data.name = 'mine.py:data'"
    )


def _table_warning(place: Path, files: Sequence[Path], images: Sequence[Path]) -> str:
    """A warning about tables beside images, or "" if there are none.

    Raises DataError where the table must be what holds the labels: images are not in folders of
    several classes, or the table has the name that Hugging Face gives it.
    """
    tables = [path for path in files if path.suffix.lower() in LABEL_TABLE_SUFFIXES]
    if not tables:
        return ""
    metadata = [path for path in tables if path.name in HUGGING_FACE_TABLES]
    classes = {path.parent.name for path in images}
    is_flat = _without_class([path.relative_to(place) for path in images]) is not None
    if metadata or is_flat or len(classes) == 1:
        raise DataError(labels_in_table(next(iter(metadata or tables))))
    names = ", ".join(path.name for path in tables[:NAMED_FILES])
    return f"not read: {names}; the classes of images are the names of their folders"


def labels_in_table(table: Path) -> str:
    """The error for image files whose labels are in a table."""
    return (
        f"{table} is not read, as labels of image files are not taken from a table; put each image "
        "into a folder named by its class, or write parquet files of images and labels"
    )


def _folder_owners(place: Path, splits: FileSplits) -> dict[str, pa.Table]:
    """The folder of each image's client."""
    tables = {}
    for split, paths in splits.files.items():
        clients = [client_name(place, path, class_folders=True) for path in paths]
        tables[split] = pa.table({FILE: clients})
    return tables


def _without_class(images: Sequence[Path]) -> Path | None:
    """An image that lies in no folder of a class: in no folder, or in that of a split.

    In the layout split/image.png, all folders of images are splits. In the layout class/image.png,
    a folder may be named as a split, such as "test", and is a class.
    """
    folders = {path.parts[0].lower() for path in images if len(path.parts) == 2}
    has_class_folders = not all(map(split_named, folders))
    for path in images:
        in_split = len(path.parts) == 2 and not has_class_folders
        if len(path.parts) == 1 or in_split:
            return path
    return None


# Images in a folder without labels, such as a user's own for public data.


def images_in(place: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name; none if there is no such folder.

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
    """The images of a folder, in the order of their names, and warnings about them."""

    images: Tensor
    """(n, C, H, W) uint8."""
    warnings: tuple[str, ...]


def read_unlabelled(place: Path, request: ReadRequest | None = None) -> UnlabelledImages:
    """All images of a folder.

    Raises DataError for a file that is no image, unless such files are skipped, and for an image
    that differs from the first in size or kind.
    """
    request = request or ReadRequest()
    paths = images_in(place)
    if not paths:
        kinds = ", ".join(sorted(IMAGE_SUFFIXES))
        raise DataError(f"{place} holds no images ({kinds}); put some in, or name another folder")
    pictures = Pictures(
        source=str(place),
        request=request,
        rows=len(paths),
        within=place,
        size_remedy="set data.public_resize = true to resize all",
    )
    with file_errors(place):
        rows = read_rows(pictures, ((path, 0) for path in paths))
    if request.broken == "refuse":
        check_broken(str(place), rows.broken, can_skip=True)
    warnings = image_warnings(str(place), {"the public set": rows})
    return UnlabelledImages(torch.from_numpy(rows.images), tuple(filter(None, warnings)))
