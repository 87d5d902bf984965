"""The process of one tree: it runs an experiment, and waits for its turn before every round.

It uses only public names of fedstill, so that the same file times old and new code. Its argument
is a JSON file with the fields of ``measurements.Rounds``. It answers each line that it reads with
the seconds of one round. A round includes its evaluation and its checkpoint.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedstill
from fedstill import Experiment, Progress, from_tensors, run


class Turns(Progress):
    """Reports the time of each round, and waits before the next."""

    def __init__(self) -> None:
        self.wait()

    def started(self, folder: Path, round: int) -> None:
        """Do nothing."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Do nothing."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Report a round, and wait."""
        wall = time.perf_counter() - self.wall
        cpu = time.process_time() - self.cpu
        print(json.dumps({"wall": wall, "cpu": cpu}), flush=True)
        self.wait()

    def stop(self) -> bool:
        """Return False: the run goes on."""
        return False

    def wait(self) -> None:
        """Wait for a line, then start the clocks."""
        if not sys.stdin.readline():
            sys.exit("the process that takes the times has ended")
        self.wall = time.perf_counter()
        self.cpu = time.process_time()


def main() -> None:
    """Run the experiment."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    imported = Path(fedstill.__file__).resolve()
    if not imported.is_relative_to(task["source"]):
        sys.exit(f"timed the wrong code: {imported} is not in {task['source']}")
    experiment = Experiment(**task["experiment"])
    data = None
    if task["tensors"]:
        # Late, because torch must not be imported before fedstill, which says how its threads wait.
        from safetensors.torch import load_file

        tensors = load_file(task["tensors"])
        train = (tensors["train_images"], tensors["train_labels"])
        test = (tensors["test_images"], tensors["test_labels"])
        data = from_tensors("beside", train, test)
    print("ready", flush=True)
    run(experiment, Path("run"), data, watch=Turns())


if __name__ == "__main__":
    main()
