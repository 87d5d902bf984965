"""The view that each site has of data: its part of a data set in a simulation, or its own data at a
real site, and the public set.

Data may change with the rounds, by tasks or by arrival, but not by both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Examples, ModelSpec, Passes, Plan, Stage, View
from fedstill.core.stream import Stream, Transform
from fedstill.data.client_split import ClientSplit
from fedstill.data.inputs import Inputs

Order = Literal["mixed", "by_class"]
"""In which order a client's examples arrive: drawn evenly, or one class after another."""


@dataclass(frozen=True)
class Arrival:
    """How a client's examples arrive with the rounds.

    Source: QKT, section 5, leaves "real-time and highly dynamic scenarios" to future work, without
    a rule.
    Reading: what arrives is the client's own part of the split, in equal parts; what has arrived
    stays.
    """

    order: Order
    at_first: float
    """The share in (0, 1] of its examples that a client has in round 1."""
    rounds: int
    """The round in which a client has all its examples."""
    seed: int

    def share(self, round: int) -> float:
        """The share of its examples that a client has in a round; round 0 counts as round 1.

        >>> [Arrival("mixed", 0.5, rounds=3, seed=0).share(r) for r in (0, 1, 2, 3)]
        [0.5, 0.5, 0.75, 1.0]
        """
        if round >= self.rounds:
            return 1.0
        return self.at_first + (1 - self.at_first) * (max(round, 1) - 1) / (self.rounds - 1)

    def ranks(self, client: int, labels: Tensor) -> Tensor:
        """The rank (n,) int64 in which each of a client's examples arrives, from 0.

        labels: (n,), of all its examples.
        """
        draw = generator(seed_for(self.seed, 0, 0, client, "arrival"))
        order = torch.randperm(len(labels), generator=draw)
        if self.order == "by_class":
            ids = labels.cpu()[order]
            class_count = int(ids.max()) + 1 if len(ids) else 0
            class_ranks = torch.randperm(class_count, generator=draw)
            order = order[class_ranks[ids].argsort(stable=True)]
        return order.argsort()

    def arrived(self, ranks: Tensor, indices: Tensor, round: int) -> Tensor:
        """Those of some of a client's examples that have arrived by a round, in their order.

        ranks: (n,), of all its examples. indices: (k,), of some examples among them. If none of
        these has arrived, the first to arrive is returned.
        """
        count = max(1, int(self.share(round) * len(ranks) + 0.5))
        arrived = indices[ranks[indices] < count]
        if len(arrived):
            return arrived
        return indices[ranks[indices].argsort()[:1]]


@dataclass(frozen=True)
class TaskData:
    """A cut of the training set into tasks, on the clock of a stream."""

    stream: Stream
    task_of: Tensor | None
    """The task of each training example, (n,) int64; None if every task has all of them."""
    transforms: tuple[Transform | None, ...] = ()
    """How each task changes its images; empty if they stay as they are."""
    by_domain: bool = False
    """Whether each task has test examples of its own, by the value of a column."""
    tests: Mapping[int, Examples] = field(default_factory=dict)
    """The test sets of the tasks so far, at a real site."""

    def tasks_in(self, client: int, round: int) -> list[int]:
        """The tasks whose data a client has in a round, the present one first.

        Older tasks follow in order, if their data are kept. There are none before the client joins.
        """
        tasks = self.stream.tasks_until(client, round)
        present = tasks[-1:]
        if not self.stream.keeps_data:
            return present
        return present + tasks[:-1]

    def of_task(self, part: Tensor, task: int) -> Tensor:
        """The indices of a task's examples in ``part``, a client's positions in the training
        set.
        """
        if self.task_of is None:
            return torch.arange(len(part))
        return (self.task_of[part] == task).nonzero().flatten()

    def transformed(self, examples: Examples, task: int) -> Examples:
        """Examples with the images that a task makes of them."""
        if not self.transforms:
            return examples
        transform = self.transforms[task]
        if transform is None:
            return examples
        return Examples(transform(examples.values), examples.labels, examples.owners)


def concatenated(pieces: Sequence[Examples]) -> Examples:
    """Examples one below another, with owners where all pieces have them; a single piece is not
    copied.
    """
    if len(pieces) == 1:
        return pieces[0]
    values = torch.cat([piece.values for piece in pieces])
    labels = torch.cat([piece.labels for piece in pieces])
    owners = [piece.owners for piece in pieces if piece.owners is not None]
    if len(owners) < len(pieces):
        return Examples(values, labels)
    return Examples(values, labels, torch.cat(owners))


