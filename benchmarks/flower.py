"""Seconds and bytes of a round and of a hop, in one process, over the loopback grid, on Ray, and in
a deployment: ``python -m benchmarks.flower``.

``--ray`` adds Flower's simulation. ``--deployed DIR`` adds a federation whose server and clients
are running; it has as many clients as ``--clients``. ``--cold`` adds Flower's own programs, which
start a Python process for every message; with ``--deployed``, it also prints how many times as fast
the federation is. ``--sites 5,10,15`` starts federations with these numbers of sites instead, and
prints the cost of a message (``benchmarks.load``). ``--large`` does so for messages of 144 MB
(``benchmarks.large``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import large, load
from benchmarks.flower_programs import FlowerPrograms, flower_programs
from benchmarks.options import integers, option_parser, require_ray
from fedstill.config.experiment import Experiment
from fedstill.config.resolve import resolve
from fedstill.config.tables import Engine
from fedstill.running.journal import JOURNAL, read_journal
from fedstill.running.runner import run

ROUNDS = 3

TOPOLOGIES = ("parallel", "sequential")

FLOWER_PROGRAMS = "Flower's own"
"""The name of Flower's programs in the table."""

HEADER = (
    f"{'way':<14} {'topology':<11} {'s a round':>10} {'s a hop':>8} {'payload bytes a round':>22}"
)


def experiment(topology: str, clients: int, engine: Engine, **flower: Any) -> Experiment:
    """FedAvg on digits for three rounds of one epoch: there is little training, so that messages
    take most of the time.
    """
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


def journal_of(experiment: Experiment) -> list[dict[str, Any]]:
    """The journal of a run in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        run(experiment, Path(folder) / "run")
        return read_journal(Path(folder) / "run" / JOURNAL)


@dataclass(frozen=True)
class Cost:
    """The median seconds of a round's training, the seconds of a hop, and the bytes of a round's
    payloads in both directions.
    """

    round_seconds: float
    hop_seconds: float
    payload: int

    @staticmethod
    def of(events: Sequence[Mapping[str, Any]]) -> Cost:
        """The cost of a run with this journal."""
        rounds = [event for event in events if event["event"] == "round"]
        hops = sum(event["event"] == "client" for event in events) / len(rounds)
        seconds = median(event["seconds_training"] for event in rounds)
        return Cost(seconds, seconds / hops, rounds[-1]["bytes_up"] + rounds[-1]["bytes_down"])


def print_line(way: str, topology: str, cost: Cost) -> None:
    """Print a line of the table."""
    print(
        f"{way:<14} {topology:<11} {cost.round_seconds:>10.3f} {cost.hop_seconds:>8.3f} "
        f"{cost.payload:>22,}",
        flush=True,
    )


def print_note(topology: str, note: str) -> None:
    """Print a note below the lines of a topology."""
    print(f"{'':<14} {topology:<11} {note}", flush=True)


def print_message_bytes(topology: str, clients: int) -> None:
    """Print the bytes of a round's serialised messages, which a loopback grid counts."""
    from fedstill.flower.engine import LoopbackGrid
    from fedstill.flower.remote_runs import trial_app

    chosen = experiment(topology, clients, "flower")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        app = trial_app(resolve(chosen), None, folder / "sites")
        grid = LoopbackGrid(app, range(clients))
        run(chosen, folder / "run", grid=grid)
    print_note(
        topology,
        f"serialised messages a round: {grid.bytes_down // ROUNDS:,} bytes down, "
        f"{grid.bytes_up // ROUNDS:,} up",
    )


def print_topology(
    topology: str,
    clients: int,
    ways: Mapping[str, Mapping[str, Any]],
    programs: FlowerPrograms | None,
) -> None:
    """Print the lines of a topology.

    ``ways``: the engine and the fields of ``[flower]`` of each way.
    """
    costs = {}
    for way, settings in ways.items():
        costs[way] = Cost.of(journal_of(experiment(topology, clients, **settings)))
        print_line(way, topology, costs[way])
    if programs is not None:
        events = programs.journal(experiment(topology, clients, "serial"), f"run-{topology}")
        costs[FLOWER_PROGRAMS] = Cost.of(events)
        print_line(FLOWER_PROGRAMS, topology, costs[FLOWER_PROGRAMS])
    print_message_bytes(topology, clients)
    if programs is not None and "deployed" in costs:
        ratio = costs[FLOWER_PROGRAMS].hop_seconds / costs["deployed"].hop_seconds
        print_note(topology, f"deployed is {ratio:.1f} times as fast as Flower's own programs")


def main() -> None:
    """Print one table."""
    parser = option_parser(__doc__)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="also on Ray")
    parser.add_argument("--deployed", type=Path, metavar="DIR", help="also in this federation")
    parser.add_argument("--cold", action="store_true", help="also with Flower's own programs")
    parser.add_argument(
        "--sites", type=integers, metavar="N,...", help="start federations with so many sites"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of --sites")
    parser.add_argument("--large", action="store_true", help="send messages of 144 MB")
    options = parser.parse_args()
    if options.ray:
        require_ray(parser)
    if options.sites:
        load.print_table(options.sites, options.rounds)
        return
    if options.large:
        large.print_table()
        return
    ways: dict[str, dict[str, Any]] = {
        "in process": {"engine": "serial"},
        "loopback grid": {"engine": "flower"},
    }
    if options.ray:
        ways["Ray"] = {"engine": "flower", "grid": "ray"}
    if options.deployed:
        federation = str(options.deployed.resolve())
        ways["deployed"] = {"engine": "flower", "federation": federation}
    cold: AbstractContextManager[FlowerPrograms | None] = nullcontext()
    if options.cold:
        cold = flower_programs(options.clients)
    print(HEADER)
    with cold as programs:
        for topology in TOPOLOGIES:
            print_topology(topology, options.clients, ways, programs)


if __name__ == "__main__":
    main()
