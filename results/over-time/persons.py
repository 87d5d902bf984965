"""Human activity, of thirty people in five groups: people come over time, six at once.

The set's own split tests on other people. Here the last quarter of each person's windows are
for tests: windows overlap by half, so two that are neighbours in time are on different sides only
where the quarter begins.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

import fedstill
from fedstill.core.errors import DataError

GROUPS = 5


def data(folder: str | None = None, groups: int = GROUPS) -> fedstill.Dataset:
    """Each group's training windows and tests, people in the order of their numbers, from ``har``
    of FEDSTILL_DATA.
    """
    place = Path(folder or os.environ.get("FEDSTILL_DATA", ".")) / "har"
    files = sorted(place.glob("*.parquet"))
    if not files:
        raise DataError(
            f"{place} has no parquet files; set FEDSTILL_DATA to the folder that holds har"
        )
    tables = [pq.read_table(file, columns=["features", "subject", "label"]) for file in files]
    values = np.concatenate([np.stack(t["features"].to_numpy()) for t in tables]).astype(np.float32)
    subjects, labels = (
        np.concatenate([t[name].to_numpy() for t in tables]) for name in ("subject", "label")
    )
    people = np.unique(subjects)
    each = []
    for group in np.array_split(people, groups):
        sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for person in group:
            own = np.flatnonzero(subjects == person)
            last = len(own) - len(own) // 4
            sides[0].append(own[:last])
            sides[1].append(own[last:])
        train, test = (np.concatenate(side) for side in sides)
        each.append(((values[train], labels[train]), (values[test], labels[test])))
    return fedstill.from_clients(
        "har, by group", each, names=[f"group {g + 1}" for g in range(groups)], kind="table"
    )
