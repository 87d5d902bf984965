"""Reads images into arrays: images in columns of tables, in folders by class, in folders without
labels, and in IDX and NPZ files.
"""

from __future__ import annotations

import gzip
import math
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.errors import DataError, cut_reason, on_one_line
from fedstill.core.fields import nfc
from fedstill.core.files import counted
from fedstill.data.dataset import FILE, DatasetInfo, Decoded, ReadRequest, Split
from fedstill.data.sources.columns import (
    Owners,
    declared_classes,
    encode_frames,
    owners_of,
    schema_of_frames,
)
from fedstill.data.sources.files import (
    EXAMPLE_BYTES,
    check_ratio,
    check_size,
    client_name,
    file_errors,
    file_list,
    has_suffix,
    image_files_by_split,
    split_of_name,
)
from fedstill.data.sources.images import (
    IMAGE_SUFFIXES,
    PICTURE_CHANNELS,
    TWELVE_BITS,
    DecodedImages,
    Pictures,
    broken_names,
    check_broken,
    decode_images,
)
from fedstill.data.sources.schema import (
    check_owner,
    image_columns,
    image_keys,
    label_column,
    no_column,
)
from fedstill.data.sources.tables import (
    CsvFrame,
    ImageFrame,
    LabelledImage,
    check_image_type,
    with_missing,
)
from fedstill.data.sources.verification import (
    RawSplit,
    checked_label,
    decoded_with_class_ids,
)

# The images of a data set.


def decoded_images(
    source: str,
    splits: Mapping[str, DecodedImages],
    request: ReadRequest,
    names: tuple[str, ...] | None,
    owner_tables: Mapping[str, pa.Table],
) -> Decoded:
    """The images of all splits with class ids and owners, and warnings about them.

    names: the names of the classes, if labels are ids. owner_tables: the column of owners of each
    split; empty without owners. Raises DataError for broken images, unless the request leaves them
    out.
    """
    if request.broken == "refuse":
        broken = [image for rows in splits.values() for image in rows.broken]
        check_broken(source, broken, can_skip=True)
    owners = Owners()
    if owner_tables:
        tables = {
            split: owner_tables[split].take(pa.array(rows.positions))
            for split, rows in splits.items()
        }
        positions = {split: rows.positions for split, rows in splits.items()}
        owners = owners_of(source, tables, request.options.owner, positions=positions)

    raw = {}
    for split, rows in splits.items():
        notes: tuple[str, ...] = ()
        if rows.unlabelled:
            notes = (
                f"{split}: {rows.unlabelled:,} of {rows.rows:,} images without a label were left "
                "out",
            )
        raw[split] = RawSplit(rows.images, rows.labels, owners.codes.get(split), notes)
    data = decoded_with_class_ids(raw, names, DatasetInfo(owners=owners.names))
    return data.with_warnings(*image_warnings(source, splits))


def image_warnings(source: str, splits: Mapping[str, DecodedImages]) -> list[str]:
    """Warnings about broken and dark images."""
    warnings = [_broken_warning(source, split, rows) for split, rows in splits.items()]
    warnings.append(_dark_warning([rows.largest for rows in splits.values()]))
    return [warning for warning in warnings if warning]


