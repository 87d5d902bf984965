"""The gain from replaying recorded steps on a CUDA card:
``python -m benchmarks.replayed [--pairs 3] [--precisions fp32,bf16]``.

Rounds of W1 and of the chain W2, with and without recorded steps, in turn, in each precision. The
benchmark also prints whether the final models have the same bits.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from benchmarks.fedstill_loop import FedstillLoop
from benchmarks.options import names_among, option_parser
from benchmarks.turns import ratios, seconds_in_turns
from benchmarks.workloads import WORKLOADS
from fedstill.config.resolve import resolve
from fedstill.engines.hardware import REPLAY
from fedstill.report import terminal
from fedstill.running.preparation import prepare

METHODS = {"W1": ("fedavg", "fedntd", "fedadkd"), "W2": ("fedseq", "sfedkd")}
"""The methods by workload."""

HEAD = ["", "kernel by kernel, s", "replayed, s", "times as fast", "same bits"]


def run_round(loop: FedstillLoop, replay: str) -> None:
    """Train a round, with recorded steps if ``replay`` is 1."""
    os.environ[REPLAY] = replay
    loop.run_round()
    torch.cuda.synchronize()


def measure(workload_name: str, method: str, precision: str, pairs: int) -> Sequence[str]:
    """The row of a method in a precision."""
    workload = WORKLOADS[workload_name]
    dataset = workload.dataset()
    experiment = workload.experiment(method, device="cuda", precision=precision)
    plain = FedstillLoop(prepare(resolve(experiment), dataset))
    replayed = FedstillLoop(prepare(resolve(experiment), dataset))
    contestants = {
        "plain": partial(run_round, plain, "0"),
        "replayed": partial(run_round, replayed, "1"),
    }
    with closing(plain.engine), closing(replayed.engine):
        seconds = seconds_in_turns(contestants, pairs)

    speed_up = ratios(seconds["plain"], seconds["replayed"])
    answer = "NO"
    if same_bits(plain.parameters(), replayed.parameters()):
        answer = "yes"
    return (
        f"{workload_name}, {method}, {precision}",
        f"{statistics.median(seconds['plain']):.3f}",
        f"{statistics.median(seconds['replayed']):.3f}",
        f"{statistics.median(speed_up):.2f} ({min(speed_up):.2f}–{max(speed_up):.2f})",
        answer,
    )


def same_bits(model: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> bool:
    """Whether two models have the same bits."""
    return all(torch.equal(value, reference[name]) for name, value in model.items())


def main() -> None:
    """Print a row for each workload, method and precision."""
    precisions = ["fp32", "bf16", "tf32"]
    parser = option_parser(__doc__)
    parser.add_argument(
        "--pairs", type=int, default=3, help="rounds of each kind after the warm-up"
    )
    parser.add_argument(
        "--precisions",
        type=names_among(precisions),
        default="fp32,bf16",
        help="the precisions (default: fp32,bf16)",
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here, and only there steps are replayed")
    rows = []
    for workload, methods in METHODS.items():
        for method in methods:
            rows += [
                measure(workload, method, precision, options.pairs)
                for precision in options.precisions
            ]
    screen = terminal.console()
    screen.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; median over {options.pairs} "
        "pairs of rounds"
    )
    screen.print(terminal.PlainTable(HEAD, rows))


if __name__ == "__main__":
    main()
