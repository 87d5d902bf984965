"""Topologies: the stages of each round, and the clients that act in them.

The sampled clients depend on the run's seed and the round, or on the round alone. They cannot
depend on earlier replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch

from fedstill.core.errors import ConfigError
from fedstill.core.fields import Count, check_ranges
from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Stage, World
from fedstill.core.registry import register


class Topology(Protocol):
    """A function from a round to its stages."""

    def __call__(self, round: int, world: World) -> list[Stage]:
        """The stages of a round (1 is the first), numbered from 0."""


Cohorts = Literal["official"] | None


def sample(world: World, round: int, count: int | None, cohorts: Cohorts = None) -> list[int]:
    """Distinct clients of a round, drawn uniformly, in the order of the draw.

    count: by default ten, or all clients if there are fewer. cohorts: None to draw from the run's
    seed; "official" to draw from the round alone, as FedNTD's code does. Clients without data in
    the round's task are excluded.

    Source: "official", ``BaseServer._client_sampling`` of Lee-Gihun/FedNTD: NumPy seeded with the
    round, from 0.
    """
    if cohorts == "official":
        order = torch.from_numpy(np.random.RandomState(round - 1).permutation(world.clients))
    else:
        draw = generator(seed_for(world.seed, round, 0, SERVER, "sample"))
        order = torch.randperm(world.clients, generator=draw)
    if world.stream.tasks > 1:
        is_present = torch.zeros(world.clients, dtype=torch.bool)
        is_present[world.stream.present(round)] = True
        order = order[is_present[order]]
    if count is None:
        count = min(10, world.clients)
    clients: list[int] = order[:count].tolist()
    return clients


@dataclass(frozen=True)
class _Sampled:
    sampled: Count | None = None
    """The number of clients in a round; unset: ten, or all if there are fewer."""
    cohorts: Cohorts = None
    """How clients are drawn: unset, from the run's seed; "official", as in FedNTD's code, with the
    same draws for every seed.
    """
    task_end: str | None = None
    """The name of a stage after the last round of each task, for all clients of the task; without
    [stream], after the last round.
    """

    def __post_init__(self) -> None:
        check_ranges(self)

    def draw(self, round: int, world: World) -> list[int]:
        """The sampled clients of a round, in the order of the draw."""
        if self.sampled is not None and self.sampled > world.clients:
            raise ConfigError(
                f"topology.sampled = {self.sampled} is more than topology.clients = "
                f"{world.clients}; set topology.sampled to {world.clients} or less"
            )
        return sample(world, round, self.sampled, self.cohorts)

    def task_end_stages(self, round: int, world: World) -> list[Stage]:
        """The stage that ends a task, in the task's last round. It precedes the stages that end the
        run.
        """
        is_last = round == world.rounds or world.stream.ends(round)
        if not self.task_end or not is_last:
            return []
        return [Stage(round, 0, self.task_end, everyone(world, round))]


@register("topology", "parallel")
@dataclass(frozen=True)
class Parallel(_Sampled):
    """All sampled clients train in parallel; the server aggregates their replies."""

    server: str = ""
    """The name of a stage after training, in which the server works on public data (FedDF)."""
    first: str = ""
    """The name of a stage before the stages of round 1, for all clients."""
    last: str = ""
    """The name of a stage after the last round, for all clients (FT-FedAvg). "ridge": the model's
    last layer is computed from sums that they send, with any method.
    """
    before: str = ""
    """The name of a stage before training in every round, for its clients (FedRep, Ditto)."""
    after: str = ""
    """The name of a stage after training in every round, for its clients."""
    closing: str = ""
    """The name of the very last stage, in which the server works (CCVR)."""

    def __call__(self, round: int, world: World) -> list[Stage]:
        clients = tuple(sorted(self.draw(round, world)))
        stages = [
            Stage(round, 0, name, clients) for name in (self.before, "train", self.after) if name
        ]
        if self.first and round == 1:
            stages.insert(0, Stage(round, 0, self.first, everyone(world, round)))
        if self.server:
            stages.append(Stage(round, 0, self.server, (SERVER,), "public"))
        stages += self.task_end_stages(round, world)
        if self.last and round == world.rounds:
            stages.append(Stage(round, 0, self.last, everyone(world, round)))
        if self.closing and round == world.rounds:
            stages.append(Stage(round, 0, self.closing, (SERVER,), "public"))
        return _numbered(stages)


@register("topology", "sequential")
@dataclass(frozen=True)
class Sequential(_Sampled):
    """Sampled clients train one after another, in random order: each starts from the model of the
    previous client.
    """

    order: Literal["drawn", "fixed"] = "drawn"
    """Whether clients act in the order of the draw, or in the order of their ids. With "fixed", all
    clients act if sampled is unset (MetaFed).
    """
    first: str = ""
    """The name of a stage before the chain of round 1, for all clients side by side (MetaFed)."""
    last: str = ""
    """The name of a stage after the last round, for all clients side by side (MetaFed)."""

    def __call__(self, round: int, world: World) -> list[Stage]:
        chain: Sequence[int]
        if self.order == "fixed" and self.sampled is None:
            chain = everyone(world, round)
        else:
            chain = self.draw(round, world)
        if self.order == "fixed":
            chain = sorted(chain)
        stages = [Stage(round, 0, "train", (client,), sequential=True) for client in chain]
        if self.first and round == 1:
            stages.insert(0, Stage(round, 0, self.first, everyone(world, round)))
        stages += self.task_end_stages(round, world)
        if self.last and round == world.rounds:
            stages.append(Stage(round, 0, self.last, everyone(world, round)))
        return _numbered(stages)


@register("topology", "public_logits")
@dataclass(frozen=True)
class PublicLogits(_Sampled):
    """Clients train on their own data and send logits on public data. The server and then the
    clients learn from these logits.
    """

    first: str = ""
    """The name of a stage before the stages of round 1, for all clients, on public data (FedMD)."""
    start: str = ""
    """Another name of the stage ``local`` in round 1, which so can have another plan. All clients
    act in it (FedMD).
    """
    last: str = ""
    """The name of a stage after the last round, for all clients, on their own data (FedMD)."""

    def __call__(self, round: int, world: World) -> list[Stage]:
        name = "local"
        if self.start and round == 1:
            name = self.start
            clients = everyone(world, round)
        else:
            clients = tuple(sorted(self.draw(round, world)))
        stages = [
            Stage(round, 0, name, clients),
            Stage(round, 0, "teach_server", (SERVER,), "public"),
            Stage(round, 0, "distil", clients, "public"),
        ]
        if self.first and round == 1:
            stages.insert(0, Stage(round, 0, self.first, everyone(world, round), "public"))
        stages += self.task_end_stages(round, world)
        if self.last and round == world.rounds:
            stages.append(Stage(round, 0, self.last, everyone(world, round)))
        return _numbered(stages)


@register("topology", "peer_to_peer")
@dataclass(frozen=True)
class PeerToPeer:
    """In each round, every client trains its own model. Then students learn from their peers'
    models, and refine theirs.
    """

    students: tuple[int, ...] = ()
    """The ids of the clients that learn from peers; empty: all clients."""
    server: str = ""
    """The name of a stage after the fit, in which the server works on public data."""
    transfer: bool = True
    """Whether students learn from their peers' models."""
    refine: bool = True
    """Whether students refine their models after the transfer."""

    def __call__(self, round: int, world: World) -> list[Stage]:
        present = everyone(world, round)
        unknown_ids = sorted(set(self.students) - set(range(world.clients)))
        if unknown_ids:
            raise ConfigError(
                f"topology.students names {unknown_ids[0]}; clients are 0 to {world.clients - 1}"
            )
        students = present
        if self.students:
            students = tuple(sorted(set(self.students) & set(present)))
        stages = [Stage(round, 0, "fit", present)]
        if self.server:
            stages.append(Stage(round, 0, self.server, (SERVER,), "public"))
        if self.transfer and students:
            stages.append(Stage(round, 0, "transfer", students))
        if self.refine and students:
            stages.append(Stage(round, 0, "refine", students))
        return _numbered(stages)


def has_chain(stages: Sequence[Stage]) -> bool:
    """Whether a round contains a chain, in which each client passes the model to the next."""
    return any(stage.sequential for stage in stages)


def everyone(world: World, round: int) -> tuple[int, ...]:
    """All clients; with tasks, those that take part in a round."""
    if world.stream.tasks > 1:
        return tuple(world.stream.present(round))
    return tuple(range(world.clients))


def _numbered(stages: Sequence[Stage]) -> list[Stage]:
    return [replace(stage, index=i) for i, stage in enumerate(stages)]
