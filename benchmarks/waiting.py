"""What it is worth that torch's threads fall asleep soon:
``python -m benchmarks.waiting [--busy 0,1,2] [--pairs 3]``.

Rounds of a chain (W2, two clients, one epoch) and of stacked clients (W4), with a torch thread a
core (``threads = [1, cores]``), alone and beside processes that do nothing but take time, with GNU
OpenMP's own waiting and with fedstill's. Every measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.speed import spread
from fedstill.engines.hardware import cores
from fedstill.report import terminal

HOWS = {"the library's": "import torch, fedstill", "fedstill's": "import fedstill"}
"""What is imported first decides: the library reads its setting when torch loads it."""
ROUNDS = {"W2": 4, "W4": 20}
CODE = """
import sys, time
from dataclasses import replace
from benchmarks.ours import Ours
from benchmarks.workloads import WORKLOADS
from fedstill.engines.hardware import cores
from fedstill.running.preparation import prepare
from fedstill.config.resolve import resolve
name, rounds = sys.argv[1], int(sys.argv[2])
work = WORKLOADS[name]
if name == "W2":
    work = replace(work, clients=2, sampled=2, plan={**work.plan, "epochs": 1})
experiment = work.experiment(work.methods[0], engine="auto", threads=[1, cores()])
run = Ours(prepare(resolve(experiment), work.dataset()))
for _ in range(rounds):
    began = time.perf_counter()
    run.run_round()
    print(time.perf_counter() - began)
"""


def seconds(workload: str, imports: str) -> float:
    """The median round of a process, without its first half."""
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    rounds = ROUNDS[workload]
    command = [sys.executable, "-c", imports + CODE, workload, str(rounds)]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, check=True)
    return statistics.median(map(float, done.stdout.split()[rounds // 2 :]))


@contextmanager
def beside(count: int) -> Iterator[None]:
    """So many busy processes while something is measured."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", default="0,1,2", help="busy processes beside it")
    parser.add_argument("--pairs", type=int, default=3, help="turns")
    asked = parser.parse_args()
    rows = []
    for workload in ROUNDS:
        for busy in map(int, asked.busy.split(",")):
            taken: dict[str, list[float]] = {how: [] for how in HOWS}
            with beside(busy):
                for _ in range(asked.pairs):
                    for how, imports in HOWS.items():
                        taken[how].append(seconds(workload, imports))
            ratios = [a / b for a, b in zip(*taken.values(), strict=True)]
            rows.append((workload, str(busy), *map(spread, taken.values()), spread(ratios)))
    screen = terminal.console()
    screen.print(f"{cores()} cores; seconds a round, median (min–max) over {asked.pairs} turns")
    screen.print(terminal.PlainTable(["", "busy beside it", *HOWS, "times as fast"], rows))


if __name__ == "__main__":
    main()