def _broken_warning(source: str, split: str, rows: DecodedImages) -> str:
    if not rows.broken:
        return ""
    return (
        f"left out {counted(len(rows.broken), 'broken image')} of {rows.rows:,} in {split} "
        f"({broken_names(source, rows.broken)})"
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


# Tables, which may have a column of images.


def read_frames(
    source: str,
    frames: Mapping[str, ImageFrame | CsvFrame],
    request: ReadRequest,
    within: Path | str,
) -> Decoded:
    """The rows of {split: frame} as arrays of images or of other columns.

    within: the folder or the hub data set of the frames; files outside of it are not opened, even
    if a row refers to them. Raises DataError for missing or ambiguous columns, and for values that
    cannot be read.
    """
    schema = schema_of_frames(source, frames, request)
    if schema is not None:
        check_not_encoded(source, request)
        if request.broken != "refuse":
            raise DataError(
                f"data.broken is only for images, which {source} does not hold; remove it"
            )
        return encode_frames(source, frames, schema)

    image_frames: dict[str, ImageFrame] = {}
    images = {}
    labels = {}
    for split, frame in frames.items():
        if isinstance(frame, CsvFrame):
            raise DataError(f"{source}: a CSV file holds no images; remove {image_keys(request)}")
        check_owner(source, frame.schema.names, request.options)
        image_frames[split] = frame
        images[split] = _image_column(source, frame.schema, request)
        labels[split] = label_column(source, frame.schema, request)
    names = declared_classes(source, image_frames, labels)

    rows = {}
    for split, image_frame in image_frames.items():
        pictures = Pictures(f"{source}, {split}", request, image_frame.rows, within)
        labelled_images = image_frame.labelled_images(images[split], labels[split])
        rows[split] = decode_images(pictures, labelled_images)
    owner = request.options.owner
    owner_tables = {}
    if owner:
        marks = request.options.missing_values
        owner_tables = {
            split: with_missing(frame.read([owner]), marks, [owner])
            for split, frame in frames.items()
        }
    return decoded_images(source, rows, request, names, owner_tables)


def _image_column(source: str, schema: pa.Schema, request: ReadRequest) -> str:
    """The column of images; DataError if it is missing or ambiguous."""
    candidates = image_columns(schema)
    name = nfc(request.image)
    if not name and len(candidates) == 1:
        name = candidates[0]
    if name is None or name not in schema.names:
        raise DataError(no_column(source, "image", name, schema.names))
    check_image_type(source, name, schema.field(name).type)
    return name


def check_not_encoded(source: str, request: ReadRequest) -> None:
    """Raise DataError if keys on the decoding of images are set although the data are not encoded
    images.
    """
    values = {"data.mode": request.mode, "data.size": request.size}
    for key, value in values.items():
        if value is not None:
            raise DataError(
                f"{key} is only for encoded images, which {source} does not hold; remove it"
            )


def check_no_columns(source: str, request: ReadRequest) -> None:
    """Raise DataError if keys on columns are set although the data have none."""
    options = request.options
    if options.owner not in ("", FILE):
        raise DataError(
            f"{source} has no columns, so it has no column {options.owner!r}; write parquet files "
            "with this column, or put images into folders of clients and set partition.column = "
            f"{FILE!r}"
        )
    keys = {
        "data.image_column": request.image,
        "data.label_column": request.label,
        "data.missing_values": options.missing_values,
    }
    for key, value in keys.items():
        if value:
            raise DataError(
                f"{key} is only for data with columns, which {source} does not have; remove it"
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
    check_no_columns(str(place), request)
    images = [path for path in files if has_suffix(path, IMAGE_SUFFIXES)]
    images.sort(key=lambda path: nfc(path.as_posix()))
    if not images:
        raise DataError(_no_images(place, files))
    flat = _without_class([path.relative_to(place) for path in images])
    warning = _table_warning(files, images, is_flat=flat is not None)
    if flat is not None:
        raise DataError(
            f"{place / flat} is not in the folder of a class; put each image into a folder named "
            "after its class: "
            f"{place.name}/cat/{flat.name}, or {place.name}/train/cat/{flat.name}"
        )

    splits = image_files_by_split(place, images)
    rows = {}
    owner_tables = {}
    for split, paths in splits.parts.items():
        pictures = Pictures(f"{place}, {split}", request, len(paths), place)
        labelled_images = (LabelledImage(path, path.parent.name) for path in paths)
        rows[split] = decode_images(pictures, labelled_images)
        if request.options.owner == FILE:
            clients = [client_name(place, path, class_folders=True) for path in paths]
            owner_tables[split] = pa.table({FILE: clients})
    data = decoded_images(str(place), rows, request, None, owner_tables)
    layout = ""
    if request.options.owner != FILE:
        layout = _layout_warning([path.relative_to(place) for path in images])
    return data.with_warnings(warning, layout, *splits.warnings)


def _layout_warning(images: Sequence[Path]) -> str:
    """A warning about folders above the classes that are no splits, or "" if there are none."""
    for path in images:
        folders = path.parts[:-1]
        if split_of_name(folders[0]):
            folders = folders[1:]
        if len(folders) > 1:
            return (
                f"the class of an image is the folder that contains it: {path.as_posix()} is of "
                f"class {folders[-1]!r}, and {folders[-2]!r} is not used"
            )
    return ""


def _no_images(place: Path, files: Sequence[Path]) -> str:
    kinds = Counter(path.suffix.lower() for path in files if path.suffix)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3)) or "nothing else"
    return (
        f"{place} holds no images (it holds {counts}); images need one folder per class, "
        "for example train/cat/1.png. To read other files, such as sounds, write a function: "
        "data.name = 'mine.py:data'"
    )


