"""Reads local files and folders as arrays: tables, images by class, IDX and NPZ files."""

from __future__ import annotations

import gzip
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import chain, islice, product
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow.parquet as pq
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedstill.core import registry
from fedstill.core.errors import DataError, cut_reason, on_one_line
from fedstill.core.files import named_path
from fedstill.data.cache import cached
from fedstill.data.dataset import Decoded, Kind, ReadingOptions, ReadRequest, Split
from fedstill.data.sources.catalog import KNOWN_FOLDERS, KnownData
from fedstill.data.sources.columns import frames_of
from fedstill.data.sources.files import (
    EXAMPLE_BYTES,
    FileSplits,
    check_size,
    file_errors,
    file_list,
    files_below,
    split_tables,
    splits_in,
)
from fedstill.data.sources.image_sets import (
    check_not_encoded,
    labels_in_table,
    read_columns,
    read_image_folder,
    read_without_images,
)
from fedstill.data.sources.images import IMAGE_SUFFIXES
from fedstill.data.sources.schema import check_images_only, image_columns, table_schema
from fedstill.data.sources.tables import CSV_SUFFIXES, CsvFrame, ParquetFrame, single_file
from fedstill.data.sources.verification import PICTURE_CHANNELS, checked_label, completed

TABLE_SUFFIXES = (".parquet", *CSV_SUFFIXES)

DATA_SUFFIXES = (*TABLE_SUFFIXES, ".npz")
"""The suffixes of files that can be a data set on their own."""


def data_root(folder: str | Path | None) -> Path | None:
    """The folder of local data: ``folder``, the environment variable ``FEDSTILL_DATA``, or None."""
    root = folder
    if root is None:
        root = os.environ.get("FEDSTILL_DATA")
    if not root:
        return None
    return named_path(root)


def local_folder(name: str, folder: str | Path | None) -> Path | None:
    """The folder with this name in ``data_root(folder)``, or None."""
    root = data_root(folder)
    if root is None or name in ("", ".", "..") or "/" in name:
        return None
    place = root / name
    if not place.is_dir():
        return None
    return place


def is_data_file(path: Path) -> bool:
    """Whether a path is a file that can be a data set on its own."""
    return path.suffix.lower() in DATA_SUFFIXES and path.is_file()


def is_table(path: Path) -> bool:
    """Whether a path has the suffix of a parquet or CSV file."""
    return path.suffix.lower() in TABLE_SUFFIXES


def is_parquet(path: Path) -> bool:
    """Whether a path has the suffix of a parquet file."""
    return path.suffix.lower() == ".parquet"


def read_data_file(name: str, path: Path, request: ReadRequest) -> Decoded:
    """The verified data in a parquet, CSV or NPZ file; without a test split, a fifth is held out.

    The file is decoded once. The cache key contains its size and modification time.
    """
    status = path.stat()
    key_fields = {
        "file": str(path.resolve()),
        "stamp": [status.st_size, status.st_mtime_ns],
        "request": asdict(request),
    }

    def decode() -> Decoded:
        data = _decoded_file(path, request)
        return completed(name, data, request.options, in_place=True)

    return cached(path.stem, key_fields, decode)


def _decoded_file(path: Path, request: ReadRequest) -> Decoded:
    if is_table(path):
        return read_tables(path.parent, {"train": [path]}, request)
    check_images_only(str(path), request.options)
    check_not_encoded(str(path), request)
    return read_npz(path)


def read_folder(
    name: str, place: Path, request: ReadRequest, entry: KnownData | None = None
) -> Decoded:
    """The verified data in a folder; without a test split, a fifth is held out.

    The folder is decoded once. The cache key contains the names, sizes and modification times of
    its files. Raises DataError for an empty folder, and for files that are not a data set.
    """
    files = files_below(place, {*DATA_SUFFIXES, ".gz", *IMAGE_SUFFIXES})
    key_fields = {
        "folder": str(place.resolve()),
        "files": [_stamp(place, path) for path in files],
        "request": asdict(request),
        "known": None if entry is None else asdict(entry),
    }

    def decode() -> Decoded:
        if not files:
            raise DataError(
                f"{place} is empty; it needs parquet or CSV files, or images in folders named by "
                "their class"
            )
        tables = table_splits(place, files)
        data = _decoded_folder(place, files, tables, request)
        data = completed(name, data, request.options, entry, in_place=True)
        if entry is not None:
            return data
        return replace(data, about=data.about.with_notes(_file_note(tables)))

    return cached(name, key_fields, decode)


