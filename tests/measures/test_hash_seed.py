"""Measures give the same bits whatever order a process's sets have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import toys
from fedstill.running.journal import without_times
from fedstill.running.runner import run
from journals import journal_events


def measured(folder: Path) -> Any:
    """The events of two measures of a toy run."""
    experiment = toys.toy(measure=("divergence", "diversity"), model="toy_batchnorm", rounds=2)
    run(experiment, folder, toys.blobs())
    return without_times(journal_events(folder, event="measure"))


def other_hash_seed() -> str:
    """Another seed of hashes than this process has."""
    if os.environ.get("PYTHONHASHSEED") == "1":
        return "2"
    return "1"


PROGRAM = """
import json, pathlib, sys
from test_hash_seed import measured
print(json.dumps(measured(pathlib.Path(sys.argv[1]))))
"""


@pytest.mark.slow
def test_measures_do_not_depend_on_the_order_of_sets(tmp_path: Path) -> None:
    search_path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {
        **os.environ,
        "PYTHONHASHSEED": other_hash_seed(),
        "PYTHONPATH": search_path,
    }
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "other process")]

    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    events = json.loads(process.stdout)
    assert events == measured(tmp_path / "this process")
    assert "diversity" in {event["measure"] for event in events}
