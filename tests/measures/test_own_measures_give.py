"""Return values of a user's own measure: numbers of NumPy and torch are accepted, and values that
no journal can contain are refused.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

import toys
from fedstill.core.errors import FedstillError
from fedstill.running.result import Result
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
NUMBERS = {
    "a": np.float32(0.5),
    "b": torch.tensor([1.0, 2.0]),
    "c": np.arange(3),
    "d": {np.int64(4): torch.tensor(5)},
}
PLAIN = {"a": 0.5, "b": [1.0, 2.0], "c": [0, 1, 2], "d": {"4": 5}}
"""
PLAIN = {"a": 0.5, "b": [1.0, 2.0], "c": [0, 1, 2], "d": {"4": 5}}


def run_with_measure(folder: Path, body: str) -> Result:
    """Run one round with a measure whose class has this body."""
    methods = textwrap.indent(textwrap.dedent(body), "    ")
    (folder / "mine.py").write_text(MEASURE.format(methods) + NUMBERS)
    experiment = replace(toys.toy(), base=folder, measure=("mine.py",), rounds=1)
    return run(experiment, folder / "run", data=toys.blobs())


def test_numbers_of_numpy_and_torch_are_numbers_of_the_journal(tmp_path: Path) -> None:
    body = """
    def look(self, result, context):
        return NUMBERS

    def at_client(self, visit):
        return {"of_client": NUMBERS}

    def of_round(self, reports):
        assert all(event["of_client"] == PLAIN for event in reports.clients)
        return {"of_round": NUMBERS}
    """

    result = run_with_measure(tmp_path, body)

    assert PLAIN.items() <= result.measures[0].items()
    assert result.history[0]["of_round"] == PLAIN


WITHOUT_REPORT = "def at_client(self, visit):\n    return {}\n\n"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("def look(self, result, context):\n    return 3.5", "Mine.look returns a float"),
        (
            "def look(self, result, context):\n    return {'round': 9}",
            "Mine.look returns 'round', which is a field of the run",
        ),
        (
            "def look(self, result, context):\n    return {'client': [1, 2]}",
            "client = [1, 2]",
        ),
        (
            "def look(self, result, context):\n    return {'a': {1, 2}}",
            "Mine.look returns a set as 'a'",
        ),
        (
            "def look(self, result, context):\n    return {3: 1}",
            "Mine.look returns a field with the name 3",
        ),
        (
            "def at_client(self, visit):\n    return {'loss': 1.0}",
            "Mine.at_client returns 'loss', which is a field of the",
        ),
        (
            "def at_client(self, visit):\n    return {'a': object()}",
            "Mine.at_client returns an object as 'a'",
        ),
        ("def at_client(self, visit):\n    return [1]", "Mine.at_client returns a list"),
        (
            WITHOUT_REPORT + "def of_round(self, reports):\n    return {'accuracy': 1.0}",
            "Mine.of_round returns 'accuracy', which is a field of the run",
        ),
        (
            WITHOUT_REPORT + "def of_round(self, reports):\n    return None",
            "Mine.of_round returns None",
        ),
    ],
)
def test_a_value_that_no_journal_can_contain_names_the_measure_and_its_line(
    body: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(FedstillError) as error:
        run_with_measure(tmp_path, body)

    text = str(error.value)
    assert problem in text
    assert "mine.py, line" in text
    assert "\n" not in text
