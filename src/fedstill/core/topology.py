"""Topologies: schedules of which clients act in which stage of a round.

Which clients are sampled follows from the run's seed and the round, or from the round alone. It
cannot depend on which clients have answered.
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
    """A schedule: the stages of each round."""

    def __call__(self, round: int, world: World) -> list[Stage]:
        """The stages of a round (1 is the first), numbered from 0."""


Cohorts = Literal["official"] | None


def sample(world: World, round: int, count: int | None, cohorts: Cohorts = None) -> list[int]:
    """Distinct clients of a round in the order drawn, uniformly; by default ten, or all if there
    are fewer.

    cohorts: None, drawn by key from the run's seed; "official", by the round alone, as FedNTD's
    code does. Clients that are not there in the round's task are passed over.

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
    """Clients a round; unset, ten, or all where there are fewer."""
    cohorts: Cohorts = None
    """Whose draws of clients: unset, the run's seed's; "official", those of FedNTD's code, the same
    for every seed.
    """
    task_end: str | None = None
    """A stage of this name follows the last round of every task, for all clients that are there;
    without [stream] the last round's.
    """

    def __post_init__(self) -> None:
        check_ranges(self)

    def drawn(self, round: int, world: World) -> list[int]:
        if self.sampled is not None and self.sampled > world.clients:
            raise ConfigError(
                f"topology.sampled = {self.sampled} is more than the {world.clients} clients there "
                "are"
            )
        return sample(world, round, self.sampled, self.cohorts)

    def ending(self, round: int, world: World) -> list[Stage]:
        """The stage that ends a task, in the task's last round. It comes before the stages that end
        the run.
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
    """A stage of this name follows, in which the server works on public data (FedDF)."""
    first: str = ""
    """A stage of this name stands before round 1's, for all clients."""
    last: str = ""
    """A stage of this name follows the last round's, for all clients (FT-FedAvg). "ridge": the
    model's last layer is solved for from sums that they send, whatever the method.
    """
    before: str = ""
    """A stage of this name stands before every round's, for the round's clients (FedRep, Ditto)."""
    after: str = ""
    """A stage of this name follows every round's, for the round's clients."""
    closing: str = ""
    """A stage of this name is the very last, in which the server works (CCVR)."""

    def __call__(self, round: int, world: World) -> list[Stage]:
        clients = tuple(sorted(self.drawn(round, world)))
        stages = [
            Stage(round, 0, name, clients) for name in (self.before, "train", self.after) if name
        ]
        if self.first and round == 1:
            stages.insert(0, Stage(round, 0, self.first, everyone(world, round)))
        if self.server:
            stages.append(Stage(round, 0, self.server, (SERVER,), "public"))
        stages += self.ending(round, world)
        if self.last and round == world.rounds:
            stages.append(Stage(round, 0, self.last, everyone(world, round)))
        if self.closing and round == world.rounds:
            stages.append(Stage(round, 0, self.closing, (SERVER,), "public"))
        return _numbered(stages)


@register("topology", "sequential")
@dataclass(frozen=True)
class Sequential(_Sampled):
    """Sampled clients train one after another, in random order; each starts from the model of the
    previous client.
    """

    order: Literal["drawn", "fixed"] = "drawn"
    """Whether clients act in the order drawn, or by their ids; then all do, if sampled is unset
    (MetaFed).
    """
    first: str = ""
    """A stage of this name stands before round 1's chain, for all clients side by side
    (MetaFed).
    """
    last: str = ""
    """A stage of this name follows the last round's chain, for all clients side by side
    (MetaFed).
    """

    def __call__(self, round: int, world: World) -> list[Stage]:
        is_everyone_in = self.order == "fixed" and self.sampled is None
        clients = everyone(world, round) if is_everyone_in else self.drawn(round, world)
        chain = sorted(clients) if self.order == "fixed" else clients
        stages = [Stage(round, 0, "train", (c,), sequential=True) for c in chain]
        if self.first and round == 1:
            stages.insert(0, Stage(round, 0, self.first, everyone(world, round)))
        stages += self.ending(round, world)
        if self.last and round == world.rounds:
            stages.append(Stage(round, 0, self.last, everyone(world, round)))
        return _numbered(stages)


@register("topology", "public_logits")
@dataclass(frozen=True)
class PublicLogits(_Sampled):
    """Clients train on their own data and send logits on public data; the server and the clients
    learn from these logits.
    """

    first: str = ""
    """A stage of this name stands before round 1's, for all clients, on public data (FedMD)."""
    start: str = ""
    """What the stage ``local`` is called in round 1, for a plan of its own; then all clients act in
    it (FedMD).
    """
    last: str = ""
    """A stage of this name follows the last round's, for all clients, on their own data (FedMD)."""

    def __call__(self, round: int, world: World) -> list[Stage]:
        name = "local"
        if self.start and round == 1:
            name = self.start
            clients = everyone(world, round)
        else:
            clients = tuple(sorted(self.drawn(round, world)))
        stages = [
            Stage(round, 0, name, clients),
            Stage(round, 0, "teach_server", (SERVER,), "public"),
            Stage(round, 0, "distil", clients, "public"),
        ]
        if self.first and round == 1:
            stages.insert(0, Stage(round, 0, self.first, everyone(world, round), "public"))
        stages += self.ending(round, world)
        if self.last and round == world.rounds:
            stages.append(Stage(round, 0, self.last, everyone(world, round)))
        return _numbered(stages)


@register("topology", "peer_to_peer")
@dataclass(frozen=True)
class PeerToPeer:
    """In each round, every client trains its own model; then clients learn from their peers'
    models, and refine.
    """

    students: tuple[int, ...] = ()
    """Ids of the clients that learn; empty, all do."""
    server: str = ""
    """A stage of this name follows the fit, in which the server works on public data."""
    transfer: bool = True
    """Whether students learn from their peers' models."""
    refine: bool = True
    """Whether students refine what they have learned."""

    def __call__(self, round: int, world: World) -> list[Stage]:
        present = everyone(world, round)
        strangers = sorted(set(self.students) - set(range(world.clients)))
        if strangers:
            raise ConfigError(
                f"topology.students names {strangers[0]}; clients are 0 to {world.clients - 1}"
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


def has_links(stages: Sequence[Stage]) -> bool:
    """Whether a round is a chain, in which a client hands the model on to the next, whatever stages
    stand around it.
    """
    return any(stage.sequential for stage in stages)


def everyone(world: World, round: int) -> tuple[int, ...]:
    """All clients; with tasks, those that take part in a round."""
    if world.stream.tasks > 1:
        return tuple(world.stream.present(round))
    return tuple(range(world.clients))


def _numbered(stages: Sequence[Stage]) -> list[Stage]:
    return [replace(stage, index=i) for i, stage in enumerate(stages)]
