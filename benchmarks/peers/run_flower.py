"""Flower's simulation as a contestant: an actor of one core each, PyTorch's plain loop in the
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
from benchmarks.peers.common import Rounds, Task, cores, given


class GivenClients(FedAvg):
    """FedAvg with the task's clients: each drawn node is told which one to be."""

    def __init__(self, task: Task, rounds: Rounds) -> None:
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0)
        self.task, self.rounds = task, rounds

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message a client."""
        self.rounds.begin()
        clients = self.task.cohort(server_round)
        nodes, _ = sample_nodes(grid, self.task.clients, len(clients))
        for node, client in zip(nodes, clients, strict=True):
            told = ConfigRecord({"round": server_round, "client": client})
            yield Message(RecordDict({"arrays": arrays, "config": told}), node, MessageType.TRAIN)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple:
        """The mean; an error of a client ends the run."""
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) != len(self.task.cohort(server_round)):
            raise RuntimeError(failed[0] if failed else "a client did not answer")
        made = super().aggregate_train(server_round, replies)
        self.rounds.end()
        return made


def main() -> None:
    """Run every round of the task."""
    task, source, out = given()
    rounds = Rounds()
    folder, client_app, server_app = str(source), ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        mine, told = common.kept(folder), message.content["config"]
        model = mine.network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        common.train(mine, told["round"], told["client"], model)
        metrics = MetricRecord({"num-examples": len(mine.client(told["client"])[1])})
        return Message(
            RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
            reply_to=message,
        )

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        done = GivenClients(task, rounds).start(grid, ArrayRecord(dict(task.initial)), task.rounds)
        how = f"Ray, {cores()} actors of num_cpus=1 and one thread"
        rounds.report(out, done.arrays.to_torch_state_dict(), how)

    settings = {
        "init_args": {"num_cpus": cores()},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server_app, client_app, task.clients, backend_config=settings)


if __name__ == "__main__":
    main()
