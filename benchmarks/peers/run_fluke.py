"""fluke as a contestant: its own loop over clients and batches, in memory, without evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import library as operators

from benchmarks.peers.common import Assignment, RoundClock, Task, cores

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # A torchvision that was built for CUDA expects operators that a CPU build of torch does not
    # have. fluke does not call them, so declaring them is enough.
    missing = operators.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        missing.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server


@dataclass
class Course:
    """What server and clients share: the task, the clock, and the current round."""

    task: Task
    clock: RoundClock = field(default_factory=RoundClock)
    round: int = 0

    @property
    def rate(self) -> float:
        """The learning rate of the current round."""
        return self.task.rate(self.round)


class TaskServer(Server):
    """A server that draws the task's clients and measures the time."""

    def __init__(self, course: Course, clients: Sequence[Client]) -> None:
        super().__init__(course.task.network(), None, clients, weighted=True)
        self.course = course

    def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
        """The clients of the next round, which begins here."""
        self.course.clock.begin()
        self.course.round += 1
        cohort = self.course.task.cohort(self.course.round)
        return [self.clients[client] for client in cohort]

    def aggregate(self, eligible: Sequence[Client], client_models: Any) -> None:
        """Compute the mean, which ends the round."""
        super().aggregate(eligible, client_models)
        self.course.clock.end()


class TaskLoader(FastDataLoader):
    """fluke's fast loader, with the task's batch orders."""

    def __init__(self, course: Course, client: int) -> None:
        examples = course.task.client(client)
        self.course = course
        self.client = client
        self.client_tensors = (examples.images, examples.labels)
        self.loaded_round = 0
        super().__init__(*self.client_tensors, num_labels=10, batch_size=course.task.about["batch"])

    def __iter__(self) -> FastDataLoader:
        """Begin the next epoch of the current round."""
        if self.loaded_round != self.course.round:
            self.loaded_round = self.course.round
            self.epoch_orders = iter(self.course.task.order(self.loaded_round, self.client))
        positions = next(self.epoch_orders)
        self.tensors = [tensor[positions] for tensor in self.client_tensors]
        return super().__iter__()


class TaskOptimiser(OptimizerConfigurator):
    """The optimiser with the learning rate of the round."""

    def __init__(self, course: Course) -> None:
        about = course.task.about
        super().__init__(
            {
                "name": "SGD",
                "lr": course.task.rate(1),
                "momentum": about["momentum"],
                "weight_decay": about["weight_decay"],
            }
        )
        self.course = course

    def __call__(self, model: torch.nn.Module, *arguments: Any, **settings: Any) -> Any:
        """The optimiser of a client."""
        return super().__call__(model, *arguments, **settings, lr=self.course.rate)


def client_of(course: Course, client: int) -> Client:
    """A client of the task."""
    return Client(
        index=client,
        train_set=TaskLoader(course, client),
        test_set=None,
        optimizer_cfg=TaskOptimiser(course),
        loss_fn=torch.nn.CrossEntropyLoss(),
        local_epochs=course.task.about["epochs"],
        persistency=False,
    )


def main() -> None:
    """Run every round of the task."""
    assignment = Assignment.from_arguments()
    course = Course(assignment.task())
    task = course.task
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    clients = [client_of(course, client) for client in range(task.clients)]
    server = TaskServer(course, clients)
    share = len(task.cohort(1)) / task.clients
    np.random.seed(0)
    algorithm = FedAVG(task.clients, None, None, clients=clients, server=server)
    algorithm.run(task.rounds, share, finalize=False)
    setup = f"one client after another, in memory, {cores()} threads"
    course.clock.report(assignment.report_folder, server.model.state_dict(), setup)


if __name__ == "__main__":
    main()
