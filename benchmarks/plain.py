"""A round as most people write it in PyTorch: a DataLoader over tensors, a copy of the model,
torch.optim, one client after another.

It trains the same clients from the same weights in the same batch order as fedstill, so both end
with the same model. Benchmarks check this: a comparison of different trainings would be useless.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from benchmarks.peers.common import Task, train


class PlainLoop:
    """FedAvg, or FedSeq if the task is a chain: one round for each call.

    ``model``: the network; it gets the task's initial weights.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task = task
        self.model = model
        self.round = 0
        self.model.load_state_dict(dict(task.initial))

    def run_round(self) -> None:
        """Train the clients of the next round, one after another."""
        self.round += 1
        clients = self.task.cohort(self.round)
        if self.task.about["chain"]:
            for client in clients:
                train(self.task, self.round, client, self.model)
            return
        self.model.load_state_dict(self._mean_after_training(clients))

    def _mean_after_training(self, clients: list[int]) -> dict[str, torch.Tensor]:
        """The mean of the clients' models, weighted by their numbers of examples."""
        models = []
        sizes = []
        for client in clients:
            model = train(self.task, self.round, client, copy.deepcopy(self.model))
            models.append(model.state_dict())
            sizes.append(len(self.task.client(client)))
        weights = torch.tensor(sizes, dtype=torch.float64)
        weights /= weights.sum()

        mean = {}
        for name in models[0]:
            terms = [model[name] * weight for model, weight in zip(models, weights, strict=True)]
            mean[name] = sum(terms)
        return mean

    def parameters(self) -> dict[str, torch.Tensor]:
        """The global model."""
        return {name: value.detach() for name, value in self.model.state_dict().items()}
