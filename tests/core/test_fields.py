"""The one checker of values, for fields and for config tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
import pytest
from annotated_types import Interval

from fedstill.core.errors import ConfigError
from fedstill.core.fields import checked, problem

NOTED = Annotated[float, {"unit": "seconds"}, Interval(gt=0)]
"""Metadata that cannot be hashed, as another library may write it."""


def test_an_annotation_that_cannot_be_hashed_is_checked_like_any_other() -> None:
    assert checked({"wait": (NOTED, 1.0)}, {"wait": 2.0}, "mine") == {"wait": 2.0}
    with pytest.raises(ConfigError, match=r"mine\.wait = -1\.0: input should be greater than 0"):
        checked({"wait": (NOTED, 1.0)}, {"wait": -1.0}, "mine")


def test_numpys_numbers_count_as_the_numbers_that_they_are() -> None:
    count = Annotated[int, Interval(ge=1)]
    assert problem(count, np.int64(3)) == ""
    assert problem(count, np.int64(0)) != ""
    assert problem(count, np.float64(1.5)) != ""
    assert problem(count, True) != ""


def test_where_a_list_or_a_table_is_wanted_a_text_is_told_to_be_a_list() -> None:
    either = Mapping[str, list[str]] | tuple[str, ...] | None
    assert problem(either, "ward") == "'ward': write a list, ['ward']"
    assert problem(Mapping[str, str], "ward") == "'ward': input should be a valid dictionary"
    assert problem(either, {"ward": ["A"]}) == problem(either, ("ward",)) == ""
