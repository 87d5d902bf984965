"""Where stacking clients stops paying: stages of the vectorised and the pooled engine in turn,
steps small to large.

``python -m benchmarks.crossover`` prints what ``fedstill.engines.vectorised.CROSSOVER`` is taken
from; with ``--device cuda``, the same of a card.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import closing
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.workloads import Workload
from fedstill.config.resolve import resolve
from fedstill.core.records import Payload
from fedstill.engines.hardware import cores
from fedstill.engines.serial import SerialEngine
from fedstill.running.preparation import Prepared, prepare
from fedstill.running.world import work_of_stages

MODELS: tuple[tuple[str, tuple[int, int, int], dict[str, Any]], ...] = (
    ("MLP 200-200", (1, 8, 8), {"name": "mlp"}),
    ("MLP 200-200", (1, 28, 28), {"name": "mlp"}),
    ("MLP 1024-1024", (1, 28, 28), {"name": "mlp", "hidden": (1024, 1024)}),
    ("digits' CNN", (1, 8, 8), {"name": "digits_cnn"}),
    ("digits' CNN", (1, 16, 16), {"name": "digits_cnn"}),
    ("digits' CNN", (3, 32, 32), {"name": "digits_cnn"}),
    ("FedNTD's CNN", (3, 32, 32), {"name": "cnn"}),
)


def measured(
    clients: int, pairs: int, device: str
) -> list[tuple[str, int, float, list[float], list[float]]]:
    """(network, batch, MFLOP in a client's step, seconds of pooled stages, of vectorised ones), by
    MFLOP.
    """
    out = []
    for label, shape, model in MODELS:
        for batch in (10, 50):
            plan = {"epochs": 1, "batch": batch, "lr": 0.01, "momentum": 0.9}
            work = Workload("crossover", label, clients, clients, 2 * batch, shape, model, plan)
            data = work.dataset()
            asked = [
                work.experiment("fedavg", engine=e, device=device) for e in ("pooled", "vectorised")
            ]
            ready = [prepare(resolve(one), data) for one in asked]
            stages = work_of_stages(ready[0].settings, ready[0].world, ready[0].sites)
            size = max(stage.flops for stage in stages) / 1e6
            pooled, vectorised = in_turn(ready, pairs)
            out.append((f"{label}, {'x'.join(map(str, shape))}", batch, size, pooled, vectorised))
    return sorted(out, key=lambda row: row[2])


def in_turn(ready: list[Prepared], pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of a stage under each of two engines, one after the other; the first pair warms up
    and is dropped.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    with closing(ready[0].engine()) as first, closing(ready[1].engine()) as second:
        for _ in range(pairs + 1):
            for engine, run, times in zip((first, second), ready, seconds, strict=True):
                times.append(stage_seconds(engine, run))
    return seconds[0][1:], seconds[1][1:]


def stage_seconds(engine: SerialEngine, ready: Prepared) -> float:
    """Seconds that an engine takes for the first round's stage."""
    method, world = ready.settings.method, ready.world
    (stage,) = ready.settings.schedule(1, world)
    state = method.initial_state(world)
    payloads = {c: Payload(params=state.params) for c in stage.clients}
    began = time.perf_counter()
    replies = engine.run(method.work(stage), stage, payloads, 0)
    if ready.settings.device == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    if any(r.failure for r in replies):
        raise SystemExit(replies[0].failure)
    return took


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"{cores()} cores"


def main() -> None:
    """Print one row a network and batch."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, default=16)
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = options.parse_args()
    table = Table(
        title=f"On {_name(given.device)}: {given.clients} clients, two steps each, {given.pairs} "
        "pairs of stages"
    )
    for name in (
        "network, images",
        "batch",
        "MFLOP a step",
        "pooled, s",
        "vectorised, s",
        "times as fast (min-max)",
    ):
        table.add_column(name, justify="left" if name.startswith("network") else "right")
    for label, batch, size, pooled, vectorised in measured(
        given.clients, given.pairs, given.device
    ):
        ratios = [a / b for a, b in zip(pooled, vectorised, strict=True)]
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        middle = [f"{statistics.median(v):.3f}" for v in (pooled, vectorised)]
        table.add_row(label, str(batch), f"{size:.3g}", *middle, shown)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
