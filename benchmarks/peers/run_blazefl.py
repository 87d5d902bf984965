"""blazefl as a contestant: its thread pool with one thread for each client, as many clients at a
time as cores, and PyTorch's plain loop in the client.
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
from benchmarks.peers.common import Assignment, RoundClock, Task, cores


class Networks:
    """The task's network, in the interface that blazefl expects."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def select_model(self, model_name: str) -> torch.nn.Module:
        """A new network."""
        return self.task.network()


class Handler(FedAvgBaseServerHandler):
    """blazefl's server, with the task's clients."""

    task: Task

    def sample_clients(self) -> list[int]:
        """The clients of the round."""
        return self.task.cohort(self.round + 1)


class Trainer(FedAvgThreadPoolClientTrainer):
    """blazefl's thread pool with the plain loop as client, because blazefl's own client has neither
    momentum nor weight decay.
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
        return FedAvgUplinkPackage(cid, serialize_model(model), len(self.task.client(cid)))


def handler_of(task: Task, networks: Networks) -> Handler:
    """The server of a task."""
    cohort_size = len(task.cohort(1))
    handler = Handler(
        model_selector=networks,
        model_name="",
        dataset=None,
        global_round=task.rounds,
        num_clients=task.clients,
        sample_ratio=cohort_size / task.clients,
        device="cpu",
        batch_size=task.about["batch"],
        seed=0,
    )
    # blazefl rounds the ratio down.
    handler.num_clients_per_round = cohort_size
    handler.task = task
    return handler


def trainer_of(task: Task, networks: Networks) -> Trainer:
    """The clients of a task."""
    trainer = Trainer(
        model_selector=networks,
        model_name="",
        dataset=None,
        device="cpu",
        num_clients=task.clients,
        epochs=task.about["epochs"],
        batch_size=task.about["batch"],
        lr=task.rate(1),
        seed=0,
        num_parallels=cores(),
    )
    trainer.task = task
    return trainer


def main() -> None:
    """Run every round of the task."""
    assignment = Assignment.from_arguments()
    task = assignment.task()
    networks = Networks(task)
    handler = handler_of(task, networks)
    trainer = trainer_of(task, networks)
    clock = RoundClock()
    while not handler.if_stop():
        clock.begin()
        trainer.round = handler.round + 1
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        with torch.no_grad():
            for package in trainer.uplink_package():
                handler.load(package)
        clock.end()
    setup = f"thread pool, {cores()} clients of one thread side by side"
    clock.report(assignment.report_folder, handler.model.state_dict(), setup)


if __name__ == "__main__":
    main()
