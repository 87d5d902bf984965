"""The round as most people write it: a DataLoader over tensors, a copy of the model, torch.optim,
client by client.

It trains the same clients from the same weights in the same batch order as fedstill, so that both
end with the same model, and that is checked: two loops of which one did less would compare nothing.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from benchmarks.peers.common import Task, train


class PlainLoop:
    """FedAvg, or FedSeq on a chain, from the task's first weights, one round a call; ``model``: its
    network.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task, self.model, self.round = task, model, 0
        self.model.load_state_dict(dict(task.initial))

    def run_round(self) -> None:
        """Train the round's clients one after another, each from the model before or all from one,
        then averaged.
        """
        self.round += 1
        clients = self.task.cohort(self.round)
        if self.task.about["chain"]:
            for c in clients:
                train(self.task, self.round, c, self.model)
            return
        results = [
            train(self.task, self.round, c, copy.deepcopy(self.model)).state_dict() for c in clients
        ]
        sizes = torch.tensor([len(self.task.client(c)[1]) for c in clients], dtype=torch.float64)
        mean = {
            k: sum(r[k] * w for r, w in zip(results, sizes / sizes.sum(), strict=True))
            for k in results[0]
        }
        self.model.load_state_dict(mean)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The global model."""
        return {k: v.detach() for k, v in self.model.state_dict().items()}
