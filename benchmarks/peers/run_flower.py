"""Flower's simulation as a contestant: an actor for each core, and PyTorch's plain loop in the
client.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from flwr.simulation import run_simulation

from benchmarks.peers import common
from benchmarks.peers.common import Assignment, RoundClock, Task, cores


class TaskClients(FedAvg):
    """FedAvg with the task's clients: each message names the client that the node simulates."""

    def __init__(self, task: Task, clock: RoundClock) -> None:
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0)
        self.task = task
        self.clock = clock

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message for each client."""
        self.clock.begin()
        clients = self.task.cohort(server_round)
        nodes, _ = sample_nodes(grid, self.task.clients, len(clients))
        for node, client in zip(nodes, clients, strict=True):
            instruction = ConfigRecord({"round": server_round, "client": client})
            content = RecordDict({"arrays": arrays, "config": instruction})
            yield Message(content, node, MessageType.TRAIN)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple:
        """The mean of the replies. If a client failed, this ends the run."""
        replies = list(replies)
        failures = [reply.error.reason for reply in replies if reply.has_error()]
        if failures:
            raise RuntimeError(failures[0])
        if len(replies) != len(self.task.cohort(server_round)):
            raise RuntimeError("a client did not answer")
        aggregated = super().aggregate_train(server_round, replies)
        self.clock.end()
        return aggregated


def client_app(task_folder: str) -> ClientApp:
    """The app that trains a client; every process reads the task once."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        task = common.cached_task(task_folder)
        instruction = message.content["config"]
        client = instruction["client"]
        model = task.network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        common.train(task, instruction["round"], client, model)
        metrics = MetricRecord({"num-examples": len(task.client(client))})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def server_app(assignment: Assignment, task: Task) -> ServerApp:
    """The app that runs all rounds and writes the report."""
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        clock = RoundClock()
        strategy = TaskClients(task, clock)
        result = strategy.start(grid, ArrayRecord(dict(task.initial)), task.rounds)
        setup = f"Ray, {cores()} actors of num_cpus=1 and one thread"
        clock.report(assignment.report_folder, result.arrays.to_torch_state_dict(), setup)

    return app


def main() -> None:
    """Run every round of the task."""
    assignment = Assignment.from_arguments()
    task = assignment.task()
    backend = {
        "init_args": {"num_cpus": cores()},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(
        server_app(assignment, task),
        client_app(str(assignment.folder)),
        task.clients,
        backend_config=backend,
    )


if __name__ == "__main__":
    main()
