"""The one checker of values in Python, by the annotations of their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import pytest
from annotated_types import Interval, Len

from fedstill.core.errors import ConfigError
from fedstill.core.fields import check_ranges, problem

NOTED = Annotated[float, {"unit": "seconds"}, Interval(gt=0)]
"""Metadata that cannot be hashed, as another library may write it."""

Count = Annotated[int, Interval(ge=1)]
Positive = Annotated[float, Interval(gt=0)]
Few = Annotated[tuple[Positive, ...], Len(1, 2)]


def test_numpys_numbers_count_as_the_numbers_that_they_are() -> None:
    assert problem(Count, np.int64(3)) == ""
    assert problem(Count, np.int64(0)) != ""
    assert problem(Count, np.float64(1.5)) != ""
    assert problem(Count, True) != ""


@pytest.mark.parametrize(
    ("hint", "legal", "illegal"),
    [
        (NOTED, 2, [0, -1.0, float("nan"), float("inf"), "2", True, None]),
        (Count | None, None, ["", 0]),
        (Annotated[int, Interval(gt=0, lt=3)], 2, [0, 3, 2.0]),
        (Annotated[int, Interval(le=3)], 3, [4]),
        (Few, (1.0, 2), [(), (1.0, 2.0, 3.0), 1.0, (1.0, 0.0)]),
        (tuple[Count, Count] | Literal["auto"], (1, 2), [(1,), (0, 1), "many", 1]),
        (tuple[Count, Count] | Literal["auto"], "auto", ["Auto"]),
        (bool, False, [0, "false"]),
    ],
)
def test_only_what_an_annotation_allows_is_legal(
    hint: object, legal: object, illegal: list[object]
) -> None:
    assert problem(hint, legal) == ""
    assert all(problem(hint, value) for value in illegal)


def test_the_field_of_a_record_is_named() -> None:
    @dataclass(frozen=True)
    class Waits:
        wait: NOTED = 1.0
        note: str = ""

    check_ranges(Waits(wait=2))
    with pytest.raises(ConfigError, match=r"Waits\.wait = -1\.0"):
        check_ranges(Waits(wait=-1.0))
