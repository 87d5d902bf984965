"""The cost of teachers: seconds a round of FedSeq, and of SFedKD with K teachers in float32 and in
bfloat16.

``python -m benchmarks.teachers [--images 500] [--epochs 5] [--repeats 3]``: workload W2, a chain of
ten clients. In the table "cached", inputs are not augmented, and a teacher's logits are computed
once for each client and round. In the table "not cached", inputs are flipped at random, and every
teacher runs on every batch. The contestants take turns, one round each; the first round, which has
no teachers, is a warm-up. Ratios compare with FedSeq's round of the same turn, in seconds on the
clock and in processor seconds of all threads. Other programs disturb the latter less.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.fedstill_loop import FedstillLoop
from benchmarks.options import integers, option_parser
from benchmarks.turns import ratios, spread
from benchmarks.workloads import WORKLOADS, Workload
from fedstill.config.resolve import resolve
from fedstill.engines.devices import has_bfloat16
from fedstill.engines.hardware import workers
from fedstill.report import terminal
from fedstill.running.preparation import prepare

AUGMENTATIONS: dict[str, list[str]] = {"cached": [], "not cached": ["flip"]}
"""The augmentations of each table."""


@dataclass
class Contestant:
    """A run that takes turns with others, and the times of its rounds."""

    name: str
    run: FedstillLoop
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)

    def run_round(self) -> None:
        """Run one round, and note its times."""
        began = time.perf_counter()
        processor_began = time.process_time()
        self.run.run_round()
        self.seconds.append(time.perf_counter() - began)
        self.processor_seconds.append(time.process_time() - processor_began)


def workload(clients: int, images: int, epochs: int) -> Workload:
    """Workload W2, or one of another size for a quick look."""
    full = WORKLOADS["W2"]
    about = (
        f"a chain of {clients} clients, {images} images of 3 x 32 x 32 each, {epochs} epochs of "
        "batches of 50"
    )
    plan = {**full.plan, "epochs": epochs}
    return replace(full, about=about, clients=clients, sampled=clients, images=images, plan=plan)


def contestants(chain: Workload, ks: Sequence[int], augment: list[str]) -> list[Contestant]:
    """FedSeq, and SFedKD with each number of teachers at each precision."""
    settings: dict[str, dict[str, Any]] = {"FedSeq": {"method": {"name": "fedseq"}}}
    for k in ks:
        sfedkd = {"method": {"name": "sfedkd", "k": k}}
        settings[f"K = {k}"] = sfedkd
        if has_bfloat16("cpu"):
            settings[f"K = {k}, bf16"] = {**sfedkd, "teacher_precision": "bf16"}

    data = chain.dataset()
    fedseq = chain.experiment("fedseq", data={"augment": augment})
    return [
        Contestant(name, FedstillLoop(prepare(resolve(replace(fedseq, **changes)), data)))
        for name, changes in settings.items()
    ]


def rows(entrants: Sequence[Contestant], repeats: int) -> list[tuple[str, ...]]:
    """Rows of one table: the name, seconds a round, and both ratios to FedSeq."""
    for contestant in entrants:
        contestant.run.run_round()
    for _ in range(repeats):
        for contestant in entrants:
            contestant.run_round()
    base = entrants[0]
    return [
        (
            contestant.name,
            spread(contestant.seconds),
            spread(ratios(contestant.seconds, base.seconds)),
            spread(ratios(contestant.processor_seconds, base.processor_seconds)),
        )
        for contestant in entrants
    ]


def main() -> None:
    """Print a table for cached logits, and one for others."""
    parser = option_parser(__doc__)
    parser.add_argument("--clients", type=int, default=10, help="clients of the chain")
    parser.add_argument("--images", type=int, default=500, help="images of a client")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each after the warm-up")
    parser.add_argument("--k", type=integers, default="1,3,5,7,10", help="numbers of teachers")
    parser.add_argument("--table", choices=AUGMENTATIONS, help="only one of the two tables")
    options = parser.parse_args()
    if max(options.k) > options.clients:
        parser.error(
            f"--k {max(options.k)}: a chain of {options.clients} clients has at most so many "
            "teachers"
        )

    chain = workload(options.clients, options.images, options.epochs)
    screen = terminal.console()
    screen.print(
        f"{chain.about}; {workers()} workers, {options.repeats} turns: median (smallest to largest)"
    )
    for table, augment in AUGMENTATIONS.items():
        if options.table in (None, table):
            titles = [table, "seconds a round", "times FedSeq's", "processor, times FedSeq's"]
            cells = rows(contestants(chain, options.k, augment), options.repeats)
            screen.print(terminal.PlainTable(titles, cells))


if __name__ == "__main__":
    main()
