"""The gain from letting torch's waiting threads sleep soon:
``python -m benchmarks.waiting [--busy 0,1,2] [--pairs 3]``.

Rounds of a chain (W2 with two clients and one epoch) and of stacked clients (W4), with one torch
thread for each core (``threads = [1, cores]``). They run alone and next to processes that keep a
core busy, with the default of GNU OpenMP and with fedstill's. Each measurement is a process of its
own.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks.options import integers, option_parser
from benchmarks.turns import ratios, spread
from fedstill.engines.hardware import cores
from fedstill.report import terminal

IMPORTS = {"OpenMP's default": "import torch, fedstill", "fedstill's": "import fedstill"}
"""The first import decides, because OpenMP reads its setting when torch loads it."""

ROUNDS = {"W2": 4, "W4": 20}
"""The rounds of a measurement, by workload."""

NOT_INHERITED = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables of the environment that would replace both defaults."""

PROGRAM = """
import sys
from dataclasses import replace
from benchmarks.fedstill_loop import FedstillLoop
from benchmarks.turns import seconds_of
from benchmarks.workloads import WORKLOADS
from fedstill.engines.hardware import cores
from fedstill.running.preparation import prepare
from fedstill.config.resolve import resolve

name = sys.argv[1]
rounds = int(sys.argv[2])
workload = WORKLOADS[name]
if name == "W2":
    plan = {**workload.plan, "epochs": 1}
    workload = replace(workload, clients=2, sampled=2, plan=plan)
experiment = workload.experiment(workload.methods[0], engine="auto", threads=[1, cores()])
loop = FedstillLoop(prepare(resolve(experiment), workload.dataset()))
for _ in range(rounds):
    print(seconds_of(loop.run_round))
"""


def median_round(workload: str, imports: str) -> float:
    """The median seconds of a round in a new process, without the first half of the rounds."""
    variables = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    rounds = ROUNDS[workload]
    command = [sys.executable, "-c", imports + PROGRAM, workload, str(rounds)]
    process = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    seconds = [float(line) for line in process.stdout.split()]
    return statistics.median(seconds[rounds // 2 :])


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep so many processes busy during the block."""
    command = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
        yield


def measure(workload: str, busy: int, turns: int) -> Sequence[str]:
    """The row of a workload next to some busy processes."""
    seconds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    with busy_processes(busy):
        for _ in range(turns):
            for name, imports in IMPORTS.items():
                seconds[name].append(median_round(workload, imports))
    speed_up = ratios(seconds["OpenMP's default"], seconds["fedstill's"])
    return workload, str(busy), *map(spread, seconds.values()), spread(speed_up)


def main() -> None:
    """Measure all rows, and print one table."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--busy", type=integers, default="0,1,2", help="numbers of busy processes (default: 0,1,2)"
    )
    parser.add_argument("--pairs", type=int, default=3, help="measurements of each default")
    options = parser.parse_args()
    rows = []
    for workload in ROUNDS:
        rows += [measure(workload, busy, options.pairs) for busy in options.busy]
    screen = terminal.console()
    screen.print(f"{cores()} cores; seconds a round, median (min–max) over {options.pairs} turns")
    screen.print(terminal.PlainTable(["", "busy processes", *IMPORTS, "times as fast"], rows))


if __name__ == "__main__":
    main()
