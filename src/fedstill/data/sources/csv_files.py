"""CSV files of a data set: a table, or texts, with a line of column names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedstill.data.sources.column_files import CsvFrame, only_file
from fedstill.data.sources.columns import Columns
from fedstill.data.sources.decoded import Decoded
from fedstill.data.sources.kinds import input_columns
from fedstill.data.sources.tabular import read_frames, shown_first
from fedstill.errors import DataError


def read_csv_files(folder: Path, files: Mapping[str, Sequence[Path]], columns: Columns) -> Decoded:
    """The CSV files of a folder, by split; raises DataError for one that cannot be read, or has no
    clear columns.
    """
    frames = {split: CsvFrame(tuple(paths)) for split, paths in files.items()}
    what = str(only_file(files) or folder)
    first = shown_first(frames)
    if not first.rows:
        raise DataError(
            f"{only_file({'': first.files}) or what} has a line of column names and no rows below "
            "it"
        )
    inputs = input_columns(what, first.schema, columns)
    if inputs is None:
        raise DataError(
            f"{what}: a CSV file holds no images; leave data.image_column and data.kind out"
        )
    return read_frames(what, frames, inputs)
