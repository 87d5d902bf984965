"""Names that measures of users import: an import of a former one says the new one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from fedstill.core import registry
from fedstill.core.errors import ConfigError


@pytest.mark.parametrize(
    ("former", "name"), [("Room", "EvaluationContext"), ("Reports", "RoundReports")]
)
def test_a_former_name_is_an_error_that_says_the_new_one(
    former: str, name: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(f"from fedstill.measures.base import {former}\n")
    with pytest.raises(ConfigError, match=name):
        registry.lookup("measure", "mine.py", tmp_path)


def test_other_names_that_are_absent_are_absent() -> None:
    base = importlib.import_module("fedstill.measures.base")
    assert not hasattr(base, "Rooms")
