"""The view of each site: its part of a data set in a simulation, or the data of a real site, and
the public set.

Data may change during a run, either with the tasks or as examples arrive.
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
"""The order in which a client's examples arrive: random, or one class after another."""


@dataclass(frozen=True)
class Arrival:
    """The arrival of a client's examples over the rounds.

    Source: QKT, section 5, which leaves "real-time and highly dynamic scenarios" to future work.
    Reading: the client's part of the split arrives in equal amounts per round, and stays.
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
            order = self._order_by_class(order, labels.cpu(), draw)
        return order.argsort()

    @staticmethod
    def _order_by_class(order: Tensor, labels: Tensor, draw: torch.Generator) -> Tensor:
        """The examples of an order, with one class after another. The order of classes is drawn;
        the examples of a class keep their order.
        """
        ids = labels[order]
        class_count = 0
        if len(ids):
            class_count = int(ids.max()) + 1
        class_ranks = torch.randperm(class_count, generator=draw)
        return order[class_ranks[ids].argsort(stable=True)]

    def arrived(self, ranks: Tensor, indices: Tensor, round: int) -> Tensor:
        """The examples in ``indices`` that have arrived by a round, in order.

        ranks: (n,), the ranks of all examples of the client. indices: (k,), some of these examples.
        If none of them has arrived, the first one to arrive is returned.
        """
        count = max(1, int(self.share(round) * len(ranks) + 0.5))
        arrived = indices[ranks[indices] < count]
        if len(arrived):
            return arrived
        return indices[ranks[indices].argsort()[:1]]


@dataclass(frozen=True)
class TaskData:
    """The division of the training set into tasks, with the schedule of a stream."""

    stream: Stream
    task_of: Tensor | None
    """The task of each training example, (n,) int64; None if every task has all examples."""
    transforms: tuple[Transform | None, ...] = ()
    """The transformation of images in each task; empty if there is none."""
    by_domain: bool = False
    """Whether each task has its own test examples, selected by the value of a column."""
    tests: Mapping[int, Examples] = field(default_factory=dict)
    """The test sets of the tasks so far, at a real site."""

    def tasks_in(self, client: int, round: int) -> list[int]:
        """The tasks whose data a client has in a round: the current task, then earlier tasks in
        order if their data are kept. Empty before the client joins.
        """
        tasks = self.stream.tasks_until(client, round)
        present = tasks[-1:]
        if not self.stream.keeps_data:
            return present
        return present + tasks[:-1]

    def of_task(self, part: Tensor, task: int) -> Tensor:
        """The indices of a task's examples in ``part``, the positions of a client's examples."""
        if self.task_of is None:
            return torch.arange(len(part))
        return (self.task_of[part] == task).nonzero().flatten()

    def transformed(self, examples: Examples, task: int) -> Examples:
        """Examples after the transformation of a task."""
        if not self.transforms:
            return examples
        transform = self.transforms[task]
        if transform is None:
            return examples
        return Examples(transform(examples.values), examples.labels, examples.owners)


def concatenated(pieces: Sequence[Examples]) -> Examples:
    """The concatenation of examples, with owners if all pieces have owners. A single piece is not
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
    """A client's training examples and held-out examples, or their positions."""

    train: Part
    held_out: Part


