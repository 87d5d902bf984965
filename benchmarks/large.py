"""What messages of 144 MB cost: ``python -m benchmarks.flower --large``.

Four clients train a network with 36 million parameters on digits, in one process and over the
loopback grid, in turn and each in a process of its own. A message is an instruction or a reply. The
difference between the two engines, divided by the number of messages, is what a message costs
beyond training: seconds of the clock, and of the processor. Memory is the peak above that of the
same run with a tiny network, in copies of the payload.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from fedstill.config.experiment import Experiment
from fedstill.running.journal import read_journal
from fedstill.running.recording import Quiet
from fedstill.running.runner import run

CLIENTS = 4

ROUNDS = 3

WIDTH = 5968
"""Units of each of two hidden layers: 36.1 million parameters on digits."""

ENGINES = {"in process": "serial", "loopback grid": "flower"}


@dataclass(frozen=True)
class Cost:
    """What a round costs: seconds of the clock and of the processor (the median of the rounds).

    ``payload``: bytes of a message. ``memory``: bytes at the peak, above the run with a tiny
    network.
    """

    seconds: float
    processor_seconds: float
    payload: int
    memory: int


class RoundTimes(Quiet):
    """Notes the processor time after each round."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def started(self, folder: Path, round: int) -> None:
        """The run starts."""
        self.times.append(time.process_time())

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """A round is complete."""
        self.times.append(time.process_time())


def experiment(engine: str, width: int) -> Experiment:
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


def measure(engine: str) -> Cost:
    """The cost of a round in this process, which should do nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        run(experiment(engine, width=8), Path(folder) / "tiny")
        memory = psutil.Process().memory_info().rss
        times = RoundTimes()
        run(experiment(engine, WIDTH), Path(folder) / "large", watch=times)
        events = read_journal(Path(folder) / "large" / "journal.jsonl")
    rounds = [event for event in events if event["event"] == "round"]
    ends = zip(times.times, times.times[1:], strict=False)
    # Linux gives the peak in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Cost(
        seconds=median(event["seconds_training"] for event in rounds),
        processor_seconds=median(end - begin for begin, end in ends),
        payload=rounds[-1]["bytes_up"] // CLIENTS,
        memory=peak - memory,
    )


def in_new_process(engine: str) -> Cost:
    """The same, measured in a process that ends afterwards."""
    command = [sys.executable, "-m", "benchmarks.large", engine]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Cost(**json.loads(output))


def print_table() -> None:
    """Print a line for each engine, and what a message costs."""
    print(f"{'way':<14} {'s a round':>10} {'processor s':>12} {'peak, copies':>13}")
    costs = {name: in_new_process(engine) for name, engine in ENGINES.items()}
    for name, cost in costs.items():
        copies = cost.memory / cost.payload
        print(f"{name:<14} {cost.seconds:>10.2f} {cost.processor_seconds:>12.2f} {copies:>13.1f}")

    trained = costs["in process"]
    sent = costs["loopback grid"]
    messages = 2 * CLIENTS
    seconds = (sent.seconds - trained.seconds) / messages
    processor_seconds = (sent.processor_seconds - trained.processor_seconds) / messages
    copies = (sent.memory - trained.memory) / sent.payload
    print(
        f"a message of {sent.payload / 1e6:.0f} MB beyond training: {seconds:.2f} s, "
        f"{processor_seconds:.2f} s of the processor; memory of {copies:.1f} copies more"
    )


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1]))))
