"""Seconds and peak memory of ``fedstill.load_runs`` and ``fedstill report``: ``python -m
benchmarks.frame [--against COMMIT]``.

The runs are those of results/fedadkd-table1-full, 200 rounds of ten clients each, repeated under
other seeds until there are 100. Each command is a process of its own. Seconds of ``load_runs``
count from the end of the imports. Its memory is the peak of the process; the last column is the
peak before the call, which NumPy, pandas and pydantic take. With ``--against``, another commit
writes the same report.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.beside.trees import ROOT, Tree, checked_out, working_tree
from fedstill.report import terminal

PACK = ROOT / "results" / "fedadkd-table1-full.runs.tar.xz"

RUNS = 100

METRICS = (None, ["accuracy"], ["accuracy", "class_accuracy", "loss", "bytes_up"])
"""What is loaded; None for all."""

PROGRAM = """
import json, sys, time
import fedstill, pandas
from fedstill.running import frame

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024

before = peak()
began = time.perf_counter()
rows = len(fedstill.load_runs(sys.argv[1], json.loads(sys.argv[2])))
seconds = time.perf_counter() - began
print(json.dumps([f"{rows:,}", f"{seconds:.2f}", f"{peak():.0f}", f"{before:.0f}"]))
"""


def make_runs(folder: Path) -> None:
    """Write 100 runs: those of the pack, again and again with other seeds."""
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
        # the first seed is the run's; that of the partition stays
        text = re.sub(r"^seed = \d+$", f"seed = {seed}", text, count=1, flags=re.M)
        config.write_text(text, encoding="utf-8")
    shutil.rmtree(packed)


def loading(runs: Path, metrics: Sequence[str] | None) -> list[str]:
    """A line of the table of ``load_runs``."""
    program = [sys.executable, "-c", PROGRAM, str(runs), json.dumps(metrics)]
    done = subprocess.run(program, check=True, capture_output=True, encoding="utf-8")
    name = "all metrics"
    if metrics:
        name = ", ".join(metrics)
    return [name, *json.loads(done.stdout)]


def reporting(runs: Path, tree: Tree) -> list[str]:
    """A line of the table of ``fedstill report``."""
    page = runs.parent / "report.html"
    command = [sys.executable, "-m", "fedstill", "report", str(runs), "--out", str(page)]
    variables = {**os.environ, "PYTHONPATH": str(tree.source)}
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=variables)
    seconds = time.perf_counter() - began
    return [tree.name, f"{seconds:.1f}"]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="COMMIT", help="a commit that writes the report, too")
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