def _stamp(place: Path, path: Path) -> tuple[str, int, int]:
    """The name, size and modification time of a file, which reveal changes."""
    status = path.stat()
    return str(path.relative_to(place)), status.st_size, status.st_mtime_ns


def _decoded_folder(
    place: Path, files: Sequence[Path], tables: FileSplits, request: ReadRequest
) -> Decoded:
    """The data in a folder, by its layout: tables, IDX, NPZ, or images by class."""
    if tables.files:
        return _decoded_tables(place, tables, files, request)
    check_images_only(str(place), request.options)
    archives = [path for path in files if path.parent == place and path.suffix.lower() == ".npz"]
    if not is_idx(place) and not archives:
        return read_image_folder(place, files, request)
    check_not_encoded(str(place), request)
    if is_idx(place):
        return read_idx(place)
    return read_npz(archives[0])


def _decoded_tables(
    place: Path, tables: FileSplits, files: Sequence[Path], request: ReadRequest
) -> Decoded:
    warning = _images_warning(tables.files, files, request)
    data = read_tables(place, tables.files, request)
    return replace(data, about=data.about.with_warnings(*tables.warnings, warning))


def table_splits(place: Path, files: Sequence[Path]) -> FileSplits:
    """The table files of a folder by split: parquet files, or else CSV files.

    CSV files next to images do not count. Raises DataError if some splits are parquet files and
    others are CSV files.
    """
    parquet = [path for path in files if is_parquet(path)]
    csv = [path for path in files if path.suffix.lower() in CSV_SUFFIXES]
    has_images = any(path.suffix.lower() in IMAGE_SUFFIXES for path in files)
    if not parquet and has_images:
        return FileSplits({})
    if not parquet:
        return split_tables(place, csv)

    splits = split_tables(place, parquet)
    for path in csv:
        if not set(splits_in(path.stem)) <= set(splits.files):
            raise DataError(
                f"{place} has parquet files ({file_list(parquet)}) and {path.name}; all splits "
                "must have the same format: write all of them as parquet or all as CSV"
            )
    if csv:
        warning = f"ignored because there are parquet files: {file_list(csv)}; move them elsewhere"
        splits = replace(splits, warnings=(*splits.warnings, warning))
    return splits


def _images_warning(
    tables: Mapping[str, Sequence[Path]], files: Sequence[Path], request: ReadRequest
) -> str:
    """A warning about image files next to parquet files without images, or "".

    Raises DataError if there is one image per row, because the table probably holds their labels.
    """
    images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
    if not images or request.image:
        return ""
    frame = ParquetFrame(tuple(chain.from_iterable(tables.values())))
    if image_columns(frame.schema):
        return ""
    if len(images) >= frame.rows:
        raise DataError(labels_in_table(frame.files[0]))
    return f"ignored because there are parquet files: {len(images):,} image files"


def read_tables(folder: Path, files: Mapping[str, Sequence[Path]], request: ReadRequest) -> Decoded:
    """Read the table files of a folder by split: either parquet files or CSV files.

    Raises DataError like ``read_parquet`` and ``read_csv``.
    """
    first = next(chain.from_iterable(files.values()))
    if is_parquet(first):
        return read_parquet(folder, files, request)
    return read_csv(folder, files, request)


def read_csv(folder: Path, files: Mapping[str, Sequence[Path]], request: ReadRequest) -> Decoded:
    """Read the CSV files of a folder by split.

    Raises DataError for a file that cannot be read, and for ambiguous columns.
    """
    source = _name_of(folder, files)
    frames = frames_of(CsvFrame, folder, files, request.options)
    for frame in frames.values():
        if not frame.rows:
            place = single_file(frame.files) or source
            raise DataError(f"{place} has a header but no rows; add rows")
    data = read_without_images(source, frames, request)
    if data is None:
        raise DataError(
            f"{source}: a CSV file holds no images; remove data.image_column and data.kind"
        )
    return data


def read_parquet(
    folder: Path, files: Mapping[str, Sequence[Path]], request: ReadRequest
) -> Decoded:
    """Read the parquet files of a folder by split: images, or other columns.

    Raises DataError for damaged files, for ambiguous columns, and for data that exceed the limits.
    """
    source = _name_of(folder, files)
    try:
        with file_errors(source):
            frames = frames_of(ParquetFrame, folder, files, request.options)
            return read_columns(source, frames, request, folder)
    except DataError:
        raise
    except Exception as error:  # many kinds, by version of the library
        raise DataError(
            f"{_damaged(files) or folder} cannot be read ({on_one_line(error)}); it is damaged or "
            "not a data set; download or write it again"
        ) from error


