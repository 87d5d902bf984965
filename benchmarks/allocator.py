"""What keeping freed memory is worth:
``python -m benchmarks.allocator [--workloads W1,W4] [--pairs 3]``.

Each contestant is a process of its own; they take turns, one round each. Ratios are of the same
turn.
"""

from __future__ import annotations

import argparse
import os

from benchmarks.speed import Contestant, spread
from benchmarks.workloads import WORKLOADS
from fedstill.engines.hardware import KEEP_FREED
from fedstill.report import terminal


def measure(name: str, pairs: int) -> list[tuple[str, ...]]:
    """Rows of a workload: how, seconds a round, how many times as fast as handing memory back, peak
    memory.
    """
    running = {}
    for label, value in (("handed back", "0"), ("kept", "1")):
        os.environ[KEEP_FREED] = value
        running[label] = Contestant(
            label, name, WORKLOADS[name].methods[0], {"engine": "pooled"}, 1 + pairs
        )
        running[label].ask("round")
    for _ in range(pairs):
        for one in running.values():
            one.seconds.append(one.ask("round"))
    base = running["handed back"].seconds
    rows = []
    for label, one in running.items():
        ratios = [b / s for b, s in zip(base, one.seconds, strict=True)]
        rows.append(
            (
                f"{name}, {label}",
                spread(one.seconds),
                spread(ratios),
                f"{one.ask('memory') / 1e6:,.0f} MB",
            )
        )
        one.end()
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default="W1,W4", help="which, e.g. W1,W4")
    parser.add_argument(
        "--pairs", type=int, default=3, help="rounds of each, in turn, after one to warm up"
    )
    asked = parser.parse_args()
    rows = [row for name in asked.workloads.split(",") for row in measure(name, asked.pairs)]
    heads = ["freed memory", "seconds a round", "times the speed", "peak memory"]
    terminal.console().print(terminal.PlainTable(heads, rows))
