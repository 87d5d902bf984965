"""Hostile clients, planted in a simulation: which clients are hostile, and what they send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedstill.config.settings import Settings
from fedstill.core.extensions import Engine, Middleware
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Group, Payload, Reply, Stage
from fedstill.core.work import ClientWork

FACTORS = {"sign_flip": -1.0, "scaled": 10.0}
"""What an attack multiplies a client's change by."""


def hostile_clients(settings: Settings) -> frozenset[int]:
    """The hostile clients of a simulation, drawn by key; at least one where an attack is set, none
    without.
    """
    if settings.clients_table.attack is None:
        return frozenset()
    share = settings.clients_table.attackers or 0.1
    draw = generator(seed_for(settings.seed, 0, 0, SERVER, "hostile"))
    order: list[int] = torch.randperm(settings.clients, generator=draw).tolist()
    return frozenset(order[: max(1, round(share * settings.clients))])


@dataclass(frozen=True)
class Hostile:
    """An engine of whose clients some send something else than they trained.

    What was sent down counts as 0: a model comes back ``factor`` times as far from it, a change
    ``factor`` times as large, and so does every other real tensor.
    """

    engine: Engine
    clients: frozenset[int]
    factor: float

    def run(
        self, work: ClientWork, stage: Stage, payloads: Mapping[int, Payload], seed: int
    ) -> list[Reply]:
        """The replies of all clients, of which the hostile ones have changed theirs."""
        replies = self.engine.run(work, stage, payloads, seed)
        return [self._sent(reply, payloads) for reply in replies]

    def commit(self, stage: Stage, clients: Sequence[int]) -> None:
        """Keep what the clients remember: hostile ones, too, remember what they trained."""
        self.engine.commit(stage, clients)

    def _sent(self, reply: Reply, payloads: Mapping[int, Payload]) -> Reply:
        if reply.client not in self.clients or reply.failure:
            return reply
        payload = payloads[reply.client]
        content = Payload(
            {name: self._group(group, payload.get(name)) for name, group in reply.content.items()}
        )
        return Reply(reply.client, content, reply.examples, reply.metrics, reply.round, reply.stage)

    def _group(self, group: Group, start: Group | None) -> Group:
        if isinstance(group, Mapping):
            near = start if isinstance(start, Mapping) else {}
            return {name: self._tensor(value, near.get(name)) for name, value in group.items()}
        if isinstance(group, Tensor):
            return self._tensor(group, start if isinstance(start, Tensor) else None)
        return group

    def _tensor(self, value: Tensor, start: Tensor | None) -> Tensor:
        if not value.is_floating_point():
            return value
        if start is None:
            return value * self.factor
        return start + self.factor * (value - start)


def hostile_middleware(settings: Settings) -> tuple[Middleware, ...]:
    """What makes clients hostile that change what they send; empty if the config plants none."""
    factor = FACTORS.get(settings.clients_table.attack or "")
    if factor is None:
        return ()
    clients = hostile_clients(settings)
    return (lambda engine: Hostile(engine, clients, factor),)
