"""Seconds and peak memory of ``fedstill.load_runs`` and ``fedstill report``:
``python -m benchmarks.frame [--against COMMIT]``.

The runs are those of results/fedadkd-table1-full with 200 rounds of ten clients each, copied with
other seeds until there are 100. Each command is a process of its own. The seconds of ``load_runs``
are without imports. Its memory is the peak of the process. The last column is the peak before the
call, which NumPy, pandas and pydantic need. With ``--against``, another commit also writes the
report.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.beside.trees import ROOT, Tree, checked_out, working_tree
from benchmarks.options import option_parser
from benchmarks.turns import seconds_of
from fedstill.report import terminal

PACK = ROOT / "results" / "fedadkd-table1-full.runs.tar.xz"

RUNS = 100

METRICS = (None, ["accuracy"], ["accuracy", "class_accuracy", "loss", "bytes_up"])
"""The metrics that are loaded; None for all."""

PROGRAM = """
import json, sys, time
import fedstill, pandas
from fedstill.running import frame

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024

start_peak = peak()
began = time.perf_counter()
rows = len(fedstill.load_runs(sys.argv[1], json.loads(sys.argv[2])))
seconds = time.perf_counter() - began
print(json.dumps([f"{rows:,}", f"{seconds:.2f}", f"{peak():.0f}", f"{start_peak:.0f}"]))
"""


def make_runs(folder: Path) -> None:
    """Write 100 runs: copies of those of the pack, with other seeds."""
    packed = folder / "packed"
    with tarfile.open(PACK) as archive:
        archive.extractall(packed, filter="data")
    originals = sorted(path.parent for path in packed.rglob("config.toml"))
    for number in range(RUNS):
        original = originals[number % len(originals)]
        cell = folder / "runs" / original.parent.name
        seed = len(list(cell.glob("seed*")))
        copy = cell / f"seed{seed}"
        shutil.copytree(original, copy)
        config = copy / "config.toml"
        text = config.read_text(encoding="utf-8")
        # The first seed is that of the run. The seed of the partition remains.
        text = re.sub(r"^seed = \d+$", f"seed = {seed}", text, count=1, flags=re.M)
        config.write_text(text, encoding="utf-8")
    shutil.rmtree(packed)


def loading(runs: Path, metrics: Sequence[str] | None) -> list[str]:
    """A line of the table of ``load_runs``."""
    program = [sys.executable, "-c", PROGRAM, str(runs), json.dumps(metrics)]
    process = subprocess.run(program, check=True, capture_output=True, encoding="utf-8")
    name = "all metrics"
    if metrics:
        name = ", ".join(metrics)
    return [name, *json.loads(process.stdout)]


def reporting(runs: Path, tree: Tree) -> list[str]:
    """A line of the table of ``fedstill report``."""
    page = runs.parent / "report.html"
    command = [sys.executable, "-m", "fedstill", "report", str(runs), "--out", str(page)]
    variables = {**os.environ, "PYTHONPATH": str(tree.source)}
    program = partial(subprocess.run, command, check=True, capture_output=True, env=variables)
    seconds = seconds_of(program)
    return [tree.name, f"{seconds:.1f}"]


def main() -> None:
    """Print both tables."""
    parser = option_parser(__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="a commit that also writes the report")
    options = parser.parse_args()
    screen = terminal.console()
    with tempfile.TemporaryDirectory() as name:
        make_runs(Path(name))
        runs = Path(name) / "runs"
        head = [f"load_runs, {RUNS} runs", "rows", "s", "peak, MB", "imports, MB"]
        screen.print(terminal.PlainTable(head, [loading(runs, metrics) for metrics in METRICS]))
        lines = [reporting(runs, working_tree())]
        if options.against:
            with checked_out(options.against) as earlier:
                lines.append(reporting(runs, earlier))
        screen.print(terminal.PlainTable([f"report, {RUNS} runs", "s"], lines))


if __name__ == "__main__":
    main()
