"""fluke as a contestant: its own loop over clients and batches, in memory, no evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import library as operators

from benchmarks.peers.common import Rounds, Task, cores, given

try:
    import torchvision  # noqa: F401
except (
    RuntimeError
):  # built for CUDA: beside a CPU build of torch it misses operators that nothing here calls
    missing = operators.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        missing.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server


class Turns(Server):
    """A server that draws the task's clients and keeps the time."""

    def __init__(self, task: Task, clients: Sequence[Client]) -> None:
        super().__init__(task.network(), None, clients, weighted=True)
        self.task, self.clock, self.round = task, Rounds(), 0

    def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
        """The clients of the round, which begins here."""
        self.clock.begin()
        self.round += 1
        return [self.clients[c] for c in self.task.cohort(self.round)]

    def aggregate(self, eligible: Sequence[Client], client_models: Any) -> None:
        """The mean, with which the round ends."""
        super().aggregate(eligible, client_models)
        self.clock.end()


def main() -> None:
    """Run every round of the task."""
    task, _, out = given()
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    about, clients = task.about, []

    class InOrder(FastDataLoader):
        """fluke's fast loader, with the task's order for its own."""

        def __init__(self, client: int) -> None:
            self.client, self.own, self.round = client, task.client(client), 0
            super().__init__(*self.own, num_labels=10, batch_size=about["batch"])

        def __iter__(self) -> FastDataLoader:
            if self.round != server.round:
                self.round, self.epochs = server.round, iter(task.order(server.round, self.client))
            positions = next(self.epochs)
            self.tensors = [tensor[positions] for tensor in self.own]
            return super().__iter__()

    class Rate(OptimizerConfigurator):
        """The optimiser with the learning rate of the round."""

        def __call__(self, model: torch.nn.Module, *given: Any, **more: Any) -> Any:
            return super().__call__(model, *given, **more, lr=task.rate(server.round))

    sgd = {
        "name": "SGD",
        "lr": task.rate(1),
        "momentum": about["momentum"],
        "weight_decay": about["weight_decay"],
    }
    for number in range(task.clients):
        loss = torch.nn.CrossEntropyLoss()
        loader = InOrder(number)
        clients.append(
            Client(number, loader, None, Rate(sgd), loss, about["epochs"], persistency=False)
        )
    server = Turns(task, clients)
    share = len(task.cohort(1)) / task.clients
    np.random.seed(0)
    FedAVG(task.clients, None, None, clients=clients, server=server).run(
        task.rounds, share, finalize=False
    )
    server.clock.report(
        out, server.model.state_dict(), f"one client after another, in memory, {cores()} threads"
    )


if __name__ == "__main__":
    main()