def _name_of(folder: Path, files: Mapping[str, Sequence[Path]]) -> str:
    """The name of the data in messages: the file, if there is only one."""
    return str(single_file(chain.from_iterable(files.values())) or folder)


def _damaged(files: Mapping[str, Sequence[Path]]) -> Path | None:
    """The first file that cannot be opened."""
    for path in chain.from_iterable(files.values()):
        try:
            pq.ParquetFile(path).close()
        except Exception:
            return path
    return None


def _file_note(tables: FileSplits) -> str:
    """A note about the table files of each split, if a split has several, or ""."""
    if all(len(paths) == 1 for paths in tables.files.values()):
        return ""
    sources = [f"{split} from {file_list(paths)}" for split, paths in tables.files.items()]
    return f"read {'; '.join(sources)}"


# The kind of a data set's examples, before the data set is read.


FILES_LOOKED_AT = 1000
"""The number of files in a folder among which the first table is searched."""


def likely_kind(name: str, folder: str, label_column: str, options: Mapping[str, Any]) -> Kind:
    """The kind of a data set's examples; "image" if it is unknown before the data are read.

    name: a registered name, a path, or a folder in ``folder``; options: values of fields of
    ``ReadingOptions``.
    """
    if "kind" in options:
        return options["kind"]  # type: ignore[no-any-return]
    if name in registry.names("dataset") or ":" in name:
        return "image"
    entry = KNOWN_FOLDERS.get(name)
    if entry is not None and entry.options.kind != "auto":
        return entry.options.kind
    place = local_folder(name, folder or None) or Path(name)
    try:
        file = _first_table(place)
        if file is None:
            return "image"
        modified = file.stat().st_mtime_ns
        return _kind_of_table(file, modified, label_column, ReadingOptions(**options))
    except OSError:
        return "image"  # reading the data reports the error


def _first_table(place: Path) -> Path | None:
    """The file itself, or the first table in a folder."""
    if place.is_file() and is_table(place):
        return place
    if not place.is_dir():
        return None
    paths = sorted(islice(place.iterdir(), FILES_LOOKED_AT))
    tables = (path for path in paths if is_table(path) and path.is_file())
    return next(tables, None)


@lru_cache(maxsize=64)
def _kind_of_table(file: Path, modified: int, label_column: str, options: ReadingOptions) -> Kind:
    """The kind of a table's examples; ``modified``: its modification time, for the cache key."""
    frame: ParquetFrame | CsvFrame = CsvFrame((file,), options)
    if is_parquet(file):
        frame = ParquetFrame((file,), options)
    request = ReadRequest(label=label_column or None, options=options.normalised)
    try:
        schema = table_schema(str(file), frame.schema, request)
    except (DataError, ValueError, OSError):
        return "image"  # reading the data reports the error
    if schema is None:
        return "image"
    return schema.options.kind  # type: ignore[return-value]


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
            array = _unpacked(path, dimensions)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged ({error}); download it again") from error
    if array is None:
        raise DataError(
            f"{path} is truncated or not an IDX file of {dimensions} dimension(s); download it "
            "again"
        )
    return array


def _unpacked(path: Path, dimensions: int) -> NDArray[np.uint8] | None:
    """The array in an IDX file; None if the header is invalid or does not match the data."""
    with gzip.open(path) as file:
        head = file.read(4 + 4 * dimensions)
        if head[:4] != bytes([0, 0, 8, dimensions]) or len(head) != 4 + 4 * dimensions:
            return None
        shape = np.frombuffer(head[4:], dtype=">i4").tolist()
        if min(shape) <= 0:
            return None
        count = math.prod(shape)
        check_size(path, count, path.stat().st_size)
        data = file.read(count + 1)
    if len(data) != count:
        return None
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
    check_size(path, sum(info.file_size for info in infos.values()), path.stat().st_size)
    headers = {array: _header(archive, info) for array, info in infos.items()}
    count = 0
    for name in names.values():
        count += _count(path, headers[f"{name}_images.npy"], headers[f"{name}_labels.npy"])
    stored = sum(header.nbytes for header in headers.values())
    check_size(path, stored + EXAMPLE_BYTES * count)
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


def _count(path: Path, images: _Header, labels: _Header) -> int:
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
    if len(images.shape) not in (3, 4) or count != images.shape[0]:
        raise ValueError(
            f"{images.name} has shape {_short(images.shape)} and {images.dtype}, with {count} "
            "labels"
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
