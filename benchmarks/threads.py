"""The cost or gain of one torch thread for each core, for a client that acts alone, a stack, and a
server that trains: ``python -m benchmarks.threads [--only W2,...] [--pairs 5] [--rounds 3]``.

A chain (W2), a stack of small clients (W4), and FedDF, whose server distils, each with one thread
(``threads = 1``, the default) and with a thread for each core. "alone" is one run without others.
"as many as cores" are so many runs at the same time, each with its share of the cores, as
``fedstill compare`` starts them. The two settings take turns, one round each.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.beside.measurements import Seconds, TimedRun, environment, started
from benchmarks.beside.trees import working_tree
from benchmarks.options import names_among, option_parser
from benchmarks.turns import ratios, spread
from benchmarks.workloads import WORKLOADS, Workload, write_tensors
from fedstill.engines.hardware import WORKERS, cores
from fedstill.report import terminal

CLIENTS = 2
"""The clients in a round of W2 and of FedDF. A few are enough, because ratios do not depend on
their number.
"""


@dataclass(frozen=True)
class Case:
    """An experiment on the images of a workload. ``about``: its name in the table."""

    workload: Workload
    about: str
    experiment: Mapping[str, Any]


def _cases() -> dict[str, Case]:
    """The cases by their names for ``--only``."""
    chain = WORKLOADS["W2"]
    small = WORKLOADS["W4"]
    topology = {"kind": "sequential", "clients": chain.clients, "sampled": CLIENTS}
    one_epoch = {**chain.plan, "epochs": 1}
    distillation = {"epochs": 1, "batch": 128, "optimiser": "adam", "lr": 0.001}
    feddf = chain.values(
        "feddf",
        topology={**topology, "kind": "parallel", "server": "teach_server"},
        plan={"train": {**one_epoch, "steps": 1}, "teach_server": distillation},
        data={"public": 1000},
    )
    fedseq = chain.values("fedseq", topology=topology, plan=one_epoch)
    fedavg = small.values("fedavg", engine="vectorised")
    return {
        "W2": Case(chain, "a chain of clients (W2, FedSeq)", fedseq),
        "server": Case(chain, "a server that distils (FedDF)", feddf),
        "W4": Case(small, "a stack of small clients (W4, FedAvg)", fedavg),
    }


CASES = _cases()


@dataclass(frozen=True)
class Timing:
    """The median seconds of a round with one thread, and with a thread for each core; of the
    slowest of the simultaneous runs.
    """

    single: Seconds
    threaded: Seconds


def timed(case: Case, simultaneous: int, rounds: int, scratch: Path) -> Timing:
    """Time both settings in turn, with so many simultaneous runs of each."""
    tensors = write_tensors(case.workload, scratch)

    def task(threads: int) -> dict[str, Any]:
        experiment = {**case.experiment, "threads": [1, threads], "rounds": rounds + 1}
        return {"experiment": experiment, "tensors": str(tensors)}

    with ExitStack() as stack:
        single = stack.enter_context(_started_runs(task(1), simultaneous))
        threaded = stack.enter_context(_started_runs(task(cores()), simultaneous))
        for turn in range(rounds + 1):
            order = [single, threaded]
            if turn % 2:
                order.reverse()
            for runs in order:
                _run_round(runs)
        return Timing(_slowest(single), _slowest(threaded))


@contextmanager
def _started_runs(task: Mapping[str, Any], count: int) -> Iterator[list[TimedRun]]:
    """Start so many runs, each with its share of the cores."""
    tree = working_tree()
    share = max(1, cores() // count)
    variables = {**environment(tree, 0), WORKERS: str(share)}
    with ExitStack() as stack:
        yield [stack.enter_context(started(tree, variables, task)) for _ in range(count)]


def _run_round(runs: Sequence[TimedRun]) -> None:
    """Run a round of simultaneous runs."""
    for run in runs:
        run.begin_round()
    for run in runs:
        run.end_round()


def _slowest(runs: Sequence[TimedRun]) -> Seconds:
    """The largest median wall-clock seconds, and the CPU seconds of all runs together, without the
    first round.
    """
    medians = [run.median(1) for run in runs]
    return Seconds(
        wall=max(seconds.wall for seconds in medians),
        cpu=sum(seconds.cpu for seconds in medians),
    )


def cells(timings: Sequence[Timing]) -> list[str]:
    """The numbers of a row."""
    single = [timing.single for timing in timings]
    threaded = [timing.threaded for timing in timings]
    single_wall = [seconds.wall for seconds in single]
    threaded_wall = [seconds.wall for seconds in threaded]
    cpu_ratios = ratios([seconds.cpu for seconds in threaded], [seconds.cpu for seconds in single])
    return [
        f"{statistics.median(single_wall):.3g}",
        f"{statistics.median(threaded_wall):.3g}",
        spread(ratios(threaded_wall, single_wall)),
        spread(cpu_ratios),
    ]


def main() -> None:
    """Measure the cases, and print one table."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--only",
        type=names_among(CASES),
        default=list(CASES),
        help="some of the cases: W2,server,W4",
    )
    parser.add_argument("--pairs", type=int, default=5, help="pairs of groups of new processes")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each run after the first")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for key in options.only:
            case = CASES[key]
            for label, simultaneous in {"alone": 1, "as many as cores": cores()}.items():
                timings = [
                    timed(case, simultaneous, options.rounds, Path(name))
                    for _ in range(options.pairs)
                ]
                rows.append([case.about, label, *cells(timings)])
    screen = terminal.console()
    screen.print(f"{cores()} cores; median (min–max) over {options.pairs} pairs, seconds a round")
    threads = f"{cores()} threads"
    head = ["", "runs", "1 thread", threads, f"{threads} / 1, wall", f"{threads} / 1, CPU"]
    screen.print(terminal.PlainTable(head, rows))


if __name__ == "__main__":
    main()
