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
from fedstill.running.journal import read_journal, without_times
from fedstill.running.runner import run

OTHER = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
"""Another seed of hashes than this process has."""


def measured(folder: Path) -> Any:
    """The events of two measures of a toy run."""
    experiment = toys.toy(measure=("divergence", "diversity"), model="toy_batchnorm", rounds=2)
    run(experiment, folder, toys.blobs())
    return without_times(
        [e for e in read_journal(folder / "journal.jsonl") if e["event"] == "measure"]
    )


@pytest.mark.slow
def test_measures_do_not_depend_on_the_order_of_sets(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "PYTHONHASHSEED": OTHER,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    program = (
        "import json, sys, pathlib, test_hash_seed as t; "
        "print(json.dumps(t.measured(pathlib.Path(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "there")]
    there = json.loads(
        subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    )
    assert there == measured(tmp_path / "here")
    assert "diversity" in {event["measure"] for event in there}
