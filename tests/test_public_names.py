"""The public names: ``dir(fedstill)`` lists all of them, and each can be read without an import."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedstill
from fedstill.manifest import PACKAGES

ROOT = Path(__file__).parents[1]

REFERENCE = re.findall(
    r"^::: fedstill\.(\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE
)
"""The modules, classes and functions of the reference, below ``fedstill``."""

OUTER = [package.name for package in PACKAGES]


def referenced(path: str) -> object:
    """A module, class or function of the reference."""
    try:
        return importlib.import_module(f"fedstill.{path}")
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"fedstill.{module}"), name)


def reference_parameters() -> list[Any]:
    """The paths of the reference as parameters; those in an outer package are marked."""
    parameters = []
    for path in REFERENCE:
        package = path.partition(".")[0]
        marks = []
        if package in OUTER:
            marks.append(pytest.mark.uses(package))
        parameters.append(pytest.param(path, marks=marks))
    return parameters


def output_of(program: str) -> str:
    """The output of a program in a new process."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", reference_parameters())
def test_the_names_of_the_reference_are_in_dir(path: str) -> None:
    """Classes and functions have their names; modules have that of their package."""
    target = referenced(path)
    if inspect.ismodule(target):
        assert path.partition(".")[0] in dir(fedstill)
        return
    name = path.rpartition(".")[2]
    assert name in dir(fedstill)
    assert getattr(fedstill, name) is target


def test_each_name_in_dir_has_a_docstring() -> None:
    for name in set(dir(fedstill)) - {"__version__"}:
        assert inspect.getdoc(getattr(fedstill, name)), name
    assert dir(fedstill) == sorted(dir(fedstill))


@pytest.mark.uses("export")
def test_dir_has_every_name_that_a_star_imports() -> None:
    assert set(fedstill.__all__) <= set(dir(fedstill))


def test_dir_loads_no_large_package() -> None:
    """A shell calls it to complete names."""
    program = (
        "import sys, fedstill; dir(fedstill); print({'torch', 'pandas', 'numpy', 'rich'} & "
        "set(sys.modules))"
    )
    assert output_of(program) == "set()\n"


def test_the_names_of_a_run_load_no_package_that_few_runs_need() -> None:
    """Each of them would delay every start by half a second."""
    program = (
        "import sys, fedstill; fedstill.Result, fedstill.run; print({'pandas', 'scipy'} & "
        "set(sys.modules))"
    )
    assert output_of(program) == "set()\n"
