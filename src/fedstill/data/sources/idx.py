"""IDX: the files that MNIST and Fashion-MNIST were published in, as Debian's dataset-fashion-mnist
holds them.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedstill.data.sources.decoded import Arrays, Decoded
from fedstill.data.sources.limits import in_one_line, refuse_large
from fedstill.errors import DataError

FILES = {"train": "train", "test": "t10k"}


def is_idx(folder: Path) -> bool:
    """Whether a folder holds images in IDX files."""
    return (folder / "train-images-idx3-ubyte.gz").is_file()


def read_idx(folder: Path) -> Decoded:
    """Both splits of a folder of four ``*-ubyte.gz`` files; DataError names a file that is absent
    or damaged.
    """
    return Decoded({split: _split(folder, prefix) for split, prefix in FILES.items()}, None)


def _split(folder: Path, prefix: str) -> Arrays:
    images = _array(folder / f"{prefix}-images-idx3-ubyte.gz", dimensions=3)
    labels = _array(folder / f"{prefix}-labels-idx1-ubyte.gz", dimensions=1)
    return images[:, None], labels.astype(np.int64)


def _array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """A file of bytes: two zeros, the type 8, the number of dimensions, the sizes (4 bytes each),
    the data.
    """
    with in_one_line(path):
        if not path.is_file():
            raise DataError(f"{path} is absent; the four IDX files belong in one folder")
        try:
            with gzip.open(path) as file:
                head = file.read(4 + 4 * dimensions)
                shape = (
                    np.frombuffer(head[4:], dtype=">i4").tolist()
                    if len(head) == 4 + 4 * dimensions
                    else []
                )
                count = math.prod(shape)
                if head[:4] == bytes([0, 0, 8, dimensions]) and min(shape, default=0) > 0:
                    refuse_large(path, count, path.stat().st_size)
                    data = file.read(count + 1)
                    if len(data) == count:
                        return np.frombuffer(data, dtype=np.uint8).reshape(shape)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged ({error}); download it again") from error
    raise DataError(
        f"{path} is not an IDX file of {dimensions} dimension(s), or is cut short; download it "
        "again"
    )
