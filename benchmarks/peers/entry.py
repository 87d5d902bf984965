"""A contestant's runs of one workload, and whether they trained what fedstill trained."""

from __future__ import annotations

import json
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
from benchmarks.peers.common import Task, cores
from benchmarks.peers.environments import Contestant

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Entry:
    """A contestant, its interpreter, and what its runs gave; ``failure`` says why it has none."""

    contestant: Contestant
    python: Path
    failure: str = ""
    # of each run, the seconds of each round but the first
    runs: list[list[float]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    said: Mapping[str, Any] = field(default_factory=dict)
    final: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether this is fedstill as it comes, which the others are compared with."""
        return self.contestant.module == "run_fedstill" and not self.contestant.arguments

    def run(self, folder: Path, seconds: float) -> None:
        """One run of the task in a folder, within a time; one that fails is tried again. Its files
        are gone then.
        """
        self._try(folder, seconds)
        if self.failure and "not done within" not in self.failure:
            self._try(folder, seconds)

    def _try(self, folder: Path, seconds: float) -> None:
        with tempfile.TemporaryDirectory(prefix="peer-") as name:
            out = Path(name)
            ran = processes.run(self._command(folder, out), self._settings(out), out, seconds)
            self.failure = ran.failure or (
                "" if (out / "result.json").exists() else "it ended without a result"
            )
            if self.failure:
                return
            self.said = json.loads((out / "result.json").read_text(encoding="utf-8"))
            self.final = {k: v.clone() for k, v in load_file(out / "final.safetensors").items()}
        others = self.said["seconds"][1:]
        self.runs.append(others)
        self.starts.append(self.said["first_ended"] - ran.began - statistics.median(others))
        self.peaks.append(ran.peak)

    def _command(self, folder: Path, out: Path) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cores())]
        module = [
            "-m",
            f"benchmarks.peers.{self.contestant.module}",
            str(folder),
            str(out),
            *self.contestant.arguments,
        ]
        return [str(self.python), *(launcher if self.contestant.torchrun else []), *module]

    def _settings(self, out: Path) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
        path = [
            str(REPOSITORY),
            os.environ.get("PYTHONPATH", "") if self.contestant.module == "run_fedstill" else "",
        ]
        places = dict.fromkeys(["RAY_TMPDIR", "FLWR_HOME", "TMPDIR"], str(out))
        own = self.contestant.settings
        return {
            **inherited,
            **places,
            "HF_HUB_OFFLINE": "1",
            **own,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }


def accuracy(task: Task, params: Mapping[str, Tensor]) -> float:
    """The share of the test images that weights get right."""
    network = task.network().eval()
    network.load_state_dict(dict(params))
    with torch.inference_mode():
        right = [network(x).argmax(1) for x in task.examples["test_images"].split(250)]
    return float((torch.cat(right) == task.examples["test_labels"]).double().mean())


def distance(task: Task, params: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """How far weights are from others, as a share of how far training moved those from the first
    ones.
    """
    gap = sum(float((params[k] - others[k]).double().square().sum()) for k in others)
    moved = sum(float((others[k] - task.initial[k]).double().square().sum()) for k in others)
    return (gap / moved) ** 0.5
