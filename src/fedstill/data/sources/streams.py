"""Encoded images read through the ``datasets`` library: parquet files, images in a folder by class, the hub."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from fedstill.data.sources.columns import Columns, decoded_splits
from fedstill.data.sources.decoded import Decoded
from fedstill.errors import DataError

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
HUB_SECONDS = 10


def parquet_files(folder: Path) -> dict[str, list[Path]]:
    """The parquet files of every split, by the first word of the file's name or else its folder's; no word is train."""
    by_split: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.parquet")):
        words = [re.split(r"[-_.]", part)[0].lower() for part in (path.name, path.parent.name)]
        split = next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), "train")
        by_split.setdefault(split, []).append(path)
    return by_split


def read_parquet(folder: Path, columns: Columns) -> Decoded:
    """A folder of parquet files in the Hugging Face layout; DataError if one is damaged or has no image and label."""
    files = {split: [str(path) for path in paths] for split, paths in parquet_files(folder).items()}
    with _reading(str(folder), "the file is damaged or not image data; download or write it again"):
        import datasets

        streams = datasets.load_dataset("parquet", data_files=files, streaming=True)
        return decoded_splits(str(folder), dict(streams), columns)


def read_image_folder(folder: Path, columns: Columns) -> Decoded:
    """Images in folders named by their class, with folders named by the split above them or without."""
    with _reading(str(folder), "a folder of images holds one folder a class, e.g. train/cat/1.png"):
        import datasets

        streams = datasets.load_dataset("imagefolder", data_dir=str(folder), streaming=True, drop_labels=False)
        return decoded_splits(str(folder), dict(streams), columns)


def read_hub(name: str, columns: Columns, remedy: str) -> Decoded:
    """A data set of the Hugging Face hub; DataError with ``remedy`` if the hub does not answer or has no such thing."""
    _reach(name, remedy)
    with _reading(f"hub dataset {name!r}", remedy):
        import datasets

        streams = datasets.load_dataset(name, streaming=True)
        named = {SPLIT_NAMES.get(split, split): stream for split, stream in streams.items()}
        return decoded_splits(name, {s: named[s] for s in ("train", "validation", "test") if s in named}, columns)


def _reach(name: str, remedy: str) -> None:
    """Ask the hub for a data set with one short request, because the library's own retries hang without a network."""
    from huggingface_hub import HfApi

    try:
        HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None).dataset_info(name, timeout=HUB_SECONDS)
    except Exception as error:  # many kinds, by version and transport; all mean that there is nothing to read
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(f"the Hugging Face hub does not give {name!r} ({reason}); {remedy}") from error


@contextlib.contextmanager
def _reading(what: str, remedy: str) -> Iterator[None]:
    """Turn what the libraries raise on bad files into one DataError that says where and what to do."""
    import datasets
    import pyarrow

    kinds = (OSError, ValueError, RuntimeError, KeyError, pyarrow.ArrowException, datasets.exceptions.DatasetsError)
    try:
        yield
    except kinds as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(f"{what} cannot be read ({reason}); {remedy}") from error
