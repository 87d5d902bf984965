"""Check that this version is not slower than the last release: ``make bench-guard``.

The benchmark times start-up, the first round, rounds of W1, W2 and W4, and a round of a million
clients, compared with the last release tag (``benchmarks.beside``). It also measures the time that
a run takes beyond training. The status is 1 if the whole 95 % interval of a ratio lies above 1.05,
or if a run takes more than two seconds beyond training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.beside.__main__ import chosen, compare
from benchmarks.beside.trees import ROOT, NoSuchCommit

LIMIT = 1.05
"""The ratio to the release above which a measurement counts as slower."""

MOST_OVERHEAD = 2.0
"""The most seconds that a run may take beyond training."""

ONE_RUN = """rounds = 10
method = "fedntd"
"""
"""The config of the run whose overhead is measured: digits with the default measures."""

RUNS = 5


def last_release(repository: Path = ROOT) -> str:
    """The last release tag before the current commit; raises NoSuchCommit without one."""
    command = ["git", "-C", str(repository), "describe", "--tags", "--abbrev=0"]
    command += ["--match", "v[0-9]*"]
    process = subprocess.run(command, capture_output=True, encoding="utf-8")
    if process.returncode:
        raise NoSuchCommit(
            "no release tag v* before this commit: run git fetch --tags, or name a commit by --rev"
        )
    return process.stdout.strip()


def overhead(seconds: float, events: Iterable[dict[str, Any]]) -> float:
    """The seconds of a run beyond training: start-up, data, evaluation, measures, checkpoints.

    ``seconds``: of the whole process. ``events``: of its journal.
    """
    rounds = [event for event in events if event["event"] == "round"]
    training_seconds: float = sum(event["seconds_training"] for event in rounds)
    return seconds - training_seconds


def measured_overhead() -> float:
    """The smallest overhead of a few runs, which other programs disturbed least."""
    return min(_overhead_of_a_run() for _ in range(RUNS))


def _overhead_of_a_run() -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "one.toml").write_text(ONE_RUN, encoding="utf-8")
        command = [sys.executable, "-m", "fedstill", "run", "one.toml", "--out", "run", "-q"]
        environment = dict(os.environ)
        # With this variable, Python compiles the library again in every process.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, cwd=folder, env=environment)
        seconds = time.perf_counter() - began
        journal = (folder / "run" / "journal.jsonl").read_text(encoding="utf-8")
    return overhead(seconds, map(json.loads, journal.splitlines()))


def main() -> int:
    """Compare with the last release, and measure the overhead; 1 if either is too slow."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.guard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rev", default="", help="the commit to compare with (default: last tag)")
    parser.add_argument("--only", default="", help="a part, e.g. start-up,W4; overhead by itself")
    parser.add_argument("--pairs", type=int, default=0, help="of each measurement (default: 6–20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the ratios here")
    options = parser.parse_args()

    names = [name for name in options.only.split(",") if name]
    status = 0
    try:
        if names != ["overhead"]:
            groups = ",".join(name for name in names if name != "overhead")
            revision = options.rev or last_release()
            status = compare(revision, chosen(groups), options.pairs, options.json, LIMIT)
    except (NoSuchCommit, ValueError) as error:
        parser.error(str(error))
    if names and "overhead" not in names:
        return status
    seconds = measured_overhead()
    print(f"a run beyond training: {seconds:.2f} s, at most {MOST_OVERHEAD:g} s")
    return int(status or seconds > MOST_OVERHEAD)


if __name__ == "__main__":
    sys.exit(main())
