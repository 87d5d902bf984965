"""What replaying recorded steps gains on a CUDA card: rounds with and without, in turn.

``python -m benchmarks.replayed [--pairs 3] [--precisions fp32,bf16]``: W1 and the chain W2, in each
arithmetic. The models at the end are compared to the bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import closing

import torch

from benchmarks.ours import Ours
from benchmarks.workloads import WORKLOADS
from fedstill.config.resolve import resolve
from fedstill.engines.hardware import REPLAY
from fedstill.report import terminal
from fedstill.running.preparation import prepare

ROWS = (("W1", "fedavg"), ("W1", "fedntd"), ("W1", "fedadkd"), ("W2", "fedseq"), ("W2", "sfedkd"))


def seconds(one: Ours, replay: bool) -> float:
    """Seconds of a round."""
    os.environ[REPLAY] = "1" if replay else "0"
    began = time.perf_counter()
    one.run_round()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measured(
    workload: str, method: str, precision: str, pairs: int
) -> tuple[list[float], list[float], bool]:
    """Seconds of rounds launched kernel by kernel, of rounds replayed, and whether their models are
    the same.
    """
    made = WORKLOADS[workload]
    data = made.dataset()
    asked = [made.experiment(method, device="cuda", precision=precision) for _ in range(2)]
    plain, replayed = (Ours(prepare(resolve(one), data)) for one in asked)
    times: tuple[list[float], list[float]] = ([], [])
    with closing(plain.engine), closing(replayed.engine):
        for _ in range(pairs + 1):
            times[0].append(seconds(plain, replay=False))
            times[1].append(seconds(replayed, replay=True))
    other = replayed.parameters()
    return (
        times[0][1:],
        times[1][1:],
        all(torch.equal(v, other[k]) for k, v in plain.parameters().items()),
    )


def main() -> None:
    """Print one row a workload, method and arithmetic."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--pairs", type=int, default=3, help="rounds of each, in turn, after one to warm up"
    )
    options.add_argument("--precisions", default="fp32,bf16")
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.replayed: torch sees no CUDA device here, and steps are replayed on one "
            "only"
        )
    rows = []
    for workload, method in ROWS:
        for precision in given.precisions.split(","):
            plain, replayed, same = measured(workload, method, precision, given.pairs)
            ratios = [a / b for a, b in zip(plain, replayed, strict=True)]
            shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
            each = [f"{statistics.median(times):.3f}" for times in (plain, replayed)]
            rows.append(
                (f"{workload}, {method}, {precision}", *each, shown, "yes" if same else "NO")
            )
    screen = terminal.console()
    screen.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; median over {given.pairs} "
        "pairs of rounds"
    )
    screen.print(
        terminal.PlainTable(
            ["", "kernel by kernel, s", "replayed, s", "times as fast", "same bits"], rows
        )
    )


if __name__ == "__main__":
    main()
