"""``fedstill --help`` costs hardly more than the help of an empty app."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.startup import empty_app

from fedstill import manifest

MOST_SECONDS = 0.05
PAIRS = 7


def test_help_imports_no_command(tmp_path: Path) -> None:
    program = "import sys; from fedstill.cli import call; call(['--help']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.splitlines()[-1].split())
    assert imported.isdisjoint({"torch", "numpy", "pydantic"})
    assert imported.isdisjoint(package.module for package in manifest.PACKAGES)
    assert {name for name in imported if name.startswith("fedstill.")} <= {
        "fedstill.cli",
        "fedstill.cli.app",
        "fedstill.core",
        "fedstill.core.errors",
        "fedstill.manifest",
        "fedstill.version",
    }


def processor_seconds(command: list[str], folder: Path) -> float:
    """The processor's time that a command takes, which other programs hardly change."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, cwd=folder, env=os.environ)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


@pytest.mark.slow
def test_help_costs_hardly_more_than_that_of_an_empty_app(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text(empty_app(), encoding="utf-8")
    empty = []
    ours = []
    for _ in range(PAIRS):
        empty.append(processor_seconds([sys.executable, "empty.py"], tmp_path))
        ours.append(processor_seconds([sys.executable, "-m", "fedstill", "--help"], tmp_path))
    assert min(ours) - min(empty) <= MOST_SECONDS
