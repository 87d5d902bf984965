"""What each site sees: its part of a data set in a simulation, its own data at a real site; and the
public set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedstill.core.keys import generator, seed_for
from fedstill.core.records import SERVER, Examples, ModelSpec, Passes, Plan, Stage, View
from fedstill.core.stream import Stream, Transform
from fedstill.data.arrival import Arrival
from fedstill.data.client_split import ClientSplit
from fedstill.data.inputs import Inputs

# Which of a client's examples belong to which task, and how a task shows its images.


@dataclass(frozen=True)
class TaskData:
    """A cut of the training set, on the clock of a stream.

    ``task_of``: (n,) int64, the task of each training example; None where every task shows all of
    them. ``transforms``: how each task shows its images; empty: as they are. ``by_domain``: whether
    each task has test examples of its own, those of its value of a column. ``tests``: a real site's
    own test sets of the tasks so far.
    """

    stream: Stream
    task_of: Tensor | None
    transforms: tuple[Transform | None, ...] = ()
    by_domain: bool = False
    tests: Mapping[int, Examples] = field(default_factory=dict)

    def had(self, client: int, round: int) -> list[int]:
        """The tasks whose data a client has in a round: its own first, then the older ones in
        order, if these are kept.

        The older ones are those that it has been in; none before it joins.
        """
        been = self.stream.been_in(client, round)
        return [*been[-1:], *(been[:-1] if self.stream.kept else ())]

    def of_task(self, part: Tensor, task: int) -> Tensor:
        """Which of a client's examples, given their positions in the training set, belong to a
        task, by number.
        """
        if self.task_of is None:
            return torch.arange(len(part))
        return (self.task_of[part] == task).nonzero().flatten()

    def shown(self, examples: Examples, task: int) -> Examples:
        """Examples as a task shows them."""
        change = self.transforms[task] if self.transforms else None
        return (
            examples
            if change is None
            else Examples(change(examples.values), examples.labels, examples.owners)
        )


def concatenated(pieces: Sequence[Examples]) -> Examples:
    """Examples one below another, with owners where all pieces have them; a single piece is not
    copied.
    """
    if len(pieces) == 1:
        return pieces[0]
    owners = [piece.owners for piece in pieces if piece.owners is not None]
    return Examples(
        torch.cat([piece.values for piece in pieces]),
        torch.cat([piece.labels for piece in pieces]),
        torch.cat(owners) if len(owners) == len(pieces) else None,
    )


@dataclass(frozen=True)
class SiteViews:
    """The views of sites over one training set: all clients' in a simulation, one client's at a
    real site.

    ``split``: which client has which examples of ``train``; None where sites keep their data: then
    all of ``train`` are the site's own. ``public``: the public set, which is also the
    server's data. Its labels are shown in the stages named in ``labelled`` only, and are -1 in all
    others.
    ``own_tests``: test sets of clients, which at real sites stay there. ``plans`` say by stage what
    share of its own data a client holds out; ``held_out`` which: drawn by key, or the last of its
    part. ``queries``: what clients ask for. ``passes``: how a model is run over data. ``arrival``:
    how the data of clients grow with the rounds; None: all are there from the start. ``tasks``:
    which data belong to which task.
    ``flipped``: clients that train on false labels, C - 1 - label.
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

    def counts(self, client: int, round: int | None = None) -> Tensor:
        """Label counts (C,) of a client's own data, held-out ones included: of what it has in a
        round, or of all.
        """
        return self._counts(self.train.labels[self._had(client, round)])

    def all_counts(self, round: int | None = None) -> Tensor:
        """The label counts (clients, C) of all clients, as ``counts``; (0, C) where the sites keep
        them.
        """
        if self.split is None:
            return torch.zeros(0, self.classes, dtype=torch.int64)
        split = self.split
        if round is not None and (self.tasks is not None or self.arrival is not None):
            in_round = [self._had(client, round).numpy() for client in range(len(split))]
            split = ClientSplit.of_parts(in_round)
        return split.label_table(self.train.labels, self.classes)

    def _had(self, client: int, round: int | None) -> Tensor:
        part = self.positions(client)
        if round is not None and self.tasks is not None:
            some = [self.tasks.of_task(part, task) for task in self.tasks.had(client, round)]
            part = part[torch.cat([*some, part[:0]])]
        if round is not None and self.arrival is not None:
            turns = self.arrival.turns(client, self.train.labels[part])
            part = part[self.arrival.there(turns, torch.arange(len(part)), round)]
        return part

    def smaller_than(self, size: int) -> int | None:
        """The first client that has fewer examples than this; None if there is none, or where sites
        keep their data.
        """
        if self.split is None:
            return None
        return next(iter(np.flatnonzero(self.split.sizes < size).tolist()), None)

    def label_shares(self, client: int) -> list[float]:
        """What shares of a client's own data the classes (C,) have."""
        counts = self.counts(client)
        shares: list[float] = (counts / counts.sum()).tolist()
        return shares

    def trains_on(self, client: int, stage: str) -> int:
        """The number of a site's own examples that it does not hold out in a stage."""
        plan = self.plans.get(stage)
        return len(self._held_apart(client, self.size(client), plan.validation if plan else 0.0)[0])

    def size(self, client: int) -> int:
        """The number of a site's own examples."""
        return len(self.public or ()) if client == SERVER else len(self.positions(client))

    def view(self, client: int, stage: Stage) -> View:
        """What a client sees in a stage; the server sees the public set as its data."""
        spec = self.model(client)
        passes, public = self.passes(spec), self._public(stage)
        if client == SERVER:
            data = public or Examples(self.train.values[:0], self.train.labels[:0])
            counts = torch.zeros(self.classes, dtype=torch.int64)
            return View(client, spec, data, counts, public, None, None, passes)
        plan = self.plans.get(stage.name)
        data, held = self._shown(client, plan.validation if plan else 0.0, stage.round)
        if client in self.flipped:
            data = replace(data, labels=self.classes - 1 - data.labels)
        validation, query = held if len(held) else None, self.queries.get(client, ())
        test = self.own_tests.get(client)
        counts = self.counts(client, stage.round) if len(held) else self._counts(data.labels)
        if len(held) and client in self.flipped:
            counts = counts.flip(0)
        tests = self.tasks.tests if self.tasks is not None else {}
        return View(client, spec, data, counts, public, validation, test, passes, query, tests)

    def _shown(self, client: int, share: float, round: int) -> tuple[Examples, Examples]:
        """What a client trains on in a round, and what it holds out, as its task shows them."""
        if self.tasks is None:
            own, held = self._split(client, share, round)
            return self.train.take(own), self.train.take(held)
        part, trained, apart = self.positions(client), list[Examples](), list[Examples]()
        for task in self.tasks.had(client, round):
            some = part[self.tasks.of_task(part, task)]
            for pieces, which in zip(
                (trained, apart), self._held_apart(client, len(some), share, task), strict=True
            ):
                pieces.append(self.tasks.shown(self.train.take(some[which]), task))
        nothing = self.train.take(part[:0])
        return concatenated(trained or [nothing]), concatenated(apart or [nothing])

    def _counts(self, labels: Tensor) -> Tensor:
        return torch.bincount(labels.cpu(), minlength=self.classes)

    def _public(self, stage: Stage) -> Examples | None:
        return self.public if stage.name in self.labelled else self._unlabelled

    @cached_property
    def _unlabelled(self) -> Examples | None:
        return self.public and Examples(self.public.values, torch.full_like(self.public.labels, -1))

    def _split(self, client: int, share: float, round: int | None = None) -> tuple[Tensor, Tensor]:
        """Positions in ``train`` of what a client trains on, and of the share that it holds out; of
        a round, or all.
        """
        part = self.positions(client)
        own, held = self._held_apart(client, len(part), share)
        if round is not None and self.arrival is not None:
            turns = self.arrival.turns(client, self.train.labels[part])
            own, held = (self.arrival.there(turns, some, round) for some in (own, held))
        return part[own], part[held]

    def _held_apart(
        self, client: int, size: int, share: float, task: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Which of a client's examples (by their number, from 0) it trains on, and which it holds
        out.
        """
        everything = torch.arange(size)
        if self.held_out == "last" and share > 0 and size > 1:
            rounded = int((1 - share) * size)  # down, as in HiPer-FedKD's notebooks
            kept = min(max(1, rounded), size - 1)
            return everything[:kept], everything[kept:]
        held = max(1, round(share * size)) if share > 0 and size > 1 else 0
        if not held:
            return everything, everything[:0]
        order = torch.randperm(
            size, generator=generator(seed_for(self.seed, task, 0, client, "validation"))
        )
        return order[held:].sort().values, order[:held].sort().values
