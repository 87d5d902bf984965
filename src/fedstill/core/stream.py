"""Tasks over time: the task of each client in each round, and the division of data into tasks.

Both are pure functions of the config and the seed, so nothing has to be saved. Tasks count from 0
here, and from 1 in output for human readers.
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
"""The outputs that take part in training: all, those of the classes seen so far, or those of the
task's classes.
"""

EVERYONE = -1
"""The id that stands for the run as a whole: the server's. It is never late."""

Transform = Callable[[Tensor], Tensor]
"""From images (n, channels, H, W) uint8 to images of the same shape, in integers only."""


@dataclass(frozen=True)
class Cut:
    """The division of a training set into tasks by a stream."""

    task: NDArray[np.int64] | None
    """The task of each example, from 0, (n,) int64; None if every task has all examples."""
    classes: tuple[tuple[int, ...], ...]
    """The classes of each task."""
    transforms: tuple[Transform | None, ...] = ()
    """The transformation of each task's images; empty if there is none."""
    mix: tuple[float, ...] = ()
    """For each task, the share of examples that follow a second split instead of the first; empty
    if there is one split.
    """
    by_domain: bool = False
    """Whether test examples also belong to the task of their column's value."""


@dataclass(frozen=True)
class Stream:
    """The schedule of a run's tasks. By default, there is one task.

    It is known to all clients. All random numbers are keyed by ``seed``.
    """

    starts: tuple[int, ...] = (1,)
    """The first round of each task."""
    rounds: int = 0
    """The number of rounds."""
    by_task: tuple[tuple[int, ...], ...] = ()
    """The classes of each task."""
    head: Head = "all"
    """Which outputs take part in training."""
    restarts: bool = True
    """Whether the learning rate's schedule restarts with each task."""
    clients: int = 0
    lag: int = 0
    """The largest lag of a client in rounds; each client's lag is drawn."""
    join: float = 1.0
    """The share of clients that take part from the start; the others join evenly over the tasks."""
    stay: float = 0.0
    """The share of clients that stay with the old task when the task changes."""
    keeps_data: bool = False
    """Whether clients also train on the data of earlier tasks."""
    seed: int = 0
    absent: frozenset[tuple[int, int]] = field(default=frozenset(), repr=False)
    """The pairs (task, client) of clients without examples in a task."""

    @property
    def nothing_before(self) -> str:
        """The warning for a method that uses earlier tasks, if the run has a single task; empty if
        it has several.
        """
        if self.tasks > 1:
            return ""
        return "without [stream] there is no earlier task, and this trains as fedavg; add [stream]"

    @property
    def tasks(self) -> int:
        """The number of tasks."""
        return len(self.starts)

    def task(self, round: int, client: int = EVERYONE) -> int:
        """The task of a client in a round, from 0; -1 before the client joins. Without a client,
        the task of the run.
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

    def tasks_until(self, client: int, round: int) -> list[int]:
        """The tasks of a client up to a round, ascending, without those that it skipped."""
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
        """Whether the run or any client changes its task after the previous round."""
        if round <= 1 or self.tasks == 1:
            return False
        return any(round - lag in self.starts[1:] for lag in range(self.lag + 1))

    def within(self, round: int) -> int:
        """The number of a round within its task, from 1; the unchanged number if schedules do not
        restart.
        """
        if not self.restarts:
            return round
        return round - self.starts[self._clock(round)] + 1

    def classes(self, task: int) -> tuple[int, ...]:
        """The classes of a task."""
        return self.by_task[task]

    def seen(self, task: int) -> tuple[int, ...]:
        """The classes of a task and of all earlier tasks, ascending."""
        return tuple(sorted({c for classes in self.by_task[: task + 1] for c in classes}))

    def outputs(self, task: int, classes: int) -> tuple[int, ...]:
        """The classes whose outputs take part in the training of a task; classes: C.

        If clients also train on data of earlier tasks, their classes are included.
        """
        if self.head == "all":
            return tuple(range(classes))
        if self.head == "task" and not self.keeps_data:
            return self.classes(task)
        return self.seen(task)

    def present(self, round: int) -> list[int]:
        """The clients that have joined by a round, and have examples in their task."""
        everyone = range(self.clients)
        if self.join >= 1 and not self.absent:
            return list(everyone)
        tasks = ((client, self.task(round, client)) for client in everyone)
        return [client for client, task in tasks if task >= 0 and (task, client) not in self.absent]

    def mask(self, round: int, client: int, classes: int) -> Tensor | None:
        """The outputs that take part in a client's training in a round, (C,) bool; None for all."""
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

    def _draw(self, purpose: str, task: int = 0) -> torch.Generator:
        return generator(seed_for(self.seed, task, 0, EVERYONE, purpose))

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
        """For each task, the clients that stay with the previous task."""
        count = round(self.stay * self.clients)
        staying: list[frozenset[int]] = [frozenset()]
        for task in range(1, self.tasks):
            order = torch.randperm(self.clients, generator=self._draw("stay", task)).tolist()
            staying.append(frozenset(order[:count]))
        return staying


ONE_TASK = Stream()
"""The stream of a run without tasks."""


# ---- tasks that begin at dates -------------------------------------------------------------------


def cut_times(cuts: Sequence[str]) -> list[datetime.datetime]:
    """The times at which all tasks except the first begin. Raises ConfigError for texts that are
    not dates, or not in ascending order.
    """
    moments = []
    for cut in cuts:
        moment = moment_of(cut)
        if moment is None:
            raise ConfigError(
                f"stream.cuts has {cut!r}, which is not a date; write dates as 2023-01-31"
            )
        moments.append(moment)
    for index, (earlier, later) in enumerate(pairwise(moments)):
        if earlier >= later:
            raise ConfigError(
                f"stream.cuts must ascend, but {cuts[index + 1]} is not after {cuts[index]}"
            )
    return moments


def tasks_of_times(
    source: str, column: str, values: Sequence[str], cuts: Sequence[str]
) -> list[int]:
    """The task of each value of a time column, from 0: the number of cuts at or before it.

    source: the data, for messages. Raises DataError for a value that is not a date.

    >>> tasks_of_times("rows", "acquired", ["2022-12-31", "2023-01-01"], ["2023-01-01"])
    [0, 1]
    """
    moments = cut_times(cuts)
    tasks = []
    for value in values:
        moment = moment_of(value)
        if moment is None:
            raise DataError(
                f"{source}: column {column!r} has {value[:40]!r}, which is not a date; write dates "
                "as 2023-01-31"
            )
        tasks.append(bisect.bisect_right(moments, moment))
    return tasks


def moment_of(text: str) -> datetime.datetime | None:
    """The date or time of a text in ISO format, in UTC if it has no zone; None for other texts.

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
