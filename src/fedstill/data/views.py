"""What each site sees: its part of a data set in a simulation, its own data at a real site; and the
public set. Data may be new: some examples are there in round 1, the rest comes with the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

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
    """In which order a client's examples arrive, the share ``at_first`` in (0, 1] of round 1, in
    how many rounds.

    Source: QKT, section 5, leaves "real-time and highly dynamic scenarios" to future work, without
    a rule.
    Reading: what arrives is the client's own part of the split, in equal parts; what has arrived
    stays.
    """

    order: Order
    at_first: float
    rounds: int
    seed: int

    def share(self, round: int) -> float:
        """The share of its examples that a client has in a round; the census, round 0, is before
        round 1.

        >>> [Arrival("mixed", 0.5, rounds=3, seed=0).share(r) for r in (0, 1, 2, 3)]
        [0.5, 0.5, 0.75, 1.0]
        """
        if round >= self.rounds:
            return 1.0
        return self.at_first + (1 - self.at_first) * (max(round, 1) - 1) / (self.rounds - 1)

    def turns(self, client: int, labels: Tensor) -> Tensor:
        """When each of a client's examples arrives, given its labels (n,): (n,) int64, 0 for the
        first.
        """
        draw = generator(seed_for(self.seed, 0, 0, client, "arrival"))
        order = torch.randperm(len(labels), generator=draw)
        if self.order == "by_class":
            ids = labels.cpu()[order]
            classes = torch.randperm(int(ids.max()) + 1 if len(ids) else 0, generator=draw)
            order = order[classes[ids].argsort(stable=True)]
        return order.argsort()

    def there(self, turns: Tensor, some: Tensor, round: int) -> Tensor:
        """Those of some of a client's examples (k,), given by number, that have arrived by a round,
        in their order.

        turns: (n,) of all its examples. At least one of them: the first to arrive, if the round has
        none of them yet.
        """
        count = max(1, int(self.share(round) * len(turns) + 0.5))
        arrived = some[turns[some] < count]
        return arrived if len(arrived) else some[turns[some].argsort()[:1]]


@dataclass(frozen=True)
class TaskData:
    """A cut of the training set into tasks, on the clock of a stream.

    task_of: (n,) int64, the task of each training example; None where every task shows all of them.
    transforms: how each task shows its images; empty if it shows them as they are. by_domain:
    whether each task has test examples of its own, those of its value of a column. tests: a real
    site's test sets of the tasks so far.
    """

    stream: Stream
    task_of: Tensor | None
    transforms: tuple[Transform | None, ...] = ()
    by_domain: bool = False
    tests: Mapping[int, Examples] = field(default_factory=dict)

    def had(self, client: int, round: int) -> list[int]:
        """The tasks whose data a client has in a round: its present one first, then the older ones
        in order, if these are kept; none before it joins.
        """
        tasks = self.stream.been_in(client, round)
        present = tasks[-1:]
        if not self.stream.kept:
            return present
        return present + tasks[:-1]

    def of_task(self, part: Tensor, task: int) -> Tensor:
        """Which of a client's examples, given their positions in the training set, belong to a
        task, by number.
        """
        if self.task_of is None:
            return torch.arange(len(part))
        return (self.task_of[part] == task).nonzero().flatten()

    def shown(self, examples: Examples, task: int) -> Examples:
        """Examples as a task shows them."""
        transform = self.transforms[task] if self.transforms else None
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


class Division(NamedTuple):
    """Which examples a client trains on, and which it holds out to validate."""

    train: Tensor
    held_out: Tensor


@dataclass(frozen=True)
class SiteViews:
    """The views of sites over one training set: all clients' in a simulation, one client's at a
    real site.

    split: which client has which examples of ``train``; None where sites keep their data: then all
    of ``train`` are the site's own. public: the public set, which is also the server's data. Its
    labels are shown in the stages named in ``labelled`` only, and are -1 in all others. own_tests:
    test sets of clients, which at real sites stay there. plans: they say by stage what share of its
    own data a client holds out; ``held_out`` says which: drawn by key, or the last of its part.
    queries: what clients ask for. passes: how a model is run over data. arrival: how the data of
    clients grow with the rounds; None if all are there from the start. tasks: which data belong to
    which task. flipped: clients that train on false labels, C - 1 - label.
    """

    train: Examples
    split: ClientSplit | None
    classes: int
    model: Callable[[int], ModelSpec]
    passes: Callable[[ModelSpec], Passes]
    inputs: Inputs
    plans: dict[str, Plan]
    seed: int
    public: Examples | None = None
    common_test: Examples | None = None
    own_tests: Mapping[int, Examples] = field(default_factory=dict)
    queries: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    labelled: frozenset[str] = frozenset()
    held_out: Literal["last"] | None = None
    arrival: Arrival | None = None
    tasks: TaskData | None = None
    flipped: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
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
        return clients[0] if clients else None

    def trains_on(self, client: int, stage: str) -> int:
        """The number of a site's own examples that it does not hold out in a stage."""
        return len(self._numbers(client, self.size(client), self._held_out_share(stage)).train)

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
            clients = range(len(split))
            split = ClientSplit.of_parts([self._positions_in(c, round).numpy() for c in clients])
        return split.label_table(self.train.labels, self.classes)

    def label_shares(self, client: int) -> list[float]:
        """What shares of a client's own data the classes (C,) have."""
        counts = self.counts(client)
        shares: list[float] = (counts / counts.sum()).tolist()
        return shares

    def division(self, client: int, share: float, round: int | None = None) -> Division:
        """The positions in ``train`` of what a client trains on, and of the share that it holds
        out: of a round, or of all rounds.
        """
        part = self.positions(client)
        train, held_out = self._numbers(client, len(part), share)
        if round is not None and self.arrival is not None:
            turns = self.arrival.turns(client, self.train.labels[part])
            train = self.arrival.there(turns, train, round)
            held_out = self.arrival.there(turns, held_out, round)
        return Division(part[train], part[held_out])

    def view(self, client: int, stage: Stage) -> View:
        """What a client sees in a stage; the server sees the public set as its data."""
        if client == SERVER:
            return self._view_of_server(stage)
        spec = self.model(client)
        data, held_out = self._shown(client, self._held_out_share(stage.name), stage.round)
        counts = self._counts(data.labels)
        if len(held_out):
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
            validation=held_out if len(held_out) else None,
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
        plan = self.plans.get(stage)
        return 0.0 if plan is None else plan.validation

    def _positions_in(self, client: int, round: int | None) -> Tensor:
        """The positions of what a client has in a round, or of all that it has."""
        part = self.positions(client)
        if round is None:
            return part
        if self.tasks is not None:
            numbers = [self.tasks.of_task(part, task) for task in self.tasks.had(client, round)]
            # An empty piece more, for a client that has no task yet.
            part = part[torch.cat([*numbers, part[:0]])]
        if self.arrival is not None:
            turns = self.arrival.turns(client, self.train.labels[part])
            part = part[self.arrival.there(turns, torch.arange(len(part)), round)]
        return part

    def _shown(self, client: int, share: float, round: int) -> tuple[Examples, Examples]:
        """What a client trains on in a round, and what it holds out, as its task shows them."""
        if self.tasks is None:
            division = self.division(client, share, round)
            return self.train.take(division.train), self.train.take(division.held_out)
        part = self.positions(client)
        trained: list[Examples] = []
        held_out: list[Examples] = []
        for task in self.tasks.had(client, round):
            of_task = part[self.tasks.of_task(part, task)]
            numbers = self._numbers(client, len(of_task), share, task)
            trained.append(self.tasks.shown(self.train.take(of_task[numbers.train]), task))
            held_out.append(self.tasks.shown(self.train.take(of_task[numbers.held_out]), task))
        nothing = self.train.take(part[:0])
        return concatenated(trained or [nothing]), concatenated(held_out or [nothing])

    def _numbers(self, client: int, size: int, share: float, task: int = 0) -> Division:
        """Which of a client's examples it trains on and which it holds out, by their numbers within
        its part, from 0.
        """
        everything = torch.arange(size)
        if share == 0 or size < 2:
            return Division(everything, everything[:0])
        if self.held_out == "last":
            rounded = int((1 - share) * size)  # down, as in HiPer-FedKD's notebooks
            trained = min(max(1, rounded), size - 1)
            return Division(everything[:trained], everything[trained:])
        draw = generator(seed_for(self.seed, task, 0, client, "validation"))
        order = torch.randperm(size, generator=draw)
        count = max(1, round(share * size))
        return Division(order[count:].sort().values, order[:count].sort().values)

    def _counts(self, labels: Tensor) -> Tensor:
        return torch.bincount(labels.cpu(), minlength=self.classes)

    def _public(self, stage: Stage) -> Examples | None:
        return self.public if stage.name in self.labelled else self._unlabelled

    @cached_property
    def _unlabelled(self) -> Examples | None:
        if self.public is None:
            return None
        return Examples(self.public.values, torch.full_like(self.public.labels, -1))
