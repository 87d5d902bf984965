"""The table ``[stream]`` of a config: the clock of a run's tasks; the kind that it names cuts the
data.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from fedstill.errors import ConfigError
from fedstill.experiment.config.named_tables import NAMED
from fedstill.fields import Count, CountOrZero, PositiveShare, Seed, Share
from fedstill.stream import Head

NO_STREAM = NAMED["stream"][1]
"""The kind of a run with one task."""

SITES = "sites"
"""The kind of a run whose sites have data of their own, by task."""


@dataclass(frozen=True)
class StreamTable:
    """``[stream]``, beside its kind's own keys: how many tasks, who is in which, and what a change
    leaves behind.
    """

    tasks: Count = 5
    """How many tasks there are, one after another."""
    rounds: tuple[Count, ...] = ()
    """The rounds of each task; empty: equal shares of the run's."""
    compose: Literal["tasks_first", "clients_first"] = "tasks_first"
    """Whether the partition splits each task's data, or all data once, each client's part then
    being cut by task.
    """
    past: Literal["gone", "kept"] = "gone"
    """Whether clients lose the data of earlier tasks, or train on all that they have had: the upper
    bound.
    """
    head: Head = "all"
    """Outputs that take part in training: all, those of the classes seen so far, or those of the
    task's own classes.
    """
    lr: Literal["restart", "go_on"] = "restart"
    """Whether the learning rate's schedule begins anew with each task, or goes on over the run."""
    lag: CountOrZero = 0
    """By how many rounds at most a client comes late to each task, drawn by key; 0: none does."""
    join: PositiveShare = 1.0
    """The share of clients that is there from the start; the others enter evenly over the tasks,
    drawn by key.
    """
    stay: Share = 0.0
    """The share of clients that stays with its task at a change, drawn by key for each change."""
    seed: Seed | None = None
    """What tasks, lags, entries and stays are drawn from; unset: the run's seed."""

    def starts(self, rounds: int) -> tuple[int, ...]:
        """The first round of each task; raises ConfigError where the run's rounds cannot be shared
        out so.
        """
        if not self.rounds:
            if rounds % self.tasks:
                raise ConfigError(
                    f"rounds = {rounds} cannot be shared by stream.tasks = {self.tasks}; set "
                    "rounds to a multiple, or "
                    "write the rounds of each task in stream.rounds"
                )
            return tuple(range(1, rounds + 1, rounds // self.tasks))
        if len(self.rounds) != self.tasks:
            raise ConfigError(
                f"stream.rounds has the rounds of {len(self.rounds)} tasks, and stream.tasks = "
                f"{self.tasks}"
            )
        if sum(self.rounds) != rounds:
            raise ConfigError(
                f"stream.rounds has {sum(self.rounds)} rounds in all, and rounds = {rounds}"
            )
        return tuple(accumulate(self.rounds[:-1], initial=1))

    def longest(self, rounds: int) -> int:
        """Over how many rounds a learning rate's schedule runs: those of the longest task, or of
        the run.
        """
        starts = (*self.starts(rounds), rounds + 1)
        lengths = [b - a for a, b in pairwise(starts)]
        return max(lengths) if self.lr == "restart" else rounds
