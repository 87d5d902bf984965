"""Outer packages are independent: each can be absent, and everything else works."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocking.sitecustomize import VARIABLE
from fedstill import manifest
from fedstill.config.tables import record_tables

TESTS = Path(__file__).parent
PACKAGES = [package.name for package in manifest.PACKAGES]

QUICK = ("benchmark",)
"""Tried in every run of the suite; the others are slow tests."""


def cases() -> Iterator[object]:
    """Each package, most of them as slow tests."""
    for name in PACKAGES:
        marks: list[pytest.MarkDecorator] = []
        if name not in QUICK:
            marks.append(pytest.mark.slow)
        yield pytest.param(name, marks=marks)


def methods_that_build_on(package: str) -> list[str]:
    """The methods that the import contract allows to import a package."""
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    pairs = [entry.split(" -> ") for entry in contract.get("ignore_imports", [])]
    return [
        importer
        for importer, imported in pairs
        if importer.startswith("fedstill.methods.") and imported.startswith(f"fedstill.{package}.")
    ]


def without(package: str) -> dict[str, str]:
    """The environment of a child process in which a package is blocked."""
    paths = [str(TESTS / "blocking"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, VARIABLE: package, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize("package", [*cases()])
def test_everything_else_works_without_a_package(package: str, tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS / "without_a_package.py"), str(tmp_path)]
    done = subprocess.run(
        [*command, *methods_that_build_on(package)],
        env=without(package),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").is_file()
    (imported,) = [line for line in done.stdout.splitlines() if line.startswith("imported")]
    assert int(imported.split()[1]) > 250


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_the_whole_suite_passes_without_a_package(package: str) -> None:
    """Tests that need the package are left out, or fail as expected."""
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "loadscope"]
    done = subprocess.run(
        [*command, "--block", package], cwd=TESTS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]


def parts() -> Iterator[object]:
    """All parts of all packages."""
    for package in manifest.PACKAGES:
        for value in vars(package).values():
            if isinstance(value, tuple):
                for part in value:
                    if isinstance(part, str):
                        continue  # a key of a label, which names no code
                    yield pytest.param(part, id=part.target, marks=pytest.mark.uses(package.name))


@pytest.mark.parametrize("part", [*parts()])
def test_every_part_of_the_manifest_is_there(part: manifest.Part) -> None:
    assert part.load() is not None
    assert part.help.endswith(".")


def test_every_config_table_has_a_place() -> None:
    names = list(record_tables())
    for table in manifest.config_tables():
        assert names.index(table.name) > names.index(table.follows)


def test_the_table_of_a_missing_package_is_an_unknown_key(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedstill", "explain", "-s", "privacy.clip=1"]
    done = subprocess.run(
        command, env=without("privacy"), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "fedstill.privacy" in done.stderr
