"""The round as most people write it: a DataLoader over tensors, a copy of the model, torch.optim, client by client.

It draws the same clients, starts and batch orders as fedstill, so that both end with the same model, and that is
checked: two loops of which one did less would compare nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from fedstill.experiment.prepare import Prepared
from fedstill.keys import generator, seed_for
from fedstill.models import contract
from fedstill.records import SERVER
from fedstill.topology import sample


class _Order(Sampler[int]):
    """The order that fedstill draws for a client, epoch by epoch."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.draw = n, generator(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n, generator=self.draw).tolist())

    def __len__(self) -> int:
        return self.n


class PlainLoop:
    """FedAvg, one round a call."""

    def __init__(self, ready: Prepared) -> None:
        self.ready, self.round = ready, 0
        self.model = contract.build(ready.world.model(SERVER))
        self.model.load_state_dict(dict(ready.world.initial(SERVER)))
        images = ready.sites.inputs.plain(ready.sites.train.images)
        self.sets = [TensorDataset(images[p], ready.sites.train.labels[p]) for p in ready.sites.parts]

    def run_round(self) -> None:
        """Train the round's clients one after another, and average them."""
        self.round += 1
        settings = self.ready.settings
        clients = sorted(sample(self.ready.world, self.round, settings["topology"]["sampled"]))
        results = [self._client(client) for client in clients]
        sizes = torch.tensor([float(len(self.sets[c])) for c in clients])
        mean = {k: sum(r[k] * w for r, w in zip(results, sizes / sizes.sum(), strict=True)) for k in results[0]}
        self.model.load_state_dict(mean)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The global model."""
        return {k: v.detach() for k, v in self.model.state_dict().items()}

    def _client(self, client: int) -> dict[str, torch.Tensor]:
        plan, seed = self.ready.world.plans["train"], self.ready.world.seed
        model = copy.deepcopy(self.model).train()
        sgd = torch.optim.SGD(
            model.parameters(), plan.lr_at(self.round), momentum=plan.momentum, weight_decay=plan.weight_decay
        )
        order = _Order(len(self.sets[client]), seed_for(seed, self.round, 0, client, "order"))
        loader = DataLoader(self.sets[client], plan.batch, sampler=order)
        total = 0.0
        for _ in range(plan.epochs):
            for x, y in loader:
                sgd.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                sgd.step()
                total += loss.item()
        return model.state_dict()