Part = TypeVar("Part", Tensor, Examples)


@dataclass(frozen=True, eq=False)
class Division(Generic[Part]):
    """What a client trains on, and what it holds out: examples, or their positions."""

    train: Part
    held_out: Part


@dataclass(frozen=True)
class SiteViews:
    """The views of sites over one training set: all clients' in a simulation, one client's at a
    real site.

    Raises ValueError if both ``arrival`` and ``tasks`` are set.
    """

    train: Examples
    split: ClientSplit | None
    """The positions of each client's examples in ``train``; None at a real site, to which all of
    ``train`` belong.
    """
    classes: int
    model: Callable[[int], ModelSpec]
    """The network of each client."""
    passes: Callable[[ModelSpec], Passes]
    """How a network is run over data."""
    inputs: Inputs
    plans: dict[str, Plan]
    """The plan of each stage, with the share of its own data that a client holds out."""
    seed: int

    public: Examples | None = None
    """The public set, which is also the server's data."""
    common_test: Examples | None = None
    own_tests: Mapping[int, Examples] = field(default_factory=dict)
    """Test sets of clients. At real sites, they stay there."""
    queries: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The classes that clients ask for."""
    labelled: frozenset[str] = frozenset()
    """The stages in which the public set has labels; in all others, they are -1."""
    held_out: Literal["last"] | None = None
    """Which examples a client holds out: the last of its part, or random ones (None)."""
    arrival: Arrival | None = None
    """How the data of clients grow with the rounds; None if all are there from the start."""
    tasks: TaskData | None = None
    """Which data belong to which task; None without tasks."""
    flipped: frozenset[int] = frozenset()
    """The clients that attack: they train on false labels, C - 1 - label."""

    def __post_init__(self) -> None:
        if self.arrival is not None and self.tasks is not None:
            raise ValueError("data change by arrival or by tasks, not by both")
        self._unlabelled  # noqa: B018  (made once, before there are threads)

    def positions(self, client: int) -> Tensor:
        """The positions of a client's examples in ``train``."""
        if self.split is None:
            return torch.arange(len(self.train))
        return torch.from_numpy(self.split[client])

    def size(self, client: int) -> int:
        """The number of a site's own examples."""
        if client == SERVER:
            return len(self.public or ())
        return len(self.positions(client))

    def smaller_than(self, size: int) -> int | None:
        """The first client that has fewer examples than this; None if there is none, or where sites
        keep their data.
        """
        if self.split is None:
            return None
        clients: list[int] = np.flatnonzero(self.split.sizes < size).tolist()
        return next(iter(clients), None)

    def trains_on(self, client: int, stage: str) -> int:
        """The number of a site's own examples that it does not hold out in a stage."""
        indices = self.divided_indices(client, self.size(client), self._held_out_share(stage))
        return len(indices.train)

    def counts(self, client: int, round: int | None = None) -> Tensor:
        """Label counts (C,) of a client's own data, held-out ones included: of what it has in a
        round, or of all.
        """
        return self._counts(self.train.labels[self._positions_in(client, round)])

    def all_counts(self, round: int | None = None) -> Tensor:
        """The label counts (clients, C) of all clients, as ``counts``; (0, C) where the sites keep
        them.
        """
        split = self.split
        if split is None:
            return torch.zeros(0, self.classes, dtype=torch.int64)
        changes = self.tasks is not None or self.arrival is not None
        if round is not None and changes:
            parts = [self._positions_in(client, round).numpy() for client in range(len(split))]
            split = ClientSplit.of_parts(parts)
        return split.label_table(self.train.labels, self.classes)

    def label_shares(self, client: int) -> list[float]:
        """The share of each class (C,) in a client's own data."""
        counts = self.counts(client)
        shares: list[float] = (counts / counts.sum()).tolist()
        return shares

    def division(self, client: int, share: float, round: int | None = None) -> Division[Tensor]:
        """The positions in ``train`` of a client's examples, of which it holds out a share: of
        those that have arrived in a round, or of all.
        """
        part = self.positions(client)
        indices = self.divided_indices(client, len(part), share)
        train = indices.train
        held_out = indices.held_out
        if round is not None and self.arrival is not None:
            ranks = self.arrival.ranks(client, self.train.labels[part])
            train = self.arrival.arrived(ranks, train, round)
            held_out = self.arrival.arrived(ranks, held_out, round)
        return Division(part[train], part[held_out])

    def view(self, client: int, stage: Stage) -> View:
        """What a client sees in a stage; the server sees the public set as its data."""
        if client == SERVER:
            return self._view_of_server(stage)
        spec = self.model(client)
        divided = self._examples(client, self._held_out_share(stage.name), stage.round)
        data = divided.train
        counts = self._counts(data.labels)
        validation = None
        if len(divided.held_out):
            validation = divided.held_out
            counts = self.counts(client, stage.round)
        if client in self.flipped:
            data = replace(data, labels=self.classes - 1 - data.labels)
            counts = counts.flip(0)
        tests: Mapping[int, Examples] = {}
        if self.tasks is not None:
            tests = self.tasks.tests
        return View(
            client=client,
            model=spec,
            data=data,
            counts=counts,
            public=self._public(stage),
            validation=validation,
            test=self.own_tests.get(client),
            passes=self.passes(spec),
            query=self.queries.get(client, ()),
            tests=tests,
        )

    def _view_of_server(self, stage: Stage) -> View:
        spec = self.model(SERVER)
        public = self._public(stage)
        nothing = Examples(self.train.values[:0], self.train.labels[:0])
        return View(
            client=SERVER,
            model=spec,
            data=public or nothing,
            counts=torch.zeros(self.classes, dtype=torch.int64),
            public=public,
            validation=None,
            test=None,
            passes=self.passes(spec),
        )

    def _held_out_share(self, stage: str) -> float:
        if stage not in self.plans:
            return 0.0
        return self.plans[stage].validation

    def _positions_in(self, client: int, round: int | None) -> Tensor:
        """The positions of a client's examples in a round, or of all its examples."""
        part = self.positions(client)
        if round is None:
            return part
        if self.tasks is not None:
            tasks = self.tasks.tasks_in(client, round)
            # An empty piece more, for a client that has no task yet.
            indices = [part[:0], *(self.tasks.of_task(part, task) for task in tasks)]
            return part[torch.cat(indices)]
        if self.arrival is not None:
            ranks = self.arrival.ranks(client, self.train.labels[part])
            return part[self.arrival.arrived(ranks, torch.arange(len(part)), round)]
        return part

    def _examples(self, client: int, share: float, round: int) -> Division[Examples]:
        """A client's examples in a round, of which it holds out a share."""
        if self.tasks is not None:
            return self._examples_of_tasks(self.tasks, client, share, round)
        division = self.division(client, share, round)
        return Division(self.train.take(division.train), self.train.take(division.held_out))

    def _examples_of_tasks(
        self, tasks: TaskData, client: int, share: float, round: int
    ) -> Division[Examples]:
        """The same of each task that a client has, one task's examples below another's."""
        part = self.positions(client)
        train: list[Examples] = []
        held_out: list[Examples] = []
        for task in tasks.tasks_in(client, round):
            positions = part[tasks.of_task(part, task)]
            indices = self.divided_indices(client, len(positions), share, task)
            train.append(tasks.transformed(self.train.take(positions[indices.train]), task))
            held_out.append(tasks.transformed(self.train.take(positions[indices.held_out]), task))
        nothing = self.train.take(part[:0])
        return Division(concatenated(train or [nothing]), concatenated(held_out or [nothing]))

    def divided_indices(
        self, client: int, size: int, share: float, task: int = 0
    ) -> Division[Tensor]:
        """The indices from 0 to ``size`` of a client's examples of a task, of which it holds out a
        share. A subclass may hold out others.
        """
        indices = torch.arange(size)
        if share == 0 or size < 2:
            return Division(indices, indices[:0])
        if self.held_out == "last":
            rounded = int((1 - share) * size)  # down, as in HiPer-FedKD's notebooks
            trained = min(max(1, rounded), size - 1)
            return Division(indices[:trained], indices[trained:])
        draw = generator(seed_for(self.seed, task, 0, client, "validation"))
        order = torch.randperm(size, generator=draw)
        count = max(1, round(share * size))
        return Division(order[count:].sort().values, order[:count].sort().values)

    def _counts(self, labels: Tensor) -> Tensor:
        return torch.bincount(labels.cpu(), minlength=self.classes)

    def _public(self, stage: Stage) -> Examples | None:
        if stage.name in self.labelled:
            return self.public
        return self._unlabelled

    @cached_property
    def _unlabelled(self) -> Examples | None:
        if self.public is None:
            return None
        return Examples(self.public.values, torch.full_like(self.public.labels, -1))
