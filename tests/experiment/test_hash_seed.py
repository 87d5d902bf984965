"""Measures give the same bits whatever order a process's sets have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json
import sys
from pathlib import Path
import fedstill
import toys
from fedstill.experiment.run_directory.journal import read_journal, without_times
experiment = toys.toy(measure=("divergence", "diversity"), model="toy_batchnorm", rounds=2)
fedstill.run(experiment, sys.argv[1], toys.blobs())
events = read_journal(Path(sys.argv[1]) / 'journal.jsonl')
print(json.dumps(without_times([e for e in events if e["event"] == "measure"])))
"""


def test_measures_do_not_depend_on_the_order_of_sets(tmp_path: Path) -> None:
    printed = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / seed)]
        printed.add(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(printed) == 1
    assert '"measure": "diversity"' in printed.pop()
