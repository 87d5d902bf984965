"""Dates at which a time column is cut into tasks."""

from __future__ import annotations

import datetime
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from fedstill.core.errors import ConfigError, DataError


def cut_times(cuts: Sequence[str]) -> list[datetime.datetime]:
    """The moments at which each task but the first begins; raises ConfigError for what is no date,
    or out of order.
    """
    moments = []
    for cut in cuts:
        if (moment := moment_of(cut)) is None:
            raise ConfigError(
                f"stream.cuts has {cut!r}, which is no date; write dates as 2023-01-31"
            )
        moments.append(moment)
    for k, (before, after) in enumerate(pairwise(moments)):
        if before >= after:
            raise ConfigError(
                f"stream.cuts must ascend, and {cuts[k + 1]} does not come after {cuts[k]}"
            )
    return moments


def tasks_of_times(what: str, column: str, values: Sequence[str], cuts: Sequence[str]) -> list[int]:
    """The task of each value of a time column, from 0: as many as there are cuts that are not after
    it.

    Raises DataError for a value that is no date.

    >>> tasks_of_times("rows", "acquired", ["2022-12-31", "2023-01-01"], ["2023-01-01"])
    [0, 1]
    """
    moments, tasks = cut_times(cuts), []
    for value in values:
        if (moment := moment_of(value)) is None:
            raise DataError(
                f"{what}: column {column!r} has {value[:40]!r}, which is no date; write dates as "
                "2023-01-31"
            )
        tasks.append(bisect_right(moments, moment))
    return tasks


def moment_of(text: str) -> datetime.datetime | None:
    """A date or time in ISO's form, UTC where it names no zone; None for any other text.

    >>> moment_of("2023-01-31").isoformat(), moment_of("31.1.2023"), moment_of("7")
    ('2023-01-31T00:00:00+00:00', None, None)
    """
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
