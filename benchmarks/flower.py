"""Seconds and bytes of a round and of a hop, by how messages travel: in process, loopback grid,
Ray, deployed.

``python -m benchmarks.flower``; ``--ray`` and ``--deployed DIR`` add Flower's simulation, and a
federation whose server and clients are running (made with as many clients as ``--clients``).
``--cold`` adds Flower's own programs, which start a Python for every message; with ``--deployed``
it prints how many times as fast the federation is. ``--sites 5,10,15`` starts federations of so
many sites instead, and prints what a message costs (``benchmarks.load``). ``--large`` does so for
messages of 144 MB (``benchmarks.large``).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import large, load
from benchmarks.flowers_own import flowers_own
from fedstill.config.experiment import Experiment
from fedstill.running.journal import read_journal
from fedstill.running.runner import run

ROUNDS = 3


def experiment(topology: str, clients: int, engine: str, **flower: Any) -> Experiment:
    """Digits, one epoch, three rounds: little training, so that what is left is the way."""
    return Experiment(
        rounds=ROUNDS,
        seed=1,
        threads=1,
        measure=(),
        engine=engine,
        flower=flower,
        method="fedavg",
        data="digits",
        partition={"kind": "iid"},
        topology={"kind": topology, "clients": clients, "sampled": clients},
        plan={"epochs": 1},
    )


def in_folder(what: Experiment) -> list[dict[str, Any]]:
    """The journal of a run that this process starts."""
    with tempfile.TemporaryDirectory() as folder:
        run(what, Path(folder) / "run")
        return read_journal(Path(folder) / "run" / "journal.jsonl")


def measured(events: Sequence[dict[str, Any]]) -> tuple[float, float, int]:
    """Seconds of training a round (the median), seconds a hop, and payload bytes a round, both
    ways.
    """
    rounds = [e for e in events if e["event"] == "round"]
    hops = sum(e["event"] == "client" for e in events) / len(rounds)
    seconds = median(e["seconds_training"] for e in rounds)
    return seconds, seconds / hops, rounds[-1]["bytes_up"] + rounds[-1]["bytes_down"]


def wire(what: Experiment) -> tuple[int, int]:
    """Serialised bytes a round, down and up, over a loopback grid."""
    from fedstill.config.resolve import resolve
    from fedstill.flower.engine import LoopbackGrid
    from fedstill.flower.remote_runs import trial_app

    with tempfile.TemporaryDirectory() as folder:
        settings = resolve(what)
        grid = LoopbackGrid(
            trial_app(settings, None, Path(folder) / "sites"), range(settings.clients)
        )
        run(what, Path(folder) / "run", grid=grid)  # type: ignore[arg-type]
        return grid.bytes_down // ROUNDS, grid.bytes_up // ROUNDS


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--deployed", type=Path)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--sites", type=lambda text: [int(number) for number in text.split(",")])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", action="store_true")
    given = parser.parse_args()
    if given.sites:
        load.print_table(given.sites, given.rounds)
        return
    if given.large:
        large.print_table()
        return
    ways: dict[str, dict[str, Any]] = {
        "in process": {"engine": "serial"},
        "loopback grid": {"engine": "flower"},
    }
    if given.ray:
        ways["Ray"] = {"engine": "flower", "grid": "ray"}
    if given.deployed:
        ways["deployed"] = {"engine": "flower", "federation": str(given.deployed.resolve())}
    print(
        f"{'way':<14} {'topology':<11} {'s a round':>10} {'s a hop':>8} "
        f"{'payload bytes a round':>22}"
    )
    with flowers_own(given.clients) if given.cold else nullcontext() as cold:
        for topology in ("parallel", "sequential"):
            what = {
                name: experiment(topology, given.clients, **values) for name, values in ways.items()
            }
            hops = {name: line(name, topology, in_folder(one)) for name, one in what.items()}
            if cold is not None:
                hops["Flower's own"] = line(
                    "Flower's own", topology, cold.journal(what["in process"])
                )
            down, up = wire(experiment(topology, given.clients, "flower"))
            print(
                f"{'':<14} {topology:<11} serialised messages a round: {down:,} bytes down, {up:,} "
                "up",
                flush=True,
            )
            if cold is not None and given.deployed:
                ratio = hops["Flower's own"] / hops["deployed"]
                print(
                    f"{'':<14} {topology:<11} deployed is {ratio:.1f} times as fast as Flower's "
                    "own programs",
                    flush=True,
                )


def line(way: str, topology: str, events: Sequence[dict[str, Any]]) -> float:
    """Print a line of the table; the seconds a hop."""
    seconds, hop, size = measured(events)
    print(f"{way:<14} {topology:<11} {seconds:>10.3f} {hop:>8.3f} {size:>22,}", flush=True)
    return hop


if __name__ == "__main__":
    main()
