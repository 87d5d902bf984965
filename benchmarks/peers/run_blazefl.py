"""blazefl as a contestant: its thread pool, a client of one thread on each core, PyTorch's plain
loop in the client.
"""

from __future__ import annotations

import threading

import torch
from blazefl.contrib.fedavg import (
    FedAvgBaseServerHandler,
    FedAvgDownlinkPackage,
    FedAvgThreadPoolClientTrainer,
    FedAvgUplinkPackage,
)
from blazefl.core import deserialize_model, serialize_model

from benchmarks.peers import common
from benchmarks.peers.common import Rounds, Task, cores, given


class Networks:
    """The one network there is, as blazefl asks for it."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def select_model(self, model_name: str) -> torch.nn.Module:
        """A new one."""
        return self.task.network()


class Handler(FedAvgBaseServerHandler):
    """blazefl's server, with the task's clients."""

    task: Task

    def sample_clients(self) -> list[int]:
        """The clients of the round."""
        return self.task.cohort(self.round + 1)


class Trainer(FedAvgThreadPoolClientTrainer):
    """blazefl's pool of threads; the client is ours, for its own knows neither momentum nor weight
    decay.
    """

    task: Task
    round = 1

    def worker(
        self, cid: int, device: str, payload: FedAvgDownlinkPackage, stop_event: threading.Event
    ) -> FedAvgUplinkPackage:
        """Train one client."""
        torch.set_num_threads(1)
        model = self.model_selector.select_model(self.model_name)
        with torch.no_grad():
            deserialize_model(model, payload.model_parameters)
        common.train(self.task, self.round, cid, model)
        return FedAvgUplinkPackage(cid, serialize_model(model), len(self.task.client(cid)[1]))


def main() -> None:
    """Run every round of the task."""
    task, _, out = given()
    networks, about, rounds = Networks(task), task.about, Rounds()
    share, batch = len(task.cohort(1)) / task.clients, about["batch"]
    handler = Handler(networks, "", None, task.rounds, task.clients, share, "cpu", batch, 0)
    handler.num_clients_per_round = len(task.cohort(1))  # blazefl rounds the share down
    trainer = Trainer(
        networks,
        "",
        None,
        "cpu",
        task.clients,
        about["epochs"],
        batch,
        task.rate(1),
        0,
        num_parallels=cores(),
    )
    handler.task = trainer.task = task
    while not handler.if_stop():
        rounds.begin()
        trainer.round = handler.round + 1
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        with torch.no_grad():
            for package in trainer.uplink_package():
                handler.load(package)
        rounds.end()
    rounds.report(
        out,
        handler.model.state_dict(),
        f"thread pool, {cores()} clients of one thread side by side",
    )


if __name__ == "__main__":
    main()
