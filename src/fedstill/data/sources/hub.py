"""Data sets on the Hugging Face hub, images and others, read through the ``datasets`` library."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedstill.core.errors import DataAbsent, DataError
from fedstill.data.cache import Decoded
from fedstill.data.sources.columns import SPLIT_NAMES, Columns, decoded_splits
from fedstill.data.sources.limits import in_one_line, refuse_large
from fedstill.data.sources.schema import input_columns
from fedstill.data.sources.tabular import read_frames

HUB_SECONDS = 10
ROWS_A_BATCH = 1000


def read_hub(name: str, columns: Columns, remedy: str) -> Decoded:
    """A data set of the Hugging Face hub; DataAbsent with ``remedy`` if it does not answer or has
    no such thing.
    """
    _reach(name, remedy)
    with _reading(f"hub dataset {name!r}", remedy):
        import datasets

        streams = datasets.load_dataset(name, streaming=True)
        named = {
            SPLIT_NAMES.get(split, split): _Stream(stream) for split, stream in streams.items()
        }
        tables = {
            split: named[split] for split in ("train", "validation", "test") if split in named
        }
        frames = {split: HubFrame(name, table.stream) for split, table in tables.items()}
        if frames and (inputs := input_columns(name, next(iter(frames.values())).schema, columns)):
            return read_frames(name, frames, inputs)
        return decoded_splits(name, tables, columns, within=name)


@dataclass(frozen=True)
class HubFrame:
    """A streaming data set as columns: what is no image."""

    name: str
    stream: Any

    @property
    def schema(self) -> pa.Schema:
        """The columns and what they hold; none where the hub does not say it."""
        return self.stream.features.arrow_schema if self.stream.features else pa.schema([])

    @property
    def files(self) -> tuple[Path, ...]:
        """None: it is on the hub."""
        return ()

    def read(self, names: Sequence[str], gaps: bool = False) -> pa.Table:
        """Some columns, all rows; raises DataError for more than may be read."""
        parts, size = [], 0
        schema = pa.schema([self.schema.field(name) for name in names])
        for batch in self.stream.select_columns(list(names)).iter(batch_size=ROWS_A_BATCH):
            parts.append(pa.Table.from_pydict(batch, schema=schema))
            size += parts[-1].nbytes
            refuse_large(f"hub dataset {self.name!r}", size)
        return pa.concat_tables(parts).combine_chunks() if parts else schema.empty_table()


@dataclass(frozen=True)
class _Stream:
    """A streaming data set as the rows of a split."""

    stream: Any
    rows: int = 0

    @property
    def features(self) -> Mapping[str, Any]:
        """What each column holds."""
        return dict(self.stream.features or {})

    def cells(self, image: str, label: str) -> Iterator[tuple[Any, Any]]:
        """Each row's encoded image and its label."""
        import datasets

        stream = self.stream.select_columns([image, label]).cast_column(
            image, datasets.Image(decode=False)
        )
        for batch in stream.iter(batch_size=ROWS_A_BATCH):
            yield from zip(batch[image], batch[label], strict=True)


def _reach(name: str, remedy: str) -> None:
    """Ask the hub for a data set with one short request, because the library's own retries hang
    without a network.
    """
    from huggingface_hub import HfApi

    try:
        HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None).dataset_info(
            name, timeout=HUB_SECONDS
        )
    except (
        Exception
    ) as error:  # many kinds, by version and transport; all mean that there is nothing to read
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataAbsent(
            f"the Hugging Face hub does not give {name!r} ({reason}); {remedy}"
        ) from error


@contextlib.contextmanager
def _reading(what: str, remedy: str) -> Iterator[None]:
    """Turn what the libraries raise on bad files into one DataError that says where and what to
    do.
    """
    import datasets
    import pyarrow

    kinds = (OSError, ValueError, TypeError, RuntimeError, KeyError, AttributeError)
    libraries = (pyarrow.ArrowException, datasets.exceptions.DatasetsError)
    try:
        yield
    except MemoryError as error:
        with in_one_line(what):
            raise error
    except (*kinds, *libraries) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(f"{what} cannot be read ({reason}); {remedy}") from error
