"""Tasks over time: a stream says which clients are in which task in a round, and how the data are
cut into tasks.

Both are pure functions of the config and the seed, so nothing has to be saved. Tasks are counted
from 0 here, and from 1 where people read them.
"""

from __future__ import annotations

import bisect
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.core.errors import ConfigError, DataError
from fedstill.core.keys import generator, seed_for

Head = Literal["all", "seen", "task"]
"""Which outputs take part in training: all, those of the classes seen so far, or those of the
task's own classes.
"""

EVERYONE = -1
"""The client whose clock is never late: the server's id."""

Transform = Callable[[Tensor], Tensor]
"""From images (n, channels, H, W) uint8 to images of the same shape, by whole numbers only."""


@dataclass(frozen=True)
class Cut:
    """How a kind of stream cuts the training set into tasks."""

    task: NDArray[np.int64] | None
    """The task of each example, from 0, (n,) int64; None if every task shows all examples."""
    classes: tuple[tuple[int, ...], ...]
    """The classes of each task."""
    transforms: tuple[Transform | None, ...] = ()
    """How each task shows its images; empty if they stay as they are."""
    mix: tuple[float, ...] = ()
    """For each task, the share of examples that go to their client of a second split instead of the
    first; empty if there is one split.
    """
    by_domain: bool = False
    """Whether test examples, too, belong to the task of their column's value."""


@dataclass(frozen=True)
class Stream:
    """The schedule of a run's tasks, which everybody may know. By default, one task for the whole
    run.

    All draws are made by key from ``seed``.
    """

    starts: tuple[int, ...] = (1,)
    """The first round of each task."""
    rounds: int = 0
    """The number of the run's rounds."""
    by_task: tuple[tuple[int, ...], ...] = ()
    """The classes of each task."""
    head: Head = "all"
    """Which outputs take part in training."""
    restarts: bool = True
    """Whether the learning rate's schedule begins anew with each task."""
    clients: int = 0
    lag: int = 0
    """The most rounds by which a client may be late; each client's lag is drawn."""
    join: float = 1.0
    """The share of clients that take part from the start; the others join evenly over the tasks."""
    stay: float = 0.0
    """The share of clients that stay with the old task when the task changes."""
    kept: bool = False
    """Whether clients also train on the data of earlier tasks."""
    seed: int = 0
    absent: frozenset[tuple[int, int]] = field(default=frozenset(), repr=False)
    """The pairs (task, client) of clients without examples in a task."""

    @property
    def nothing_before(self) -> str:
        """The warning for a method that uses earlier tasks if the run has only one; empty if it has
        more.
        """
        if self.tasks > 1:
            return ""
        return "without [stream] there is no earlier task, and this trains as fedavg; add [stream]"

    @property
    def tasks(self) -> int:
        """How many tasks there are."""
        return len(self.starts)

    def task(self, round: int, client: int = EVERYONE) -> int:
        """The task that a client is in, from 0; -1 while it has not joined. Without a client the
        run's own task.
        """
        if self.tasks == 1:
            return 0
        if client < 0:
            return self._clock(round)
        task = self._clock(round - self._lag_of(client))
        entry = self._entries[client]
        if task < entry:
            return -1
        while task > entry and client in self._staying[task]:
            task -= 1
        return task

    def been_in(self, client: int, round: int) -> list[int]:
        """The tasks that a client has been in by a round, ascending; those that it passed over are
        not among them.
        """
        starts = [start + self._lag_of(client) for start in self.starts]
        rounds = [start for start in starts if start < round]
        tasks = {self.task(r, client) for r in (*rounds, round)}
        return sorted(tasks - {-1})

    def begins(self, round: int) -> bool:
        """Whether a task begins in a round."""
        return round in self.starts

    def ends(self, round: int) -> bool:
        """Whether a task ends with a round."""
        return round == self.rounds or round + 1 in self.starts

    def changes(self, round: int) -> bool:
        """Whether the run or any client changes its task between the round before and this one."""
        if round <= 1 or self.tasks == 1:
            return False
        return any(round - lag in self.starts[1:] for lag in range(self.lag + 1))

    def within(self, round: int) -> int:
        """The round counted within its task, from 1; as it is where schedules go on over the
        run.
        """
        if not self.restarts:
            return round
        return round - self.starts[self._clock(round)] + 1

    def classes(self, task: int) -> tuple[int, ...]:
        """The classes of a task."""
        return self.by_task[task]

    def seen(self, task: int) -> tuple[int, ...]:
        """The classes of a task and of all before it, ascending."""
        return tuple(sorted({c for classes in self.by_task[: task + 1] for c in classes}))

    def outputs(self, task: int, classes: int) -> tuple[int, ...]:
        """The classes whose outputs take part in a task's training, of so many in all.

        Where data of earlier tasks are kept, their outputs take part as well.
        """
        if self.head == "all":
            return tuple(range(classes))
        if self.head == "task" and not self.kept:
            return self.classes(task)
        return self.seen(task)

    def present(self, round: int) -> list[int]:
        """The clients that have joined by a round, and have examples in their task of it."""
        everyone = range(self.clients)
        if self.join >= 1 and not self.absent:
            return list(everyone)
        tasks = ((client, self.task(round, client)) for client in everyone)
        return [client for client, task in tasks if task >= 0 and (task, client) not in self.absent]

    def mask(self, round: int, client: int, classes: int) -> Tensor | None:
        """Which outputs take part in a client's training in a round, (C,) bool; None where all
        do.
        """
        task = self.task(round, client)
        if task < 0:
            return None
        outputs = self.outputs(task, classes)
        if len(outputs) == classes:
            return None
        mask = torch.zeros(classes, dtype=torch.bool)
        mask[list(outputs)] = True
        return mask

    def _lag_of(self, client: int) -> int:
        if not self.lag:
            return 0
        return self._lags[client]

    def _clock(self, round: int) -> int:
        return max(0, bisect.bisect_right(self.starts, round) - 1)

    def _draw(self, what: str, task: int = 0) -> torch.Generator:
        return generator(seed_for(self.seed, task, 0, EVERYONE, what))

    @cached_property
    def _lags(self) -> list[int]:
        lags: list[int] = torch.randint(
            0, self.lag + 1, (self.clients,), generator=self._draw("lag")
        ).tolist()
        return lags

    @cached_property
    def _entries(self) -> list[int]:
        """The task in which each client joins, from 0."""
        first = max(1, round(self.join * self.clients))
        entries = [0] * self.clients
        if first < self.clients and self.tasks > 1:
            order = torch.randperm(self.clients, generator=self._draw("join")).tolist()
            for i, client in enumerate(order[first:]):
                entries[client] = 1 + i * (self.tasks - 1) // (self.clients - first)
        return entries

    @cached_property
    def _staying(self) -> list[frozenset[int]]:
        """The clients that stay with the task before, at the change to each task."""
        count = round(self.stay * self.clients)
        staying: list[frozenset[int]] = [frozenset()]
        for task in range(1, self.tasks):
            order = torch.randperm(self.clients, generator=self._draw("stay", task)).tolist()
            staying.append(frozenset(order[:count]))
        return staying


