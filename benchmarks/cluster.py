"""When a cluster pays off: ``python -m benchmarks.cluster`` measures messages over Ray on this
machine, and predicts a round on several machines.

The prediction assumes that clients are spread evenly, and that the server's work for one message
after another does not overlap with training. With n clients of c seconds each, k cores per machine,
M machines and m seconds of work per message, a round takes n c / k seconds on one machine
(``engine = "pooled"``), and n c / (M k) + n m on a cluster. Needs the extra ``flower-simulation``.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.flower import experiment as digits
from benchmarks.options import option_parser, require_ray
from benchmarks.turns import seconds_of
from fedstill.engines.hardware import cores
from fedstill.report import terminal
from fedstill.running.journal import JOURNAL, read_journal
from fedstill.running.runner import run

ROUNDS = 4
CLIENTS = 6
MODELS = {"small": (64,), "large": (2000, 2000)}
"""The hidden layers of the networks that are sent."""

SECONDS_OF_CLIENT = (0.1, 1.0, 10.0, 60.0)
"""The seconds of training per client for which rounds are predicted."""


@dataclass(frozen=True)
class Messages:
    """The measured messages of one network.

    megabytes: of one message. seconds: of work per request and reply, beyond training.
    start: seconds until Ray's workers were ready.
    """

    name: str
    megabytes: float
    seconds: float
    start: float

    def cells(self) -> list[str]:
        """A row of the table."""
        return [self.name, f"{self.megabytes:.3g}", f"{self.seconds:.3g}", f"{self.start:.3g}"]


def measure(name: str) -> Messages:
    """Run on Ray, and compare the seconds of a round with the seconds of training."""
    experiment = replace(
        digits("parallel", CLIENTS, "flower", grid="ray"),
        rounds=ROUNDS,
        model={"name": "mlp", "hidden": MODELS[name]},
    )
    with tempfile.TemporaryDirectory() as folder:
        run_folder = Path(folder) / "run"
        run_seconds = seconds_of(partial(run, experiment, run_folder))
        events = read_journal(run_folder / JOURNAL)
    rounds = [event for event in events if event["event"] == "round"]
    # The first round also prepares the run in each worker.
    later = rounds[1:]
    training = median(event["seconds_clients"] for event in later)
    stage = median(event["seconds_training"] for event in later)
    # The clients train on all cores at the same time.
    training_of_stage = training / min(cores(), CLIENTS)
    message_seconds = max(0.0, stage - training_of_stage)
    return Messages(
        name=name,
        megabytes=rounds[-1]["bytes_up"] / CLIENTS / 1e6,
        seconds=message_seconds / CLIENTS,
        start=run_seconds - sum(event["seconds"] for event in rounds),
    )


def predicted(client: float, message: float, machines: int, clients: int = 100) -> float:
    """How many times as fast a round of ``clients`` clients is on ``machines`` machines as on one
    machine, for so many seconds of training per client and of work per message.

    >>> round(predicted(client=10.0, message=0.0, machines=10), 3)
    10.0
    """
    alone = clients * client / cores()
    cluster = clients * client / (machines * cores()) + clients * message
    return alone / cluster


def main() -> None:
    """Print the measured messages and the predicted rounds."""
    parser = option_parser(__doc__)
    parser.add_argument(
        "--machines", type=int, default=10, help="their number; all have the cores of this one"
    )
    options = parser.parse_args()
    require_ray(parser)
    screen = terminal.console()
    measured = [measure(name) for name in MODELS]
    screen.print(f"{cores()} cores, {CLIENTS} clients, {ROUNDS} rounds on Ray")
    rows = [messages.cells() for messages in measured]
    screen.print(terminal.PlainTable(["network", "MB", "s a message", "s to start"], rows))
    screen.print(f"\npredicted: times as fast on {options.machines} such machines as on one")
    rows = []
    for seconds in SECONDS_OF_CLIENT:
        speed_ups = [predicted(seconds, m.seconds, options.machines) for m in measured]
        rows.append([f"{seconds:g} s a client", *(f"{speed_up:.2g}" for speed_up in speed_ups)])
    screen.print(terminal.PlainTable(["training", *MODELS], rows))


if __name__ == "__main__":
    main()
