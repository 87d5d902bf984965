"""Seconds a round beside a plain loop's, as ratios:
``python -m benchmarks.speed [--workloads W1,W4] [--pairs 3]``.

Every contestant lives in a process of its own, and they take turns, one round each, so that
whatever else the machine does meets all of them. Times are of training alone; evaluation and a
checkpoint have rows of their own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import peak
from benchmarks.ours import Ours
from benchmarks.peers.hand_out import task_of
from benchmarks.plain import PlainLoop
from benchmarks.workloads import WORKLOADS, Workload, flops
from fedstill.config.resolve import resolve
from fedstill.core.records import SERVER
from fedstill.engines.devices import has_bfloat16
from fedstill.engines.hardware import cores
from fedstill.models import contract
from fedstill.report import terminal
from fedstill.running.preparation import prepare

PLAIN = "plain PyTorch"


def contest(
    line: Connection, workload: str, method: str, changes: dict[str, Any], rounds: int
) -> None:
    """A contestant's process: does what it is told, and answers; at most so many rounds."""
    made = WORKLOADS[workload]
    ready = prepare(resolve(made.experiment(method, **changes)), made.dataset())
    torch.set_num_threads(cores())
    plain = changes == {}
    one = (
        PlainLoop(task_of(ready, rounds), contract.build(ready.world.model(SERVER)))
        if plain
        else Ours(ready)
    )
    answers = {"parameters": one.parameters, "memory": _memory, "flops": lambda: flops(made, ready)}
    while (asked := line.recv()) != "end":
        if asked == "round":
            began = time.perf_counter()
            one.run_round()
            line.send(time.perf_counter() - began)
        else:
            line.send(answers[asked]() if asked in answers else getattr(one, asked)())


def _memory() -> float:
    scale = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale)


@dataclass
class Contestant:
    """A process that takes turns with others."""

    name: str
    workload: str
    method: str
    changes: dict[str, Any]
    rounds: int
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, other = context.Pipe()
        self.process = context.Process(
            target=contest,
            args=(other, self.workload, self.method, self.changes, self.rounds),
            daemon=True,
        )
        self.process.start()
        other.close()

    def ask(self, what: str) -> Any:
        """Have one thing done; its answer."""
        self.line.send(what)
        return self.line.recv()

    def end(self) -> None:
        """End the process."""
        self.line.send("end")
        self.process.join()


def turns(contestants: Sequence[Contestant], pairs: int) -> float:
    """Let each do one round to warm up, then ``pairs`` in turn; how far the plain loop's model is
    from ours.

    The distance is relative to how far training moved it, and of the first round: the same work, in
    other bits.
    """
    for one in contestants:
        one.ask("round")
    plain, ours = (
        next(c for c in contestants if (c.name == PLAIN) == p).ask("parameters")
        for p in (True, False)
    )
    gap = max(float((plain[k] - ours[k]).abs().max()) for k in plain)
    size = max(float(v.abs().max()) for v in plain.values())
    for _ in range(pairs):
        for one in contestants:
            one.seconds.append(one.ask("round"))
    return gap / size


def measure(name: str, pairs: int, limits: dict[str, float]) -> None:
    """Measure one workload and print its table."""
    workload = WORKLOADS[name]
    base = workload.methods[0]
    rows: list[tuple[str, str, dict[str, Any]]] = [
        (PLAIN, base, {}),
        ("serial", base, {"engine": "serial"}),
    ]
    engine = default_engine(workload)
    default = {"engine": engine}
    rows.append((f"default ({engine}), {base}", base, default))
    if has_bfloat16("cpu"):
        bfloat16 = {**default, "precision": "bf16"}
        rows.append((f"default ({engine}), {base}, bfloat16", base, bfloat16))
    rows += [(f"default ({engine}), {m}", m, default) for m in workload.methods[1:]]
    if workload.augmented:
        mirrored = {**default, "data": {"augment": ["flip"]}}
        rows += [(f"default ({engine}), {m}, mirrored", m, mirrored) for m in workload.methods]
    contestants = [
        Contestant(label, name, method, changes, 1 + pairs) for label, method, changes in rows
    ]
    gap = turns(contestants, pairs)
    reference, serial, *_ = contestants
    work = reference.ask("flops")
    limit = peak.limit(limits, "float32")
    lower = peak.limit(limits, "bfloat16")
    screen = terminal.console()
    screen.print(f"\n{name}: {workload.about}")
    screen.print(
        f"{work / 1e9:,.1f} GFLOP a round without teachers; at this machine's float32 limit "
        f"{work / limit:.3g} s"
    )
    table = []
    for one in contestants:
        own = lower if "precision" in one.changes else limit
        share = (
            f"{100 * work / statistics.median(one.seconds) / own:.0f} %"
            if one.method == base
            else ""
        )
        table.append(
            (
                one.name,
                spread(one.seconds),
                spread(ratios(reference, one)),
                spread(ratios(serial, one)),
                share,
                f"{one.ask('memory') / 1e6:,.0f} MB",
            )
        )
    heads = [
        "",
        "seconds a round",
        "times plain's speed",
        "times serial's speed",
        "of the limit",
        "peak memory",
    ]
    screen.print(terminal.PlainTable(heads, table))
    ours = contestants[-1]
    screen.print(
        f"evaluating 10,000 images: {ours.ask('evaluate'):.3g} s; a checkpoint: "
        f"{ours.ask('save'):.3g} s"
    )
    screen.print(
        f"largest difference to plain PyTorch's model after one round: {gap:.1e} of its largest "
        "weight"
    )
    for one in contestants:
        one.end()


def default_engine(workload: Workload) -> str:
    """The engine that a workload has if its config names none."""
    ready = prepare(resolve(workload.experiment(workload.methods[0])), workload.dataset())
    return ready.settings.engine


def ratios(slower: Contestant, faster: Contestant) -> list[float]:
    """How many times as long a contestant takes as another, turn by turn."""
    return [a / b for a, b in zip(slower.seconds, faster.seconds, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Median, and from smallest to largest."""
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


def main() -> None:
    """Measure the limit, then each workload."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which, e.g. W1,W4")
    parser.add_argument(
        "--pairs", type=int, default=3, help="rounds of each, in turn, after one to warm up"
    )
    asked = parser.parse_args()
    limits = peak.rates()
    screen = terminal.console()
    screen.print(
        f"{cores()} cores, torch {torch.__version__}; median (min–max) over {asked.pairs} pairs of "
        "rounds"
    )
    screen.print(
        terminal.PlainTable(
            ["kernel, all cores", "GFLOP/s"], [(k, f"{v / 1e9:,.0f}") for k, v in limits.items()]
        )
    )
    for name in asked.workloads.split(","):
        measure(name, asked.pairs, limits)


if __name__ == "__main__":
    main()
