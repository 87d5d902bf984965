"""A contestant's runs of one workload, and whether they performed the same training as fedstill."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.peers import processes
from benchmarks.peers.common import FINAL_MODEL, RESULT, Task, cores
from benchmarks.peers.environments import FEDSTILL, NOT_INHERITED, Contestant

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Entry:
    """A contestant, its interpreter, and the results of its runs.

    ``failure``: why there are none. ``runs``: the seconds of each run's rounds, except the first.
    ``starts``: the seconds of each run's start. ``peaks``: its peak memory. ``result``, ``final``:
    the report and the global model of the last run.
    """

    contestant: Contestant
    python: Path
    failure: str = ""
    runs: list[list[float]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    result: Mapping[str, Any] = field(default_factory=dict)
    final: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def is_fedstill(self) -> bool:
        """Whether this is fedstill, with which the others are compared."""
        return self.contestant == FEDSTILL

    @property
    def medians(self) -> list[float]:
        """The median round of each run."""
        return [statistics.median(seconds) for seconds in self.runs]

    def run(self, task_folder: Path, seconds: float) -> None:
        """Run the task once, within a time limit; a run that fails otherwise is tried again."""
        self._try(task_folder, seconds)
        if self.failure and processes.TIMED_OUT not in self.failure:
            self._try(task_folder, seconds)

    def _try(self, task_folder: Path, seconds: float) -> None:
        with tempfile.TemporaryDirectory(prefix="peer-") as name:
            folder = Path(name)
            command = self._command(task_folder, folder)
            outcome = processes.run(command, self._environment(folder), folder, seconds)
            self.failure = outcome.failure
            if not self.failure and not (folder / RESULT).exists():
                self.failure = "it ended without a result"
            if self.failure:
                return
            self.result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
            # The tensors are copied, because the folder is deleted.
            final = load_file(folder / FINAL_MODEL)
            self.final = {name: value.clone() for name, value in final.items()}
        rounds = self.result["seconds"][1:]
        first_round_ended = self.result["first_ended"] - outcome.began
        self.runs.append(rounds)
        self.starts.append(first_round_ended - statistics.median(rounds))
        self.peaks.append(outcome.peak)

    def _command(self, task_folder: Path, report_folder: Path) -> list[str]:
        command = [str(self.python)]
        if self.contestant.torchrun:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(cores())]
        command += ["-m", f"benchmarks.peers.{self.contestant.module}"]
        return [*command, str(task_folder), str(report_folder)]

    def _environment(self, folder: Path) -> dict[str, str]:
        variables = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
        variables |= dict.fromkeys(["RAY_TMPDIR", "FLWR_HOME", "TMPDIR"], str(folder))
        variables["HF_HUB_OFFLINE"] = "1"
        variables |= self.contestant.settings
        path = [str(REPOSITORY)]
        # fedstill itself may be on the path of this process.
        if self.is_fedstill and os.environ.get("PYTHONPATH"):
            path.append(os.environ["PYTHONPATH"])
        variables["PYTHONPATH"] = os.pathsep.join(path)
        return variables


def accuracy(task: Task, parameters: Mapping[str, Tensor]) -> float:
    """The share of the test images that a model classifies correctly."""
    network = task.network().eval()
    network.load_state_dict(dict(parameters))
    with torch.inference_mode():
        batches = task.examples["test_images"].split(250)
        predictions = torch.cat([network(batch).argmax(1) for batch in batches])
    return float((predictions == task.examples["test_labels"]).double().mean())


def distance(
    task: Task, parameters: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> float:
    """The distance of a model from a reference, relative to the distance that training moved the
    reference.
    """
    difference = 0.0
    movement = 0.0
    for name, value in reference.items():
        difference += float((parameters[name] - value).double().square().sum())
        movement += float((value - task.initial[name]).double().square().sum())
    return math.sqrt(difference / movement)
