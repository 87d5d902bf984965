"""Time a commit and the working tree in alternation: ``python -m benchmarks.beside REV``.

Every pair is two fresh processes of the same Python with the same threads, one of each tree; the
order changes from pair to pair. A ratio is the working tree's time divided by REV's, the median
over pairs. Its 95 % interval needs six pairs. A ratio is "slower" if its whole interval lies above
1.03, "within" if none of it does, "undecided" otherwise. The command ends with status 1 if the
wall-clock or the CPU seconds of any measurement are slower.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks.beside.measurements import MEASUREMENTS, Failed, Measurement, warm_up
from benchmarks.beside.ratios import LIMIT, Pair, Ratio, Verdict, ratio_of
from benchmarks.beside.trees import NoSuchCommit, Tree, checked_out, working_tree
from benchmarks.peers.common import cores
from fedstill.report import terminal

CLOCKS = ("wall", "CPU")

HEAD = ["", "clock", "REV, s", "working tree, s", "ratio", "95 % interval", "pairs", ""]


@dataclass
class Timed:
    """A measurement and its pairs so far, one list for each clock."""

    measurement: Measurement
    pairs: dict[str, list[Pair]] = field(default_factory=lambda: {clock: [] for clock in CLOCKS})

    def ratios(self) -> dict[str, Ratio]:
        """Return the ratio of each clock."""
        return {clock: ratio_of(pairs) for clock, pairs in self.pairs.items()}


def measure(timed: Timed, pairs: int, rev: Tree, working: Tree, scratch: Path) -> None:
    """Time so many pairs, and print the ratios of each."""
    for number in range(pairs):
        order = [rev, working]
        if number % 2:
            order.reverse()
        seconds = timed.measurement.time(order, number, scratch)
        rev_seconds = seconds[order.index(rev)]
        working_seconds = seconds[order.index(working)]
        timed.pairs["wall"].append(Pair(rev=rev_seconds.wall, working=working_seconds.wall))
        timed.pairs["CPU"].append(Pair(rev=rev_seconds.cpu, working=working_seconds.cpu))
        latest = ", ".join(f"{clock} {timed.pairs[clock][-1].ratio:.3f}" for clock in CLOCKS)
        _log(f"{timed.measurement.name}, pair {number + 1} of {pairs}: {latest}")


def show(results: Sequence[Timed], limit: float) -> None:
    """Print the table, which ratios are slower, and how many are undecided."""
    screen = terminal.console()
    # A file should get complete lines.
    screen.width = max(screen.width, 120)
    rows = []
    names: dict[Verdict, list[str]] = {verdict: [] for verdict in Verdict}
    for timed in results:
        for clock, ratio in timed.ratios().items():
            name = timed.measurement.name
            verdict = ratio.verdict(limit)
            names[verdict].append(f"{name} ({clock})")
            rows.append(
                [
                    name,
                    clock,
                    f"{ratio.rev:.4g}",
                    f"{ratio.working:.4g}",
                    f"{ratio.median:.3f}",
                    _interval(ratio),
                    str(len(timed.pairs[clock])),
                    verdict,
                ]
            )
    screen.print(terminal.PlainTable(HEAD, rows))
    if slower := names[Verdict.SLOWER]:
        screen.print(f"slower than {limit} times REV's: {'; '.join(slower)}")
    if undecided := names[Verdict.UNDECIDED]:
        screen.print(
            f"{len(undecided)} of {len(rows)} undecided: take more --pairs (at least 6), on a "
            "machine that does nothing else"
        )


def described(rev: Tree, working: Tree, limit: float) -> dict[str, Any]:
    """Return what the times depend on besides the code."""
    return {
        "rev": {"name": rev.name, "commit": rev.commit},
        "working_tree": {"commit": working.commit, "changed": working.changed},
        "processor": _processor(),
        "cores": cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "limit": limit,
    }


def recorded(results: Sequence[Timed], about: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Return the contents of the JSON file: seconds of every pair, ratios and verdicts."""
    rows = []
    for timed in results:
        for clock, ratio in timed.ratios().items():
            rows.append(
                {
                    "group": timed.measurement.group,
                    "measurement": timed.measurement.name,
                    "clock": clock,
                    **{key: _or_none(value) for key, value in asdict(ratio).items()},
                    "verdict": ratio.verdict(limit),
                    "pairs": [asdict(pair) for pair in timed.pairs[clock]],
                }
            )
    return {**about, "ratios": rows}


def chosen(only: str) -> list[Measurement]:
    """Return the measurements of these groups; raises ValueError for a name that is none."""
    groups = list(dict.fromkeys(measurement.group for measurement in MEASUREMENTS))
    names = groups
    if only:
        names = only.split(",")
    if unknown := set(names) - set(groups):
        raise ValueError(f"--only {','.join(sorted(unknown))}: not among {','.join(groups)}")
    return [measurement for measurement in MEASUREMENTS if measurement.group in names]


def main() -> int:
    """Time both trees, print and write the results; 1 if the working tree is slower."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.beside",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rev", metavar="REV", help="the commit, tag or branch to compare with")
    parser.add_argument("--only", default="", help="a part, e.g. start-up,first-round,W1,W2,W4")
    parser.add_argument("--pairs", type=int, default=0, help="of each measurement (default: 6–20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    options = parser.parse_args()
    # sys.exit unwinds the stack, so that the git worktree is removed and timed processes end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        measurements = chosen(options.only)
        return compare(options.rev, measurements, options.pairs, options.json)
    except (NoSuchCommit, ValueError) as error:
        parser.error(str(error))
    except Failed as error:
        sys.exit(str(error))


def compare(
    revision: str,
    measurements: Sequence[Measurement],
    pairs: int,
    file: Path | None,
    limit: float = LIMIT,
) -> int:
    """Time the measurements in both trees; ``pairs`` 0 takes each measurement's own number. 1 if a
    ratio is above the limit.
    """
    began = time.monotonic()
    working = working_tree()
    with checked_out(revision) as rev, tempfile.TemporaryDirectory() as name:
        about = described(rev, working, limit)
        load = os.getloadavg()
        note = ""
        if working.changed:
            note = ", with uncommitted changes"
        _log(f"REV {rev.commit[:12]}; working tree {working.commit[:12]}{note}")
        _log(f"{about['processor']}, {cores()} cores; load average {load[0]:.2f}")
        _log("warming up")
        warm_up((rev, working), Path(name))
        results = [Timed(measurement) for measurement in measurements]
        for timed in results:
            measure(timed, pairs or timed.measurement.pairs, rev, working, Path(name))
    show(results, limit)
    minutes = (time.monotonic() - began) / 60
    loads = {"before": load[0], "after": os.getloadavg()[0]}
    _log(f"{minutes:.1f} minutes; load average {loads['before']:.2f}, then {loads['after']:.2f}")
    if file:
        contents = recorded(results, {**about, "load_average": loads, "minutes": minutes}, limit)
        file.write_text(json.dumps(contents, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    verdicts = {ratio.verdict(limit) for timed in results for ratio in timed.ratios().values()}
    return int(Verdict.SLOWER in verdicts)


def _processor() -> str:
    """Return the processor's name on Linux, its architecture elsewhere."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _interval(ratio: Ratio) -> str:
    if math.isnan(ratio.low):
        return ""
    return f"{ratio.low:.3f}–{ratio.high:.3f}"


def _or_none(number: float) -> float | None:
    """JSON has no nan."""
    if math.isnan(number):
        return None
    return number


def _log(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
