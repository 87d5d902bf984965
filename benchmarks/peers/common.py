"""The task of all contestants, and the report of each. It needs only torch and safetensors, since
it is imported in the environments of other libraries.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
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

TASK = "task.json"
"""The file of a task's settings."""

RESULT = "result.json"
"""The file of a contestant's report."""

FINAL_MODEL = "final.safetensors"
"""The file of a contestant's final global model."""


@dataclass(frozen=True)
class Labelled:
    """The images of a client (n, C, H, W), and their labels (n,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Task:
    """The rounds to train: images, initial weights, and each round's clients and batch orders.

    ``about``: the plan, the clients of each round, the learning rates and the layers.
    ``examples``: ``images`` (N, C, H, W) in float32 and ``labels`` (N,), client after client;
    ``starts`` (clients + 1,), the position of each client's first example; ``test_images`` and
    ``test_labels``. ``initial``: a state dict. ``orders``: for each "round.client", the order of
    the client's examples in each epoch (epochs, n).
    """

    about: Mapping[str, Any]
    examples: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    orders: Mapping[str, Tensor]

    @classmethod
    def load(cls, folder: Path) -> Task:
        """Read a task. Its tensors are mapped from the files, so processes share their memory."""
        about = json.loads((folder / TASK).read_text(encoding="utf-8"))
        return cls(
            about=about,
            examples=load_file(folder / "examples.safetensors"),
            initial=load_file(folder / "initial.safetensors"),
            orders=load_file(folder / "orders.safetensors"),
        )

    def save(self, folder: Path) -> None:
        """Write a task."""
        save_file(dict(self.examples), folder / "examples.safetensors")
        save_file(dict(self.initial), folder / "initial.safetensors")
        save_file(dict(self.orders), folder / "orders.safetensors")
        (folder / TASK).write_text(json.dumps(dict(self.about)), encoding="utf-8")

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.about["cohorts"])

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.examples["starts"]) - 1

    def cohort(self, round: int) -> list[int]:
        """The clients of a round; the first round is 1."""
        return list(self.about["cohorts"][round - 1])

    def rate(self, round: int) -> float:
        """The learning rate of a round."""
        return float(self.about["rates"][round - 1])

    def client(self, client: int) -> Labelled:
        """The examples of a client, as views."""
        start, end = self.examples["starts"][client : client + 2].tolist()
        return Labelled(self.examples["images"][start:end], self.examples["labels"][start:end])

    def order(self, round: int, client: int) -> Tensor:
        """The order of a client's examples in each epoch (epochs, n)."""
        return self.orders[f"{round}.{client}"]

    def network(self) -> nn.Module:
        """The network in plain PyTorch, with the initial weights."""
        layers = [LAYERS[kind](*arguments) for kind, *arguments in self.about["layers"]]
        network = Network(nn.Sequential(*layers), nn.Linear(*self.about["head"]))
        network.load_state_dict(dict(self.initial))
        return network

    def optimiser(self, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.SGD:
        """The optimiser of a client."""
        return torch.optim.SGD(
            parameters,
            lr=lr,
            momentum=self.about["momentum"],
            weight_decay=self.about["weight_decay"],
        )


class Network(nn.Module):
    """A body and a head."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C) of a batch."""
        logits: Tensor = self.head(self.body(x))
        return logits


class TaskOrder(Sampler[int]):
    """A client's positions in the order of the task; each iteration is an epoch."""

    def __init__(self, order: Tensor) -> None:
        self.length = order.shape[1]
        self.epochs = iter(order.tolist())

    def __iter__(self) -> Iterator[int]:
        return iter(next(self.epochs))

    def __len__(self) -> int:
        return self.length


def train(task: Task, round: int, client: int, model: nn.Module) -> nn.Module:
    """Train a model as most people write it: a DataLoader over tensors, torch.optim, and a running
    sum of the loss.
    """
    examples = task.client(client)
    loader = DataLoader(
        TensorDataset(examples.images, examples.labels),
        task.about["batch"],
        sampler=TaskOrder(task.order(round, client)),
    )
    optimiser = task.optimiser(model.train().parameters(), task.rate(round))
    device = next(model.parameters()).device
    total_loss = 0.0
    for _ in range(task.about["epochs"]):
        for images, labels in loader:
            optimiser.zero_grad()
            logits = model(images.to(device))
            loss = nn.functional.cross_entropy(logits, labels.to(device))
            loss.backward()
            optimiser.step()
            total_loss += loss.item()
    return model


@cache
def cached_task(folder: str) -> Task:
    """A task, which each process reads once."""
    return Task.load(Path(folder))


@dataclass(frozen=True)
class Assignment:
    """The two arguments of a contestant's program: the folder of its task, and the folder for its
    report.
    """

    folder: Path
    report_folder: Path

    @staticmethod
    def from_arguments() -> Assignment:
        """Read the arguments of this process."""
        return Assignment(Path(sys.argv[1]), Path(sys.argv[2]))

    def task(self) -> Task:
        """Read the task."""
        return Task.load(self.folder)


class RoundClock:
    """The times of a contestant's rounds: call ``begin`` and ``end`` around each of them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.first_ended = 0.0
        self._began = 0.0

    def begin(self) -> None:
        """Call this when a round begins."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """Call this when a round has ended, and the global model is the next one."""
        self.seconds.append(time.perf_counter() - self._began)
        if not self.first_ended:
            self.first_ended = time.time()

    def report(self, folder: Path, model: Mapping[str, Tensor], setup: str) -> None:
        """Write the times, the final global model and a description of the setup to a folder."""
        values = {name: value.detach().contiguous() for name, value in model.items()}
        save_file(values, folder / FINAL_MODEL)
        result = {
            "seconds": self.seconds,
            "first_ended": self.first_ended,
            "setup": setup,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
