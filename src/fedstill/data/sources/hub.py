"""Data sets on the Hugging Face hub, which the ``datasets`` library reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedstill.core.errors import DataAbsent, DataError
from fedstill.data.dataset import Decoded
from fedstill.data.form import ReadingOptions, ReadRequest, nfc
from fedstill.data.sources.encode import read_frames
from fedstill.data.sources.image_columns import decoded_splits
from fedstill.data.sources.image_sets import check_not_encoded
from fedstill.data.sources.limits import memory_error, refuse_large
from fedstill.data.sources.schema import table_schema
from fedstill.data.sources.splits import SPLITS, split_named
from fedstill.data.sources.tables import normalised, with_missing

HUB_SECONDS = 10
ROWS_A_BATCH = 1000


def read_hub(name: str, request: ReadRequest, remedy: str) -> Decoded:
    """A data set of the Hugging Face hub.

    Raises DataAbsent with ``remedy`` if the hub does not answer or has no such data set.
    """
    _reach(name, remedy)
    with _reading(f"hub dataset {name!r}", remedy):
        import datasets

        streams = datasets.load_dataset(name, streaming=True)
        by_split = {split_named(split) or split: stream for split, stream in streams.items()}
        streams = {split: by_split[split] for split in SPLITS if split in by_split}
        left_out = [split for split in by_split if split not in streams]
        caution = f"left out: the splits {', '.join(left_out)} of the hub" if left_out else ""
        data = _read_streams(name, streams, request)
    return replace(data, about=data.about.with_cautions(caution))


def _read_streams(name: str, streams: Mapping[str, Any], request: ReadRequest) -> Decoded:
    frames = {split: HubFrame(name, stream, request.options) for split, stream in streams.items()}
    if frames:
        first = next(iter(frames.values()))
        schema = table_schema(name, first.schema, request)
        if schema is not None:
            check_not_encoded(name, request)
            return read_frames(name, frames, schema)
    return decoded_splits(name, frames, request, within=name)


@dataclass(frozen=True)
class HubFrame:
    """A streaming data set as columns, or as rows of images."""

    name: str
    stream: Any
    options: ReadingOptions
    rows: int = 0
    """0: the hub does not tell the number of rows."""

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types; none if the hub does not tell them."""
        if not self.stream.features:
            return pa.schema([])
        return normalised(Path(self.name), self.stream.features.arrow_schema)

    @property
    def files(self) -> tuple[Path, ...]:
        """None: it is on the hub."""
        return ()

    def read(self, names: Sequence[str], optional: bool = False) -> pa.Table:
        """Some columns, all rows; raises DataError for more than may be read.

        optional: is ignored; all rows of a stream have the same columns.
        """
        features = self.stream.features.arrow_schema
        stored_names = [name for name in features.names if nfc(name) in names]
        schema = pa.schema([features.field(name) for name in stored_names])
        tables = [schema.empty_table()]
        size = 0
        for batch in self.stream.select_columns(stored_names).iter(batch_size=ROWS_A_BATCH):
            tables.append(pa.Table.from_pydict(batch, schema=schema))
            size += tables[-1].nbytes
            refuse_large(f"hub dataset {self.name!r}", size)
        table = pa.concat_tables(tables).combine_chunks()
        table = table.rename_columns([nfc(name) for name in stored_names])
        return with_missing(table.select(list(names)), self.options.missing_values)

    def cells(self, image: str, label: str) -> Iterator[tuple[Any, Any]]:
        """Each row's encoded image and its label."""
        import datasets

        stored_names = {nfc(name): name for name in self.stream.features.arrow_schema.names}
        image = stored_names[image]
        label = stored_names[label]
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
    """Turn the libraries' errors about bad files into a DataError that names the data set."""
    import datasets
    import pyarrow

    kinds = (OSError, ValueError, TypeError, RuntimeError, KeyError, AttributeError)
    libraries = (pyarrow.ArrowException, datasets.exceptions.DatasetsError)
    try:
        yield
    except MemoryError as error:
        raise memory_error(what, error) from error
    except (*kinds, *libraries) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(f"{what} cannot be read ({reason}); {remedy}") from error