ONE_TASK = Stream()
"""The stream of a run without tasks."""


# Tasks that begin at dates: a column holds the time of each example.


def cut_times(cuts: Sequence[str]) -> list[datetime.datetime]:
    """The moments at which each task but the first begins; raises ConfigError for what is no date,
    or out of order.
    """
    moments = []
    for cut in cuts:
        if (moment := moment_of(cut)) is None:
            raise ConfigError(
                f"stream.cuts has {cut!r}, which is no date; write dates as 2023-01-31"
            )
        moments.append(moment)
    for k, (before, after) in enumerate(pairwise(moments)):
        if before >= after:
            raise ConfigError(
                f"stream.cuts must ascend, and {cuts[k + 1]} does not come after {cuts[k]}"
            )
    return moments


def tasks_of_times(what: str, column: str, values: Sequence[str], cuts: Sequence[str]) -> list[int]:
    """The task of each value of a time column, from 0: as many as there are cuts that are not after
    it.

    Raises DataError for a value that is no date.

    >>> tasks_of_times("rows", "acquired", ["2022-12-31", "2023-01-01"], ["2023-01-01"])
    [0, 1]
    """
    moments = cut_times(cuts)
    tasks = []
    for value in values:
        if (moment := moment_of(value)) is None:
            raise DataError(
                f"{what}: column {column!r} has {value[:40]!r}, which is no date; write dates as "
                "2023-01-31"
            )
        tasks.append(bisect.bisect_right(moments, moment))
    return tasks


def moment_of(text: str) -> datetime.datetime | None:
    """A date or time in ISO's form, UTC where it names no zone; None for any other text.

    >>> moment_of("2023-01-31").isoformat(), moment_of("31.1.2023"), moment_of("7")
    ('2023-01-31T00:00:00+00:00', None, None)
    """
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    if moment.tzinfo is None:
        return moment.replace(tzinfo=datetime.UTC)
    return moment