def _table_warning(files: Sequence[Path], images: Sequence[Path], *, is_flat: bool) -> str:
    """A warning about tables next to images, or "" if there are none.

    is_flat: whether an image is not in the folder of a class. Raises DataError if the table
    probably holds the labels: either images are not in folders of several classes, or the table has
    one of the names of Hugging Face's layout.
    """
    tables = [path for path in files if has_suffix(path, LABEL_TABLE_SUFFIXES)]
    if not tables:
        return ""
    metadata = [path for path in tables if path.name in HUGGING_FACE_TABLES]
    classes = {path.parent.name for path in images}
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


def _without_class(images: Sequence[Path]) -> Path | None:
    """An image that is not in the folder of a class, but in no folder or in the folder of a split.

    In the layout split/image.png, all folders of images are splits. In the layout class/image.png,
    a folder may have the name of a split, such as "test", but is a class.
    """
    folders = {path.parts[0].lower() for path in images if len(path.parts) == 2}
    has_class_folders = not all(map(split_of_name, folders))
    for path in images:
        in_split = len(path.parts) == 2 and not has_class_folders
        if len(path.parts) == 1 or in_split:
            return path
    return None


# Images in a folder without labels, for example a user's public data.


def images_in(place: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name; empty if the folder does not exist.

    Hidden files are left out. A folder with such files has no folders of classes.
    """
    with file_errors(place):
        if not place.is_dir():
            return []
        images = (path for path in place.iterdir() if has_suffix(path, IMAGE_SUFFIXES))
        return sorted(path for path in images if path.is_file() and not path.name.startswith("."))


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
        rows = decode_images(pictures, (LabelledImage(path, 0) for path in paths))
    if request.broken == "refuse":
        check_broken(str(place), rows.broken, can_skip=True)
    warnings = image_warnings(str(place), {"the public set": rows})
    return UnlabelledImages(torch.from_numpy(rows.images), tuple(warnings))


# IDX: the format of MNIST and Fashion-MNIST, and of Debian's package dataset-fashion-mnist.


IDX_PREFIXES = {"train": "train", "test": "t10k"}


def is_idx(folder: Path) -> bool:
    """Whether a folder holds images in IDX files."""
    return (folder / "train-images-idx3-ubyte.gz").is_file()


def read_idx(folder: Path) -> Decoded:
    """Read both splits of a folder with four ``*-ubyte.gz`` files.

    Raises DataError with the name of a missing or damaged file.
    """
    return Decoded(
        {split: _idx_split(folder, prefix) for split, prefix in IDX_PREFIXES.items()}, None
    )


def _idx_split(folder: Path, prefix: str) -> Split:
    images = _idx_array(folder / f"{prefix}-images-idx3-ubyte.gz", dimensions=3)
    labels = _idx_array(folder / f"{prefix}-labels-idx1-ubyte.gz", dimensions=1)
    return Split(images[:, None], labels.astype(np.int64))


def _idx_array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array in an IDX file: two zero bytes, the type 8, the number of dimensions, the sizes (4
    bytes each) and the data.
    """
    with file_errors(path):
        if not path.is_file():
            raise DataError(f"{path} is missing; all four IDX files must be in one folder")
        try:
            return _unpacked(path, dimensions)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged ({error}); download it again") from error


def _unpacked(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array in an IDX file; DataError if the header is invalid or does not match the data."""
    problem = f"{path} is truncated or not an IDX file of {counted(dimensions, 'dimension')}"
    problem += "; download it again"
    with gzip.open(path) as file:
        head = file.read(4 + 4 * dimensions)
        if head[:4] != bytes([0, 0, 8, dimensions]) or len(head) != 4 + 4 * dimensions:
            raise DataError(problem)
        shape = np.frombuffer(head[4:], dtype=">i4").tolist()
        if min(shape) <= 0:
            raise DataError(problem)
        count = math.prod(shape)
        check_size(path, count)
        check_ratio(path, count, path.stat().st_size)
        data = file.read(count + 1)
    if len(data) != count:
        raise DataError(problem)
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


# NPZ: the archive format of MedMNIST. Headers are read and checked before arrays.


MEDMNIST_NAMES = {"train": "train", "validation": "val", "test": "test"}
"""The prefixes of array names, by split."""

HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
PACKED = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""The compressions that NumPy writes. Others may unpack a few bytes to gigabytes at once."""


@dataclass(frozen=True)
class _Header:
    """The header of an array in an archive: its shape and data type."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_npz(path: Path) -> Decoded:
    """Read the splits of an archive with ``train_images``, ``train_labels``, ``val_…`` and
    ``test_…``.

    Images are (N, H, W) or (N, H, W, C) uint8, or (N, C, H, W) if C is 1, 3 or 4 and the last axis
    is not. Labels are whole numbers (N,) or (N, 1). Pickles are not read. Raises DataError for
    other arrays, and for arrays that exceed the limits.
    """
    try:
        with file_errors(path), zipfile.ZipFile(path) as archive:
            names = _checked_splits(path, archive)
            splits = {split: _npz_split(path, archive, name) for split, name in names.items()}
            return Decoded(splits, None)
    except DataError:
        raise
    except (
        EOFError,
        ValueError,
        KeyError,
        NotImplementedError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        # zipfile raises NotImplementedError for an unknown version or compression, and RuntimeError
        # for a password.
        raise DataError(
            f"{path} is damaged or not an archive of images and labels ({on_one_line(error)}); "
            "download it again"
        ) from error


def _checked_splits(path: Path, archive: zipfile.ZipFile) -> dict[str, str]:
    """The splits of an archive and the prefixes of their arrays' names.

    This checks the sizes and headers of all arrays. Raises ValueError for a damaged archive, and
    DataError for unsuitable arrays.
    """
    members = set(archive.namelist())
    names = {
        split: name for split, name in MEDMNIST_NAMES.items() if f"{name}_images.npy" in members
    }
    arrays = [f"{name}_{part}.npy" for name, part in product(names.values(), ("images", "labels"))]
    _check_array_names(path, members, arrays)
    infos = {array: archive.getinfo(array) for array in arrays}
    unpacked = sum(info.file_size for info in infos.values())
    check_size(path, unpacked)
    check_ratio(path, unpacked, path.stat().st_size)
    headers = {array: _header(archive, info) for array, info in infos.items()}
    count = 0
    for name in names.values():
        count += _example_count(path, headers[f"{name}_images.npy"], headers[f"{name}_labels.npy"])
    check_size(path, unpacked + EXAMPLE_BYTES * count)
    return names


def _check_array_names(path: Path, members: Collection[str], required: Sequence[str]) -> None:
    """Raise DataError for an archive that lacks a required array."""
    arrays = sorted(name.removesuffix(".npy") for name in members if name.endswith(".npy"))
    if "train_images.npy" not in required:
        required = ["train_images.npy"]  # the first array to add
    absent = [name.removesuffix(".npy") for name in required if name not in members]
    if arrays and absent:
        raise DataError(
            f"{path} has no array {absent[0]!r} (it has {', '.join(map(repr, arrays))[:200]}); it "
            "needs train_images and train_labels, and test_images and test_labels if there is a "
            "test split"
        )


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Header:
    """The header of an array; ValueError if it holds no numbers, or if its size is inconsistent."""
    if info.compress_type not in PACKED:
        raise ValueError(f"{info.filename} has a compression that NumPy does not use")
    with archive.open(info) as file:
        version = npy.read_magic(file)
        if version not in HEADERS:
            raise ValueError(f"{info.filename} is an array of NPY version {version}")
        try:
            shape, _, dtype = HEADERS[version](file)
        # Python's parser of a damaged header
        except (MemoryError, RecursionError, tokenize.TokenError) as error:
            raise ValueError(f"{info.filename} has a damaged header") from error
        start = file.tell()
    if dtype.kind in "US" and info.filename.endswith("_labels.npy"):
        raise DataError(
            f"{info.filename} holds texts or bytes, not class ids; convert them with names, ids = "
            "np.unique(labels, return_inverse=True), then save ids"
        )
    if dtype.hasobject and info.filename.endswith("_labels.npy"):
        raise DataError(
            f"{info.filename} holds Python objects, not class ids; convert them with names, ids = "
            "np.unique(labels.astype(str), return_inverse=True), then save ids"
        )
    if dtype.hasobject or dtype.subdtype is not None or dtype.kind not in "biuf":
        raise ValueError(f"{info.filename} holds {dtype}, not numbers")
    header = _Header(info.filename, shape, dtype)
    has_wrong_side = any(isinstance(side, bool) or side < 1 for side in shape)
    if has_wrong_side or header.nbytes != info.file_size - start:
        raise ValueError(
            f"{header.name} claims to have shape {_short(shape)}, but holds "
            f"{info.file_size - start:,} bytes"
        )
    return header


def _example_count(path: Path, images: _Header, labels: _Header) -> int:
    """The number of examples; raises an error if the arrays are not images and labels."""
    count = math.prod(labels.shape)
    if images.dtype != np.uint8:
        raise DataError(
            f"{path}: {images.name} holds {images.dtype}, but images must be uint8 from 0 to 255; "
            "for other numbers, write a function with fedstill.from_tensors, and set data.name = "
            "'mine.py:data'"
        )
    if len(labels.shape) == 2 and labels.shape[0] == images.shape[0] and labels.shape[1] > 1:
        raise DataError(
            f"{path}: {labels.name} has shape {_short(labels.shape)}, but must have one class id "
            "per image; for one-hot labels, save labels.argmax(1)"
        )
    if len(images.shape) == 2 and count == images.shape[0]:
        raise DataError(
            f"{path}: {images.name} has shape {_short(images.shape)}, but images need a height and "
            "a width; save images.reshape(-1, height, width)"
        )
    if len(images.shape) not in (3, 4):
        raise DataError(
            f"{path}: {images.name} has shape {_short(images.shape)}, but images must be (N, H, W) "
            "or (N, H, W, C); save the array in this shape"
        )
    if count != images.shape[0]:
        raise DataError(
            f"{path}: {images.name} has {images.shape[0]:,} images, but {labels.name} has "
            f"{count:,} labels; save one label per image"
        )
    return count


def _npz_split(path: Path, archive: zipfile.ZipFile, key: str) -> Split:
    images = _npz_array(archive, f"{key}_images.npy")
    labels = _npz_array(archive, f"{key}_labels.npy")
    if images.ndim == 3:
        images = images[..., None]
    source = f"{path}, {key}_labels"
    class_ids = [
        checked_label(source, row, label) for row, label in enumerate(labels.reshape(-1).tolist())
    ]
    has_channels_last = (
        images.shape[3] in PICTURE_CHANNELS or images.shape[1] not in PICTURE_CHANNELS
    )
    if has_channels_last:
        images = images.transpose(0, 3, 1, 2)
    return Split(np.ascontiguousarray(images), np.array(class_ids, dtype=np.int64))


def _npz_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    file: IO[bytes]
    with archive.open(name) as file:
        return np.asarray(npy.read_array(file, allow_pickle=False))


def _short(shape: tuple[int, ...]) -> str:
    return cut_reason(str(shape), 60)
