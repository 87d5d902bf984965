"""The size of a client's step above which stacked clients are no longer faster: stages of the
vectorised and of the pooled engine, in turn.

``python -m benchmarks.crossover`` prints the numbers from which
``fedstill.engines.vectorised.CROSSOVER`` was chosen; ``--device cuda`` measures a card.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.options import option_parser
from benchmarks.turns import ratios, seconds_in_turns
from benchmarks.workloads import Workload
from fedstill.config.resolve import resolve
from fedstill.core.records import Payload
from fedstill.engines.hardware import cores
from fedstill.engines.serial import SerialEngine
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.world import work_of_stages


@dataclass(frozen=True)
class Network:
    """A network on images of a shape."""

    name: str
    image_shape: tuple[int, int, int]
    model: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The name in the table."""
        return f"{self.name}, {'x'.join(map(str, self.image_shape))}"


NETWORKS = (
    Network("MLP 200-200", (1, 8, 8), {"name": "mlp"}),
    Network("MLP 200-200", (1, 28, 28), {"name": "mlp"}),
    Network("MLP 1024-1024", (1, 28, 28), {"name": "mlp", "hidden": (1024, 1024)}),
    Network("digits' CNN", (1, 8, 8), {"name": "digits_cnn"}),
    Network("digits' CNN", (1, 16, 16), {"name": "digits_cnn"}),
    Network("digits' CNN", (3, 32, 32), {"name": "digits_cnn"}),
    Network("FedNTD's CNN", (3, 32, 32), {"name": "cnn"}),
)

BATCH_SIZES = (10, 50)

HEAD = (
    "network, images",
    "batch",
    "MFLOP a step",
    "pooled, s",
    "vectorised, s",
    "times as fast (min-max)",
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The seconds of stages in both engines.

    ``megaflop``: millions of floating-point operations in a client's step.
    """

    network: Network
    batch: int
    megaflop: float
    pooled: Sequence[float]
    vectorised: Sequence[float]

    def cells(self) -> list[str]:
        """A row of the table."""
        speed_up = ratios(self.pooled, self.vectorised)
        return [
            self.network.label,
            str(self.batch),
            f"{self.megaflop:.3g}",
            f"{statistics.median(self.pooled):.3f}",
            f"{statistics.median(self.vectorised):.3f}",
            f"{statistics.median(speed_up):.2f} ({min(speed_up):.2f}-{max(speed_up):.2f})",
        ]


def compare(network: Network, batch: int, clients: int, pairs: int, device: str) -> Comparison:
    """Run stages in both engines, in turn. Each client trains two steps."""
    workload = Workload(
        name="crossover",
        about=network.name,
        clients=clients,
        sampled=clients,
        images=2 * batch,
        shape=network.image_shape,
        model=network.model,
        plan={"epochs": 1, "batch": batch, "lr": 0.01, "momentum": 0.9},
    )
    dataset = workload.dataset()

    def prepared_for(engine: str) -> Prepared:
        experiment = workload.experiment("fedavg", engine=engine, device=device)
        return prepare(resolve(experiment), dataset)

    pooled = prepared_for("pooled")
    vectorised = prepared_for("vectorised")
    pooled_engine = pooled.engine()
    vectorised_engine = vectorised.engine()
    with closing(pooled_engine), closing(vectorised_engine):
        contestants = {
            "pooled": stage_of(pooled_engine, pooled),
            "vectorised": stage_of(vectorised_engine, vectorised),
        }
        seconds = seconds_in_turns(contestants, pairs)
    stages = work_of_stages(pooled.settings, pooled.world, pooled.sites)
    largest = max(stage.flops for stage in stages)
    return Comparison(
        network=network,
        batch=batch,
        megaflop=largest / 1e6,
        pooled=seconds["pooled"],
        vectorised=seconds["vectorised"],
    )


def stage_of(engine: SerialEngine, prepared: Prepared) -> Callable[[], None]:
    """A function that runs the first round's stage in an engine."""
    method = prepared.settings.method
    world = prepared.world
    (stage,) = prepared.settings.schedule(1, world)
    state = method.initial_state(world)
    payloads = {client: Payload(params=state.params) for client in stage.clients}
    work = method.work(stage)

    def run() -> None:
        replies = engine.run(work, stage, payloads, 0)
        if prepared.settings.device == "cuda":
            torch.cuda.synchronize()
        failures = [reply.failure for reply in replies if reply.failure]
        if failures:
            raise SystemExit(failures[0])

    return run


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{cores()} cores"


def main() -> None:
    """Print a row for each network and batch size, sorted by the size of a step."""
    parser = option_parser(__doc__)
    parser.add_argument("--clients", type=int, default=16, help="clients of a stage")
    parser.add_argument("--pairs", type=int, default=5, help="stages of each after the warm-up")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    comparisons = []
    for network in NETWORKS:
        comparisons += [
            compare(network, batch, options.clients, options.pairs, options.device)
            for batch in BATCH_SIZES
        ]
    comparisons.sort(key=lambda comparison: comparison.megaflop)

    table = Table(
        title=f"On {_device_name(options.device)}: {options.clients} clients, two steps each, "
        f"{options.pairs} pairs of stages"
    )
    table.add_column(HEAD[0])
    for name in HEAD[1:]:
        table.add_column(name, justify="right")
    for comparison in comparisons:
        table.add_row(*comparison.cells())
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
