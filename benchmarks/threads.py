"""What torch threads are worth to a client that acts alone, to a stack, and to a server that
trains: ``python -m benchmarks.threads [--only W2,...] [--pairs 6] [--rounds 3]``.

A chain (W2), a stack of small clients (W4), and FedDF, whose server distils, each with one thread
(``threads = 1``, the default) and with a thread a core. ``alone``: one run, which has the machine
to itself. ``as many as cores``: so many runs at once, each with its share of the cores, as
``fedstill compare`` does them. The two settings take turns, a round each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.beside.measurements import Seconds, TimedRun, environment, started
from benchmarks.beside.trees import working_tree
from benchmarks.speed import spread
from benchmarks.workloads import WORKLOADS, write_tensors
from fedstill.engines.hardware import cores
from fedstill.report import terminal

CLIENTS = 2
"""Clients of W2 and of FedDF's round: what is compared is seconds a step, so a few are enough."""


@dataclass(frozen=True)
class Case:
    """An experiment on a workload's images; ``about``: what it is in the table."""

    workload: str
    about: str
    experiment: Mapping[str, Any]


def cases() -> dict[str, Case]:
    """The cases by the name that ``--only`` takes."""
    chain = WORKLOADS["W2"]
    few = {"kind": "sequential", "clients": chain.clients, "sampled": CLIENTS}
    one_epoch = {**chain.plan, "epochs": 1}
    distils = {"epochs": 1, "batch": 128, "optimiser": "adam", "lr": 0.001}
    return {
        "W2": Case(
            "W2",
            "a chain of clients (W2, FedSeq)",
            chain.values("fedseq", topology=few, plan=one_epoch),
        ),
        "server": Case(
            "W2",
            "a server that distils (FedDF)",
            chain.values(
                "feddf",
                topology={**few, "kind": "parallel", "server": "teach_server"},
                plan={"train": {**one_epoch, "steps": 1}, "teach_server": distils},
                data={"public": 1000},
            ),
        ),
        "W4": Case(
            "W4",
            "a stack of small clients (W4, FedAvg)",
            WORKLOADS["W4"].values("fedavg", engine="vectorised"),
        ),
    }


@dataclass(frozen=True)
class Timing:
    """Medians over rounds, of the slowest of the runs that are done at once."""

    one: Seconds
    many: Seconds


def timed(case: Case, at_once: int, rounds: int, scratch: Path) -> Timing:
    """Time the two settings in turn, ``at_once`` runs of each at a time."""
    with ExitStack() as stack:
        groups = [
            [
                stack.enter_context(_run(case, threads, at_once, rounds, scratch))
                for _ in range(at_once)
            ]
            for threads in (1, cores())
        ]
        for turn in range(rounds + 1):
            order = groups if turn % 2 == 0 else groups[::-1]
            for group in order:
                _round(group)
        one, many = (_slowest(group) for group in groups)
    return Timing(one, many)


@contextmanager
def _run(case: Case, threads: int, at_once: int, rounds: int, scratch: Path) -> Iterator[TimedRun]:
    experiment = {**case.experiment, "threads": [1, threads], "rounds": rounds + 1}
    tree = working_tree()
    task = {
        "experiment": experiment,
        "tensors": str(write_tensors(WORKLOADS[case.workload], scratch)),
    }
    share = str(max(1, cores() // at_once))
    with started(tree, {**environment(tree, 0), "FEDSTILL_WORKERS": share}, task) as run:
        yield run


def _round(group: Sequence[TimedRun]) -> None:
    """A round of runs that are done at once."""
    for run in group:
        run.begin_round()
    for run in group:
        run.end_round()


def _slowest(group: Sequence[TimedRun]) -> Seconds:
    """The medians without the first round; CPU seconds of all runs together."""
    medians = [run.median(1) for run in group]
    return Seconds(
        wall=max(seconds.wall for seconds in medians),
        cpu=sum(seconds.cpu for seconds in medians),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(cases()), help="which, e.g. W2,server")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of groups of fresh processes")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, after a first one")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for key in options.only.split(","):
            case = cases()[key]
            for label, at_once in {"alone": 1, "as many as cores": cores()}.items():
                timings = [
                    timed(case, at_once, options.rounds, Path(name)) for _ in range(options.pairs)
                ]
                rows.append((case.about, label, *_columns(timings)))
    screen = terminal.console()
    many = f"{cores()} threads"
    screen.print(f"{cores()} cores; median (min–max) over {options.pairs} pairs, seconds a round")
    head = ["", "runs", "1 thread", many, f"{many} / 1, wall", f"{many} / 1, CPU"]
    screen.print(terminal.PlainTable(head, rows))


def _columns(timings: Sequence[Timing]) -> list[str]:
    wall = [timing.many.wall / timing.one.wall for timing in timings]
    cpu = [timing.many.cpu / timing.one.cpu for timing in timings]
    return [
        f"{statistics.median(timing.one.wall for timing in timings):.3g}",
        f"{statistics.median(timing.many.wall for timing in timings):.3g}",
        spread(wall),
        spread(cpu),
    ]


if __name__ == "__main__":
    main()
