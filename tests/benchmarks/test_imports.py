"""Benchmarks use names of the package that may move."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import benchmarks

USES = {
    "cluster": "flower",
    "first_client": "benchmark",
    "first_round": "benchmark",
    "flower": "flower",
    "flower_programs": "flower",
    "forgotten": "unlearning",
    "large": "flower",
    "load": "flower",
}
"""The outer packages that a benchmark needs."""


def modules() -> list[object]:
    """All benchmarks outside packages, with their marks."""
    parameters = []
    for path in sorted(Path(benchmarks.__path__[0]).glob("[a-z]*.py")):
        marks = []
        if path.stem in USES:
            marks.append(pytest.mark.uses(USES[path.stem]))
        if USES.get(path.stem) == "flower":
            marks.append(pytest.mark.needs_flower)
        parameters.append(pytest.param(path.stem, marks=marks))
    return parameters


@pytest.mark.parametrize("name", modules())
def test_a_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
