"""The seconds of a round compared with a plain PyTorch loop:
``python -m benchmarks.speed [--workloads W1,W4] [--pairs 3]``.

Each contestant is a process of its own. They take turns, one round each, so that other programs on
the machine disturb all of them alike. The seconds are those of training. Evaluation and checkpoints
are measured separately.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import peak
from benchmarks.contestants import Contestant, Training, run_in_turns
from benchmarks.options import names_among, option_parser
from benchmarks.turns import ratios, spread
from benchmarks.workloads import WORKLOADS, Workload
from fedstill.config.resolve import resolve
from fedstill.engines.devices import has_bfloat16
from fedstill.engines.hardware import cores
from fedstill.report import terminal
from fedstill.running.preparation import prepare

PLAIN = "plain PyTorch"

HEAD = [
    "",
    "seconds a round",
    "times plain's speed",
    "times serial's speed",
    "of the limit",
    "peak memory",
]


def default_engine(workload: Workload) -> str:
    """The engine of a workload whose config names none."""
    experiment = workload.experiment(workload.methods[0])
    return prepare(resolve(experiment), workload.dataset()).settings.engine


def contestants_of(workload: Workload, pairs: int) -> list[Contestant]:
    """The contestants of a workload: the plain loop, the serial engine, and the default engine with
    all methods. The first method is also measured in bfloat16.
    """
    base_method = workload.methods[0]
    engine = default_engine(workload)
    label = f"default ({engine})"
    default = {"engine": engine}

    def contestant(name: str, method: str, changes: Mapping[str, Any] | None) -> Contestant:
        training = Training(
            workload=workload.name, method=method, changes=changes, rounds=1 + pairs
        )
        return Contestant(name, training)

    contestants = [
        contestant(PLAIN, base_method, None),
        contestant("serial", base_method, {"engine": "serial"}),
        contestant(f"{label}, {base_method}", base_method, default),
    ]
    if has_bfloat16("cpu"):
        bfloat16 = {**default, "precision": "bf16"}
        contestants.append(contestant(f"{label}, {base_method}, bfloat16", base_method, bfloat16))
    contestants += [
        contestant(f"{label}, {method}", method, default) for method in workload.methods[1:]
    ]
    if workload.augmented:
        mirrored = {**default, "data": {"augment": ["flip"]}}
        contestants += [
            contestant(f"{label}, {method}, mirrored", method, mirrored)
            for method in workload.methods
        ]
    return contestants


def largest_difference(plain: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> float:
    """The largest difference of a weight from the plain loop's, relative to the latter's largest
    weight.
    """
    differences = [float((plain[name] - model[name]).abs().max()) for name in plain]
    weights = [float(value.abs().max()) for value in plain.values()]
    return max(differences) / max(weights)


@dataclass(frozen=True)
class Limits:
    """This machine's floating-point operations per second."""

    float32: float
    bfloat16: float

    @staticmethod
    def of(rates: dict[str, float]) -> Limits:
        """The limits among the rates of kernels."""
        return Limits(peak.limit(rates, "float32"), peak.limit(rates, "bfloat16"))

    def of_changes(self, changes: Mapping[str, Any] | None) -> float:
        """The limit of a training with these changes."""
        if changes and "precision" in changes:
            return self.bfloat16
        return self.float32


def measure(name: str, pairs: int, limits: Limits) -> None:
    """Measure one workload, and print its table."""
    workload = WORKLOADS[name]
    contestants = contestants_of(workload, pairs)
    for contestant in contestants:
        contestant.warm_up()
    # Models are compared after one round, because rounding errors grow from round to round.
    plain, serial, *_ = contestants
    difference = largest_difference(plain.request("parameters"), serial.request("parameters"))
    run_in_turns(contestants, pairs)

    operations = plain.request("operations")
    screen = terminal.console()
    screen.print(f"\n{name}: {workload.about}")
    screen.print(
        f"{operations / 1e9:,.1f} GFLOP a round without teachers; at this machine's float32 limit "
        f"{operations / limits.float32:.3g} s"
    )
    screen.print(terminal.PlainTable(HEAD, rows(contestants, operations, limits)))
    last = contestants[-1]
    screen.print(
        f"evaluating 10,000 images: {last.request('evaluation'):.3g} s; a checkpoint: "
        f"{last.request('checkpoint'):.3g} s"
    )
    screen.print(
        f"largest difference from plain PyTorch's model after one round: {difference:.1e} of its "
        "largest weight"
    )
    for contestant in contestants:
        contestant.end()


def rows(
    contestants: Sequence[Contestant], operations: float, limits: Limits
) -> list[Sequence[str]]:
    """The rows of a workload's table."""
    plain, serial, *_ = contestants
    rows: list[Sequence[str]] = []
    for contestant in contestants:
        seconds = contestant.seconds
        share = ""
        # The number of operations is that of the first method.
        if contestant.training.method == plain.training.method:
            rate = operations / statistics.median(seconds)
            share = f"{100 * rate / limits.of_changes(contestant.training.changes):.0f} %"
        memory = contestant.request("peak memory")
        rows.append(
            (
                contestant.name,
                spread(seconds),
                spread(ratios(plain.seconds, seconds)),
                spread(ratios(serial.seconds, seconds)),
                share,
                f"{memory / 1e6:,.0f} MB",
            )
        )
    return rows


def main() -> None:
    """Measure the limits of the machine, then each workload."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--workloads",
        type=names_among(WORKLOADS),
        default=list(WORKLOADS),
        help="the workloads, e.g. W1,W4 (default: all)",
    )
    parser.add_argument(
        "--pairs", type=int, default=3, help="rounds of each contestant after the warm-up"
    )
    options = parser.parse_args()

    rates = peak.rates()
    screen = terminal.console()
    screen.print(
        f"{cores()} cores, torch {torch.__version__}; median (min–max) over {options.pairs} pairs "
        "of rounds"
    )
    kernels = [(kernel, f"{rate / 1e9:,.0f}") for kernel, rate in rates.items()]
    screen.print(terminal.PlainTable(["kernel, all cores", "GFLOP/s"], kernels))
    for name in options.workloads:
        measure(name, options.pairs, Limits.of(rates))


if __name__ == "__main__":
    main()
