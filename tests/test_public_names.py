"""``dir(fedstill)`` shows what there is: all public names, each of which can be had, without being
imported before.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedstill
from fedstill.manifest import PACKAGES

ROOT = Path(__file__).parents[1]
REFERENCE = re.findall(
    r"^::: fedstill\.(\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE
)

OUTER = [package.name for package in PACKAGES]


def thing(path: str) -> object:
    """A module, class or function of the reference."""
    try:
        return importlib.import_module(f"fedstill.{path}")
    except ModuleNotFoundError:
        home, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"fedstill.{home}"), name)


def marked(path: str) -> object:
    """A path of the reference as a parameter, with the outer package that it is in."""
    package = path.partition(".")[0]
    uses = [pytest.mark.uses(package)] if package in OUTER else []
    return pytest.param(path, marks=uses)


@pytest.mark.parametrize("path", [marked(path) for path in REFERENCE])
def test_what_the_reference_is_about_is_in_dir(path: str) -> None:
    """A class or a function by its own name, a module by the part of the library that it is in."""
    own = thing(path)
    name = path.partition(".")[0] if inspect.ismodule(own) else path.rpartition(".")[2]
    assert name in dir(fedstill)
    if not inspect.ismodule(own):
        assert getattr(fedstill, name) is own


def test_every_name_in_dir_can_be_had_and_tells_what_it_is() -> None:
    for name in set(dir(fedstill)) - {"__version__"}:
        assert inspect.getdoc(getattr(fedstill, name)), name
    assert dir(fedstill) == sorted(dir(fedstill))


@pytest.mark.uses("export")
def test_dir_has_every_name_that_a_star_imports() -> None:
    assert set(fedstill.__all__) <= set(dir(fedstill))


def test_dir_costs_nothing() -> None:
    """Neither the import nor ``dir`` loads anything heavy: a shell completes names with it."""
    program = (
        "import sys, fedstill; dir(fedstill); print({'torch', 'pandas', 'numpy', 'rich'} & "
        "set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_a_run_loads_nothing_that_few_runs_need() -> None:
    """Each would make every start longer by half a second."""
    program = (
        "import sys, fedstill; fedstill.Result, fedstill.run; print({'pandas', 'scipy'} & "
        "set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
