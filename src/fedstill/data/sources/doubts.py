"""Columns of a table that are read, but perhaps not as they are meant: what a run says of them when
it begins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NAME_OF_ROWS = re.compile(r"unnamed: ?\d+|(.*[^a-z])?(id|ids|uuid|idx|index|nr|no)", re.IGNORECASE)
CAPITAL_ID = re.compile(r".*[a-z](ID|Id|Nr|No)")
"""How columns are called that number rows: id, patient_id, patientID, Unnamed: 0."""

STEPS = 1024
"""Numbers that span fewer steps of 32 bits than this are looked at: some may have become alike."""


def names_of_rows(table: pa.Table, columns: Sequence[str]) -> list[str]:
    """A sentence for each column of whole numbers that is called as a number of rows is, and
    differs in every row.
    """
    return [
        f"{name}: all {len(table):,} values differ; if it only numbers the rows, leave it out with "
        "data.columns"
        for name in columns
        if (NAME_OF_ROWS.fullmatch(name) or CAPITAL_ID.fullmatch(name))
        and pa.types.is_integer(table[name].type)
        and pc.count_distinct(table[name], mode="all").as_py() == len(table) > 1
    ]


def too_close(table: pa.Table, columns: Sequence[str]) -> list[str]:
    """A sentence for each column whose numbers are alike once they have 32 bits, such as seconds
    since 1970.
    """
    out = []
    for name in (
        name
        for name in columns
        if pa.types.is_integer(table[name].type) or _exact(table[name].type)
    ):
        exact = table[name].drop_null().cast(pa.float64()).to_numpy()
        exact = exact[np.isfinite(exact)]
        if (
            not len(exact)
            or np.ptp(exact) >= STEPS * np.finfo(np.float32).eps * np.abs(exact).max()
        ):
            continue
        before, after = (len(np.unique(values)) for values in (exact, exact.astype(np.float32)))
        if after < before:
            out.append(
                f"{name}: its {before:,} different numbers, from {exact.min():.12g} to "
                f"{exact.max():.12g}, are "
                f"{after:,} in 32 bits; subtract the smallest from all"
            )
    return out


def _exact(kind: pa.DataType) -> bool:
    return bool(pa.types.is_float64(kind) or pa.types.is_decimal(kind))
