"""The gain from keeping freed memory:
``python -m benchmarks.allocator [--workloads W1,W4] [--pairs 3]``.

One contestant returns freed memory to the operating system, the other one keeps it. Each is a
process of its own; they take turns, one round each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks.contestants import Contestant, Training, run_in_turns
from benchmarks.options import names_among, option_parser
from benchmarks.turns import ratios, spread
from benchmarks.workloads import WORKLOADS
from fedstill.engines.hardware import KEEP_FREED
from fedstill.report import terminal


def started(label: str, keep_freed: str, training: Training) -> Contestant:
    """A contestant after its warm-up. It inherits the value of the environment variable."""
    os.environ[KEEP_FREED] = keep_freed
    contestant = Contestant(label, training)
    contestant.warm_up()
    return contestant


def measure(name: str, pairs: int) -> list[Sequence[str]]:
    """The rows of a workload."""
    training = Training(
        workload=name,
        method=WORKLOADS[name].methods[0],
        changes={"engine": "pooled"},
        rounds=1 + pairs,
    )
    returning = started("returned", "0", training)
    keeping = started("kept", "1", training)
    run_in_turns((returning, keeping), pairs)

    rows: list[Sequence[str]] = []
    for contestant in (returning, keeping):
        memory = contestant.request("peak memory")
        rows.append(
            (
                f"{name}, {contestant.name}",
                spread(contestant.seconds),
                spread(ratios(returning.seconds, contestant.seconds)),
                f"{memory / 1e6:,.0f} MB",
            )
        )
        contestant.end()
    return rows


def main() -> None:
    """Measure the workloads, and print one table."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--workloads",
        type=names_among(WORKLOADS),
        default="W1,W4",
        help="the workloads (default: W1,W4)",
    )
    parser.add_argument(
        "--pairs", type=int, default=3, help="rounds of each contestant after the warm-up"
    )
    options = parser.parse_args()
    rows: list[Sequence[str]] = []
    for name in options.workloads:
        rows += measure(name, options.pairs)
    head = ["freed memory", "seconds a round", "times the speed", "peak memory"]
    terminal.console().print(terminal.PlainTable(head, rows))


if __name__ == "__main__":
    main()
