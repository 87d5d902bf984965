"""What a user's own measure gives: NumPy's and torch's numbers are taken, and what no journal holds
is refused.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

import toys
from fedstill.core.errors import FedstillError
from fedstill.running.runner import run

MEASURE = """
import numpy as np
import torch
from fedstill.measures.base import Measure
from fedstill.core.registry import register

@register("measure", "mine")
class Mine(Measure):
{}
"""
NUMBERS = """
NUMBERS = {"a": np.float32(0.5), "b": torch.tensor([1.0, 2.0]), "c": np.arange(3), "d": {np.int64(4): torch.tensor(5)}}
PLAIN = {"a": 0.5, "b": [1.0, 2.0], "c": [0, 1, 2], "d": {"4": 5}}
"""  # noqa: E501


def _run(folder: Path, body: str, **changes: object):  # type: ignore[no-untyped-def]
    (folder / "mine.py").write_text(
        MEASURE.format(textwrap.indent(textwrap.dedent(body), "    ")) + NUMBERS
    )
    what = replace(toys.toy(), base=folder, measure=("mine.py",), rounds=1, **changes)  # type: ignore[arg-type]
    return run(what, folder / "run", data=toys.blobs())


def test_numbers_of_numpy_and_torch_are_numbers_of_the_journal(tmp_path: Path) -> None:
    body = """
    def look(self, seen, context):
        return NUMBERS

    def at_client(self, seen):
        return {"of_client": NUMBERS}

    def of_round(self, seen):
        assert all(event["of_client"] == PLAIN for event in seen.clients)
        return {"of_round": NUMBERS}
    """
    result = _run(tmp_path, body)
    plain = {"a": 0.5, "b": [1.0, 2.0], "c": [0, 1, 2], "d": {"4": 5}}
    assert plain.items() <= result.measures[0].items()
    assert result.history[0]["of_round"] == plain


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def look(self, seen, context):\n    return 3.5", "Mine.look returns a float"),
        (
            "def look(self, seen, context):\n    return {'round': 9}",
            "Mine.look returns 'round', which is a field of the run",
        ),
        (
            "def look(self, seen, context):\n    return {'client': [1, 2]}",
            "client = [1, 2]",
        ),
        (
            "def look(self, seen, context):\n    return {'a': {1, 2}}",
            "Mine.look returns a set as 'a'",
        ),
        (
            "def look(self, seen, context):\n    return {3: 1}",
            "Mine.look returns a field with the name 3",
        ),
        (
            "def at_client(self, seen):\n    return {'loss': 1.0}",
            "Mine.at_client returns 'loss', which is a field of the",
        ),
        (
            "def at_client(self, seen):\n    return {'a': object()}",
            "Mine.at_client returns an object as 'a'",
        ),
        ("def at_client(self, seen):\n    return [1]", "Mine.at_client returns a list"),
        (
            "def at_client(self, seen):\n    return {}\n\ndef of_round(self, seen):\n    return "
            "{'accuracy': 1.0}",
            "Mine.of_round returns 'accuracy', which is a field of the run",
        ),
        (
            "def at_client(self, seen):\n    return {}\n\ndef of_round(self, seen):\n    return "
            "None",
            "Mine.of_round returns None",
        ),
    ],
)
def test_what_no_journal_holds_names_the_measure_and_its_line(
    body: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(FedstillError) as error:
        _run(tmp_path, body)
    text = str(error.value)
    assert said in text
    assert "mine.py, line" in text
    assert "\n" not in text
