"""The cost of messages of 144 MB: ``python -m benchmarks.flower --large``.

Four clients train a network with 36 million parameters on digits, in one process and over the
loopback grid, each in a process of its own. A message is an instruction or a reply. The cost of a
message beyond training is the difference between the two engines, divided by the number of
messages: wall-clock seconds and processor seconds. Memory is the peak above that of the same run
with a tiny network, in copies of the payload.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.memory import peak_memory
from fedstill.config.experiment import Experiment
from fedstill.config.tables import Engine
from fedstill.running.journal import JOURNAL, read_journal
from fedstill.running.recording import Quiet
from fedstill.running.runner import run

CLIENTS = 4

ROUNDS = 3

WIDTH = 5968
"""Units of each of two hidden layers: 36.1 million parameters on digits."""

ENGINES: Mapping[str, Engine] = {"in process": "serial", "loopback grid": "flower"}


@dataclass(frozen=True)
class Cost:
    """The cost of a round: wall-clock seconds and processor seconds (the median of the rounds).

    ``payload``: bytes of a message. ``memory``: bytes at the peak, above the run with a tiny
    network.
    """

    seconds: float
    processor_seconds: float
    payload: int
    memory: int


class RoundTimes(Quiet):
    """Records the processor time after each round."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def started(self, folder: Path, round: int) -> None:
        """The run starts."""
        self.times.append(time.process_time())

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """A round is complete."""
        self.times.append(time.process_time())


def experiment(engine: Engine, width: int) -> Experiment:
    """FedAvg on digits, one epoch a round."""
    return Experiment(
        rounds=ROUNDS,
        seed=1,
        threads=1,
        measure=(),
        engine=engine,
        method="fedavg",
        data="digits",
        model={"name": "mlp", "hidden": (width, width)},
        partition={"kind": "iid"},
        topology={"clients": CLIENTS, "sampled": CLIENTS},
        plan={"epochs": 1},
    )


def measure(engine: Engine) -> Cost:
    """The cost of a round in this process, which should not have done anything else."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(experiment(engine, width=8), folder / "tiny")
        memory = psutil.Process().memory_info().rss
        watch = RoundTimes()
        run(experiment(engine, WIDTH), folder / "large", watch=watch)
        events = read_journal(folder / "large" / JOURNAL)
    rounds = [event for event in events if event["event"] == "round"]
    return Cost(
        seconds=median(event["seconds_training"] for event in rounds),
        processor_seconds=median(end - begin for begin, end in pairwise(watch.times)),
        payload=rounds[-1]["bytes_up"] // CLIENTS,
        memory=peak_memory() - memory,
    )


def in_new_process(way: str) -> Cost:
    """The cost of a round of a way in ``ENGINES``, measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.large", way]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Cost(**json.loads(output))


def print_table() -> None:
    """Print a line for each engine, and the cost of a message."""
    print(f"{'way':<14} {'s a round':>10} {'processor s':>12} {'peak, copies':>13}")
    costs = {way: in_new_process(way) for way in ENGINES}
    for name, cost in costs.items():
        copies = cost.memory / cost.payload
        print(f"{name:<14} {cost.seconds:>10.2f} {cost.processor_seconds:>12.2f} {copies:>13.1f}")

    direct = costs["in process"]
    serialised = costs["loopback grid"]
    messages = 2 * CLIENTS
    seconds = (serialised.seconds - direct.seconds) / messages
    processor_seconds = serialised.processor_seconds - direct.processor_seconds
    copies = (serialised.memory - direct.memory) / serialised.payload
    print(
        f"a message of {serialised.payload / 1e6:.0f} MB beyond training: {seconds:.2f} s, "
        f"{processor_seconds / messages:.2f} s of the processor; memory of {copies:.1f} copies "
        "more"
    )


if __name__ == "__main__":
    print(json.dumps(asdict(measure(ENGINES[sys.argv[1]]))))
