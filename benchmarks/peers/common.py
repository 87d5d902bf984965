"""What every contestant is given and gives back. It needs torch and safetensors alone: peers'
environments load it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

LAYERS = {
    "Conv2d": nn.Conv2d,
    "MaxPool2d": nn.MaxPool2d,
    "ReLU": nn.ReLU,
    "Flatten": nn.Flatten,
    "Linear": nn.Linear,
}


@dataclass(frozen=True)
class Task:
    """The rounds to run: examples, weights to start from, and for every round its clients and their
    batch orders.

    ``examples``: images (N, C, H, W) float32 and labels (N,), client after client, ``starts``
    (clients + 1,) says from where, and the same to test on. ``initial``: a state dict. ``orders``:
    (epochs, n) positions among a client's own examples for every "round.client". ``about``: the
    plan, the cohorts, the rates and the layers.
    """

    about: Mapping[str, Any]
    examples: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    orders: Mapping[str, Tensor]

    @classmethod
    def load(cls, folder: Path) -> Task:
        """Read a task; its tensors are mapped from the files, so that processes share them."""
        parts = (
            load_file(folder / f"{name}.safetensors") for name in ("examples", "initial", "orders")
        )
        return cls(json.loads((folder / "task.json").read_text(encoding="utf-8")), *parts)

    def save(self, folder: Path) -> None:
        """Write a task."""
        for name in ("examples", "initial", "orders"):
            save_file(dict(getattr(self, name)), folder / f"{name}.safetensors")
        (folder / "task.json").write_text(json.dumps(dict(self.about)), encoding="utf-8")

    @property
    def rounds(self) -> int:
        """How many rounds to run."""
        return len(self.about["cohorts"])

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.examples["starts"]) - 1

    def cohort(self, round: int) -> list[int]:
        """The clients of a round (1 is the first)."""
        return list(self.about["cohorts"][round - 1])

    def rate(self, round: int) -> float:
        """The learning rate of a round."""
        return float(self.about["rates"][round - 1])

    def client(self, client: int) -> tuple[Tensor, Tensor]:
        """The images and labels of a client: views, no copies."""
        start, end = self.examples["starts"][client : client + 2].tolist()
        return self.examples["images"][start:end], self.examples["labels"][start:end]

    def order(self, round: int, client: int) -> Tensor:
        """The order of a client's examples in each epoch (epochs, n)."""
        return self.orders[f"{round}.{client}"]

    def network(self) -> nn.Module:
        """The network of the initial weights, in plain PyTorch."""
        body = nn.Sequential(*(LAYERS[kind](*numbers) for kind, *numbers in self.about["layers"]))
        network = Network(body, nn.Linear(*self.about["head"]))
        network.load_state_dict(dict(self.initial))
        return network

    def optimiser(self, parameters: Any, lr: float) -> torch.optim.SGD:
        """The optimiser of a client."""
        about = self.about
        return torch.optim.SGD(
            parameters, lr=lr, momentum=about["momentum"], weight_decay=about["weight_decay"]
        )


class Network(nn.Module):
    """A body and a head."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C) of a batch."""
        return self.head(self.body(x))


class InOrder(Sampler[int]):
    """The positions that are given, epoch by epoch."""

    def __init__(self, order: Tensor) -> None:
        self.length, self.epochs = order.shape[1], iter(order.tolist())

    def __iter__(self) -> Iterator[int]:
        return iter(next(self.epochs))

    def __len__(self) -> int:
        return self.length


def train(task: Task, round: int, client: int, model: nn.Module) -> nn.Module:
    """Train a model as most people write it: a DataLoader over tensors, torch.optim, the loss
    summed up.
    """
    order = InOrder(task.order(round, client))
    loader = DataLoader(TensorDataset(*task.client(client)), task.about["batch"], sampler=order)
    sgd = task.optimiser(model.train().parameters(), task.rate(round))
    device = next(model.parameters()).device
    total = 0.0
    for _ in range(task.about["epochs"]):
        for x, y in loader:
            sgd.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            sgd.step()
            total += loss.item()
    return model


@cache
def kept(folder: str) -> Task:
    """A task, read once a process."""
    return Task.load(Path(folder))


class Rounds:
    """The clock of a contestant: ``begin`` and ``end`` around each round, ``report`` after the
    last.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.first_ended = 0.0

    def begin(self) -> None:
        """A round begins."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """A round has ended: the global model is the next one."""
        self.seconds.append(time.perf_counter() - self._began)
        self.first_ended = self.first_ended or time.time()

    def report(self, folder: Path, model: Mapping[str, Tensor], how: str) -> None:
        """Write the times, the final global model and how it was run into a folder."""
        save_file(
            {k: v.detach().contiguous() for k, v in model.items()}, folder / "final.safetensors"
        )
        python = ".".join(map(str, sys.version_info[:3]))
        said = {"seconds": self.seconds, "first_ended": self.first_ended, "how": how}
        (folder / "result.json").write_text(
            json.dumps({**said, "torch": torch.__version__, "python": python}), encoding="utf-8"
        )


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def given() -> tuple[Task, Path, Path]:
    """A runner's task, the folder it came from, and the folder for its report: its two
    arguments.
    """
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    return Task.load(source), source, out
