"""Files of arrays: IDX (MNIST and Fashion-MNIST) and NPZ (MedMNIST)."""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedstill.core.errors import DataError, cut_reason, on_one_line
from fedstill.data.dataset import Decoded, Split
from fedstill.data.sources.limits import EXAMPLE_BYTES, check_size, file_errors
from fedstill.data.sources.verify import class_ids

# IDX: the format of MNIST and Fashion-MNIST, and of Debian's package dataset-fashion-mnist.


PREFIXES = {"train": "train", "test": "t10k"}


def is_idx(folder: Path) -> bool:
    """Whether a folder holds images in IDX files."""
    return (folder / "train-images-idx3-ubyte.gz").is_file()


def read_idx(folder: Path) -> Decoded:
    """Both splits of a folder of four ``*-ubyte.gz`` files.

    Raises DataError naming a file that is absent or damaged.
    """
    return Decoded({split: _idx_split(folder, prefix) for split, prefix in PREFIXES.items()}, None)


def _idx_split(folder: Path, prefix: str) -> Split:
    images = _idx_array(folder / f"{prefix}-images-idx3-ubyte.gz", dimensions=3)
    labels = _idx_array(folder / f"{prefix}-labels-idx1-ubyte.gz", dimensions=1)
    return Split(images[:, None], labels.astype(np.int64))


def _idx_array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """A file of bytes: two zeros, the type 8, the number of dimensions, the sizes (4 bytes each),
    the data.
    """
    with file_errors(path):
        if not path.is_file():
            raise DataError(f"{path} is absent; the four IDX files belong in one folder")
        try:
            array = _unpacked(path, dimensions)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged ({error}); download it again") from error
    if array is None:
        raise DataError(
            f"{path} is not an IDX file of {dimensions} dimension(s), or is cut short; download it "
            "again"
        )
    return array


def _unpacked(path: Path, dimensions: int) -> NDArray[np.uint8] | None:
    """The array in an IDX file; None if the header is another, or the data are fewer or more."""
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


# NPZ: the archive of arrays that MedMNIST is published in. Headers are read and checked before
# arrays.


MEDMNIST_NAMES = {"train": "train", "validation": "val", "test": "test"}
"""The beginnings of the names of arrays, by split."""

CHANNELS = (1, 3, 4)
"""The numbers of channels that images have. An axis of another length is none of channels."""

HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
PACKED = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""The compressions that NumPy writes. Others unpack a few bytes to gigabytes at a time."""


@dataclass(frozen=True)
class _Header:
    """The header of an array in an archive: its shape and its type of numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_npz(path: Path) -> Decoded:
    """The splits of an archive with ``train_images``, ``train_labels``, ``val_…`` and ``test_…``.

    Images are (N, H, W) or (N, H, W, C) uint8, or (N, C, H, W) if C is 1, 3 or 4 and the last axis
    is not. Labels are (N,) or (N, 1) whole numbers. Pickles are not read. Raises DataError for
    other arrays, and for more than may be read.
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
    """The splits of an archive and the beginnings of their arrays' names.

    The sizes and headers of all their arrays are checked. Raises ValueError for a damaged archive,
    and DataError for arrays of another kind.
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
    """Raise DataError for an archive of arrays that lacks a required one."""
    arrays = sorted(name.removesuffix(".npy") for name in members if name.endswith(".npy"))
    if "train_images.npy" not in required:
        required = ["train_images.npy"]  # the first to add
    absent = [name.removesuffix(".npy") for name in required if name not in members]
    if arrays and absent:
        raise DataError(
            f"{path} has no array {absent[0]!r} among {', '.join(map(repr, arrays))[:200]}; it "
            "needs train_images and train_labels, and test_images and test_labels if there is a "
            "test split"
        )


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Header:
    """The header of an array; ValueError if it holds no numbers, or another size than it claims."""
    if info.compress_type not in PACKED:
        raise ValueError(f"{info.filename} is not packed as NumPy does it")
    with archive.open(info) as file:
        version = npy.read_magic(file)
        if version not in HEADERS:
            raise ValueError(f"{info.filename} is an array of NPY version {version}")
        try:
            shape, _, dtype = HEADERS[version](file)
        except (MemoryError, RecursionError) as error:  # the parser of a damaged header
            raise ValueError(f"{info.filename} has a damaged header") from error
        start = file.tell()
    if dtype.kind in "US" and info.filename.endswith("_labels.npy"):
        raise DataError(
            f"{info.filename} holds texts or bytes, not class ids; names, ids = "
            "np.unique(labels, return_inverse=True), and save ids"
        )
    if dtype.hasobject or dtype.subdtype is not None or dtype.kind not in "biuf":
        raise ValueError(f"{info.filename} holds {dtype}, not numbers")
    header = _Header(info.filename, shape, dtype)
    has_wrong_side = any(isinstance(side, bool) or side < 1 for side in shape)
    if has_wrong_side or header.nbytes != info.file_size - start:
        raise ValueError(
            f"{header.name} says that it has shape {_short(shape)}, and holds "
            f"{info.file_size - start:,} bytes"
        )
    return header


def _count(path: Path, images: _Header, labels: _Header) -> int:
    """The number of examples; raises an error if these are no images and their labels."""
    count = math.prod(labels.shape)
    if images.dtype != np.uint8:
        raise DataError(
            f"{path}: {images.name} holds {images.dtype}, and images are uint8 from 0 to 255; for "
            "other numbers write a function with fedstill.from_tensors, and name it as data.name = "
            "'mine.py:data'"
        )
    if len(labels.shape) == 2 and labels.shape[0] == images.shape[0] and labels.shape[1] > 1:
        raise DataError(
            f"{path}: {labels.name} has shape {_short(labels.shape)}, and needs one class id an "
            "image; of one-hot labels save labels.argmax(1)"
        )
    if len(images.shape) not in (3, 4) or count != images.shape[0]:
        raise ValueError(
            f"{images.name} has shape {_short(images.shape)} and {images.dtype}, and {count} labels"
        )
    return count


def _npz_split(path: Path, archive: zipfile.ZipFile, key: str) -> Split:
    images = _npz_array(archive, f"{key}_images.npy")
    labels = _npz_array(archive, f"{key}_labels.npy")
    if images.ndim == 3:
        images = images[..., None]
    ids = class_ids(f"{path}, {key}_labels", labels.reshape(-1).tolist())
    has_channels_last = images.shape[3] in CHANNELS or images.shape[1] not in CHANNELS
    if has_channels_last:
        images = images.transpose(0, 3, 1, 2)
    return Split(np.ascontiguousarray(images), ids)


def _npz_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    file: IO[bytes]
    with archive.open(name) as file:
        return np.asarray(npy.read_array(file, allow_pickle=False))


def _short(shape: tuple[int, ...]) -> str:
    return cut_reason(str(shape), 60)
