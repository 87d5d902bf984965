"""What it is worth to train the seeds of a comparison in common stacks: ``python -m benchmarks.seeds [--pairs 3]``.

Whole comparisons on handwritten digits, 100 clients, ten a round, one epoch of batches of 10, side by side and in a
chain, of as many settings as there are cores: every seed for itself with the pooled engine and with the vectorised one,
and the seeds of a setting together, which takes one process a setting. They take turns; seconds are of the whole
command, with starting and the evaluation after each round. ``--settings 1``: what it does to a single setting.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.speed import spread
from fedstill import Experiment
from fedstill.engines.cores import cores
from fedstill.experiment.compare import compare, variants
from fedstill.report import terminal

CONTESTANTS = {
    "parallel": ("pooled, each for itself", "vectorised, each for itself", "vectorised, together"),
    "sequential": ("pooled, each for itself", "vectorised, together"),
}


def seconds(kind: str, how: str, seeds: Sequence[int], rounds: int, settings: int) -> float:
    """Seconds of one comparison."""
    engine, _, company = how.partition(", ")
    grid = {"plan.lr": [0.01 * (1 + i) for i in range(settings)]}
    topology = {"kind": kind, "clients": 100, "sampled": 10}
    plan = {"epochs": 1, "batch": 10, "lr": 0.01, "lr_decay": 1.0, "momentum": 0.9, "weight_decay": 0.0}
    method = "fedavg" if kind == "parallel" else "fedseq"
    experiment = Experiment(
        method=method, rounds=rounds, engine=engine, measure=(), topology=topology, plan=plan, partition="iid"
    )
    with tempfile.TemporaryDirectory() as folder:
        runs = variants(experiment, Path(folder), seeds=seeds, grid=grid, stack_seeds=company == "together")
        began = time.perf_counter()
        outcomes = compare(runs, cores(), lambda _: None)
        taken = time.perf_counter() - began
    for outcome in outcomes:
        if outcome.problem:
            raise RuntimeError(outcome.problem)
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="3,10", help="how many seeds, e.g. 3,10")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--settings", type=int, default=cores(), help="how many settings")
    parser.add_argument("--pairs", type=int, default=3, help="turns")
    asked = parser.parse_args()
    screen = terminal.console()
    screen.print(
        f"{cores()} cores; {asked.settings} settings, {asked.rounds} rounds; median (min–max) over {asked.pairs} turns"
    )
    for kind, contestants in CONTESTANTS.items():
        for count in map(int, asked.seeds.split(",")):
            taken: dict[str, list[float]] = {how: [] for how in contestants}
            for _ in range(asked.pairs):
                for how in contestants:
                    taken[how].append(seconds(kind, how, range(1, count + 1), asked.rounds, asked.settings))
            first = taken[contestants[0]]
            rows = []
            for how, own in taken.items():
                ratios = [a / b for a, b in zip(first, own, strict=True)]
                rows.append(
                    (how, spread(own), spread(ratios), f"{statistics.median(own) / count / asked.settings:.2g}")
                )
            screen.print(f"\n{kind}, {count} seeds")
            screen.print(terminal.table(["", "seconds", "times as fast", "seconds a run"], rows))


if __name__ == "__main__":
    main()