@dataclass(frozen=True)
class SiteViews:
    """The views of the sites on a training set: of all clients in a simulation, or of one client at
    a real site.

    Raises ValueError if both ``arrival`` and ``tasks`` are set.
    """

    train: Examples
    split: ClientSplit | None
    """The positions of each client's examples in ``train``; None at a real site, which has all of
    ``train``.
    """
    classes: int
    model: Callable[[int], ModelSpec]
    """The network of each client."""
    passes: Callable[[ModelSpec], Passes]
    """Passes of a network over data."""
    inputs: Inputs
    plans: dict[str, Plan]
    """The plan of each stage, including the share of held-out examples."""
    seed: int

    public: Examples | None = None
    """The public set, which is also the server's data."""
    common_test: Examples | None = None
    own_tests: Mapping[int, Examples] = field(default_factory=dict)
    """The own test sets of clients. Those of real sites stay there."""
    queries: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The queried classes of clients."""
    labelled: frozenset[str] = frozenset()
    """The stages in which the public set has labels; in other stages, labels are -1."""
    held_out: Literal["last"] | None = None
    """The held-out examples of a client: the last ones of its part, or random ones (None)."""
    arrival: Arrival | None = None
    """The arrival of the clients' data; None if all data are available from the start."""
    tasks: TaskData | None = None
    """The division of the data into tasks; None without tasks."""
    flipped: frozenset[int] = frozenset()
    """The attacking clients, which train on false labels C - 1 - label."""

    _unlabelled: Examples | None = field(init=False, repr=False, compare=False)
    """The public set with labels -1."""

    def __post_init__(self) -> None:
        if self.arrival is not None and self.tasks is not None:
            raise ValueError("data change by arrival or by tasks, not by both")
        # Computed here, because threads share the views.
        object.__setattr__(self, "_unlabelled", _without_labels(self.public))

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

    @property
    def has_own_tests(self) -> bool:
        """Whether clients have test sets of their own, or of tasks."""
        return bool(self.own_tests) or (self.tasks is not None and bool(self.tasks.tests))

    def first_client_below(self, size: int) -> int | None:
        """The first client with fewer than ``size`` examples; None if there is none, or at a real
        site.
        """
        if self.split is None:
            return None
        clients: list[int] = np.flatnonzero(self.split.sizes < size).tolist()
        return next(iter(clients), None)

    def training_size(self, client: int, stage: str) -> int:
        """The number of a client's training examples in a stage, without held-out ones."""
        indices = self.divided_indices(client, self.size(client), self._held_out_share(stage))
        return len(indices.train)

    def label_counts(self, client: int, round: int | None = None) -> Tensor:
        """The label counts (C,) of a client's data, including held-out examples, in a round or in
        all rounds.
        """
        return self._counts(self.train.labels[self._positions_in(client, round)])

    def all_counts(self, round: int | None = None) -> Tensor:
        """The label counts (clients, C) of all clients, like ``label_counts``; (0, C) at a real
        site.
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
        """The share of each class (C,) in a client's data."""
        counts = self.label_counts(client)
        shares: list[float] = (counts / counts.sum()).tolist()
        return shares

    def division(self, client: int, share: float, round: int | None = None) -> Division[Tensor]:
        """The positions in ``train`` of a client's training and held-out examples, for a share of
        held-out examples. With a round, only examples that have arrived.
        """
        part = self.positions(client)
        if share == 0 and (round is None or self.arrival is None):
            return Division(part, part[:0])
        indices = self.divided_indices(client, len(part), share)
        train = indices.train
        held_out = indices.held_out
        if round is not None and self.arrival is not None:
            ranks = self.arrival.ranks(client, self.train.labels[part])
            train = self.arrival.arrived(ranks, train, round)
            held_out = self.arrival.arrived(ranks, held_out, round)
        return Division(part[train], part[held_out])

    def divided_indices(
        self, client: int, size: int, share: float, task: int = 0
    ) -> Division[Tensor]:
        """The indices of training and held-out examples among the ``size`` examples that a client
        has of a task. Subclasses may hold out other examples.
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

    def view(self, client: int, stage: Stage) -> View:
        """The view of a client in a stage. The server's data are the public set."""
        if client == SERVER:
            return self._view_of_server(stage)
        spec = self.model(client)
        divided = self._examples(client, self._held_out_share(stage.name), stage.round)
        data = divided.train
        counts = self._counts(data.labels)
        validation = None
        if len(divided.held_out):
            validation = divided.held_out
            counts = self.label_counts(client, stage.round)
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
        if round is None or self.tasks is None:
            return self.division(client, share=0, round=round).train
        part = self.positions(client)
        tasks = self.tasks.tasks_in(client, round)
        # The empty piece is for clients that have no task yet.
        indices = [part[:0], *(self.tasks.of_task(part, task) for task in tasks)]
        return part[torch.cat(indices)]

    def _examples(self, client: int, share: float, round: int) -> Division[Examples]:
        """The training and held-out examples of a client in a round."""
        if self.tasks is not None:
            return self._examples_of_tasks(self.tasks, client, share, round)
        division = self.division(client, share, round)
        held_out = self._no_examples
        if len(division.held_out):
            held_out = self.train.take(division.held_out)
        return Division(self.train.take(division.train), held_out)

    @cached_property
    def _no_examples(self) -> Examples:
        return self.train.take(torch.arange(0))

    def _examples_of_tasks(
        self, tasks: TaskData, client: int, share: float, round: int
    ) -> Division[Examples]:
        """The training and held-out examples of a client in a round, concatenated over its
        tasks.
        """
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

    def _counts(self, labels: Tensor) -> Tensor:
        return torch.bincount(labels.cpu(), minlength=self.classes)

    def _public(self, stage: Stage) -> Examples | None:
        if stage.name in self.labelled:
            return self.public
        return self._unlabelled


def _without_labels(public: Examples | None) -> Examples | None:
    """Public examples with labels -1; None if there are none."""
    if public is None:
        return None
    return Examples(public.values, torch.full_like(public.labels, -1))
