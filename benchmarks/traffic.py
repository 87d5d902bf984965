"""The number of models that each client receives and sends in one round of QKT and of related
methods: ``python -m benchmarks.traffic [--clients 10]``.

Each method trains on digits for one epoch, with three classes per client and one queried class. The
number of models does not depend on the training. It is the number of bytes in the journal's client
events, divided by the size of one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import fedstill
from benchmarks.options import option_parser
from fedstill import Experiment
from fedstill.methods.fit import FIT
from fedstill.methods.naive_kd import TRANSFER
from fedstill.methods.qkt import REFINE
from fedstill.report import terminal
from fedstill.running.runs import read_run

METHODS = ("ensemble", "naive_kd", "qkt", "qkt_light", "qkt_light_volunteer")
FEWEST_CLIENTS = 4
STAGES = {FIT: "local training", TRANSFER: "phase 1", REFINE: "phase 2"}


def client_events(method: str, clients: int) -> Sequence[dict[str, Any]]:
    """The journal's events of all clients in a short run."""
    experiment = Experiment(
        method=method,
        data="digits",
        rounds=1,
        seed=1,
        measure=(),
        plan={"epochs": 1},
        topology={"clients": clients},
        partition={"kind": "pathological", "classes_per_client": 3},
        query={"draw": "single"},
    )
    with TemporaryDirectory() as folder:
        run_folder = Path(folder) / method
        fedstill.run(experiment, out=run_folder)
        return read_run(run_folder).clients


def models_by_stage(events: Sequence[dict[str, Any]]) -> list[str]:
    """Received and sent models of a client, by stage, as a mean over the stage's clients."""
    model_bytes = next(event["bytes_up"] for event in events if event["name"] == FIT)
    cells = []
    for stage in STAGES:
        stage_events = [
            event for event in events if event["name"] == stage and "bytes_down" in event
        ]
        for direction in ("bytes_down", "bytes_up"):
            if not stage_events:
                cells.append("–")
                continue
            mean_bytes = fmean(event[direction] for event in stage_events)
            cells.append(f"{mean_bytes / model_bytes:.1f}")
    return cells


def main() -> None:
    """Print a row for each method."""
    parser = option_parser(__doc__)
    parser.add_argument("--clients", type=int, default=10)
    options = parser.parse_args()
    if options.clients < FEWEST_CLIENTS:
        parser.error(
            f"use at least {FEWEST_CLIENTS} clients; each of them has three of ten classes"
        )
    head = ["models of a client"]
    for label in STAGES.values():
        head += [f"{label}: received", "sent"]
    rows = []
    for method in METHODS:
        events = client_events(method, options.clients)
        rows.append([method, *models_by_stage(events)])
    terminal.console().print(terminal.PlainTable(head, rows))


if __name__ == "__main__":
    main()
