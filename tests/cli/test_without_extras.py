"""The demo's three methods where no extra is installed, as after ``make demo``.

The tests' environment has the extras, so a child process hides them. test_wheel.py runs the demo in
an environment that has none.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import toys

PROGRAM = """
import sys
hidden, *arguments = sys.argv[1:]
sys.modules.update(dict.fromkeys(hidden.split(",")))  # None: as if it were not installed
from fedstill.cli import call
sys.exit(call(arguments))
"""


def applies(requirement: Requirement, extras: set[str]) -> bool:
    """Whether a package with these extras has this requirement, on this machine."""
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""})


def required_packages(name: str) -> set[str]:
    """A package without its extras, and all that are installed with it."""
    closure: set[Requirement] = set()
    queue = [Requirement(name)]
    while queue:
        package = queue.pop()
        if package in closure:
            continue
        closure.add(package)
        direct = map(Requirement, metadata.requires(package.name) or ())
        queue.extend(requirement for requirement in direct if applies(requirement, package.extras))
    return {canonicalize_name(package.name) for package in closure}


def modules_of_extras() -> list[str]:
    """The importable modules that are here, but not where only fedstill and its dependencies are
    installed.
    """
    required = required_packages("fedstill")
    return [
        module
        for module, packages in metadata.packages_distributions().items()
        if required.isdisjoint(map(canonicalize_name, packages))
    ]


@pytest.mark.slow
def test_the_demos_methods_need_no_extra(tmp_path: Path) -> None:
    hidden = modules_of_extras()
    assert "pytest" in hidden
    assert "torch" not in hidden
    (tmp_path / "small.toml").write_text(toys.SMALL)
    command = [
        "compare",
        "small.toml",
        "--methods",
        "fedavg,fedprox,fedntd",
        "--out",
        "runs",
        "--jobs",
        "1",
        "--quiet",
    ]
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(hidden), *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "runs" / "report.html").is_file()
