"""fedstill as a contestant among its peers: its defaults, on the images as it stores them."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.ours import Ours
from benchmarks.peers import hand_out
from benchmarks.peers.common import Rounds, Task, cores
from fedstill.config.resolve import resolve
from fedstill.running.preparation import prepare


def main() -> None:
    """Run every round of the task."""
    folder, out = map(Path, sys.argv[1:3])
    about = Task.load(folder).about
    workload, dataset = hand_out.read(folder, about)
    ready = prepare(resolve(workload.experiment("fedavg")), dataset)
    ours, rounds = Ours(ready), Rounds()
    for _ in about["cohorts"]:
        rounds.begin()
        ours.run_round()
        rounds.end()
    rounds.report(
        out, ours.parameters(), f"engine {ready.settings.engine} (default), on {cores()} cores"
    )


if __name__ == "__main__":
    main()
