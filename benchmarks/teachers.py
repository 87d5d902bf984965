"""What teachers cost: seconds a round of FedSeq and of SFedKD with K teachers, their logits cached
and not.

``python -m benchmarks.teachers [--images 500] [--epochs 5] [--repeats 3]``: workload W2, a chain of
ten clients.
Cached: inputs are not augmented, and a teacher's logits are computed once a client and round.
Not cached: inputs are mirrored at random, and every teacher is run on every batch. The contestants
take turns, one round each; the first round, which has no teachers, warms them up. Ratios are to
FedSeq's round of the same turn; of seconds on the clock, and of the processor's seconds in all
threads, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from benchmarks.ours import Ours
from benchmarks.speed import spread
from benchmarks.workloads import WORKLOADS, Workload
from fedstill.config.resolve import resolve
from fedstill.engines.hardware import workers
from fedstill.report import terminal
from fedstill.running.preparation import prepare


def workload(clients: int, images: int, epochs: int) -> Workload:
    """Workload W2, or, for a quick look, one of another size."""
    full = WORKLOADS["W2"]
    about = (
        f"a chain of {clients} clients, {images} images of 3 x 32 x 32 each, {epochs} epochs of "
        "batches of 50"
    )
    plan = {**full.plan, "epochs": epochs}
    return replace(full, about=about, clients=clients, sampled=clients, images=images, plan=plan)


def measure(made: Workload, ks: list[int], repeats: int, cached: bool) -> list[tuple[str, ...]]:
    """Rows of one table: the setting, seconds a round, times FedSeq's seconds, times FedSeq's
    processor seconds.
    """
    changes = {"data": {"augment": [] if cached else ["flip"]}}
    data = made.dataset()
    methods = {"FedSeq": {"name": "fedseq"}, **{f"K = {k}": {"name": "sfedkd", "k": k} for k in ks}}
    running = {}
    for label, fields in methods.items():
        experiment = replace(made.experiment("fedseq", **changes), method=fields)
        running[label] = Ours(prepare(resolve(experiment), data))
        running[label].run_round()
    clock: dict[str, list[float]] = {label: [] for label in running}
    busy: dict[str, list[float]] = {label: [] for label in running}
    for _ in range(repeats):
        for label, one in running.items():
            began, used = time.perf_counter(), time.process_time()
            one.run_round()
            clock[label].append(time.perf_counter() - began)
            busy[label].append(time.process_time() - used)
    return [
        (n, spread(clock[n]), *(spread(_ratios(t[n], t["FedSeq"])) for t in (clock, busy)))
        for n in running
    ]


def _ratios(one: list[float], base: list[float]) -> list[float]:
    return [a / b for a, b in zip(one, base, strict=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("clients", 10), ("images", 500), ("epochs", 5), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--k", default="1,3,5,7,10", help="numbers of teachers")
    parser.add_argument("--tables", choices=("both", "cached", "uncached"), default="both")
    given = parser.parse_args()
    ks = [int(k) for k in given.k.split(",")]
    if max(ks) > given.clients:
        parser.error(
            f"--k {max(ks)}: a chain of {given.clients} clients leaves no more teachers than that"
        )
    made = workload(given.clients, given.images, given.epochs)
    screen = terminal.console()
    screen.print(
        f"{made.about}; {workers()} workers, {given.repeats} turns: median (smallest to largest)"
    )
    for cached in [
        c for c in (True, False) if given.tables in ("both", "cached" if c else "uncached")
    ]:
        rows = measure(made, ks, given.repeats, cached)
        heads = [
            "cached" if cached else "not cached",
            "seconds a round",
            "times FedSeq's",
            "processor, times FedSeq's",
        ]
        screen.print(terminal.table(heads, rows))
