"""What kind of examples a data set most likely holds, told by its name or its first file's
columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from fedstill.core.errors import DataError
from fedstill.core.registry import names
from fedstill.data.form import Form, Kind
from fedstill.data.sources.catalog import FOLDERS
from fedstill.data.sources.column_files import CsvFrame, ParquetFrame
from fedstill.data.sources.columns import Columns
from fedstill.data.sources.folders import CSV, local_folder
from fedstill.data.sources.schema import input_columns

COLUMNS = (".parquet", *CSV)
"""How the names of files of columns end."""

LOOKED_AT = 1000
"""Files of a folder that are looked at for the first of columns."""


def likely_kind(name: str, folder: str, label_column: str, form: Mapping[str, Any]) -> Kind:
    """The kind of a data set's examples; "image" where that cannot be told without reading it.

    name: a registered name, a path, or a folder in ``folder``; form: fields of ``Form`` that are
    set.
    """
    if "kind" in form:
        return form["kind"]  # type: ignore[no-any-return]
    if name in names("dataset") or ":" in name:
        return "image"
    own = FOLDERS[name].form.kind if name in FOLDERS else "auto"
    if own != "auto":
        return own
    place = local_folder(name, folder or None) or Path(name)
    try:
        file = _first_file(place)
        stamp = file.stat().st_mtime_ns if file else 0
        return _kind_in(file, stamp, label_column, Form(**form)) if file else "image"
    except OSError:
        return "image"  # whoever reads it will say what is wrong


def _first_file(place: Path) -> Path | None:
    """The file itself, or the first of columns in a folder."""
    if place.is_file():
        return place if place.suffix.lower() in COLUMNS else None
    if not place.is_dir():
        return None
    some = sorted(islice(place.iterdir(), LOOKED_AT))
    return next((path for path in some if path.suffix.lower() in COLUMNS and path.is_file()), None)


@lru_cache(maxsize=64)
def _kind_in(file: Path, stamp: int, label_column: str, form: Form) -> Kind:
    frame = ParquetFrame((file,)) if file.suffix.lower() == ".parquet" else CsvFrame((file,))
    try:
        inputs = input_columns(
            str(file), frame.schema, Columns(None, label_column or None, None, form)
        )
    except (DataError, ValueError, OSError):
        return "image"  # whoever reads it will say what is wrong
    return "image" if inputs is None else inputs.form.kind  # type: ignore[return-value]
